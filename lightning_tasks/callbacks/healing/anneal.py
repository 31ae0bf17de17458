"""Bringing a number that a mechanism was built with from one value to another, step by step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from attention_modules import AttentionMechanism
from attention_modules.function import FunctionAttention
from attention_modules.mechanisms.shared.held_options import held_option, hold_option, try_options
from attention_modules.mechanisms.shared.options import check_integer, check_number
from lightning_tasks.training.limits import is_sequence


@dataclass(frozen=True)
class Anneal:
    """Options of mechanisms, each with its first and last value, and how many optimizer steps lie between.

    Args:
        values: by the option's name.
        steps: from the first value to the last.

    Raises:
        TypeError: if it is no mapping of such a kind.
        ValueError: if a number is out of its limits.
    """

    values: Mapping[str, tuple[float, float]]
    steps: int

    @classmethod
    def of(cls, given: Any) -> Anneal:
        """From a mapping such as ``{"lam": [0.0, 0.8], "steps": 500}``."""
        if not isinstance(given, Mapping) or "steps" not in given or len(given) < 2:
            raise TypeError(f"anneal must be a mapping such as {{'lam': [0.0, 0.8], 'steps': 500}}, got {given!r}")
        values = {}
        for name, pair in given.items():
            if name == "steps":
                continue
            if not is_sequence(pair) or len(pair) != 2:
                raise TypeError(f"anneal[{name!r}] must be two numbers, the first value and the last, got {pair!r}")
            first, last = (check_number(f"anneal[{name!r}]", value) for value in pair)
            values[str(name)] = first, last
        return cls(values, check_integer("anneal['steps']", given["steps"], 1))

    def check(self, mechanisms: Mapping[str, AttentionMechanism]) -> None:
        """Refuse what no mechanism has, what its layers would not take, and a last value that is not the option's own.

        Raises:
            ValueError: naming the option and its layer.
        """
        for name, (first, last) in self.values.items():
            having = {layer: found for layer, found in mechanisms.items() if _is_number(held_option(found, name))}
            if not having:
                raise ValueError(f"anneal[{name!r}]: {_why_none(name, [*mechanisms.values()])}")
            for layer, found in having.items():
                own: Any = dict(found.built_with or {}).get(name, held_option(found, name))
                if float(own) != float(last):
                    raise ValueError(
                        f"anneal[{name!r}] ends at {last:g}, and the mechanism of {layer!r} was built with {own!r}, "
                        f"with which a checkpoint would be loaded: build it with {name}={last:g}"
                    )
                if found.built_with is not None:
                    for share in (0.0, 1 / 3, 1 / 2):  # an option of a few values has none of its own between them
                        self._try(found, name, _as_asked(found, name, first + (last - first) * share))

    def _try(self, found: AttentionMechanism, name: str, value: float) -> None:
        """Build the mechanism with the value.

        Raises:
            ValueError: if it refuses it.
        """
        try:
            try_options(found, {name: value})
        except ValueError as error:
            raise ValueError(
                f"anneal[{name!r}] goes from {self.values[name][0]:g} to {self.values[name][1]:g}, and "
                f"{type(found).__name__} does not take {value:g} on the way: {error}"
            ) from error

    def apply(self, mechanisms: Sequence[AttentionMechanism], step: int) -> dict[str, float]:
        """Give the mechanisms the values of a step, and say which these are."""
        share = min(step / self.steps, 1.0)
        values = {
            name: last if share == 1 else first + (last - first) * share for name, (first, last) in self.values.items()
        }
        for name, value in values.items():
            for found in mechanisms:
                if _is_number(held_option(found, name)):
                    hold_option(found, name, _as_asked(found, name, value))
        return values


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _why_none(name: str, mechanisms: Sequence[AttentionMechanism]) -> str:
    """Why none of them has a number of this name that could be brought anywhere, and what to do."""
    taking = [found for found in mechanisms if name in inspect.signature(type(found)).parameters]
    if not taking:
        kinds = ", ".join(sorted({type(found).__name__ for found in mechanisms}))
        return f"no swapped layer has a mechanism with a number of this name ({kinds})"
    kind = type(taking[0]).__name__
    if isinstance(taking[0], FunctionAttention) or hasattr(taking[0], name):
        held = held_option(taking[0], name)
        return f"{name} of {kind} is {held!r}, no number" + (
            "; give the mechanism its last value" if held is None else ""
        )
    return (
        f"{kind} reads {name} once, when it is built (as an initial value does), and follows no change of it; leave it "
        "out of anneal"
    )


def _as_asked(mechanism: AttentionMechanism, name: str, value: float) -> float:
    """The number, rounded where the mechanism's option of this name is an integer by its annotation."""
    option = inspect.signature(type(mechanism)).parameters.get(name)
    return round(value) if option is not None and option.annotation in (int, "int") else value
