"""Keys of a dictionary within a dictionary on the command line: `--model.model.backbone_options.depth 2`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import jsonargparse

_DEPTH = 4  # --SECTION.ARGUMENT.KEY.KEY: a dictionary within the dictionary that an argument is
_SECTIONS = ("--model", "--data")
_VALUES = jsonargparse.ArgumentParser()  # reads a value as all others are: 1e-3 is a number, which YAML alone denies
_VALUES.add_argument("--value", type=Any)


def join_nested_keys(arguments: Sequence[str], parse: Callable[[list[str]], Any]) -> list[str]:
    """The arguments with every inner dictionary given whole: the keys that are typed joined to those it has.

    jsonargparse joins the keys of an argument's dictionary; a dictionary within it, it would replace by the one key,
    whose value it would leave a string (so does 4.53, as a test shows).

    Args:
        arguments: of the command line, the subcommand first.
        parse: gives the configuration of such arguments, a namespace.
    """
    typed = [(place, words) for place in range(len(arguments)) if (words := _words(arguments, place)) is not None]
    if not typed:
        return list(arguments)
    own = {place + step for place, (_, _, count) in typed for step in range(count)}
    rest = [each for place, each in enumerate(arguments) if place not in own and not each.startswith("--print_config")]
    section = parse(rest)[arguments[0]]
    inner: dict[str, dict[str, Any]] = {}
    joined: list[str | None] = list(arguments)
    for place, ((kind, name, key, *keys), value, count) in typed:
        outer = section[kind].get("init_args", section[kind]).get(name)
        if outer is not None and (not isinstance(outer, dict) or "class_path" in outer):
            continue  # a class, whose arguments jsonargparse joins
        option = f"--{kind}.{name}.{key}"
        found = inner.get(option, (outer or {}).get(key))
        inner[option] = _with(found, keys, _VALUES.parse_args([f"--value={value}"]).value)
        joined[place : place + count] = [f"{option}={json.dumps(inner[option])}", *[None] * (count - 1)]
    return [each for each in joined if each is not None]


def _words(arguments: Sequence[str], place: int) -> tuple[list[str], str, int] | None:
    """The parts of a nested key's name, its value, and how many arguments it takes; None for other arguments."""
    option, equals, value = arguments[place].partition("=")
    section, *keys = option.split(".")
    if section not in _SECTIONS or len(keys) + 1 < _DEPTH or "init_args" in keys:
        return None
    if not equals and place + 1 >= len(arguments):
        return None  # the parser says that the value is missing
    return [section.removeprefix("--"), *keys], value if equals else arguments[place + 1], 1 if equals else 2


def _with(given: Any, keys: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy of the dictionary `given`, by default an empty one, with `value` under `keys`, level by level."""
    given = given if isinstance(given, dict) else {}
    key, *rest = keys
    return {**given, key: _with(given.get(key), rest, value) if rest else value}
