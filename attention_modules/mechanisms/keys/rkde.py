"""Attention as robust kernel density estimation (Han et al., NeurIPS 2023), a baseline of RPC-Attention."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from attention_modules.kernels import autocast, without_autocast
from attention_modules.masks import visible
from attention_modules.mechanism import AttentionMechanism, AttentionSpec, register_mechanism
from attention_modules.mechanisms.keys.kde import normalized
from attention_modules.mechanisms.shared.chunks import attend_by
from attention_modules.mechanisms.shared.columns import attend_with_key_bias
from attention_modules.mechanisms.shared.options import check_choice, check_number
from attention_modules.mechanisms.shared.padding import padding_alone, refuse_causal, refuse_causality
from attention_modules.mechanisms.symmetric import check_self_attention
from attention_modules.precision import widest

Loss = Literal["huber", "hampel"]
_NOTHING = -1e4  # a logarithm that adds nothing to a sum, and stays a number where there is nothing else
_REJECTED = 0.01  # what the released code gives a key beyond Hampel's last part, where the paper has 0


def _sum_of_kernels(logits: Tensor, seen: Tensor, first: int) -> Tensor:
    return logits.clamp(max=0.0).exp()  # no distance is below 0 but by rounding


def key_weights(x: Tensor, seen: Tensor | None, loss: Loss, a: float, scale: float) -> Tensor:
    """The logarithm of each key's weight after one step of iteratively reweighted least squares from equal ones.

    Args:
        x: what is compared, ``[B, H, N, w]``, at least float32.
        seen: which keys are no padding, ``[B|1, H|1, 1, N|1]``; None = all.
        loss: whose weights, ``"huber"`` or ``"hampel"``.
        a: where the loss stops to be quadratic; Hampel's further parts end at 2a and 3a.
        scale: factor on the squared distances.

    Returns:
        ``[B, H, N]``, float64 where the device has it; the weights of the keys that are seen sum to 1.
    """
    x = x.to(widest(x.device))  # ‖x‖² + ‖y‖² - 2 x·y cancels
    square = x.square().sum(-1, keepdim=True)
    ones = torch.ones_like(square)
    # [2 x, -‖x‖², -1] · [y, 1, ‖y‖²] = -‖x - y‖²
    rows, columns = torch.cat([2 * x, -square, -ones], -1), torch.cat([x, ones, square], -1)
    shown = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=x.device) if seen is None else seen
    shown = shown.expand(*shown.shape[:-1], x.shape[-2])  # [B|1, H|1, 1, N]
    count = shown.sum(-1, keepdim=True, dtype=x.dtype).clamp(min=1.0)
    near = attend_by(_sum_of_kernels, rows, columns, ones, None if seen is None else shown, scale=scale) / count
    near = near.squeeze(-1)  # [B, H, N]
    shown, count = shown.squeeze(-2), count.squeeze(-1)
    mean = torch.where(shown, near, 0.0).sum(-1, keepdim=True) / count
    distance = (1 + near + mean).sqrt()
    log = _log_weight(distance, loss, a)
    return log - log.masked_fill(~shown, _NOTHING).logsumexp(-1, keepdim=True)


def _log_weight(distance: Tensor, loss: Loss, a: float) -> Tensor:
    """ln(psi(distance) / distance) of a loss."""
    slope = torch.where(distance <= a, torch.ones_like(distance), a / distance)
    if loss == "hampel":
        slope = torch.where(distance >= 2 * a, slope * (3 - distance / a), slope)
        slope = torch.where(distance >= 3 * a, torch.full_like(slope, _REJECTED), slope)
    return slope.log()


def rkde_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    loss: Loss = "huber",
    a: float = 0.2,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Σ_j w'_j e^z_ij v_j / Σ_j w_j e^z_ij, z = -‖q - k̂‖² · scale: robust kernel density estimation (Han et al., 2023).

    k̂ are the keys of norm 1, w their robust weights, and w' those of the pairs (k̂, v). As in the released code, the
    weights are of one step from equal ones, ψ(h)/h with h² = 1 + mean_j κ_ij + mean_ij κ_ij. It is fused attention with
    the bias ln w a key and the values v w'/w.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, N, d]``.
        v: values ``[B, H, N, d]``.
        loss: ``"huber"`` or ``"hampel"``. As h is at least 1, Hampel's weights are equal for ``a`` of 1/3 and less, and
            this is :func:`.kde_attention` then.
        a: where the loss stops to be quadratic; 0.2 in the released code.
        attn_mask: padding alone, boolean (True = may be seen) or additive, broadcastable to ``[B, H, 1, N]``.
        dropout_p: attention dropout.
        scale: factor on the squared distances, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape does not fit, rows would see different keys, there is not one query for each key, or an
            option is out of its limits.

    Example:
        >>> import torch
        >>> from attnswap.functional import rkde_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> rkde_attention(q, k, v).shape
        torch.Size([1, 3, 5, 8])
    """
    check_choice("loss", loss, get_args(Loss))
    check_number("a", a, above=0.0)
    check_self_attention("rkde", q, k)
    attn_mask = padding_alone("rkde", attn_mask, q, k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k = normalized(k)
    seen = None if attn_mask is None else visible(attn_mask)
    with without_autocast(q.device):
        wide = torch.promote_types(k.dtype, torch.float32)  # what the fused kernels take
        of_keys = key_weights(k, seen, loss, a, scale)
        of_pairs = key_weights(torch.cat([k, v], -1), seen, loss, a, scale)
        values = (v * (of_pairs - of_keys).exp().unsqueeze(-1)).to(v.dtype)
    return attend_with_key_bias(q, k, autocast(values), of_keys.to(wide), attn_mask, False, dropout_p, 2 * scale)


@register_mechanism("rkde")
class RobustKDEAttention(AttentionMechanism):
    """:func:`rkde_attention` as a mechanism without parameters, for attention that is not causal.

    Args:
        spec: the layer that it serves.
        loss: ``"huber"`` or ``"hampel"``.
        a: where the loss stops to be quadratic.

    Raises:
        ValueError: if an option is none of these, or the layer is causal.
    """

    one_query_per_key = True
    row_masks = False
    per_head = ()
    own_logits: ClassVar = "they are squared distances of queries and normalized keys"

    def __init__(self, spec: AttentionSpec, loss: Loss = "huber", a: float = 0.2) -> None:
        super().__init__(spec)
        self.loss = check_choice("loss", loss, get_args(Loss))
        self.a = check_number("a", a, above=0.0)
        refuse_causal("rkde", spec)

    def extra_repr(self) -> str:
        return f"loss={self.loss!r}, a={self.a}"

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
        """Mix the values.

        Raises:
            ValueError: if attention is causal or a mask tells rows apart.
        """
        refuse_causality("rkde", is_causal)
        loss: Loss = self.loss  # type: ignore[assignment]
        return rkde_attention(q, k, v, loss, self.a, attn_mask=attn_mask, dropout_p=dropout_p, scale=scale)
