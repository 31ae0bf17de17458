"""RPC-Attention: softmax attention from Principal Attention Pursuit (Teo and Nguyen, NeurIPS 2024)."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from attention_modules.kernels import autocast, without_autocast
from attention_modules.masks import combine_masks, hide, visible
from attention_modules.mechanism import AttentionMechanism, AttentionSpec, register_mechanism
from attention_modules.mechanisms.pursuit import pursue
from attention_modules.mechanisms.shared.options import MOST_REPEATS, as_float, check_integer
from attention_modules.mechanisms.symmetric import check_self_attention, keys_and_values

Threshold = Literal["released", "head", "ratio"]
_THRESHOLDS = get_args(Threshold)  # here, as torch.compile of torch 2.6 cannot look into `typing`
RELEASED_LAM = 4.0
# Below this sum of |k| a row's keys count as zero: its threshold is beyond every key, and its slope would overflow.
ZERO_NORM = 1e-12


def check_rpc_options(iterations: int, lam: float | None, threshold: str) -> None:
    """Check the options of :func:`rpc_attention`.

    Raises:
        ValueError: if ``iterations`` is none of 1 to 1,000, ``lam`` is negative or NaN, or ``threshold`` is unknown.
    """
    check_integer("iterations, the number of softmax passes,", iterations, at_least=1, at_most=MOST_REPEATS)
    if lam is not None and not (isinstance(lam, (int, float)) and as_float(lam) >= 0):  # NaN is not >= 0
        raise ValueError(f"lam must be a number of at least 0 (inf: no sparse part), got {lam!r}")
    if threshold not in _THRESHOLDS:
        raise ValueError(f"threshold must be one of {', '.join(map(repr, _THRESHOLDS))}, got {threshold!r}")


def check_rpc_shapes(k: Tensor, v: Tensor) -> None:
    """Check that keys and values have one shape.

    Raises:
        ValueError: if they differ.
    """
    if k.shape != v.shape:
        raise ValueError(
            f"RPC attention subtracts values from keys: they need one shape, got {tuple(k.shape)} and {tuple(v.shape)}"
        )


def visible_norm(k: Tensor, attn_mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Σ‖k_j‖₁ over the keys that each row sees, and their number.

    Args:
        k: keys ``[B, H, N, d]``.
        attn_mask: boolean or additive, ``[B|1, H|1, N|1, N|1]``, or None.
        is_causal: row i sees keys 0 to i only.

    Returns:
        Sum and number, in float32 (float64 for float64 keys), each broadcastable to ``[B, H, N, 1]``.
    """
    dtype = torch.promote_types(k.dtype, torch.float32)
    tokens = k.shape[-2]
    if attn_mask is None and not is_causal:
        return k.abs().sum((-2, -1), keepdim=True, dtype=dtype), torch.full((), tokens, dtype=dtype, device=k.device)
    norms = k.abs().sum(-1, dtype=dtype)  # [B, H, N]; vector_norm takes six times as long on narrow heads
    if attn_mask is not None:
        seen = visible(attn_mask).to(dtype).expand(-1, -1, -1, tokens)
        count = seen.sum(-1, keepdim=True)  # [B|1, H|1, N|1, 1]
        if seen.shape[1] == 1:  # one product for all heads
            total = (seen[:, 0] @ norms.transpose(-2, -1)).transpose(-2, -1).unsqueeze(-1)
        else:
            total = seen @ norms.unsqueeze(-1)
        return total, count
    count = torch.arange(1, tokens + 1, dtype=dtype, device=k.device).unsqueeze(-1)
    return norms.cumsum(-1).unsqueeze(-1), count


def pursuit_threshold(
    k: Tensor,
    lam: float | None = None,
    threshold: Threshold = "released",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    num_heads: int | None = None,
) -> Tensor | None:
    """The soft threshold t of Principal Attention Pursuit, a row.

    ``"released"``: t = lam·mu, ``mu = |V|·H·d/(4 Σ‖k‖₁)``, as in the released code; lam is 4 where None. H is
    ``num_heads``, the heads of the whole layer, of which k may hold some (tensor parallelism); those of k where None.
    ``"head"``: the same without H, the width of one head in place of the layer's (our reading).
    ``"ratio"``: t = lam/mu, ``mu = |V|·d/(4 Σ‖k‖₁)``, the threshold of standard Principal Component Pursuit
    (our reading); lam is ``1/√max(|V|, d)`` where None. V are the keys that the row sees (masks and
    causality: our reading).

    Returns:
        Broadcastable to ``[B, H, N, 1]``, in float32 (float64 for float64 keys); None where lam is inf.
    """
    if lam == math.inf:
        return None
    heads, _, head_dim = k.shape[-3:]
    heads = heads if num_heads is None else num_heads
    with without_autocast(k.device):  # it would take the sums to half precision, which ends at 65,504
        total, count = visible_norm(k, attn_mask, is_causal)
    if threshold == "ratio":
        factor = count.clamp(min=head_dim).rsqrt() if lam is None else lam
        return factor * 4 * total / (count.clamp(min=1) * head_dim)
    lam = RELEASED_LAM if lam is None else lam
    empty = total <= ZERO_NORM
    width = head_dim if threshold == "head" else heads * head_dim
    limit = lam * count * (width / 4) / total.masked_fill(empty, 1.0)
    return limit.masked_fill(empty, math.inf)


