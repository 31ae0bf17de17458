"""Statistics of softmax(q kᵀ) that never hold the N x M map of all heads at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from attention_modules.analysis.chunks import ChunkedLogits, check_shapes, split_mask
from attention_modules.analysis.kernels import lse_and_mean_key
from attention_modules.mechanisms.shared.acting import middles, once

Statistic = Literal["entropy", "normalised_entropy", "effective_support", "largest_probability"]
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)


def _check(q: Tensor, k: Tensor, attn_mask: Tensor | None, statistics: Sequence[str]) -> None:
    unknown = sorted(set(statistics) - set(STATISTICS))
    if unknown or not statistics:
        raise ValueError(f"unknown attention statistics {unknown}; choose some of {', '.join(STATISTICS)}")
    check_shapes(q, k, attn_mask)


def _row_statistics_from_kernel(attention: ChunkedLogits, names: Sequence[str]) -> dict[str, Tensor] | None:
    """Rows' entropy and effective number of tokens from whole attention calls, or None where no kernel fits."""
    first = lse_and_mean_key(attention.q, attention.k, attention.visible, attention.is_causal, attention.scale)
    if first is None:
        return None
    lse, mean_key = first
    mean_logit = attention.scale * mean_key.mul_(attention.q).sum(-1)
    lse = lse.masked_fill(mean_logit.isnan(), torch.nan)  # of NaN some kernels give a finite one
    rows = {"lse": lse}
    if "entropy" in names:
        rows["entropy"] = lse - mean_logit
    del mean_key, first
    if "effective_support" in names:
        doubled = lse_and_mean_key(
            attention.q, attention.k, attention.visible, attention.is_causal, 2 * attention.scale
        )
        if doubled is None:
            return None
        rows["effective_support"] = torch.exp(2 * lse - doubled[0])
    if "largest_probability" in names:
        largest = torch.cat([logits.amax(-1) for logits in attention.chunks()], -1)
        rows["largest_probability"] = torch.exp(largest - lse).clamp(max=1.0)  # two roundings may differ
    return rows


def _row_statistics_in_chunks(attention: ChunkedLogits, names: Sequence[str]) -> dict[str, Tensor]:
    """The same, differentiable and for every mask, from logits of some rows at a time."""
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for logits in attention.chunks():
        lse = logits.logsumexp(-1, keepdim=True)
        empty = lse == float("-inf")
        logits = logits - lse.masked_fill(empty, 0.0)
        probability = logits.exp()
        if "entropy" in names:
            # 0 · (-inf) is 0 here, so hidden keys are taken out before the product.
            rows["entropy"].append(-(probability * logits.masked_fill(probability == 0, 0.0)).sum(-1))
        if "effective_support" in names:
            rows["effective_support"].append(1 / probability.square().sum(-1).masked_fill(empty.squeeze(-1), 1.0))
        if "largest_probability" in names:
            rows["largest_probability"].append(probability.amax(-1))
    return {name: torch.cat(values, -1) for name, values in rows.items()}


