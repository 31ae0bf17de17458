"""Sparse attention by α-entmax: sparsemax (α = 2) and 1.5-entmax (Peters et al., ACL 2019)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from attention_modules.base import TensorMechanism
from attention_modules.kernels import attend, transforms_active
from attention_modules.masks import combine_masks, hide
from attention_modules.mechanism import AttentionSpec, register_mechanism
from attention_modules.mechanisms.shared.chunks import attend_by
from attention_modules.mechanisms.shared.options import as_float
from attention_modules.mechanisms.shared.rows import mapped

ALPHAS = (1.0, 1.5, 2.0)
# Below the largest logit: no entry so far down is in the support, whose width is at most 2. An integer for the same
# reason as HIDDEN of masks.
_FAR = 4
_STEPS = 16


def check_alpha(alpha: float) -> float:
    """The order, one of those that have a closed form.

    Raises:
        ValueError: if it is none of them.
    """
    order = as_float(alpha)
    if order not in ALPHAS:
        raise ValueError(f"alpha must be 1, 1.5 or 2, got {alpha!r}")
    return order


def entmax(z: Tensor, alpha: float) -> Tensor:
    """α-entmax of the last dimension: argmax of pᵀz + the Tsallis entropy of order α over the simplex.

    Args:
        z: logits ``[..., M]``.
        alpha: 1.5 or 2.

    Returns:
        ``[..., M]``, non-negative, each row's sum 1.
    """
    z = (z - z.amax(-1, keepdim=True).detach()) * (alpha - 1)
    inside = z > threshold(z.detach(), alpha)
    kept, size = z * inside, inside.sum(-1, keepdim=True).to(z.dtype)  # what follows has derivatives of every order
    mean = kept.sum(-1, keepdim=True) / size
    if alpha == 2.0:
        return (z - mean + 1 / size).clamp(min=0.0)
    spread = (1 - (kept.square().sum(-1, keepdim=True) - size * mean.square())) / size
    return (z - (mean - spread.clamp(min=1e-12).sqrt())).clamp(min=0.0).square()


def threshold(z: Tensor, alpha: float) -> Tensor:
    """τ of rows whose largest entry is 0: Σ_j [z_j - τ]₊^{1/(α - 1)} = 1, by Newton's method, without sorting.

    f(τ) = Σ_j [z_j - τ]₊ - 1, or ‖[z - τ]₊‖ - 1 where α = 1.5, is convex and falls, and f(-1) ≥ 0: the steps go up to
    τ and never past it, to rounding in about six. They end when none moves; where asking would wait for a device, or
    is not possible, after sixteen.

    Args:
        z: (α - 1) times logits less their row's largest, ``[..., M]``; -inf where a key is hidden.
        alpha: 1.5 or 2.

    Returns:
        ``[..., 1]``; any number in rows that see nothing.
    """
    tau, near = torch.full_like(z[..., :1], -1.0), torch.finfo(z.dtype).eps ** 0.75
    fixed = z.device.type != "cpu" or torch.compiler.is_compiling() or transforms_active()
    above = None if fixed else torch.empty_like(z)  # one for all steps
    for _ in range(_STEPS if fixed else z.shape[-1] + _STEPS):
        above = torch.relu_(z - tau if fixed else torch.sub(z, tau, out=above))
        total = above.sum(-1, keepdim=True)
        if alpha == 2.0:
            step = (total - 1) / above.sign().sum(-1, keepdim=True).clamp(min=1.0)
        else:
            norm = torch.linalg.vector_norm(above, dim=-1, keepdim=True)
            step = (norm - 1) * norm / total.clamp(min=torch.finfo(z.dtype).tiny)
        tau = tau + step
        if not fixed and not bool((step > near).any()):
            break
    return tau


class _Entmax:
    """Rows of weights r^{1/(α - 1)}, r = [z - τ]₊, and their derivatives from r alone."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def weights(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        z = logits.mul_(self.alpha - 1) if self.alpha != 2.0 else logits
        top = z.amax(-1, keepdim=True)
        top = top.masked_fill(top.isneginf(), 0.0)  # rows that see nothing
        tau = threshold(z.sub_(top), self.alpha)
        return self._power(z.sub_(tau).relu_()), torch.cat([top, tau], -1)  # whose sum would round large logits

    def again(self, logits: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        z = logits.mul_(self.alpha - 1) if self.alpha != 2.0 else logits
        top, tau = kept.split(1, -1)  # type: ignore[union-attr]
        r = z.sub_(top).sub_(tau).relu_()
        return (r, r.sign()) if self.alpha == 2.0 else (r.square(), r)

    def slope(self, above: Tensor, state: Tensor) -> Tensor:
        """s (g - Σ s g / Σ s), s = p^{2 - α} (Peters et al., 2019)."""
        above.mul_(state)
        mean = above.sum(-1, keepdim=True) / state.sum(-1, keepdim=True).clamp(min=torch.finfo(state.dtype).tiny)
        return above.addcmul_(state, mean, value=-1)

    def _power(self, r: Tensor) -> Tensor:
        return r if self.alpha == 2.0 else r.square_()


def entmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: float = 1.5,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """α-entmax(q kᵀ · scale + mask) v (Peters, Niculae and Martins, ACL 2019; Correia et al., EMNLP 2019).

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d]``.
        alpha: 1 (softmax), 1.5, or 2 (sparsemax, Martins and Astudillo, ICML 2016).
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape does not fit, or alpha is none of these.

    Example:
        >>> import torch
        >>> from attnswap.functional import entmax_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> entmax_attention(q, k, v, alpha=2.0).shape
        torch.Size([1, 3, 5, 8])
    """
    alpha = check_alpha(alpha)
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    if alpha == 1.0:
        return attend(q, k, v, hide(attn_mask), is_causal, dropout_p, scale)

    def weights(logits: Tensor, seen: Tensor, first: int) -> Tensor:
        top = logits.masked_fill(~seen, float("-inf")).amax(-1, keepdim=True)
        top = torch.where(top.isneginf(), logits.new_zeros(()), top).detach()
        return entmax(torch.where(seen, logits, top - _FAR / (alpha - 1)), alpha)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_by(weights, q, k, v, attn_mask, is_causal, dropout_p, scale)

    return mapped(_Entmax(alpha), plain, (q, k, v), attn_mask, is_causal, dropout_p, scale)


@register_mechanism("entmax")
class EntmaxAttention(TensorMechanism):
    """:func:`entmax_attention` as a mechanism, without parameters.

    Args:
        spec: the layer that it serves.
        alpha: 1 (softmax), 1.5 or 2 (sparsemax).

    Raises:
        ValueError: if ``alpha`` is none of these.
    """

    function = staticmethod(entmax_attention)
    neutral: ClassVar = {"alpha": 1.0}
    softmax_like = True
    per_head = ()

    def __init__(self, spec: AttentionSpec, alpha: float = 1.5) -> None:
        super().__init__(spec)
        self.alpha = check_alpha(alpha)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"

    def tensors(self, k: Tensor) -> tuple[Any, ...]:
        return (self.alpha,)
