"""Which layers of a model keep their attention while the others get another: every n-th, or those that cost most."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from lightning_tasks.runs.safe_files import refuse_foreign

_NEEDED = {"mechanism", "layer", "output_error"}


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
        >>> from lightning_tasks.callbacks.healing.kept import kept_layers
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
    refuse_foreign(path, path.parent)
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
