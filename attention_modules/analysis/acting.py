"""Statistics of the weights that act, whatever the mechanism: rows that do not sum to 1, and negative weights, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_modules.analysis.chunks import ChunkedLogits, split_mask
from attention_modules.analysis.kernels import lse_and_mean_key
from attention_modules.analysis.statistics import STATISTICS, Statistic, row_values, sink_shares, sums_over_rows
from attention_modules.kernels import without_autocast
from attention_modules.mechanisms.shared.acting import ELEMENTS, ActingMap, FactorMap, middles, once


def acting_sums(
    acting: ActingMap,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    statistics: Sequence[Statistic] = STATISTICS,
    sink_rows: int | None = None,
    every_row: bool = False,
    counting: Tensor | None = None,
) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor | None]:
    """What :func:`.attention_row_sums` and :func:`.sink_shares` give, of the map that mixes the values.

    Weights w need neither sum to 1 (``sigmoid``, a sink) nor be positive (differential, twicing): entropy, effective
    support and sink are those of ``|w|`` over its sum in the row, ``largest_probability`` is ``max_j |w_ij|`` as it is.
    A row whose weights are all 0 does not count. A row that sees n keys is compared with n.

    Softmax of other queries and keys costs what they do; any other map is made once, some rows or columns at a time. Of
    a mechanism that is known as a linear function alone, or as a difference of two maps, as many rows are looked at as
    values or queries are wide, the middle ones of parts of equal size, where there are at least 8 times as many.

    Args:
        acting: the map, of :func:`.acting_map`.
        attn_mask: what the layer gives its mechanism, which says how many keys a row sees.
        is_causal: likewise.
        statistics: which.
        sink_rows: how many rows are looked at for a sink, at most; 0 for all, None for no sink.
        every_row: look at all rows of any map, whatever it costs.
        counting: which rows count, boolean ``[B, N]``, as :func:`attention_modules.masks.seen_tokens`; all where None.

    Returns:
        By name, the sum over rows and their number, ``[B, H]`` each; and the share that each key takes, ``[B, H, M]``.

    Raises:
        NoMapError: if there is no such map.
        ValueError: as :func:`.attention_row_sums`.
    """
    if attn_mask is not None and attn_mask.shape[-1] > acting.shape[3]:  # which says of keys without a value, too
        attn_mask = attn_mask[..., : acting.shape[3]]
    with without_autocast(acting.device):
        if isinstance(acting, FactorMap):
            return _of_factors(acting, statistics, sink_rows, counting)
        rows = None if every_row else acting.some_rows(counting)
        return _of_blocks(acting, rows, attn_mask, is_causal, statistics, sink_rows, counting)


def _of_factors(
    acting: FactorMap, statistics: Sequence[Statistic], sink_rows: int | None, counting: Tensor | None
) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor | None]:
    of = acting.normalized()
    given: dict[str, Any] = {"attn_mask": of.attn_mask, "is_causal": of.is_causal, "scale": of.scale}
    rows, counts = row_values(of.q, of.k, **given, statistics=statistics)
    if counting is not None:
        counts = counts * counting[:, None]
    if not acting.is_plain and "largest_probability" in rows:
        rows["largest_probability"] = rows["largest_probability"] * _mass(acting, of)
    sink = None
    if sink_rows is not None:
        sink = sink_shares(of.q, of.k, **given, max_rows=sink_rows or None, counting=counting)
    return sums_over_rows(rows, counts, statistics), sink


def _mass(acting: FactorMap, normalized: FactorMap) -> Tensor:
    """Σ_j ``|w_ij|`` of each row, ``[B, H, N]``."""
    mass = torch.ones((), device=acting.q.device)
    if acting.extra or acting.weight is not None:
        every = acting
        if acting.is_causal:  # row i sees the extra keys, and keys 0 to i
            every = FactorMap(F.pad(acting.q, (0, 0, acting.extra, 0)), acting.k, None, True, acting.scale)
        whole = _log_sum_exp(every)[..., every.q.shape[2] - acting.q.shape[2] :]
        mass = (_log_sum_exp(normalized) - whole).exp()
    return mass if acting.gain is None else mass * acting.gain.squeeze(-1).abs().float()


def _log_sum_exp(of: FactorMap) -> Tensor:
    visible, bias = split_mask(of.attn_mask)
    scale = of.q.shape[-1] ** -0.5 if of.scale is None else of.scale
    q, k = of.q.float(), of.k.float()
    found = None if bias is not None else lse_and_mean_key(q, k, visible, of.is_causal, scale)
    if found is not None:
        return found[0]
    logits = ChunkedLogits(q, k, visible, bias, of.is_causal, scale)
    return torch.cat([chunk.logsumexp(-1) for chunk in logits.chunks()], -1)


def _of_blocks(
    acting: ActingMap,
    chosen: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    statistics: Sequence[Statistic],
    sink_rows: int | None,
    counting: Tensor | None,
) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor | None]:
    batch, heads, number, columns = acting.shape
    device = acting.device
    number = number if chosen is None else len(chosen)
    total, logs, squares, largest = torch.zeros(4, batch, heads, number, device=device)
    if counting is not None and chosen is not None:
        counting = counting[:, chosen] & once(chosen)
    kept = _kept_rows((batch, heads, number, columns), sink_rows, device, counting)
    mass = torch.zeros(batch, heads, columns, device=device)
    hidden = None if counting is None else ~counting[:, None]
    some: Tensor | None = None  # rows of the map that are kept where columns come one after the other
    for rows, where, part in acting.blocks(chosen):
        size = part.abs().float()
        total[..., rows] += size.sum(-1)
        if not {"entropy", "normalised_entropy"}.isdisjoint(statistics):
            logs[..., rows] += torch.special.xlogy(size, size).sum(-1)
        if "effective_support" in statistics:
            squares[..., rows] += size.square().sum(-1)
        if "largest_probability" in statistics:
            largest[..., rows] = torch.maximum(largest[..., rows], size.amax(-1))
        if sink_rows is not None and where == slice(0, columns):
            share = size / total[..., rows, None].masked_fill(total[..., rows, None] == 0, 1.0)
            mass += (share if hidden is None else share.masked_fill(hidden[..., rows, None], 0.0)).sum(-2)
        elif sink_rows is not None:
            some = size.new_zeros(batch, heads, len(kept), columns) if some is None else some
            some[..., where] = size[:, :, kept]
    used = total != 0 if hidden is None else (total != 0) & ~hidden  # NaN is
    whole = total.masked_fill(~used, 1.0)
    found = {
        "entropy": whole.log() - logs / whole,
        "effective_support": whole.square() / squares.masked_fill(~used, 1.0),
        "largest_probability": largest,
    }
    sink = None
    if sink_rows is not None:
        counted = used if some is None else used[..., kept] & once(kept)
        mass = mass if some is None else (some / whole[..., kept, None]).masked_fill(~counted[..., None], 0.0).sum(-2)
        sink = mass / counted.sum(-1, keepdim=True)
    counts = _seen(acting.shape, attn_mask, is_causal, device)[:, :heads]
    counts = counts.expand(-1, -1, acting.shape[2])
    return sums_over_rows(found, (counts if chosen is None else counts[..., chosen]) * used, statistics), sink


def _kept_rows(
    shape: tuple[int, int, int, int], wanted: int | None, device: torch.device, counting: Tensor | None
) -> Tensor:
    """Rows of a map that is made column by column, so few that they are no more than some chunks."""
    batch, heads, number, columns = shape
    few = max(16, 16 * ELEMENTS // max(1, batch * heads * columns))
    most = min(number, few if not wanted else min(few, wanted))
    return middles(number, most, device, None if counting is None else counting.any(0))


def _seen(shape: tuple[int, ...], attn_mask: Tensor | None, is_causal: bool, device: torch.device) -> Tensor:
    """How many keys each row sees, ``[B|1, H|1, N]``."""
    visible, _ = split_mask(attn_mask)
    some = torch.empty((), device=device)
    q, k = some.expand(*shape[:3], 1), some.expand(*shape[:2], shape[3], 1)
    return ChunkedLogits(q, k, visible, None, is_causal, 1.0).visible_counts()
