"""The entropy of attention held above a floor, or at a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attention_modules.mechanisms.shared.options import check_integer, check_number
from attention_modules.stabilizers.entropy import entropy_penalty
from lightning_tasks.callbacks.base import Where
from lightning_tasks.callbacks.stabilizers.map_penalty import MapPenalty


class EntropyRegularizer(MapPenalty):
    """Adds weight · Σ over layers and heads of max(0, floor - h)², or (h - target)², to the loss.

    h is a head's mean normalized entropy H_i / ln n_i over the rows that see n_i ≥ 2 keys, but those of tokens that no
    row sees (padding), from 0 (each row attends to one key) to 1 (uniform), of the map that acts where it is softmax of
    some queries and keys, its rows over their sums (:func:`attnswap.attention_maps`); the mechanism's Parameters take
    the gradient too. The square is averaged over the samples of each call: a layer that is called several times in a
    step (two views, micro-batches, GradCache) has the sum of its calls. The form is our reading; entropy collapse is
    what it works against (Zhai et al., ICML 2023). The gradient enters in the backward pass of the loss, where
    accumulation, clipping, gradient scaling and DDP treat it as the loss's own; the loss that is logged does not hold
    it. No map is held (:func:`attention_modules.stabilizers.entropy.row_entropy`).

    With manual optimization it enters whole, in the first ``manual_backward`` through a forward pass: a loss that is
    divided for accumulation does not divide it (divide ``weight``), and a ``zero_grad()`` after that pass throws it
    away, though a second optimizer trains by the same forward pass.

    Logs ``entropy_regularizer/penalty``, weight included, of each batch. Training runs without ``torch.compile``.

    Args:
        weight: factor of the penalty, at least 0; 0 only logs.
        floor: what h should not fall below, from 0 to 1; 0.2 where neither it nor ``target`` is given.
        target: what h should be, from 0 to 1, in place of a floor.
        max_rows: more rows of a map than these are looked at in so many that lie evenly from the first to the last
            (one: the last), which keeps the cost small; null for all.
        where: names of layers (a glob or several); all where None.
        layers: which of those, counted in module order.
        exclude: names (globs) to leave out.

    Raises:
        ValueError: if a number is out of its limits, or both ``floor`` and ``target`` are given; when the fit starts,
            if no layer matches, the trainer has a second ``EntropyRegularizer``, or the strategy is FSDP1 or DeepSpeed;
            in the first step, if a mechanism's map is no softmax of queries and keys (``sigmoid``, ``entmax``,
            ``twicing``), or a layer's queries and keys take no gradient (with manual optimization, or beside a
            ``BaseFinetuning`` of Lightning, a warning).

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import EntropyRegularizer
        >>> trainer = Trainer(callbacks=[EntropyRegularizer(0.1, floor=0.3)], logger=False)
    """

    metric = "entropy_regularizer/penalty"

    def __init__(
        self,
        weight: float,
        floor: float | None = None,
        target: float | None = None,
        max_rows: int | None = 16,
        where: Where = None,
        layers: list[int] | None = None,
        exclude: Sequence[str] = (),
    ) -> None:
        super().__init__(weight, where, layers, exclude)
        if floor is not None and target is not None:
            raise ValueError(f"give a floor or a target, not both: got floor={floor!r} and target={target!r}")
        floor = 0.2 if floor is None and target is None else floor
        self.floor = None if floor is None else check_number("floor", floor, 0.0, 1.0)
        self.target = None if target is None else check_number("target", target, 0.0, 1.0)
        self.max_rows = None if max_rows is None else check_integer("max_rows", max_rows, 1)

    def _penalty(self, query: Tensor, key: Tensor, given: dict[str, Any]) -> Tensor:
        limits = {"floor": self.floor, "target": self.target, "max_rows": self.max_rows}
        return entropy_penalty(query, key, **limits, **given)  # type: ignore[arg-type]
