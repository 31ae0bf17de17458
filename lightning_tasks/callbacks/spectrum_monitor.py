"""The QK eigenspectrum of each layer while a model trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from attention_modules.analysis import qk_spectrum, qk_statistics
from attention_modules.hosts import attention_layers
from attention_modules.mechanisms.shared.options import check_flag, check_integer
from lightning_tasks.callbacks.base import Callback, Where, check_alone, refuse_flat_shards, whole
from lightning_tasks.callbacks.monitoring.charts import LayerCharts
from lightning_tasks.callbacks.monitoring.names import layer_label, log_now, warn_of_caveats
from lightning_tasks.callbacks.monitoring.warnings import SPECTRUM_SIGNS, CollapseWarnings
from lightning_tasks.figures.spectrum import draw_spectra
from lightning_tasks.runs.files import save_figure
from lightning_tasks.runs.loggers import current_step, keeps_history, log_histogram
from lightning_tasks.runs.metric_names import MetricName, head_part
from lightning_tasks.training.limits import check_layer_choice

STATISTICS = ("mean", "variance", "scale", "max", "min")
MOST_SPECTRA = 64  # kept for the figure


class SpectrumMonitor(Callback):
    """Logs the eigenvalues' mean, variance, scale ‖W‖_F² and extremes of W = W_qᵀ W_k, a head, every n steps.

    ``qk_spectrum/variance/layer_00`` is the mean over the layer's heads (``max`` and ``min``: the largest and smallest
    real part of any head), ``qk_spectrum/variance/mean`` over the layers, and with ``heads`` each head has its own
    ``qk_spectrum/variance/layer_00/head_00``. Step 0 is the untrained model. Definitions and source:
    :func:`attention_modules.analysis.qk_statistics`.

    ``qk_spectrum/eigenvalues/layer_00`` is the histogram of the real parts of the eigenvalues of all heads (head_dim of
    each, without the zeros of a matrix of low rank), in W&B and TensorBoard at every record. A run that logs to
    neither leaves ``qk_spectrum_eigenvalues.png`` when its training ends: the histograms of up to 64 of its records.

    The standard deviation of the logits that such weights give tokens of mean 0 and variance 1 that have nothing in
    common is sqrt(scale) times its factor on q kᵀ (1 / sqrt(head_dim) in most layers, 1 in T5), with ``scale`` as it is
    logged. Above 50 (entropy collapse in sight) and below 0.001 (all rows attend alike) it is warned of in words, each
    once; not of layers whose logits are no such products (q/k norm, rope), which are named when training starts. Of
    sinks the spectrum says nothing. Weights that are NaN or infinite are warned of, too, and their heads' eigenvalues
    left out of histograms and the figure.

    The layer's number is its place among all self-attention layers of the model, whichever are chosen.

    Args:
        every_n_steps: optimizer steps from one record to the next.
        heads: also log each head by itself.
        where: names of layers (a glob or several); all where None.
        layers: which of those, counted in module order.
        exclude: names (globs) to leave out.

    Raises:
        ValueError: if an argument is out of its limits; at the start of the fit, if no layer matches, or the
            trainer has a second ``SpectrumMonitor``, or the strategy is FSDP1 or DeepSpeed.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import SpectrumMonitor
        >>> trainer = Trainer(callbacks=[SpectrumMonitor(every_n_steps=100)], logger=False)
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        heads: bool = False,
        where: Where = None,
        layers: list[int] | None = None,
        exclude: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.every_n_steps = check_integer("every_n_steps", every_n_steps, 1)
        self.heads = check_flag("heads", heads)
        self.where, self.layers, self.exclude = check_layer_choice(where, layers, exclude)
        self._last_step = -1
        self._spectra: dict[int, dict[str, np.ndarray]] = {}  # of a step, those of each layer by its name
        self._bad: dict[str, int] = {}  # how many weights of a layer were not finite when it was observed
        self._stride = 1  # records from one that is kept to the next
        self._charts = LayerCharts("SpectrumMonitor")
        self._warnings = CollapseWarnings("SpectrumMonitor", SPECTRUM_SIGNS)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_alone(trainer, SpectrumMonitor)
        if stage == "fit":
            refuse_flat_shards(trainer, "SpectrumMonitor cannot read weights")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        attention_layers(pl_module, self.where, self.layers, self.exclude)  # refused here, before anything is written

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_step = -1
        self._spectra, self._stride = {}, 1
        self._charts.restart()
        warn_of_caveats("SpectrumMonitor", attention_layers(pl_module, self.where, self.layers, self.exclude))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step = current_step(trainer)
        if step % self.every_n_steps == 0 and step != self._last_step:
            self._last_step = step
            values, spectra = self._observe(pl_module)
            logged = log_now(pl_module, values)
            self._charts.add(trainer, step, logged)
            self._warn(pl_module, logged, step)
            if trainer.is_global_zero:
                self._keep(trainer, step, spectra)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._charts.after_validation(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._charts.log(trainer)
        if not self._spectra:
            return
        steps, self._spectra = self._spectra, {}
        first, *others = steps.values()
        names = [name for name in first if all(name in each for each in others)]  # layers may have come or gone
        if names:
            figure = draw_spectra(list(steps), [[each[name] for name in names] for each in steps.values()], names)
            save_figure(trainer, figure, "qk_spectrum/eigenvalues")

    def _warn(self, pl_module: pl.LightningModule, logged: dict[str, float], step: int) -> None:
        layers = attention_layers(pl_module, self.where, self.layers, self.exclude)
        scales = [logged[_logged_name("scale", layer_label(layer))] for layer in layers]
        seen = {
            ("logit_deviation", layer.name): scale**0.5 * layer.scale
            for layer, scale in zip(layers, scales, strict=True)
            if layer.spectrum_caveat is None
        }
        seen |= {("non_finite", name): float(count) for name, count in self._bad.items()}
        self._warnings.look(seen, f"training step {step}")

    def _keep(self, trainer: pl.Trainer, step: int, spectra: dict[str, np.ndarray]) -> None:
        """Log histograms where that is possible, else keep the spectra for the figure."""
        if keeps_history(trainer):
            for label, values in spectra.items():
                log_histogram(trainer, _logged_name("eigenvalues", label), values, step)
        elif trainer.loggers:
            self._spectra[step] = dict(zip(self._bad, spectra.values(), strict=True))
            self._stride *= 1 + (len(self._spectra) > MOST_SPECTRA)
            every = self._stride * self.every_n_steps
            self._spectra = {kept: each for kept, each in self._spectra.items() if kept % every == 0}

    @torch.no_grad()
    def _observe(self, pl_module: pl.LightningModule) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
        """What is logged, and the real parts of the eigenvalues of each layer."""
        spectra: dict[str, np.ndarray] = {}
        self._bad = {}
        values: dict[str, Tensor] = {}
        by_layer: dict[str, list[Tensor]] = {name: [] for name in STATISTICS}
        for layer in attention_layers(pl_module, self.where, self.layers, self.exclude):
            # Small and rare: double precision on the CPU, where eigenvalues need no device of their own.
            w_q, w_k = (whole(weight).cpu().double() for weight in layer.qk_weights())
            spectrum = qk_spectrum(w_q, w_k)
            spectra[layer_label(layer)] = spectrum.eigenvalues.real.flatten().numpy()
            self._bad[layer.name] = sum(int((~weight.isfinite()).sum()) for weight in (w_q, w_k))
            statistics = qk_statistics(w_q, w_k, spectrum)
            for name in STATISTICS:
                line = layer_label(layer)
                by_layer[name].append(_over_heads(name, statistics[name]))
                values[_logged_name(name, line)] = by_layer[name][-1]
                if self.heads:
                    by_head = enumerate(statistics[name])
                    values |= {_logged_name(name, line, head_part(head)): value for head, value in by_head}
        means = {_logged_name(name, "mean"): torch.stack(by_layer[name]).mean() for name in STATISTICS}
        return values | means, spectra


def _logged_name(statistic: str, line: str, part: str = "") -> str:
    return str(MetricName(f"qk_spectrum/{statistic}", line, part))


def _over_heads(name: str, values: Tensor) -> Tensor:
    """One number for a layer, from its heads' ``[H]``."""
    return {"max": values.amax, "min": values.amin}.get(name, values.mean)().float()
