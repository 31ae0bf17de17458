"""Plain softmax attention, the neutral element of swapping."""

from __future__ import annotations

from torch import Tensor

from attention_modules.kernels import attend
from attention_modules.masks import combine_masks
from attention_modules.mechanism import AttentionMechanism, register_mechanism


@register_mechanism("softmax")
class SoftmaxAttention(AttentionMechanism):
    """softmax(q kᵀ · scale + mask) v, as PyTorch computes it (Vaswani et al., 2017, eq. 1).

    A row that a boolean mask or -inf hides wholly gives zeros; one hidden by finite numbers averages, as in PyTorch.
    """

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
        """Mix the values; ``attn_mask`` and ``is_causal`` may come together.

        Raises:
            TypeError: if the mask is neither boolean nor floating.
            ValueError: if its shape does not fit, or ``is_causal`` meets a key-value cache.
        """
        attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k)
        return attend(q, k, v, attn_mask, is_causal, dropout_p, scale)
