"""Differential attention: the difference of two softmax maps (Ye et al., ICLR 2025)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention_modules.kernels import attend
from attention_modules.masks import combine_masks, hide
from attention_modules.mechanism import AttentionMechanism, AttentionSpec, register_mechanism
from attention_modules.mechanisms.shared.acting import FactorMap, SumMap
from attention_modules.mechanisms.shared.options import check_choice, check_flag, check_number

Pairs = Literal["features", "heads"]


def differential_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    pairs: Pairs = "features",
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """(A₁ - λ A₂) v, before the norm that follows it (differential attention, Ye et al., ICLR 2025, eq. 1).

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d']``.
        lam: λ, one number.
        pairs: ``"features"``: A₁ and A₂ are of the first and the second half of each head's features, and v of the
            whole head, as in the paper's code and timm. ``"heads"``: they are of heads h and h + H/2, and v of both
            together, as in transformers' DiffLlama.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout; each map drops weights of its own.
        scale: factor on the logits of a map: 1/sqrt of the features that it is made of where None.

    Returns:
        ``[B, H, N, d']`` for features, ``[B, H/2, N, 2 d']`` for heads.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape does not fit, ``pairs`` is unknown, or the features or heads are no pairs.

    Example:
        >>> import torch
        >>> from attnswap.functional import differential_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> differential_attention(q, k, v, torch.tensor(0.5)).shape
        torch.Size([1, 3, 5, 8])
    """
    check_choice("pairs", pairs, get_args(Pairs))
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    attn_mask = hide(attn_mask)
    count = q.shape[-1] if pairs == "features" else q.shape[1]
    if count % 2:
        raise ValueError(f"differential attention with pairs={pairs!r} needs an even number of them, got {count}")
    if pairs == "features":  # half a query of zeros leaves out half of the keys, and no other tensor is padded
        half = count // 2
        scale = half**-0.5 if scale is None else scale
        halves = torch.block_diag(*q.new_ones(2, 1, half))
        if not is_causal and (attn_mask is None or attn_mask.shape[-2] == 1):  # all rows see the same keys: one call
            both = (q.unsqueeze(2) * halves.unsqueeze(1)).flatten(2, 3)
            out = _padded(both, k, v, attn_mask, False, dropout_p, scale)
            first, second = out.unflatten(2, (2, -1)).unbind(2)
        else:
            first, second = (_padded(q * part, k, v, attn_mask, is_causal, dropout_p, scale) for part in halves)
    else:
        masks = [attn_mask, attn_mask]
        if attn_mask is not None and attn_mask.shape[1] > 1:
            masks = list(attn_mask.chunk(2, 1))
        v = torch.cat(v.chunk(2, 1), -1)
        first, second = (
            _padded(q, k, v, mask, is_causal, dropout_p, scale)
            for q, k, mask in zip(q.chunk(2, 1), k.chunk(2, 1), masks, strict=True)
        )
    return torch.addcmul(first, second, lam.to(first.dtype), value=-1)


def _padded(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, dropout_p: float, scale: float | None
) -> Tensor:
    """Attention with values wider than keys, which fused kernels take once keys and queries are as wide."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    missing = v.shape[-1] - q.shape[-1]
    if missing > 0:
        q, k = F.pad(q, (0, missing)), F.pad(k, (0, missing))
    return attend(q, k, v, mask, is_causal, dropout_p, scale)


