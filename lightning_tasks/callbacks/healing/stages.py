"""The stages of healing, as plain data: what is matched, which Parameters train, for how many steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from attention_modules.mechanisms.shared.options import check_integer, check_number
from lightning_tasks.training.limits import is_sequence

Match = Literal["maps", "layers", "output", "logits", "task"]
OF_LAYERS = ("maps", "layers")  # matches of each layer alone, on the teacher's input
Train = Literal["new", "attention", "all"]
_ONLY = {"temperature": ("logits",), "task_weight": ("output", "logits")}  # options, and the matches that have them


@dataclass(frozen=True)
class Stage:
    """One stage of healing.

    Args:
        match: ``"maps"`` and ``"layers"``, each swapped layer's map or output to the teacher's, on the teacher's input;
            ``"output"`` and ``"logits"``, the network's output or the classes that its logits give; ``"task"``, the
            module's own loss.
        steps: optimizer steps; None for all that are left, in the last stage.
        train: ``"new"``, the Parameters of the mechanisms; ``"attention"``, all of the swapped layers; ``"all"``; or
            globs of names. By default ``"attention"`` where maps or layers are matched, else ``"all"``. What is frozen
            when the fit starts (as by LoRA) stays so.
        temperature: by which logits are divided; the loss is multiplied by its square.
        task_weight: of the module's own loss, which is added.
        lr_scale: factor on the optimizer's learning rates.

    Raises:
        TypeError: for options that there are not.
        ValueError: if a value is out of its limits, or an option is not one of this match.
    """

    match: Match
    steps: int | None = None
    train: Train | tuple[str, ...] = "all"
    temperature: float = 1.0
    task_weight: float = 0.0
    lr_scale: float = 1.0

    @classmethod
    def of(cls, given: Any) -> Stage:
        """A stage from a mapping of its options."""
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping) or "match" not in given or set(given) - set(names):
            raise TypeError(f"a stage is a mapping with match and any of {', '.join(names[1:])}, got {given!r}")
        match = given["match"]
        if match not in get_args(Match):
            raise ValueError(f"match must be one of {', '.join(get_args(Match))}, got {match!r}")
        for name, of in _ONLY.items():
            if name in given and match not in of:
                raise ValueError(f"{name} is an option of match {' and '.join(of)}, and {match!r} does not use it")
        steps = given.get("steps")
        return cls(
            match,
            None if steps is None else check_integer("steps", steps, 1),
            _train(given.get("train", "attention" if match in OF_LAYERS else "all")),
            _positive("temperature", given.get("temperature", 1.0)),
            check_number("task_weight", given.get("task_weight", 0.0), 0.0),
            _positive("lr_scale", given.get("lr_scale", 1.0)),
        )

    def chosen(self, names: Sequence[str], layers: Sequence[str]) -> set[str]:
        """Which of the Parameters train.

        Args:
            names: of all that the fit may train.
            layers: names of the swapped layers.

        Raises:
            ValueError: if there is none, a glob matches none, or layers are matched and one is outside of them.
        """
        inside = {name for name in names if name.startswith(tuple(f"{layer}." for layer in layers))}
        new = {name for name in names if name.startswith(tuple(f"{layer}.mechanism." for layer in layers))}
        if isinstance(self.train, str):
            found = {"new": new, "attention": inside, "all": set(names)}[self.train]
            if not found:
                raise ValueError(
                    f"train={self.train!r} leaves nothing to train in stage {self.match!r}"
                    + (": the mechanisms have no Parameters; give 'attention', or globs" if self.train == "new" else "")
                )
        else:
            found = set()
            for glob in self.train:
                matched = {name for name in names if fnmatchcase(name, glob)}
                if not matched:
                    raise ValueError(
                        f"train={glob!r} matches no Parameter that trains; they are like {sorted(names)[:3]}"
                    )
                found |= matched
        if self.match in OF_LAYERS and (outside := sorted(found - inside)):
            raise ValueError(
                f"stage {self.match!r} trains what is in the swapped layers, and train={self.train!r} chooses "
                f"{outside[0]!r}, on which no layer's output depends; give 'new', 'attention', or globs within"
            )
        return found


def stages_of(given: Any) -> tuple[Stage, ...]:
    """Stages from a list of mappings.

    Raises:
        TypeError, ValueError: as :class:`Stage`, if there is none, or one before the last has no end.
    """
    if not is_sequence(given) or not len(given):
        raise TypeError(f"stages must be a list of mappings such as {{'match': 'layers', 'steps': 500}}, got {given!r}")
    stages = tuple(Stage.of(one) for one in given)
    for number, stage in enumerate(stages[:-1], 1):
        if stage.steps is None:
            raise ValueError(f"stage {number} of {len(stages)} has no steps=, so that those after it never begin")
    return stages


def stage_at(stages: Sequence[Stage], step: int) -> int:
    """Number of the stage of an optimizer step, from 0; the last one goes on beyond its steps."""
    for number, stage in enumerate(stages):
        if stage.steps is None or step < stage.steps:
            return number
        step -= stage.steps
    return len(stages) - 1


def _train(given: Any) -> Any:
    if isinstance(given, str) and given in get_args(Train):
        return given
    globs = [given] if isinstance(given, str) else given
    if not is_sequence(globs) or not len(globs) or not all(isinstance(glob, str) for glob in globs):
        raise ValueError(f"train must be {', '.join(get_args(Train))}, a glob of names or several, got {given!r}")
    return tuple(globs)


def _positive(name: str, value: object) -> float:
    number = check_number(name, value, 0.0)
    if number == 0:
        raise ValueError(f"{name} must be above 0, got {value!r}")
    return number
