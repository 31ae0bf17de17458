"""What Principal Attention Pursuit does pass by pass, at each validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from attention_modules import RPCAttention, rpc_diagnostics
from attention_modules.hosts import AttentionLayer
from attention_modules.masks import seen_tokens
from attention_modules.mechanisms.shared.options import check_integer
from lightning_tasks.callbacks.base import Where
from lightning_tasks.callbacks.monitoring.first_batch import FirstBatchObserver
from lightning_tasks.callbacks.monitoring.names import layer_label, listed, to_numbers
from lightning_tasks.callbacks.monitoring.warnings import (
    FEWEST_KEYS,
    IDLE_PURSUIT,
    NOT_FINITE,
    PURSUIT_SIGNS,
    CollapseWarnings,
)
from lightning_tasks.runs.loggers import current_step
from lightning_tasks.runs.metric_names import MetricName

STATISTICS = ("sparsity", "residual", "entropy", "self_probability")
OF_ALL_PASSES = ("mean_abs_key", "threshold")


class PursuitMonitor(FirstBatchObserver):
    """Logs what each pass of each RPC layer does, on the first batch of every validation and test.

    Names are ``val/pursuit/sparsity/layer_00/pass_1`` and likewise ``residual``, ``entropy`` and ``self_probability``,
    and of all passes together ``val/pursuit/mean_abs_key/layer_00`` and ``val/pursuit/threshold/layer_00`` (not where
    ``lam`` is inf): means over samples and heads (where a layer is called several times, for windows of images, each is
    a sample); the layer's number is its place among all self-attention layers of the model, whichever are chosen or
    have RPC. Tokens that no row sees (padding) count in none. Definitions, and what saturation looks like:
    :func:`attention_modules.rpc_diagnostics`. A firing costs
    about two more runs of the layer on ``num_samples`` samples, its maps some rows at a time.

    Warned of in words, each once: ``self_probability`` of the last pass above 0.98 among at least 16 tokens (the
    iteration saturates), its ``sparsity`` above 0.98 (S takes all), and, when a fit ends, ``sparsity`` below 0.0001 in
    every pass of its last validation (S does nothing; not where ``lam`` is inf, which asks for it). Keys or values that
    are NaN or infinite are warned of as well; the layer's values are then NaN. Where no chosen layer has RPC attention
    nothing is logged, and that is warned of once.

    Args:
        num_samples: how many of the batch's samples are looked at, at least 1.
        where: names of layers (a glob or several); all where None.
        layers: which of those, counted in module order.
        exclude: names (globs) to leave out.

    Raises:
        ValueError: if ``num_samples`` is no integer of at least 1; when a trainer starts, if it has a second
            ``PursuitMonitor``; when a fit, validation or test starts, if no layer matches.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import PursuitMonitor
        >>> trainer = Trainer(callbacks=[PursuitMonitor(num_samples=8)], logger=False)
    """

    group = "pursuit"

    def __init__(
        self, num_samples: int = 32, where: Where = None, layers: list[int] | None = None, exclude: Sequence[str] = ()
    ) -> None:
        super().__init__(where, layers, exclude)
        self.num_samples = check_integer("num_samples", num_samples, 1)
        # By label of a layer, over its calls: samples; sums of each statistic and of how many, [2, passes]; how many
        # numbers that enter it are not finite; the fewest tokens.
        self._samples: dict[str, int] = {}
        self._sums: dict[str, dict[str, Tensor]] = {}
        self._bad: dict[str, Tensor] = {}
        self._tokens: dict[str, Tensor] = {}
        self._said_none = False
        self._warnings = CollapseWarnings("PursuitMonitor", PURSUIT_SIGNS)
        self._idleness = CollapseWarnings("PursuitMonitor", [IDLE_PURSUIT])
        self._sparsity: dict[str, float] = {}  # of each layer that has a threshold, its largest of any pass, newest

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self._sparsity = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        idle = {(IDLE_PURSUIT.statistic, name): share for name, share in self._sparsity.items()}
        self._idleness.look(idle, "when training ended")

    def _pursuing(self, pl_module: pl.LightningModule) -> list[tuple[AttentionLayer, RPCAttention]]:
        """The chosen layers with RPC attention, and their mechanisms; warns, once, where there is none."""
        chosen = self._chosen(pl_module)
        pursuing = [(layer, layer.mechanism) for layer in chosen if isinstance(layer.mechanism, RPCAttention)]
        if not pursuing and not self._said_none:
            self._said_none = True
            names = listed({layer.name: "" for layer in chosen})
            rank_zero_warn(
                f"PursuitMonitor found no layer with RPC attention among {names}, and "
                "logs nothing; swap one to 'rpc', or leave this callback out"
            )
        return pursuing

    def _open(self, pl_module: pl.LightningModule) -> None:
        self._forget()  # what a batch that was skipped before its end left
        hooks = [
            (mechanism, partial(self._observe, layer_label(layer))) for layer, mechanism in self._pursuing(pl_module)
        ]
        if hooks:
            self._hook(hooks)

    def _observe(self, label: str, mechanism: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        if not isinstance(mechanism, RPCAttention):
            raise TypeError(f"expected an RPCAttention, got {type(mechanism).__name__}")
        k, v, mask = args[1], args[2], kwargs.get("attn_mask")
        before = self._samples.setdefault(label, 0)
        some = slice(0, self.num_samples - before)
        if before and not len(k[some]):
            return
        self._samples[label] += len(k[some])
        if mask is not None and mask.dim() == 4 and mask.shape[0] == k.shape[0]:
            mask = mask[some]
        passes = rpc_diagnostics(
            k[some],
            v[some],
            iterations=mechanism.iterations,
            lam=mechanism.lam,
            threshold=mechanism.threshold,
            num_heads=mechanism.spec.num_heads,
            attn_mask=mask,
            is_causal=kwargs.get("is_causal", False),
            scale=kwargs.get("scale"),
        )
        # The residual is a number for any finite keys, but where the iteration leaves the range of numbers.
        seen = seen_tokens(mask, k[some], k[some])
        tokens = k.new_full((len(k[some]),), k.shape[2]) if seen is None else seen.sum(-1)
        residual = passes["residual"].where((tokens > 0)[:, None], 0.0)
        bad = torch.stack([(~given.isfinite()).sum() for given in (k[some], v[some], residual)]).sum().float()
        self._bad[label] = self._bad.get(label, 0) + bad
        count = (tokens.where(tokens > 0, k.shape[2]).amin() if len(tokens) else k.new_tensor(k.shape[2])).to(bad)
        self._tokens[label] = count.minimum(self._tokens.get(label, count))
        sums = self._sums.setdefault(label, {})
        for name, values in passes.items():
            values = values if values.dim() == 3 else values.unsqueeze(0)
            # Samples and heads without a row that sees something are left out.
            seen = torch.stack([values.nansum((1, 2)), (~values.isnan()).sum((1, 2)).to(values.dtype)])
            sums[name] = sums.get(name, 0) + seen

    def _add_batch(self, pl_module: pl.LightningModule, stage: str) -> None:
        sums, tokens, bad = self._by_name(pl_module), self._tokens, self._bad
        self._close_unread()
        means = {name: total / count for name, (total, count) in sums.items()}
        if means:
            beside = {_fewest(label): count for label, count in tokens.items()}
            self._look(pl_module, to_numbers({**means, **bad, **beside}), stage)
        for name, (total, count) in sums.items():
            self._joined.add(name, total, count)

    def _names(self, pl_module: pl.LightningModule) -> list[str]:
        layers = self._pursuing(pl_module)
        return [name for layer, mechanism in layers for name in _names(layer_label(layer), mechanism)]

    def _by_name(self, pl_module: pl.LightningModule) -> dict[str, tuple[Tensor, Tensor]]:
        """Sums over the calls and of how many, by logged name; sums are NaN where a number is not finite."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for layer, mechanism in self._pursuing(pl_module):
            label = layer_label(layer)
            if not self._samples.get(label):
                continue
            sums = self._sums[label]
            totals, counts = torch.cat([sums[name] for name in (*STATISTICS, *_of_all_passes(mechanism))], 1)
            totals = totals.masked_fill(self._bad[label] > 0, torch.nan)
            found |= dict(zip(_names(label, mechanism), zip(totals, counts, strict=True), strict=True))
        return found

    def _look(self, pl_module: pl.LightningModule, numbers: dict[str, float], stage: str) -> None:
        """Warn of saturation, a full S and what is not finite; keep what tells an idle one."""
        shown: dict[tuple[str, str], float] = {}
        for layer, mechanism in self._pursuing(pl_module):
            label, name = layer_label(layer), layer.name
            if _name("sparsity", label, 1) not in numbers:
                continue
            last = mechanism.iterations
            if numbers[_fewest(label)] >= FEWEST_KEYS:
                shown["self_probability", name] = numbers[_name("self_probability", label, last)]
            shown["sparsity", name] = numbers[_name("sparsity", label, last)]
            shown[NOT_FINITE.statistic, name] = numbers[label]
            if stage == "val" and mechanism.lam != math.inf:
                passes = range(1, last + 1)
                self._sparsity[name] = max(numbers[_name("sparsity", label, number)] for number in passes)
        where = f"{stage} at step {current_step(pl_module.trainer)}"
        self._warnings.look(shown, where)

    def _forget(self) -> None:
        self._samples, self._sums, self._bad, self._tokens = {}, {}, {}, {}


def _fewest(label: str) -> str:
    return f"tokens/{label}"


def _of_all_passes(mechanism: RPCAttention) -> tuple[str, ...]:
    return OF_ALL_PASSES[:1] if mechanism.lam == math.inf else OF_ALL_PASSES


def _names(label: str, mechanism: RPCAttention) -> list[str]:
    """What is logged of a layer, statistic by statistic and pass by pass."""
    numbers = range(1, mechanism.iterations + 1)
    passes = [_name(name, label, number) for name in STATISTICS for number in numbers]
    return [*passes, *(str(MetricName(f"pursuit/{name}", label)) for name in _of_all_passes(mechanism))]


def _name(statistic: str, label: str, number: int) -> str:
    return str(MetricName(f"pursuit/{statistic}", label, f"pass_{number}"))
