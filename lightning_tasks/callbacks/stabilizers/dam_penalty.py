"""The penalty of a differentiable attention mask: its open gates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from attention_modules.hosts import AttentionLayer
from attention_modules.mechanisms import DifferentiableAttentionMask
from attention_modules.mechanisms.maps.dam import dam_penalty
from lightning_tasks.callbacks.base import Where
from lightning_tasks.callbacks.stabilizers.loss_penalty import LossPenalty


class DAMPenalty(LossPenalty):
    """Adds weight · Σ over layers and heads of ‖M‖₁ to the loss, M the mask of ``dam`` that the forward pass has drawn.

    M is the whole mask ``[N, N]`` of the longest sequence: a gate counts once for each pair of positions at its
    distance, as in the released code of SparseBERT (Shi et al., ICML 2021), which has one mask for all layers. It is
    the same draw that hid keys in this forward pass, so that both gradients of a gate are those of one sample. A
    layer that is called several times in a step (two views, micro-batches, GradCache) has the sum of its calls. The
    gradient enters in the backward pass of the loss, where accumulation, clipping, gradient scaling and DDP treat it as
    the loss's own; the loss that is logged does not hold it.

    With manual optimization it enters whole, in the first ``manual_backward`` through a forward pass: a loss that is
    divided for accumulation does not divide it (divide ``weight``), and a ``zero_grad()`` after that pass throws it
    away, though a second optimizer trains by the same forward pass.

    Logs ``dam_penalty/penalty``, weight included, of each batch. Training runs without ``torch.compile``.

    Args:
        weight: λ, at least 0; 5e-5 is the default of the released script, for 12 heads, 128 tokens and one mask. 0 only
            logs.
        where: names of layers (a glob or several); all where None. Those without ``dam`` have no penalty.
        layers: which of those, counted in module order.
        exclude: names (globs) to leave out.

    Raises:
        ValueError: if a number is out of its limits; when the fit starts, if none of the layers has ``dam``, the
            trainer has a second ``DAMPenalty``, or the strategy is FSDP1 or DeepSpeed; in the first step, if the gates
            of a layer take no gradient (with manual optimization, or beside a ``BaseFinetuning`` of Lightning, a
            warning).

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import DAMPenalty, SwapAttention
        >>> trainer = Trainer(callbacks=[SwapAttention("dam"), DAMPenalty(1e-4)], logger=False)
    """

    metric = "dam_penalty/penalty"
    of = "no gates"

    def __init__(
        self,
        weight: float = 5e-5,
        where: Where = None,
        layers: list[int] | None = None,
        exclude: Sequence[str] = (),
    ) -> None:
        super().__init__(weight, where, layers, exclude)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._chosen(pl_module):
            raise ValueError(
                "DAMPenalty: none of the layers has the mechanism 'dam', whose gates it is of; put "
                "SwapAttention('dam') before it in the list of callbacks, or leave it out"
            )

    def _chosen(self, pl_module: pl.LightningModule) -> list[AttentionLayer]:
        layers = super()._chosen(pl_module)
        return [layer for layer in layers if isinstance(layer.mechanism, DifferentiableAttentionMask)]

    def _open(self) -> None:
        self._forget()
        self._in_backward = False
        drawn = [self._mechanism(layer).get_submodule("drawn") for layer in self._layers]
        self._hook((each, partial(self._of_gates, index)) for index, each in enumerate(drawn))

    def _of_gates(self, index: int, drawn: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        attached = self._attach(index, dam_penalty, *args)
        return None if attached is None else (attached, kwargs)
