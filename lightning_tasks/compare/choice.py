"""What a comparison tried for a variant, and what it chose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_tasks.json_values import list_of, number_of, of_kind, seed_of, text_of

NOTHING = -1


@dataclass(frozen=True)
class Tried:
    """What the grid had for a variant, and its score: NaN where a run of it diverged, and then why."""

    overrides: list[str]
    score: float
    diverged: str = ""


@dataclass(frozen=True)
class Choice:
    """What was tried for a variant, and the place in `tried` of what was chosen, or `NOTHING` where all diverged."""

    variant: str
    metric: str
    mode: str
    seeds: list[int]
    tried: list[Tried]
    chosen: int

    def __str__(self) -> str:
        """A sentence for the tables."""
        best = "nothing, as all diverged" if self.chosen == NOTHING else written(self.tried[self.chosen].overrides)
        seeds = f"seed{'s' if len(self.seeds) > 1 else ''} {', '.join(map(str, self.seeds))}"
        scores = [f"{written(each.overrides)} {each.score:.5g}{each.diverged and ' (diverged)'}" for each in self.tried]
        return f"{self.variant}: {best}, by {self.metric} ({self.mode}) of {seeds}: {', '.join(scores)}"


def parse_choice(given: Any) -> Choice:
    """A choice as a record has it.

    Raises:
        KeyError, TypeError, ValueError: it is damaged.
    """
    texts = {key: text_of(given[key]) for key in ("variant", "metric", "mode")}
    tried = [
        Tried(list_of(each["overrides"], str), number_of(each["score"]), text_of(each["diverged"]))
        for each in list_of(given["tried"], dict)
    ]
    seeds = [seed_of(each) for each in of_kind(given["seeds"], list)]
    if texts["mode"] not in ("min", "max"):
        raise ValueError(f"mode is {texts['mode'][:80]!r}, and min or max is needed")
    if not seeds or not all(each.overrides for each in tried):
        raise ValueError(f"the choice of {texts['variant'][:80]!r} has no seeds, or tried no settings")
    if not NOTHING <= of_kind(given["chosen"], int) < len(tried):
        raise ValueError(f"chosen is {str(given['chosen'])[:80]}, and {len(tried)} were tried")
    if given["chosen"] != NOTHING and tried[given["chosen"]].diverged:
        raise ValueError(f"chosen is {given['chosen']}, which diverged")
    return Choice(**texts, seeds=seeds, tried=tried, chosen=given["chosen"])


def key_of(override: str) -> str:
    """The setting that an override sets."""
    return override.removeprefix("--").partition("=")[0]


def label(overrides: Sequence[str]) -> str:
    """Overrides without the paths of their settings: `lr=0.001`."""
    return " ".join(f"{key_of(each).rpartition('.')[2]}={each.partition('=')[2]}" for each in overrides)


def written(overrides: Sequence[str]) -> str:
    """The same to be read: a class with its arguments as `LocAteR(weight=0.001)`."""
    return " ".join(_call(each.partition("=")[2]) or label([each]) for each in overrides)


def _call(value: str) -> str:
    """A class path with arguments as Python writes the call; "" of any other value, and of names that are none."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return ""
    match found:
        case {"class_path": str(path), **rest} if not rest.keys() - {"init_args"}:
            given = rest.get("init_args", {})
            name = path.rpartition(".")[2]
            if isinstance(given, dict) and all(each.isidentifier() for each in (name, *given)):
                return f"{name}({', '.join(f'{each}={argument!r}' for each, argument in given.items())})"
    return ""
