"""L2 attention: logits by distance, which gives the layer a Lipschitz constant (Kim et al., ICML 2021)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from attention_modules.kernels import without_autocast
from attention_modules.masks import combine_masks, hide
from attention_modules.mechanism import AttentionMechanism, AttentionSpec, register_mechanism
from attention_modules.mechanisms.shared.columns import attend_with_key_bias
from attention_modules.mechanisms.shared.options import check_flag
from attention_modules.mechanisms.symmetric import keys_of_rows


def l2_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(-‖q - k‖² · scale + mask) v (Kim, Papamakarios and Mnih, ICML 2021, eq. 2).

    ‖q‖² is one number per row, so that the weights are those of 2 q·k · scale - ‖k‖² · scale.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d]``.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout.
        scale: factor on the squared distances, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape does not fit.

    Example:
        >>> import torch
        >>> from attnswap.functional import l2_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> l2_attention(q, k, v).shape
        torch.Size([1, 3, 5, 8])
    """
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with without_autocast(k.device):
        exact = k if k.dtype.itemsize > 2 else k.float()
        bias = -scale * exact.square().sum(-1)
    return attend_with_key_bias(q, k, v, bias, hide(attn_mask), is_causal, dropout_p, 2 * scale)


@register_mechanism("l2")
class L2Attention(AttentionMechanism):
    """:func:`l2_attention` as a mechanism.

    Args:
        spec: the layer that it serves.
        shared: whether the keys ask each other (W_q = W_k), as the paper's bound of the Lipschitz constant requires;
            the layer's query projection is then dropped. The paper also ties the values' projection to it, which this
            does not.

    Raises:
        ValueError: if ``shared`` is neither True nor False.
    """

    own_logits: ClassVar = "they are squared distances of queries and keys"
    per_head = ()

    def __init__(self, spec: AttentionSpec, shared: bool = False) -> None:
        super().__init__(spec)
        self.uses_query = not check_flag("shared", shared)

    def extra_repr(self) -> str:
        return f"shared={not self.uses_query}"

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
        """Mix the values by the distance of queries and keys.

        Where the keys ask each other ``q`` is not read, but where a key-value cache holds more keys: there it is the
        keys of the new tokens.
        """
        q = q if self.uses_query else keys_of_rows("l2", q, k)
        return l2_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p, scale=scale)
