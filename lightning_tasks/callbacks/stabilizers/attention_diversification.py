"""Rows of attention that attend to different tokens, as an objective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attention_modules.mechanisms.shared.options import check_number
from attention_modules.stabilizers.diversification import diversification_loss
from lightning_tasks.callbacks.base import Where
from lightning_tasks.callbacks.stabilizers.map_penalty import MapPenalty


class AttentionDiversification(MapPenalty):
    """Adds weight · the mean over layers of the attention diversification loss to the loss (Guo et al., ICCV 2023).

    Of each layer's attention map, averaged over heads, it is the mean cosine between a row and the mean row, after what
    is at most ``threshold`` times uniform attention became 0 (:func:`.diversification_loss`), of the map that acts
    where it is softmax of some queries and keys, its rows over their sums. Rows of tokens that no row sees (padding) do
    not count. A layer that is called several times in a step (two views, micro-batches, GradCache) has the sum of its
    calls. It works against tokens that all attend to the same few. The gradient enters in the backward pass of the
    loss, where accumulation, clipping, gradient scaling and DDP treat it as the loss's own; the loss that is logged
    does not hold it.

    In the backward pass it computes every attention map once more, and holds the N × N map of the mean over heads of
    each sample, of one layer at a time: unlike other callbacks it costs memory that grows with N², and time.

    With manual optimization it enters whole, in the first ``manual_backward`` through a forward pass: a loss that is
    divided for accumulation does not divide it (divide ``weight``), and a ``zero_grad()`` after that pass throws it
    away, though a second optimizer trains by the same forward pass.

    Logs ``attention_diversification/penalty``, weight included, of each batch. Training runs without ``torch.compile``.

    Args:
        weight: factor of the loss, at least 0 (released: 1); 0 only logs.
        threshold: in units of uniform attention, at least 0 (released: 2).
        where: names of layers (a glob or several); all where None.
        layers: which of those, counted in module order.
        exclude: names (globs) to leave out.

    Raises:
        ValueError: if a number is out of its limits; when the fit starts, if no layer matches, the trainer has a second
            ``AttentionDiversification``, or the strategy is FSDP1 or DeepSpeed; in the first step, if a mechanism's map
            is no softmax of queries and keys, or a layer's queries and keys take no gradient (with manual optimization,
            or beside a ``BaseFinetuning`` of Lightning, a warning).

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import AttentionDiversification
        >>> trainer = Trainer(callbacks=[AttentionDiversification(1.0)], logger=False)
    """

    metric = "attention_diversification/penalty"

    def __init__(
        self,
        weight: float = 1.0,
        threshold: float = 2.0,
        where: Where = None,
        layers: list[int] | None = None,
        exclude: Sequence[str] = (),
    ) -> None:
        super().__init__(weight, where, layers, exclude)
        self.threshold = check_number("threshold", threshold, 0.0)

    def _penalty(self, query: Tensor, key: Tensor, given: dict[str, Any]) -> Tensor:
        return diversification_loss(query, key, threshold=self.threshold, **given) / len(self._layers)
