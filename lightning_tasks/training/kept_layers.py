"""Which layers of a model get another attention: those at given positions, or all but some that keep theirs."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from attention_modules.hosts import attention_layers
from attention_modules.mechanisms.shared.options import check_integer
from lightning_tasks.training.limits import check_layers

Layers = list[int] | dict[str, Any] | None

_NEEDED = {"mechanism", "layer", "output_error"}


def check_swapped_layers(layers: Any) -> Any:
    """The same choice of layers to swap, as plain data.

    Args:
        layers: positions in module order; or ``{"keep_every": n}`` for all but the last of every n, which may have
            ``"ranking"``, a ``drift.csv`` of ``attnswap drift``: then as many stay as they are of those that cost most.

    Raises:
        ValueError: if it is neither.
    """
    if not isinstance(layers, Mapping):
        return check_layers(layers)
    if "keep_every" not in layers or set(layers) - {"keep_every", "ranking"}:
        raise ValueError(
            "layers must be integers, None for all, or a mapping such as {'keep_every': 4} with 'ranking' where a "
            f"drift.csv says which to keep; got {dict(layers)!r}"
        )
    every, ranking = check_integer("keep_every", layers["keep_every"], 2), layers.get("ranking")
    return {"keep_every": every} | ({} if ranking is None else {"ranking": os.fspath(ranking)})


def to_swap(names: Sequence[str], layers: Mapping[str, Any], mechanism: str) -> list[str]:
    """The names but those that keep their attention, as :func:`check_swapped_layers` says.

    Raises:
        ValueError, OSError: as :func:`kept_layers`.
    """
    ranking = layers.get("ranking")
    kept = kept_layers(names, layers["keep_every"], None if ranking is None else Path(ranking), mechanism)
    return [name for name in names if name not in kept]


def chosen_names(model: nn.Module, layers: Layers | Sequence[int], mechanism: str) -> list[str]:
    """Names of a model's self-attention layers that a task swaps."""
    if isinstance(layers, Mapping):
        return to_swap([layer.name for layer in attention_layers(model)], layers, mechanism)
    return [layer.name for layer in attention_layers(model, layers=layers)]


def kept_layers(layers: Sequence[str], every: int, ranking: Path | None = None, mechanism: str = "") -> list[str]:
    """One of every so many layers: the last of each group, or as many of those whose swap costs most.

    Args:
        layers: names of those that would be swapped, in module order.
        every: the size of a group.
        ranking: a ``drift.csv`` of ``attnswap drift``, whose error of the model's output is the cost.
        mechanism: that whose rows are read.

    Raises:
        ValueError: if there are fewer layers than ``every``, or the table does not tell the cost of each.
        OSError: if the table cannot be read.

    Example:
        >>> from lightning_tasks.training.kept_layers import kept_layers
        >>> kept_layers(["0", "1", "2", "3", "4", "5"], every=3)
        ['2', '5']
    """
    if len(layers) < every:
        raise ValueError(f"keep_every={every} keeps none of {len(layers)} layers: give at most {len(layers)}")
    if ranking is None:
        return list(layers[every - 1 :: every])
    ranked = _costs(ranking, mechanism)
    costs = {name: _cost(name, ranked, ranking) for name in layers}
    dearest = sorted(layers, key=lambda name: -costs[name])[: len(layers) // every]
    return [name for name in layers if name in dearest]


def _costs(path: Path, mechanism: str) -> dict[str, float]:
    """The error of the model's output with each layer swapped alone; inf where it cannot be."""
    if not path.is_file():
        raise ValueError(f"ranking: {path} is no file; give the drift.csv that attnswap drift wrote")
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or not set(rows[0]) >= _NEEDED:
        raise ValueError(f"{path} is no drift.csv of attnswap drift: it has no {', '.join(sorted(_NEEDED))}")
    try:
        found = {row["layer"]: float(row["output_error"]) for row in rows if row["mechanism"] == mechanism}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not found:
        known = ", ".join(sorted({str(row["mechanism"]) for row in rows}))
        raise ValueError(
            f"{path} has no rows of {mechanism!r}, but of {known}: rank this mechanism with attnswap drift"
        )
    return {layer: math.inf if math.isnan(cost) else cost for layer, cost in found.items()}


def _cost(name: str, costs: dict[str, float], path: Path) -> float:
    """Of a layer whose name the table has without what holds its network."""
    found = [cost for layer, cost in costs.items() if name == layer or name.endswith(f".{layer}")]
    if len(found) != 1:
        raise ValueError(
            f"{path} has {len(found)} rows for layer {name!r}; it ranks {', '.join(sorted(costs)[:3])}, ..."
        )
    return found[0]
