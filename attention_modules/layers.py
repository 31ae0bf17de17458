"""A self-attention layer: projections around any mechanism."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from attention_modules.base import OPAQUE, drawing_apart
from attention_modules.masks import check_columns, without_causal_bias
from attention_modules.mechanism import AttentionSpec, Mechanism, build_mechanism, check_options, mechanism_class
from attention_modules.mechanisms.shared.outside import refuse_outside
from attention_modules.sharing import Link, from_the_layer


class SelfAttention(nn.Module):
    """Multi-head self-attention with a mechanism by name; takes the arguments of timm's ``Attention``.

    ``qkv`` has the rows q, k, v; where the mechanism uses no query, k and v only.

    Args:
        dim: width of the input, C.
        num_heads: number of heads, H.
        mechanism: as :func:`attention_modules.swap_attention` takes it.
        mechanism_options: its options.
        qkv_bias: whether the input projection has a bias.
        qk_norm: whether queries and keys are normalized by ``norm_layer(head_dim)``.
        scale_norm: whether the output is normalized by ``norm_layer(H * head_dim)`` before ``proj``.
        proj_bias: whether the output projection has a bias.
        gated: whether a sigmoid gate of the input multiplies the output before ``proj``.
        attn_drop: attention dropout in training.
        proj_drop: dropout after ``proj``.
        norm_layer: constructor of the norms, needed with ``qk_norm`` or ``scale_norm``.
        attn_head_dim: width of one head, ``dim // num_heads`` where None.
        dim_out: width of the output, ``dim`` where None.
        num_tokens: sequence length N, where a mechanism must know it.
        is_causal: whether the layer always hides the future, also where ``forward`` is not told to.
        layer_index: the layer's place among the model's self-attention layers, for the mechanism to know.
        device: where parameters are made.
        dtype: dtype of the parameters.

    Raises:
        ValueError: if a size is below 1, the width is not a multiple of the head count, a norm is asked for without
            ``norm_layer``, or an option of the mechanism is out of its limits.
        TypeError: if options do not fit the mechanism.

    Example:
        >>> import torch
        >>> from attnswap import SelfAttention
        >>> layer = SelfAttention(16, num_heads=2, mechanism="rpc", mechanism_options={"iterations": 2})
        >>> layer(torch.randn(1, 5, 16)).shape
        torch.Size([1, 5, 16])
    """

    link: Link | None = None

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        mechanism: Mechanism = "softmax",
        mechanism_options: Mapping[str, Any] | None = None,
        *,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        gated: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Callable[..., nn.Module] | None = None,
        attn_head_dim: int | None = None,
        dim_out: int | None = None,
        num_tokens: int | None = None,
        is_causal: bool = False,
        layer_index: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, size in (("dim", dim), ("num_heads", num_heads)):
            if size < 1:
                raise ValueError(f"{name} must be positive, got {size!r}")
        if attn_head_dim is None and dim % num_heads:
            raise ValueError(
                f"dim={dim} is not a multiple of num_heads={num_heads}; choose a head count that divides it, "
                "or set attn_head_dim"
            )
        for name, optional in (("attn_head_dim", attn_head_dim), ("dim_out", dim_out)):
            if optional is not None and optional < 1:
                raise ValueError(f"{name} must be at least 1, or None to follow dim, got {optional!r}")
        if (qk_norm or scale_norm) and norm_layer is None:
            raise ValueError("qk_norm and scale_norm need norm_layer, for example torch.nn.LayerNorm")
        if mechanism_options is not None and isinstance(mechanism, (str, type)):
            check_options(mechanism_class(mechanism), mechanism_options)
        super().__init__()
        self.__dict__["__module__"] = OPAQUE
        self.num_heads = num_heads
        self.head_dim = attn_head_dim or dim // num_heads
        self.is_causal = is_causal
        spec = AttentionSpec(dim, num_heads, self.head_dim, num_tokens, is_causal, layer_index)
        with drawing_apart():  # as in a swap: the other weights are those beside softmax attention
            built = build_mechanism(mechanism, spec, **(mechanism_options or {}))
            refuse_outside(built)
        width = num_heads * self.head_dim
        kind: dict[str, Any] = {"device": device, "dtype": dtype}

        def norm(size: int, wanted: bool) -> nn.Module:
            return norm_layer(size, **kind) if wanted and norm_layer is not None else nn.Identity()

        self.qkv = nn.Linear(dim, width * (3 if built.uses_query else 2), bias=qkv_bias, **kind)
        self.q_norm = norm(self.head_dim, qk_norm and built.uses_query)
        self.k_norm = norm(self.head_dim, qk_norm)
        self.mechanism = built.to(device=device, dtype=dtype)
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = norm(width, scale_norm)
        self.gate = nn.Linear(dim, width, bias=qkv_bias, **kind) if gated else None
        self.proj = nn.Linear(width, dim_out or dim, bias=proj_bias, **kind)
        self.proj_drop = nn.Dropout(proj_drop)

    @classmethod
    def configured(cls, mechanism: Mechanism, *, num_tokens: int | None = None, **options: Any) -> type[SelfAttention]:
        """A subclass that has its mechanism chosen, for timm's ``attn_layer``, which takes no partial.

        Args:
            mechanism: as :func:`attention_modules.swap_attention` takes it.
            num_tokens: sequence length N, where the mechanism must know it.
            options: options of the mechanism, hashable.

        The layers do not know their places (``layer_index``), by which ``differential`` starts and ``performer`` draws:
        swap the attention of the built model for these.

        Returns:
            A class; the same one for the same arguments, so that its instances copy and pickle.
        """
        make = cast(Callable[..., type[SelfAttention]], _configured)  # the cache's type takes no classes as keys
        return make(cls, mechanism, num_tokens, tuple(sorted(options.items())))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend within the sequence.

        Args:
            x: ``[B, N, dim]``.
            attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, N]``.
            is_causal: row i sees tokens 0 to i only.

        Returns:
            ``[B, N, dim_out]``.

        Raises:
            ValueError: if ``x`` has another shape, or no token; if the mechanism counts columns, and the mask hides
                padding before a sequence, or tells several sequences apart.
        """
        if x.dim() != 3 or x.shape[1] == 0 or x.shape[2] != self.qkv.in_features:
            raise ValueError(
                f"x must be [batch, tokens, {self.qkv.in_features}] with at least one token, got {tuple(x.shape)}; "
                "one sequence alone is x[None]"
            )
        if attn_mask is not None and self.mechanism.counts_columns:
            check_columns(type(self.mechanism).__name__, attn_mask)
        attn_mask, is_causal = without_causal_bias(attn_mask, is_causal or self.is_causal, x)
        # Of the heads that this process holds: all, but under tensor parallelism.
        parts = self.qkv(x).unflatten(-1, (2 + self.mechanism.uses_query, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
        *queries, k, v = parts.unbind(0)  # [B, H, N, d]
        k = self.k_norm(k)
        q = self.q_norm(queries[0]) if queries else k
        dropout_p = self.attn_drop.p if self.training else 0.0
        further = from_the_layer(self, self.mechanism.needs, x, v)
        y = self.mechanism(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p, scale=None, **further
        )
        y = self.norm(y.transpose(1, 2).flatten(2))
        if self.gate is not None:
            y = y * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(y))


class _ConfiguredType(type):
    """Type of configured classes: they pickle by their arguments, since no module holds them by name.

    timm's ``create_model`` keeps the class that it was given beside the layers made from it.
    """

    arguments: tuple[Any, ...]


def _reduce_configured(cls: _ConfiguredType) -> tuple[Any, ...]:
    return _configured, cls.arguments


copyreg.pickle(cast(Any, _ConfiguredType), cast(Any, _reduce_configured))


@cache
def _configured(
    base: type[SelfAttention], mechanism: Any, num_tokens: int | None, options: tuple[tuple[str, Any], ...]
) -> type[SelfAttention]:
    class Configured(base, metaclass=_ConfiguredType):  # type: ignore[valid-type, misc]
        arguments = (base, mechanism, num_tokens, options)

        def __init__(self, dim: int, num_heads: int = 8, **kwargs: Any) -> None:
            kwargs = {"mechanism": mechanism, "mechanism_options": dict(options), "num_tokens": num_tokens, **kwargs}
            super().__init__(dim, num_heads, **kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:
            _, _, *state = super().__reduce_ex__(protocol)
            return (_blank, self.arguments, *state)

    label = mechanism if isinstance(mechanism, str) else getattr(mechanism, "__name__", "custom")
    Configured.__name__ = Configured.__qualname__ = f"{base.__name__}[{label}]"
    return Configured


def _blank(*arguments: Any) -> SelfAttention:
    """An instance without state, which pickle and deepcopy then fill."""
    cls = _configured(*arguments)
    return cls.__new__(cls)
