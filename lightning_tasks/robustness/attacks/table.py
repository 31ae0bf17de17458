"""Attacks as configuration files name them: options checked.

The package `lightning_tasks.robustness`, which is imported before this file, registers them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from attention_modules.mechanism import nearest
from attention_modules.mechanisms.shared.options import as_float
from lightning_tasks.robustness.attacks.common import ATTACKS, Attack, check_eps, check_options, check_radius

_EXAMPLES = {"Linf": "4/255", "L2": "0.5, 1", "L1": "10"}
_NO_OPTIONS = ("model", "images", "labels", "eps", "seed", "source", "attack", "options")


@dataclass(frozen=True)
class AttackSetting:
    """An attack to run.

    Args:
        name: a key of ``ATTACKS``.
        options: of its function, all of them; for transfer, those of the attack on the twin.
        source: for transfer, the checkpoint of the twin.
        on_source: for transfer, the name of the attack on the twin.
        called: what the table calls it; by its own name where None.
        mechanism: for transfer, options that mechanisms of the attacked twin have other values of.
        eps: radii of its own, as text and number; those of the evaluation where empty.
    """

    name: str
    options: dict[str, Any]
    source: str | None = None
    on_source: str | None = None
    called: str | None = None
    mechanism: Mapping[str, Any] = field(default_factory=dict)
    eps: Sequence[tuple[str, float]] = ()

    @classmethod
    def read(cls, given: str | Mapping[str, Any]) -> AttackSetting:
        """From a name, or ``{"name": ..., option: value}``, with ``label`` for the table where that is to differ.

        ``eps`` is a list of radii of its own, which an attack in the L1 or L2 norm needs.

        Transfer also has ``source``, ``attack`` and ``mechanism``. Without a source it attacks the model itself, whose
        mechanisms have the other options meanwhile: an adaptive attack, with fewer passes of RPC-Attention say.

        Raises:
            ValueError: for an unknown attack (the nearest is named), an unknown or missing option, one out of its
                limits, transfer without a source, or an attack in another norm than L-inf without radii.
        """
        rest = {"name": given} if isinstance(given, str) else dict(given)
        if "name" not in rest:
            raise ValueError(f"the attack {rest} has no name: give {{'name': 'pgd', ...}}")
        name = _known(str(rest.pop("name", "")), ATTACKS, "attack")
        called = rest.pop("label", None)
        if name != "transfer":
            radii = _radii(name, rest.pop("eps", None))
            return cls(name, _options(name, rest), called=called, eps=radii)
        source, on_source = rest.pop("source", None), str(rest.pop("attack", "pgd"))
        mechanism: Any = rest.pop("mechanism", {})
        if not isinstance(mechanism, Mapping) or not all(isinstance(key, str) for key in mechanism):
            raise ValueError(f"the attack 'transfer': mechanism must be options by name, got {mechanism!r}")
        if not isinstance(source, str) and not (source is None and mechanism):
            raise ValueError(
                "the attack 'transfer' needs source: the checkpoint of a twin of the model; or mechanism: other "
                "options of the model's own mechanisms"
            )
        _known(on_source, {key: value for key, value in ATTACKS.items() if key != "transfer"}, "attack on the source")
        radii = _radii(on_source, rest.pop("eps", None))
        return cls(name, _options(on_source, rest), source, on_source, called, dict(mechanism), radii)

    @property
    def attack(self) -> Attack:
        """The function and what is known of it."""
        return ATTACKS[self.name]

    @property
    def label(self) -> str:
        """The attack as the table names it."""
        return self.called or self.kind

    @property
    def kind(self) -> str:
        """What is run, whatever it is called."""
        if not self.on_source:
            return self.name
        options = ", ".join(f"{key}={value}" for key, value in self.mechanism.items())
        return f"{self.name} of {self.on_source}" + (f" with {options}" if options else "")

    @property
    def seeded(self) -> bool:
        """Whether the function draws random numbers."""
        return "seed" in inspect.signature(ATTACKS[self.on_source or self.name].function).parameters

    @property
    def at_own_prediction(self) -> bool:
        """Whether it goes away from the model's own prediction, rather than from the true label."""
        return self.name.startswith("released")

    @property
    def passes(self) -> float:
        """Forward passes over the images for one eps, that which counts the successes included."""
        on_source = ATTACKS[self.on_source].passes(self.options) if self.on_source else 0.0
        return on_source + self.attack.passes(self.options) + 1


def read_attacks(given: Sequence[str | Mapping[str, Any]]) -> list[AttackSetting]:
    """Each by :meth:`AttackSetting.read`.

    Raises:
        ValueError: as there; if two would have one name in the table, and be logged as one.
    """
    settings = [AttackSetting.read(each) for each in given]
    labels = [setting.label for setting in settings]
    if twice := [label for label in dict.fromkeys(labels) if labels.count(label) > 1]:
        raise ValueError(
            f"two attacks are called {twice[0]!r} in the table: give one a label, {{label: ..., name: ...}}"
        )
    return settings


def _options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(ATTACKS[name].function).parameters
    known = {key: parameters[key].default for key in parameters if key not in _NO_OPTIONS}
    for key in given:
        _known(key, known, f"option of {name}")
    options = {**known, **given}
    if missing := [key for key, value in options.items() if value is inspect.Parameter.empty]:
        raise ValueError(f"the attack {name!r} needs {', '.join(missing)}, e.g. std: [0.229, 0.224, 0.225]")
    try:
        check_options(**options)
    except ValueError as error:
        raise ValueError(f"the attack {name!r}: {error}") from None
    return options


def _known(name: str, known: Mapping[str, Any], what: str) -> str:
    if name not in known:
        near = nearest(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known) or 'none'}"
        raise ValueError(f"unknown {what} {name!r}; {hint}")
    return name


def _radii(name: str, given: Any) -> list[tuple[str, float]]:
    norm = ATTACKS[name].norm
    if given is None and norm == "Linf":
        return []
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise ValueError(
            f"the attack {name!r} has eps={given!r}: give a list of radii in the {norm} norm of its own, "
            f"{{name: {name}, eps: [{_EXAMPLES[norm]}]}}"
        )
    try:
        radii = [read_eps(each, norm) for each in given]
    except ValueError as error:
        raise ValueError(f"the attack {name!r}: {error}") from None
    if len({radius for _, radius in radii}) < len(radii):
        raise ValueError(f"the attack {name!r} has a radius twice in eps={given!r}")
    return radii


def read_eps(given: str | float, norm: str = "Linf") -> tuple[str, float]:
    """How the table writes a radius, and the radius: ``"4/255"``, ``0.0157``.

    Raises:
        ValueError: if it is no number or fraction, not in [0, 1] for L-inf, or not above 0 and finite for other norms.
    """
    try:
        value = as_float(_fraction(given)) if isinstance(given, str) else given
    except (ValueError, ZeroDivisionError):
        value = math.nan
    try:
        check_eps(value) if norm == "Linf" else check_radius(value, finite=True)
    except ValueError as error:
        raise ValueError(str(error).replace(f"eps is {value!r}", f"eps is {given!r}")) from None
    return (given.replace(" ", "") if isinstance(given, str) else f"{float(value):g}"), float(value)


def _fraction(text: str) -> Fraction:
    """Also of decimals: 0.25/255."""
    above, _, below = text.replace(" ", "").partition("/")
    return Fraction(above) / Fraction(below or "1")
