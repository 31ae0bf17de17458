"""Whether attention becomes kernel PCA of its keys while it trains, at each validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from attention_modules import (
    AttentionMechanism,
    ScaledAttention,
    SoftmaxAttention,
    SymmetricAttention,
    softmax_attention,
)
from attention_modules.analysis import eigen_residual, projection_loss
from attention_modules.analysis.kernel_pca import mixed_values, queries_at_kernel_scale
from attention_modules.base import described, queries_of
from attention_modules.hosts import AttentionLayer
from attention_modules.masks import seen_tokens
from attention_modules.mechanisms.shared.options import check_integer
from lightning_tasks.callbacks.base import Where
from lightning_tasks.callbacks.monitoring.first_batch import FirstBatchObserver
from lightning_tasks.callbacks.monitoring.names import layer_label, listed
from lightning_tasks.callbacks.monitoring.observer import MechanismObserver
from lightning_tasks.runs.metric_names import MetricName

STATISTICS = ("projection_loss", "absolute_loss", "eigen_residual")
READ = (SoftmaxAttention, SymmetricAttention, ScaledAttention)


class KernelPCAMonitor(FirstBatchObserver, MechanismObserver):
    """Logs how far each layer is from kernel PCA of its keys, on the first batch of every validation and test.

    Names are ``val/kernel_pca/projection_loss/layer_00`` and likewise ``absolute_loss`` (J and the mean of ``|J|``, see
    :func:`attention_modules.analysis.projection_loss`) and ``eigen_residual`` (how far the values' coefficients are
    from eigenvectors of the centered Gram matrix, 0 to 1, see :func:`attention_modules.analysis.eigen_residual`), as
    means over samples and heads. Tokens that no row sees (padding) count in none. The residual needs rows that see
    every other key; causal layers have the losses alone.

    The reading (Teo and Nguyen, NeurIPS 2024) is of softmax, symmetric and scaled attention; layers with another
    mechanism are left out, and that is warned of once. A firing computes in float64 and holds some N × N maps of
    ``num_samples`` samples: about 0.05 s for 8 images and a layer of DeiT-tiny, on one core.

    Args:
        num_samples: how many of the batch's samples are looked at, at least 1.
        where: names of layers (a glob or several); all where None.
        layers: which of those, counted in module order.
        exclude: names (globs) to leave out.

    Raises:
        ValueError: if ``num_samples`` is no integer of at least 1; when a trainer starts, if it has a second
            ``KernelPCAMonitor``; when a fit, validation or test starts, if no layer matches.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import KernelPCAMonitor
        >>> trainer = Trainer(callbacks=[KernelPCAMonitor(num_samples=8)], logger=False)
    """

    group = "kernel_pca"

    def __init__(
        self, num_samples: int = 8, where: Where = None, layers: list[int] | None = None, exclude: Sequence[str] = ()
    ) -> None:
        super().__init__(where, layers, exclude)
        self.num_samples = check_integer("num_samples", num_samples, 1)
        self._samples: dict[str, int] = {}
        self._sums: dict[str, Tensor] = {}  # by name, the sum over samples and heads, and of how many
        self._said_others = False

    def _watches(self, stage: str) -> bool:
        return stage != "predict"

    def _read(self, pl_module: pl.LightningModule) -> list[AttentionLayer]:
        """The chosen layers of which the reading says something; warns, once, of the others."""
        chosen = self._chosen(pl_module)
        others = {
            layer.name: "" if layer.mechanism is None else described(layer.mechanism)
            for layer in chosen
            if not isinstance(layer.mechanism, READ)
        }
        if others and not self._said_others:
            self._said_others = True
            rank_zero_warn(
                f"KernelPCAMonitor leaves out {listed(others)}: kernel PCA is a reading of softmax, symmetric and "
                "scaled attention"
            )
        return [layer for layer in chosen if layer.name not in others]

    def _names(self, pl_module: pl.LightningModule) -> list[str]:
        return [_name(statistic, layer_label(layer)) for layer in self._read(pl_module) for statistic in STATISTICS]

    def _open(self, pl_module: pl.LightningModule) -> None:
        self._forget()
        hooks = [
            (self._mechanism(layer), partial(self._observe, layer_label(layer))) for layer in self._read(pl_module)
        ]
        if hooks:
            self._hook(hooks)

    def _observe(self, label: str, mechanism: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        if not isinstance(mechanism, AttentionMechanism):
            raise TypeError(f"expected an AttentionMechanism, got {type(mechanism).__name__}")
        left = self.num_samples - self._samples.get(label, 0)
        q, k, v = (x[:left] for x in args[:3])
        if left <= 0 or not len(k):
            return
        self._samples[label] = self._samples.get(label, 0) + len(k)
        mask = kwargs.get("attn_mask")
        if mask is not None and mask.dim() == 4 and mask.shape[0] > len(k):
            mask = mask[:left]
        given: dict[str, Any] = {
            "attn_mask": mask,
            "is_causal": bool(kwargs.get("is_causal", False)),
            "scale": kwargs.get("scale"),
        }
        with torch.no_grad():
            for name, values in _measured(mechanism, q, k, v, given):
                both = torch.stack([values.sum(), values.new_tensor(values.numel())])
                self._sums[_name(name, label)] = self._sums.get(_name(name, label), 0) + both

    def _add_batch(self, pl_module: pl.LightningModule, stage: str) -> None:
        sums = self._sums
        self._close_unread()
        for name, (total, count) in sums.items():
            self._joined.add(name, total.to(pl_module.device), count)

    def _forget(self) -> None:
        self._samples, self._sums = {}, {}


def _measured(
    mechanism: AttentionMechanism, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Each statistic of a call, ``[B, H]``, each sample alone where it has tokens that no row sees (padding)."""
    q = queries_of(mechanism, q, k)
    mixed = mixed_values(mechanism, q, k, v, **given)
    h = softmax_attention(q, k, mixed, **given)
    if mechanism.uses_query:
        q, given = queries_at_kernel_scale(q, given["scale"]), given | {"scale": None}
    mask = given["attn_mask"]
    seen = seen_tokens(mask, q, k)
    if seen is None or bool(seen.all()):
        yield from _statistics(given, q, k, mixed, h).items()
        return
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape)).expand(len(k), -1, k.shape[2], k.shape[2])
    for sample, tokens in enumerate(seen):
        if bool(tokens.any()):
            part = slice(sample, sample + 1)
            alone = given | {"attn_mask": mask[part, :, tokens][..., tokens]}
            yield from _statistics(alone, *(each[part, :, tokens] for each in (q, k, mixed, h))).items()


def _statistics(given: dict[str, Any], q: Tensor, k: Tensor, mixed: Tensor, h: Tensor) -> dict[str, Tensor]:
    """NaN where something is not finite."""
    if not all(bool(x.isfinite().all()) for x in (q, k, h)):
        return dict.fromkeys(STATISTICS, torch.full(k.shape[:2], torch.nan, device=k.device))
    loss = projection_loss(q, k, h, **given)
    found = {"projection_loss": loss.signed, "absolute_loss": loss.absolute}
    mask = given["attn_mask"]
    whole = mask is None or bool((mask if mask.dtype == torch.bool else mask == 0).all())
    if whole and not given["is_causal"] and k.shape[2] > 1:
        found["eigen_residual"] = _residual(k, mixed, given["scale"])
    return found


def _residual(k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """NaN where a key is too long for the kernel: what is watched goes on."""
    try:
        return eigen_residual(k, v, scale=scale)
    except ValueError:
        return torch.full(k.shape[:2], torch.nan, device=k.device)


def _name(statistic: str, label: str) -> str:
    return str(MetricName(f"kernel_pca/{statistic}", label))
