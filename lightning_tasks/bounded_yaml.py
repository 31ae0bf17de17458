"""YAML from anybody, as plain data of a bounded size."""

from __future__ import annotations

from typing import Any

import yaml

_MOST_ENTRIES = 1_000_000


class BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe loader without the two ways in which a small file takes all memory, or cannot be printed.

    A value that is not of the kind that its tag names, as `!!bool x`, is an error of YAML.

    Each merge key (`<<`) copies the entries of what it names, so that a few lines stand for any number of them. An
    integer of many hexadecimal digits is read, and fails where it becomes text.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._entries = 0

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node.

        Raises:
            ConstructorError: it is none of the node's tag; PyYAML's own error may be any.
        """
        try:
            return super().construct_object(node, deep)
        except (LookupError, AttributeError, ArithmeticError, ValueError) as error:
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"it is no {kind} ({type(error).__name__}: {error})", node.start_mark
            ) from error

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Resolve the merge keys of a mapping; called for what they name, too."""
        super().flatten_mapping(node)
        self._entries += len(node.value)
        if self._entries > _MOST_ENTRIES:
            raise yaml.constructor.ConstructorError(
                None, None, f"it stands for more than {_MOST_ENTRIES} entries, as its merge keys repeat others"
            )

    def construct_bounded_int(self, node: yaml.ScalarNode) -> int:
        """An integer of at most as many digits as Python reads and prints."""
        value = self.construct_yaml_int(node)
        str(value)
        return value


BoundedLoader.add_constructor("tag:yaml.org,2002:int", BoundedLoader.construct_bounded_int)


class SettingsLoader(BoundedLoader):
    """The same of settings, in which no name is there twice: PyYAML would drop the first of the two in silence."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """The node of a mapping."""
        node = super().compose_mapping_node(anchor)
        known = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (name := (key.tag, key.value)) in known:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
            known.add(name)
        return node
