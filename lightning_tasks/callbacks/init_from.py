"""Start from the weights of a checkpoint, and from nothing else of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_tasks.callbacks.base import Callback, kinds_of, listed_before
from lightning_tasks.files.swaps import built_later
from lightning_tasks.files.weights import adopt_plain_weights, read_checkpoint
from lightning_tasks.training.configure_hook import after_configure_model


class InitFromCheckpoint(Callback):
    """Load the weights of the checkpoint at `path` once the model is built and swapped; optimizer and step stay new.

    The file is read with `weights_only=True`, and of it the weights alone are used. It is a Lightning checkpoint, a
    bare state_dict, or one beside other plain data (the layout of OpenMMLab's files), of the module or of its
    `model`. Where the head (the modules and Parameters in `head_names` of the module) has another number of classes
    in the file, or is not there, it stays as it was made, with a warning; all else must fit. Weights of plain
    attention also fill layers that are built with another mechanism (which layers is said): without a query its
    rows are left out, and what the mechanism alone has stays as it is. Put it after the callbacks that change the
    model, and before those that copy it.

    Raises:
        FileNotFoundError: no file at `path`.
        ValueError: the file is no checkpoint, or the names or shapes in the file do not fit the model; a callback that
            copies the model stands before.
    """

    def __init__(self, path: str) -> None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"--init_from {path}: no such file; give the path of a .ckpt file")
        self.path = path
        self._module: ReferenceType[pl.LightningModule] | None = None  # that has the weights

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_module": None}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Have the weights loaded before the optimizers are made; at once where the network is there as it will be."""
        copying = {"DriftMonitor"} if stage != "fit" else _COPIES
        for name in [type(each).__name__ for each in listed_before(trainer, self) if kinds_of(each) & copying]:
            raise ValueError(
                f"{name} is listed before InitFromCheckpoint, so it would copy the model before its weights are there; "
                f"list InitFromCheckpoint before {name}"
            )
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # not declared there
        later = callbacks[len(listed_before(trainer, self)) :]
        if not built_later(pl_module) and not any("SwapAttention" in kinds_of(each) for each in later):
            self._load(pl_module)
            return
        after_configure_model(pl_module, self, self._load)
        if stage == "fit" and any("ModelPruning" in kinds_of(each) for each in later):
            raise ValueError(
                "ModelPruning copies the module before its setup and configure_model have run, hence before "
                "InitFromCheckpoint; build the network in __init__, override neither, and list SwapAttention first"
            )

    def _load(self, pl_module: pl.LightningModule) -> None:
        if self._module is not None and self._module() is pl_module:
            return
        content = read_checkpoint(self.path)
        saved = content.get("state_dict", content)
        if not isinstance(saved, dict):
            raise ValueError(
                f"--init_from {self.path}: its state_dict is a {type(saved).__name__}; give weights by name"
            )
        weights, left_out = _with_own_head(_of_the_module(saved, pl_module), pl_module)
        weights, adopted = adopt_plain_weights(pl_module, weights)
        try:
            pl_module.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(
                f"--init_from {self.path}: its weights do not fit {type(pl_module).__name__}; give the model the "
                f"settings that it was trained with. {error}"
            ) from error
        self._module = ref(pl_module)
        if adopted:
            rank_zero_info(f"--init_from {self.path}: weights of plain attention now fill {', '.join(adopted)}")
        if left_out:
            rank_zero_warn(f"--init_from {self.path}: {left_out}. The head starts from new weights; all else was taken")


_COPIES = {"WeightAveraging", "DriftMonitor", "ModelPruning"}


def before_copies(callbacks: Sequence[pl.Callback]) -> list[pl.Callback]:
    """The callbacks, with those that load weights before those that copy the model."""
    first = next((place for place, each in enumerate(callbacks) if _copies(each)), len(callbacks))
    late = [each for each in callbacks[first:] if isinstance(each, InitFromCheckpoint)]
    return [*callbacks[:first], *late, *(each for each in callbacks[first:] if each not in late)]


def _copies(callback: pl.Callback) -> bool:
    return bool(kinds_of(callback) & _COPIES)


def _with_own_head(weights: dict[str, Any], pl_module: pl.LightningModule) -> tuple[dict[str, Any], str]:
    """The weights with the module's own head where theirs is another one, and what was left out, "" for nothing."""
    heads = tuple(f"{name}." for name in getattr(pl_module, "head_names", ()))
    own = {name: value for name, value in pl_module.state_dict().items() if f"{name}.".startswith(heads)}
    other = {name: value for name, value in weights.items() if f"{name}.".startswith(heads)}
    here, there = _shapes(own), _shapes(other)
    if here == there:
        return weights, ""
    rest = {name: value for name, value in weights.items() if name not in other}
    return {**rest, **own}, f"its head ({there or 'none'}) is not that of this model ({here}) and is left out"


def _of_the_module(weights: dict[str, Any], pl_module: pl.LightningModule) -> dict[str, Any]:
    """A state_dict of the module, also where ``weights`` is one of its ``model`` (timm's, say)."""
    inside = {name for name in pl_module.state_dict() if name.startswith("model.")}
    is_inner = inside and not inside & weights.keys() and any(f"model.{name}" in inside for name in weights)
    return {f"model.{name}": value for name, value in weights.items()} if is_inner else weights


def _shapes(weights: dict[str, Any]) -> str:
    return ", ".join(f"{name} {list(getattr(value, 'shape', ()))}" for name, value in sorted(weights.items()))