def _sum_over(rows: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over the valid rows, and their number, ``[B, H]`` each."""
    valid = valid.expand_as(rows)
    return rows.masked_fill(~valid, 0.0).sum(-1), valid.sum(-1)


def attention_statistics(
    q: Tensor,
    k: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    statistics: Sequence[Statistic] = STATISTICS,
) -> dict[str, Tensor]:
    """Statistics of A = softmax(scale · q kᵀ + mask), averaged over the rows that see a key, in fp32.

    ``entropy``: H_i = -Σ_j A_ij ln A_ij in nats. ``normalised_entropy``: ``H_i / ln|V_i|``, over rows with at least two
    visible keys. ``effective_support``: the effective number of tokens 1 / Σ_j A_ij², from 1 (one key) to
    ``|V_i|`` (uniform), our reading of the sparsity of Tarzanagh et al. (NeurIPS 2023).
    ``largest_probability``: max_j A_ij. As in the entropy-collapse literature; which rows are left out, and what an
    additive mask hides (:func:`attention_modules.masks.visible`), are our reading.

    The entropy is lse_i - scale · q_i·(A K)_i, from one attention call with the keys as values. Where gradients are
    wanted, the mask carries a finite bias or comes with ``is_causal``, or PyTorch lacks the call, it is summed in
    chunks of rows.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        scale: factor on the logits, 1/sqrt(d) where None.
        statistics: which of the above.

    Returns:
        By name, fp32 ``[B, H]``; NaN where a head of a sample has no row to average.

    Raises:
        ValueError: if a name is unknown, shapes do not fit, or heads, rows, keys or width are 0; the batch may be.

    Example:
        >>> import torch
        >>> q, k = torch.randn(2, 1, 3, 5, 8)  # a batch of one, three heads, five tokens of width 8
        >>> from attnswap.analysis import attention_statistics
        >>> attention_statistics(q * 0, k, statistics=["effective_support"])["effective_support"]
        tensor([[5., 5., 5.]])
    """
    sums = attention_row_sums(q, k, attn_mask=attn_mask, is_causal=is_causal, scale=scale, statistics=statistics)
    return {name: total / count for name, (total, count) in sums.items()}


def attention_row_sums(
    q: Tensor,
    k: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    statistics: Sequence[Statistic] = STATISTICS,
) -> dict[str, tuple[Tensor, Tensor]]:
    """The sums that :func:`attention_statistics` averages, and of how many rows, for means over several maps.

    Returns:
        By name, the sum over rows, fp32 ``[B, H]``, and their number, int64 ``[B, H]``; arguments and errors are the
        same.

    Example:
        >>> import torch
        >>> q, k = torch.randn(2, 1, 3, 5, 8)  # a batch of one, three heads, five tokens of width 8
        >>> from attnswap.analysis import attention_row_sums
        >>> total, rows = attention_row_sums(q, k, statistics=["entropy"])["entropy"]
        >>> total.shape, rows.unique()
        (torch.Size([1, 3]), tensor([5]))
    """
    rows, counts = row_values(q, k, attn_mask=attn_mask, is_causal=is_causal, scale=scale, statistics=statistics)
    return sums_over_rows(rows, counts, statistics)


def row_values(
    q: Tensor,
    k: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    statistics: Sequence[Statistic] = STATISTICS,
) -> tuple[dict[str, Tensor], Tensor]:
    """What :func:`attention_statistics` averages, of each row, fp32 ``[B, H, N]``, and how many keys each sees.

    ``normalised_entropy`` is left to :func:`sums_over_rows`, and the entropy is there in its place.
    """
    _check(q, k, attn_mask, statistics)
    names = set(statistics) | ({"entropy"} if "normalised_entropy" in statistics else set())
    with torch.autocast(q.device.type, enabled=False):
        visible, bias = split_mask(attn_mask)
        if bias is not None and not bias.requires_grad and not bool((bias != 0).any()):
            bias = None  # the mask only hides: kernels fit
        attention = ChunkedLogits(
            q.float(), k.float(), visible, bias, is_causal, q.shape[-1] ** -0.5 if scale is None else scale
        )
        wanted = sorted(names - {"normalised_entropy"})
        differentiable = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (q, k, bias) if tensor is not None
        )
        rows = None if differentiable or bias is not None else _row_statistics_from_kernel(attention, wanted)
        if rows is None:
            rows = _row_statistics_in_chunks(attention, wanted)
        return rows, attention.visible_counts()


def sums_over_rows(
    rows: Mapping[str, Tensor], counts: Tensor, statistics: Sequence[Statistic]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Sums of what rows have, and over how many, of those that see a key, or two where keys are counted.

    Args:
        rows: by name, ``[B, H, N]``.
        counts: how many keys each row sees.
        statistics: which are wanted.
    """
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    for name in statistics:
        if name == "normalised_entropy":
            sums[name] = _sum_over(rows["entropy"].clamp(min=0) / counts.clamp(min=2).log(), counts >= 2)
        else:
            values = rows[name].clamp(min=0) if name == "entropy" else rows[name]
            sums[name] = _sum_over(values, counts >= 1)
    return sums


def attention_entropy(
    q: Tensor, k: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Mean attention entropy in nats, fp32 ``[B, H]``; arguments and source as :func:`attention_statistics`.

    Example:
        >>> import torch
        >>> q, k = torch.randn(2, 1, 3, 5, 8)  # a batch of one, three heads, five tokens of width 8
        >>> from attnswap.analysis import attention_entropy
        >>> attention_entropy(q * 0, k).exp()  # uniform attention
        tensor([[5., 5., 5.]])
    """
    return attention_statistics(q, k, attn_mask=attn_mask, is_causal=is_causal, scale=scale, statistics=("entropy",))[
        "entropy"
    ]


def attention_sink(
    q: Tensor,
    k: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    max_rows: int | None = None,
) -> Tensor:
    """max_j of the mean of A_ij over the rows i that see a key: the share of attention that one key takes of all rows.

    From 1/M (uniform over M keys) to 1 (every row attends to one and the same key). After Gu et al. (When Attention
    Sink Emerges in Language Models, ICLR 2025), who take the mean for the first key over the rows that see it; that of
    any key, over all rows, is our reading. Some rows of the map at a time.

    Args:
        q, k, attn_mask, is_causal, scale: as :func:`attention_statistics`.
        max_rows: more rows than these are looked at in so many, the middle ones of parts of equal size; all where
            None.

    Returns:
        fp32 ``[B, H]``; NaN where a head of a sample has no row that sees a key, or holds NaN in a row that does.

    Raises:
        ValueError: if shapes do not fit.

    Example:
        >>> import torch
        >>> q, k = torch.randn(2, 1, 3, 5, 8)  # a batch of one, three heads, five tokens of width 8
        >>> from attnswap.analysis import attention_sink
        >>> attention_sink(q * 0, k)  # no key takes more than another
        tensor([[0.2000, 0.2000, 0.2000]])
    """
    return sink_shares(q, k, attn_mask=attn_mask, is_causal=is_causal, scale=scale, max_rows=max_rows).amax(-1)


def sink_shares(
    q: Tensor,
    k: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    max_rows: int | None = None,
    counting: Tensor | None = None,
) -> Tensor:
    """The share of all rows' attention that each key takes, ``[B, H, M]``; arguments as :func:`attention_sink`.

    ``counting``: which rows count, boolean ``[B, N]``; all where None.
    """
    _check(q, k, attn_mask, STATISTICS)
    number, columns = q.shape[2], k.shape[2]
    most = number if max_rows is None else min(number, max_rows)
    kept = middles(number, most, q.device, counting).view(-1, 1, most, 1)  # of each sample, where these differ
    with torch.autocast(q.device.type, enabled=False):
        if attn_mask is not None:
            attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + tuple(attn_mask.shape))
            attn_mask = attn_mask if attn_mask.shape[-2] == 1 else attn_mask.take_along_dim(kept, -2)
        visible, bias = split_mask(attn_mask)
        if is_causal:
            past = torch.arange(columns, device=q.device) <= kept
            visible = past if visible is None else visible & past
        if counting is not None:
            rows_seen = counting[:, None, :, None].take_along_dim(kept, 2) & once(kept.squeeze(-1)).unsqueeze(-1)
            visible = rows_seen.expand(-1, -1, -1, columns) if visible is None else visible & rows_seen
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        attention = ChunkedLogits(q.take_along_dim(kept, 2).float(), k.float(), visible, bias, False, scale)
        mass: Tensor = torch.zeros(*k.shape[:3], device=k.device)
        rows: Tensor = torch.zeros(k.shape[:2], device=k.device)
        for logits in attention.chunks():
            empty = (logits == float("-inf")).all(-1)  # rows that see nothing, of which softmax is 0/0
            mass = mass + logits.softmax(-1).masked_fill(empty.unsqueeze(-1), 0.0).sum(-2)
            rows = rows + (~empty).sum(-1)
    return mass / rows.unsqueeze(-1)


def sink_features(x: Tensor, shares: Tensor, valid: Tensor | None = None) -> dict[str, Tensor]:
    """How far the token that a sink attends to stands out: outlier features beside attention sinks.

    ``sink_norm`` is its norm over the mean norm of all tokens, ``sink_coordinate`` its largest absolute coordinate over
    the mean of theirs (our reading of what Zhang et al., Attention Sinks: A 'Catch, Tag, Release' Mechanism for
    Embeddings, 2025, show).

    Args:
        x: tokens ``[B, N, C]``, as they enter the layer.
        shares: what each token takes of the attention of all rows, ``[B, H, N]``; the sink is the largest.
        valid: which tokens count, boolean ``[B, N]``; all where None.

    Returns:
        By name, fp32 ``[B, H]``; NaN where shares are, or all tokens are 0.

    Example:
        >>> import torch
        >>> from attnswap.analysis import sink_features
        >>> x = torch.tensor([[[3.0, 4.0], [0.0, 1.0]]])
        >>> sink_features(x, torch.tensor([[[0.9, 0.1]]]))["sink_norm"]  # 5 over (5 + 1) / 2
        tensor([[1.6667]])
    """
    x = x.float()
    found = {}
    for name, size in (("sink_norm", x.norm(dim=-1)), ("sink_coordinate", x.abs().amax(-1))):
        of_sink = size.unsqueeze(1).expand(shares.shape).gather(-1, shares.argmax(-1, keepdim=True)).squeeze(-1)
        mean = size.mean(-1) if valid is None else size.where(valid, 0.0).sum(-1) / valid.sum(-1)
        found[name] = (of_sink / mean.unsqueeze(-1)).masked_fill(shares.isnan().any(-1), torch.nan)
    return found


def token_similarity(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """Mean cosine of the angles between different tokens of a sequence, in fp32: 1 where all point one way.

    What grows to 1 in rank collapse (Dong et al., Attention is Not All You Need, ICML 2021) and oversmoothing. It is
    (‖Σ_i x̂_i‖² - n) / (n (n - 1)) for the n normalized tokens x̂_i, in O(n C).

    Args:
        x: tokens ``[B, N, C]``.
        valid: which of them count, boolean ``[B, N]``; all where None.

    Returns:
        ``[B]``; NaN where fewer than two tokens count.

    Raises:
        ValueError: if shapes do not fit.

    Example:
        >>> import torch
        >>> from attnswap.analysis import token_similarity
        >>> token_similarity(torch.ones(1, 5, 8))
        tensor([1.])
    """
    if x.ndim != 3 or (valid is not None and valid.shape != x.shape[:2]):
        shape = None if valid is None else tuple(valid.shape)
        raise ValueError(f"x must be [B, N, C] and valid [B, N], got {tuple(x.shape)} and {shape}")
    with torch.autocast(x.device.type, enabled=False):
        unit = torch.nn.functional.normalize(x.float(), dim=-1)
        if valid is not None:
            unit = unit.masked_fill(~valid.bool().unsqueeze(-1), 0.0)  # NaN of a token that does not count, too
        squares = unit.square().sum((-2, -1))  # n, but for tokens of zeros
        count = torch.full_like(squares, x.shape[1]) if valid is None else valid.sum(-1).float()
        return (unit.sum(-2).square().sum(-1) - squares) / (count * (count - 1)).masked_fill(count < 2, torch.nan)
