"""Names of layers in logs, and scalars logged at the very step at which a monitor fires."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from attention_modules import AttentionMechanism, NoMapError
from attention_modules.hosts import AttentionLayer
from lightning_tasks.runs.loggers import current_step
from lightning_tasks.runs.metric_names import layer_line

MOST_NAMES = 4


def layer_number(layer: AttentionLayer) -> int:
    """The layer's place among all self-attention layers of its model, in module order, whichever are chosen."""
    return cast(int, layer.number)  # which attention_layers() gives each


def layer_label(layer: AttentionLayer) -> str:
    """Name of the layer in logged metrics and files, the same in every monitor."""
    return layer_line(layer_number(layer))


def to_numbers(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalars brought over from the device, in one transfer."""
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True)) if values else {}


def log_now(
    pl_module: pl.LightningModule, values: Mapping[str, Tensor], beside: Mapping[str, Tensor] | None = None
) -> dict[str, float]:
    """Log scalars at the current training step, whether or not ``log_every_n_steps`` falls on it.

    ``self.log`` alone would write them with the next step that the trainer logs, under that step's number.

    Args:
        pl_module: the module that trains.
        values: what is logged, by name.
        beside: what comes over with it, in the same transfer, and is not logged.

    Returns:
        All of both.
    """
    for name, value in values.items():
        pl_module.log(name, value, on_step=True, on_epoch=False, logger=False)
    numbers = to_numbers({**values, **(beside or {})})
    if values:
        for logger in pl_module.trainer.loggers:
            logger.log_metrics({name: numbers[name] for name in values}, step=current_step(pl_module.trainer))
    return numbers


def listed(layers: Mapping[str, str]) -> str:
    """The first layers' names, each with what is to be said of it ("" for nothing), and how many more there are."""
    shown = [f"{name!r} ({detail})" if detail else repr(name) for name, detail in layers.items()]
    more = f" and {len(shown) - MOST_NAMES} more" if len(shown) > MOST_NAMES else ""
    return ", ".join(shown[:MOST_NAMES]) + more


def warn_of_caveats(monitor: str, layers: Iterable[AttentionLayer]) -> None:
    """Warn, once a reason, of the layers whose spectrum is not that of their logits."""
    by_reason: dict[str, dict[str, str]] = {}
    for layer in layers:
        if layer.spectrum_caveat is not None:
            by_reason.setdefault(layer.spectrum_caveat, {})[layer.name] = ""
    for reason, names in by_reason.items():
        rank_zero_warn(f"{monitor} on {listed(names)}: {reason}")


def warn_of_no_map(
    monitor: object, layer: str, mechanism: AttentionMechanism, error: NoMapError, told: set[type]
) -> None:
    """Warn, once a mechanism, of one that has no map to show.

    Args:
        monitor: who would show it.
        layer: name of the layer.
        mechanism: what acts in it.
        error: why there is no map.
        told: the mechanisms that it has warned of, to which a new one is added.
    """
    if type(mechanism) not in told:
        told.add(type(mechanism))
        rank_zero_warn(f"{type(monitor).__name__} shows no map of {layer!r} and layers like it: {error}")