@register_mechanism("differential")
class DifferentialAttention(AttentionMechanism):
    """:func:`differential_attention`, then RMSNorm of each (pair of) head(s) and the factor 1 - λ₀.

    λ = exp(λ_q1·λ_k1) - exp(λ_q2·λ_k2) + λ₀ with learned vectors, and λ₀ = 0.8 - 0.6 exp(-0.3 l), l the layer's index
    from 0: the buffer ``depth``, which is saved.

    Args:
        spec: the layer that it serves.
        pairs: ``"features"`` (the paper's code, timm) or ``"heads"`` (transformers' DiffLlama), as
            :func:`differential_attention` says. Rotary positions have rotated whole heads, so that layers with them
            take ``"heads"`` alone.
        affine: whether the norm has a gain; by default as published: True for features, False for heads.
        eps: of the norm.

    Raises:
        ValueError: if an option is out of its limits, or the features or heads are no pairs.
    """

    neutral: ClassVar = None
    own_logits: ClassVar = "it subtracts two maps, each of half of the features"
    depth: Tensor

    def __init__(
        self, spec: AttentionSpec, pairs: Pairs = "features", affine: bool | None = None, eps: float = 1e-5
    ) -> None:
        super().__init__(spec)
        self.pairs = check_choice("pairs", pairs, get_args(Pairs))
        self.before_rotation = pairs == "features"
        self.per_head = () if pairs == "features" else None
        count = spec.head_dim if pairs == "features" else spec.num_heads
        if count % 2:
            raise ValueError(f"pairs={pairs!r} needs an even number of them, and this layer has {count}")
        width = spec.head_dim // 2 if pairs == "features" else spec.head_dim
        self.register_buffer("depth", torch.tensor(float(spec.layer_index or 0)))
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(0.1 * torch.randn(width)) for _ in range(4)
        )
        value = spec.value_dim or spec.head_dim
        affine = pairs == "features" if affine is None else check_flag("affine", affine)
        size = value if pairs == "features" else 2 * value
        self.norm = nn.RMSNorm(size, check_number("eps", eps, above=0.0), elementwise_affine=affine)

    def extra_repr(self) -> str:
        return f"pairs={self.pairs!r}"

    @property
    def lambda_init(self) -> Tensor:
        """λ₀, at least float32."""
        depth = self.depth.to(torch.promote_types(self.lambda_q1.dtype, torch.float32)).round()  # averages may be off
        return 0.8 - 0.6 * (-0.3 * depth).exp()

    def lam(self) -> Tensor:
        """λ as it is now."""
        first = (self.lambda_q1 * self.lambda_k1).sum().exp()
        return (first - (self.lambda_q2 * self.lambda_k2).sum().exp() + self.lambda_init).to(first.dtype)

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
        """Mix the values by the difference of two maps, and normalize what comes out."""
        if scale is not None and self.pairs == "features":
            scale = scale * 2**0.5  # the layer's is that of whole heads
        out = differential_attention(
            q,
            k,
            v,
            self.lam(),
            self.pairs,  # type: ignore[arg-type]
            attn_mask=attn_mask,
            is_causal=is_causal,
            dropout_p=dropout_p,
            scale=scale,
        )
        gain = self.norm.weight  # under autocast of another dtype; where weights are offloaded, the norm fetches it
        rest = 1 - self.lambda_init
        out = (self.norm(out if gain is None else out.to(gain.dtype)).to(rest.dtype) * rest).to(out.dtype)
        if self.pairs == "heads":  # a pair's features stand side by side for the output projection, as in DiffLlama
            out = out.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2)
        return out

    def own_map(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> SumMap:
        """A₁ - λ A₂, before the norm: ``[B, H, N, M]`` for features, ``[B, H/2, N, M]`` for heads, one per pair."""
        scale = given.get("scale")
        attn_mask, is_causal = combine_masks(given.get("attn_mask"), given.get("is_causal", False), q, k, scale)
        dim, masks = (-1 if self.pairs == "features" else 1), [attn_mask] * 2
        if self.pairs == "features":
            scale = None if scale is None else scale * 2**0.5
        elif attn_mask is not None and attn_mask.shape[1] > 1:
            masks = list(attn_mask.chunk(2, 1))
        first, second = (
            FactorMap(*part, is_causal, scale) for part in zip(q.chunk(2, dim), k.chunk(2, dim), masks, strict=True)
        )
        return SumMap([(1.0, first), (-self.lam(), second)])