@keys_and_values("rpc")
def rpc_attention(
    k: Tensor,
    v: Tensor,
    *,
    iterations: int = 4,
    lam: float | None = None,
    threshold: Threshold = "released",
    num_heads: int | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """The low-rank part L after ``iterations`` softmax passes of Principal Attention Pursuit.

    L = Y = 0; then S = soft(k - L + Y/mu, t), k₂ = k - S - Y/mu, L = softmax(k₂ k₂ᵀ · scale) v,
    Y <- Y + mu (k - L - S) (Teo and Nguyen, NeurIPS 2024, and their released code). Masks and causality
    are our reading: mu and t are taken a row, over the keys that the row sees. Under a mask that is not
    transitive (a sliding window) each pass widens what a row depends on by the window.

    Args:
        k: keys ``[B, H, N, d]``.
        v: values ``[B, H, N, d]``.
        iterations: number of softmax passes, at least 1.
        lam: factor of the threshold, at least 0; None for the default of :func:`pursuit_threshold`; with
            inf nothing is sparse, and one pass is symmetric attention.
        threshold: ``"released"``, ``"head"`` or ``"ratio"``, see :func:`pursuit_threshold`.
        num_heads: heads of the whole layer where k holds some of them only, see :func:`pursuit_threshold`.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, N]``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout, in the last pass only.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError: if there is a query, or the mask is neither boolean nor floating.
        ValueError: if an option is out of its limits, or shapes do not fit.

    Example:
        >>> import torch
        >>> from attnswap.functional import rpc_attention
        >>> k, v = torch.randn(2, 1, 3, 5, 8)
        >>> rpc_attention(k, v, iterations=4, is_causal=True).shape
        torch.Size([1, 3, 5, 8])
    """
    check_rpc_options(iterations, lam, threshold)
    check_rpc_shapes(k, v)
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, k, k, scale)
    attn_mask = hide(attn_mask)
    limit = pursuit_threshold(k, lam, threshold, attn_mask, is_causal, num_heads)
    k, v = autocast(k), autocast(v)
    attn_mask = None if attn_mask is None else autocast(attn_mask)
    return pursue(k, v, limit, iterations, attn_mask, is_causal, dropout_p, scale)


@register_mechanism("rpc")
class RPCAttention(AttentionMechanism):
    """:func:`rpc_attention` as a mechanism: no query projection, no parameter.

    Args:
        spec: the layer that it serves.
        iterations: number of softmax passes, at least 1.
        lam: factor of the threshold, at least 0; None for 1/√max(N, d) with ``"ratio"``, else 4.
        threshold: ``"released"`` (t = lam·mu), ``"head"`` (the same with a head's width) or ``"ratio"`` (t = lam/mu).
            The last two are our reading.

    Raises:
        ValueError: if an option is out of its limits, or the layer's values are not as wide as its keys.
    """

    uses_query = False
    per_head = ()

    def __init__(
        self,
        spec: AttentionSpec,
        iterations: int = 4,
        lam: float | None = None,
        threshold: Threshold = "released",
    ) -> None:
        check_rpc_options(iterations, lam, threshold)
        if spec.value_dim not in (None, spec.head_dim):
            raise ValueError(
                f"RPC attention subtracts values from keys, and this layer's heads have them of different widths "
                f"({spec.head_dim} and {spec.value_dim}); use a mechanism that keeps them apart"
            )
        super().__init__(spec)
        self.iterations = iterations
        self.lam = lam
        self.threshold: Threshold = threshold

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}, lam={self.lam}, threshold={self.threshold!r}"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        """Run the pursuit; of ``q`` only the length is read.

        Raises:
            ValueError: if the numbers of queries and keys differ, or a mask's shape does not fit.
        """
        check_self_attention("RPC", q, k)
        return rpc_attention(
            k,
            v,
            iterations=self.iterations,
            lam=self.lam,
            threshold=self.threshold,
            num_heads=self.spec.num_heads,
            attn_mask=attn_mask,
            is_causal=is_causal,
            dropout_p=dropout_p,
            scale=scale,
        )
