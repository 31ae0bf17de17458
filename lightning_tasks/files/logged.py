"""What an epoch has reduced so far of the tensors that were logged, in and out of a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

_HOW = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": torch.add,
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


def logged(trainer: pl.Trainer) -> dict[str, Any]:
    """How tensors were logged that this epoch reduces, and what it has reduced so far, of how many rows."""
    results: Any = trainer.fit_loop.epoch_loop._results
    return {
        name: {
            "how": {key: getattr(each.meta, key) for key in _HOW} | {"reduce_fx": each.meta.reduce_fx.__name__},
            "synced": [each.meta.sync.should, each.meta.sync.rank_zero_only],
            "value": each.value.cpu(),
            "rows": int(getattr(each, "cumulated_batch_size", 0)),
        }
        for name, each in results.items()
        if each.is_tensor and each.meta.on_epoch and not each.has_reset and each.meta.sync.group is None
    }


def is_logged(value: Any) -> bool:
    """Whether a value is one of those that :func:`logged` gives."""
    if not isinstance(value, dict) or value.keys() != {"how", "synced", "value", "rows"}:
        return False
    how, synced, number, rows = value.values()
    known = isinstance(how, dict) and how.keys() == {*_HOW, "reduce_fx"} and how["reduce_fx"] in [*_REDUCTIONS]
    return known and isinstance(synced, list) and len(synced) == 2 and isinstance(number, Tensor) and type(rows) is int


def log_again(trainer: pl.Trainer, before: Mapping[str, Any]) -> None:
    """Have the epoch reduce what was logged before, too; it may be logged in another way from now on."""
    results: Any = trainer.fit_loop.epoch_loop._results
    of: Any = sys.modules[type(results).__module__]
    for key, each in before.items():
        meta, (should, rank_zero_only) = of._Metadata(**each["how"]), each["synced"]
        meta.sync = of._Sync(fn=trainer.strategy.reduce, _should=should, rank_zero_only=rank_zero_only)
        results[key] = of._ResultMetric(meta, True).to(trainer.strategy.root_device)
        _add(results[key], each)
    earlier = {key: results[key] for key in before}

    @torch.compiler.disable
    def log(fx: str, name: str, *given: Any, **options: Any) -> None:
        key = f"{fx}.{name}"
        of_this_epoch = key in earlier and not earlier.pop(key).has_reset
        if of_this_epoch:
            del results[key]
        type(results).log(results, fx, name, *given, **options)
        if of_this_epoch:
            _add(results[key], before[key])
        if not earlier:
            del results.log

    results.log = log  # type: ignore[operator]
    trainer._logger_connector._first_loop_iter = False  # in the first iteration, the first log of a hook begins anew


def _add(metric: Any, each: Mapping[str, Any]) -> None:
    if metric.is_tensor and metric.meta.on_epoch and metric.meta.reduce_fx.__name__ == each["how"]["reduce_fx"]:
        metric.value = _REDUCTIONS[each["how"]["reduce_fx"]](metric.value, each["value"].to(metric.value))
        metric._computed, metric._update_count = None, metric._update_count + 1
        if metric.meta.is_mean_reduction:
            metric.cumulated_batch_size = metric.cumulated_batch_size + each["rows"]
