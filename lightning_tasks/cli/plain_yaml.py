"""Configurations as YAML, with the values that defaults of other packages' arguments have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import yaml

from lightning_tasks.errors import UsageError


class PlainDumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which knows enums (their value), paths (their text), and NumPy's scalars too.

    jsonargparse leaves such values as they are where the type of the argument is another one: the `interval` of
    Lightning's `Timer` is a `str` by its signature, and an enum by its default.
    """


_PLAIN: dict[type, Callable[[Any], Any]] = {
    Enum: lambda value: value.value,
    PurePath: str,
    np.generic: lambda value: value.item(),
    tuple: list,  # named ones
    str: str.__str__,  # and other kinds of text, enums among them
}
for _kind, _plain in _PLAIN.items():
    PlainDumper.add_multi_representer(
        _kind,
        lambda dumper, value, plain=_plain: dumper.represent_data(plain(value)),  # type: ignore[misc]
    )


def dump_plain(data: Any) -> str:
    """A configuration as YAML, its keys in their order.

    Raises:
        UsageError: a value is none that YAML has; the message names its key.
    """
    try:
        return yaml.dump(data, Dumper=PlainDumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
    except yaml.representer.RepresenterError as error:
        value = error.args[-1]
        key = next(_keys_of(data, value), "a value")
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UsageError(
            f"{key} is {value!r}, of the kind {kind}, which no configuration file can hold: give text, a number, a "
            "list, a dictionary, or `{class_path, init_args}`"
        ) from error


def _keys_of(data: Any, value: Any, key: str = "") -> Iterator[str]:
    """The keys under which nested data holds the very object `value`, such as `trainer.callbacks[0].init_args.x`."""
    if data is value:
        yield key
    elif isinstance(data, dict):
        for name, each in data.items():
            yield from _keys_of(each, value, f"{key}.{name}" if key else str(name))
    elif isinstance(data, (list, tuple)):
        for place, each in enumerate(data):
            yield from _keys_of(each, value, f"{key}[{place}]")
