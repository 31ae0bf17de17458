"""Which layers of a model get another attention: those at given positions, or all but some that keep theirs."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from attention_modules.hosts import attention_layers
from attention_modules.mechanisms.shared.options import LARGEST_NUMBER, check_integer, check_number
from lightning_tasks.training.limits import check_layers

Layers = list[int] | dict[str, Any] | None

_NEEDED = {"mechanism", "layer", "output_error"}


def check_swapped_layers(layers: Any, mechanism: str) -> Any:
    """The same choice of layers to swap, as plain data that depends on no file.

    Args:
        layers: positions in module order; or ``{"keep_every": n}`` for all but the last of every n, which may have
            ``"ranking"``, a ``drift.csv`` of ``attnswap drift``, or the costs that it was read as: then as many stay as
            they are of those that cost most.
        mechanism: that whose rows of the table are read.

    Raises:
        ValueError: if it is neither, or the table cannot be read or does not name the mechanism.
    """
    if not isinstance(layers, Mapping):
        return check_layers(layers)
    if "keep_every" not in layers or set(layers) - {"keep_every", "ranking"}:
        raise ValueError(
            "layers must be integers, None for all, or a mapping such as {'keep_every': 4} with 'ranking' where a "
            f"drift.csv says which to keep; got {dict(layers)!r}"
        )
    every, ranking = check_integer("keep_every", layers["keep_every"], 2), layers.get("ranking")
    if ranking is None:
        return {"keep_every": every}
    known = isinstance(ranking, Mapping)  # of a checkpoint
    if known:
        return {"keep_every": every, "ranking": {n: check_number(f"ranking[{n!r}]", x) for n, x in ranking.items()}}
    if not isinstance(ranking, (str, Path)):
        raise ValueError(f"ranking must be the path of a drift.csv that attnswap drift wrote, got {ranking!r}")
    return {"keep_every": every, "ranking": read_ranking(Path(ranking), mechanism)}


def read_ranking(path: Path, mechanism: str) -> dict[str, float]:
    """The error of a model's output with each layer swapped alone, of a ``drift.csv``; the largest where it cannot be.

    Raises:
        ValueError: if it is no such table, or has no rows of the mechanism.
    """
    if not path.is_file():
        raise ValueError(f"ranking: {path} is no file; give the drift.csv that attnswap drift wrote")
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        if not rows or not set(rows[0]) >= _NEEDED:
            raise ValueError(f"it has no {', '.join(sorted(_NEEDED))}")
        found: dict[str, float] = {}
        for row in rows:
            if row["mechanism"] != mechanism:
                continue
            if row["layer"] in found:
                raise ValueError(f"it has two rows of {mechanism!r} for layer {row['layer']!r}")
            found[row["layer"]] = float(row["output_error"])
    except (ValueError, TypeError, csv.Error) as error:
        raise ValueError(f"ranking: {path} is no drift.csv of attnswap drift: {error}") from error
    if not found:
        known = ", ".join(sorted({str(row["mechanism"]) for row in rows}))
        raise ValueError(f"ranking: {path} has no rows of {mechanism!r}, but of {known}: rank it with attnswap drift")
    return {layer: LARGEST_NUMBER if math.isnan(cost) else min(cost, LARGEST_NUMBER) for layer, cost in found.items()}


def to_swap(names: Sequence[str], layers: Mapping[str, Any]) -> list[str]:
    """The names but those that keep their attention, as :func:`check_swapped_layers` says.

    Raises:
        ValueError: if it keeps none, or the ranking does not tell the cost of each.

    Example:
        >>> from lightning_tasks.training.kept_layers import to_swap
        >>> to_swap(["0", "1", "2", "3", "4", "5"], {"keep_every": 3})
        ['0', '1', '3', '4']
    """
    every, ranking = layers["keep_every"], layers.get("ranking")
    if len(names) < every:
        raise ValueError(f"keep_every={every} keeps none of {len(names)} layers: give at most {len(names)}")
    if ranking is None:
        kept = set(names[every - 1 :: every])
    else:
        costs = {name: _cost(name, ranking) for name in names}
        kept = set(sorted(names, key=lambda name: -costs[name])[: len(names) // every])
    return [name for name in names if name not in kept]


def chosen_names(model: nn.Module, layers: Layers | Sequence[int]) -> list[str]:
    """Names of a model's self-attention layers that a task swaps."""
    if isinstance(layers, Mapping):
        return to_swap([layer.name for layer in attention_layers(model)], layers)
    return [layer.name for layer in attention_layers(model, layers=layers)]


def _cost(name: str, costs: Mapping[str, float]) -> float:
    """Of a layer whose name the table has without what holds its network."""
    found = [cost for layer, cost in costs.items() if name == layer or name.endswith(f".{layer}")]
    if len(found) != 1:
        ranked = ", ".join(sorted(costs)[:3])
        raise ValueError(f"the ranking has {len(found)} rows for layer {name!r}; it ranks {ranked}, ...")
    return found[0]
