"""The settings in a YAML file, bounded in size and depth, without importing torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_tasks.errors import UsageError

_MAX_DEPTH = 100  # parsers are recursive: a file of some hundred levels would end them
_MAX_VALUES = 1_000_000
_MAX_BYTES = 1 << 24


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a YAML file.

    Raises:
        UsageError: it cannot be read, is no YAML, holds something else than settings by name, or is nested too deeply
            or too large, aliases counted as often as they stand there.
    """
    import yaml  # here, so that the list of recipes does without it

    from lightning_tasks.bounded_yaml import SettingsLoader

    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise UsageError(f"{path} has {size:,} bytes, and settings at most {_MAX_BYTES:,}")
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=SettingsLoader)
    except RecursionError as error:
        raise UsageError(f"{path} is nested more than {_MAX_DEPTH} levels deep") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})") from error
    except UsageError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # of a date that is none, say
        raise UsageError(f"{path} is no YAML: {error}") from error
    check_size(content, path)
    if content is None:
        raise UsageError(f"{path} is empty; settings (`name: value`) are needed")
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds {type(content).__name__} where settings (`name: value`) are needed")
    if strange := [key for key in content if not isinstance(key, str)]:
        raise UsageError(f"{path}: the name {strange[0]!r} is no text; put it into quotes")
    return content


def check_size(content: Any, path: Path) -> None:
    """Check that nested data from a file is no deeper and no larger than settings are.

    Raises:
        UsageError: it is, aliases counted as often as they stand there.
    """
    try:
        values = _count_values(content, {}, 0)
    except RecursionError as error:
        raise UsageError(f"{path} is nested more than {_MAX_DEPTH} levels deep") from error
    if values > _MAX_VALUES:
        raise UsageError(f"{path} stands for more than {_MAX_VALUES} values, as its aliases repeat others")


def _count_values(node: Any, counted: dict[int, int], depth: int) -> int:
    """How many values nested data stands for where nothing is shared; what is shared is counted once and kept.

    Raises:
        RecursionError: it is nested too deeply, or holds itself.
    """
    if not isinstance(node, (dict, list)):
        return 1
    if depth > _MAX_DEPTH:
        raise RecursionError
    if id(node) not in counted:
        inner = node.values() if isinstance(node, dict) else node
        counted[id(node)] = 1 + sum(_count_values(each, counted, depth + 1) for each in inner)
    return counted[id(node)]
