"""The largest attention logit of each head while a model trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from attention_modules.analysis import largest_logit
from attention_modules.mechanisms.shared.options import check_flag, check_integer, check_number
from lightning_tasks.callbacks.base import Where
from lightning_tasks.callbacks.monitoring.charts import LayerCharts
from lightning_tasks.callbacks.monitoring.names import layer_label, log_now
from lightning_tasks.callbacks.monitoring.warnings import NOT_FINITE, CollapseWarnings, Sign
from lightning_tasks.callbacks.stabilizers.observer import QueryKeyObserver, layers_with_own_logits
from lightning_tasks.runs.loggers import current_step
from lightning_tasks.runs.metric_names import MetricName, head_part

STATISTIC = "largest_logit"


class LogitMonitor(QueryKeyObserver):
    """Logs the largest attention logit of each layer every n steps, and warns where logits explode.

    ``attention/largest_logit/layer_00`` is the largest scale · q·k of any head over the batch, among pairs that may see
    each other (:func:`attention_modules.analysis.largest_logit`), ``attention/largest_logit/mean`` the mean of the
    layers, and with ``heads`` each head has its own ``attention/largest_logit/layer_00/head_00``. Logits that grow into
    the hundreds precede the divergence of training (Dehghani et al., ICML 2023; Kimi K2, 2025);
    :class:`~lightning_tasks.callbacks.QKClip` limits them.

    Plain layers are observed by putting plain softmax attention into them while the trainer runs, which changes no
    output. The logits are q kᵀ · scale of the q and k that the mechanism is given, not those of its own map: a
    mechanism with others (``own_logits``) is named when training starts. A firing costs about one product of queries
    and keys, and runs without ``torch.compile``. Under several processes the values are those of the first one's batch.

    Args:
        every_n_steps: optimizer steps from one observed batch to the next.
        warn_above: a layer whose largest logit is above it is warned of, once a run.
        heads: also log each head by itself.
        where: names of layers (a glob or several); all where None.
        layers: which of those, counted in module order.
        exclude: names (globs) to leave out.

    Raises:
        ValueError: if an argument is out of its limits; when a trainer starts, if it has a second ``LogitMonitor``, the
            strategy is FSDP1 or DeepSpeed, or no layer matches.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import LogitMonitor
        >>> trainer = Trainer(callbacks=[LogitMonitor(every_n_steps=100)], logger=False)
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        warn_above: float = 100.0,
        heads: bool = False,
        where: Where = None,
        layers: list[int] | None = None,
        exclude: Sequence[str] = (),
    ) -> None:
        super().__init__(where, layers, exclude)
        self.every_n_steps = check_integer("every_n_steps", every_n_steps, 1)
        self.warn_above = check_number("warn_above", warn_above, 0.0)
        self.heads = check_flag("heads", heads)
        self._last_step = -1
        self._seen: list[list[tuple[Tensor, Tensor]]] = []
        self._charts = LayerCharts("LogitMonitor")
        self._warnings = CollapseWarnings("LogitMonitor", (_exploding(self.warn_above), NOT_FINITE))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._last_step = -1
        self._charts.restart()
        if own := layers_with_own_logits(self._layers):
            rank_zero_warn(f"LogitMonitor shows q kᵀ, which are not the logits of {own}")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step = current_step(trainer)
        if step % self.every_n_steps == 0 and step != self._last_step:
            self._last_step = step
            self._open()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._hooks is None:
            return
        self._unhook()
        values, bad = self._values()
        self._forget()
        numbers = log_now(pl_module, values, bad)
        self._charts.add(trainer, self._last_step, {name: numbers[name] for name in values})
        self._warn(numbers)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._charts.after_validation(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._charts.log(trainer)

    @torch.no_grad()
    def _see(self, index: int, query: Tensor, key: Tensor, given: dict[str, Any], call: Any) -> None:
        if not self._in_backward and query.numel():
            bad = torch.stack([(~each.isfinite()).sum() for each in (query, key)]).sum()
            self._seen[index].append((largest_logit(query, key, **given).amax(0), bad.float()))

    def _values(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What is logged by name, and beside it how many queries and keys of each layer are not finite."""
        values: dict[str, Tensor] = {}
        bad: dict[str, Tensor] = {}
        by_layer = []
        for layer, calls in zip(self._layers, self._seen, strict=True):
            if not calls:
                continue
            line = layer_label(layer)
            largest = torch.stack([of for of, _ in calls]).amax(0)  # [H]
            by_layer.append(largest.amax())
            values[_logged_name(line)] = by_layer[-1]
            bad[f"{NOT_FINITE.statistic}/{line}"] = torch.stack([count for _, count in calls]).sum()
            if self.heads:
                values |= {_logged_name(line, head_part(head)): value for head, value in enumerate(largest)}
        if by_layer:
            values[_logged_name("mean")] = torch.stack(by_layer).mean()
        return values, bad

    def _warn(self, numbers: dict[str, float]) -> None:
        names = {layer_label(layer): layer.name for layer in self._layers}
        kinds = {STATISTIC: _logged_name, NOT_FINITE.statistic: lambda line: f"{NOT_FINITE.statistic}/{line}"}
        seen = {
            (statistic, name): numbers[key]
            for statistic, key_of in kinds.items()
            for line, name in names.items()
            if (key := key_of(line)) in numbers
        }
        self._warnings.look(seen, f"training step {self._last_step}")

    def _forget(self) -> None:
        self._seen = [[] for _ in self._layers]


def _exploding(threshold: float) -> Sign:
    return Sign(
        STATISTIC,
        threshold,
        False,
        "logits explode: rows come to attend to one key only, and training is about to diverge; QKClip, a norm on q "
        "and k, a lower learning rate or more warm-up are the usual cures",
    )


def _logged_name(line: str, part: str = "") -> str:
    return str(MetricName(f"attention/{STATISTIC}", line, part))
