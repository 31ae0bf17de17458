"""A bound on the Lipschitz constant of softmax attention on a ball, from its weights alone."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from attention_modules.analysis.agreement import output_of
from attention_modules.hosts.attnswap import SelfAttentionHost
from attention_modules.hosts.base import AttentionLayer
from attention_modules.hosts.sdpa.declared import DeclaredHost
from attention_modules.hosts.sdpa.rehearsed import rehearsed
from attention_modules.hosts.torch import MultiheadAttentionHost
from attention_modules.hosts.weights import Rows, bias_of
from attention_modules.mechanisms.shared.options import as_float
from attention_modules.mechanisms.softmax import SoftmaxAttention
from attention_modules.precision import to_float64

# By name, so that nothing of timm or Hugging Face is loaded here.
_PACKED = (SelfAttentionHost.name, "timm Attention")
_HUGGING_FACE = "Hugging Face"


def lipschitz_bound(
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    w_o: Tensor | None = None,
    *,
    radius: float,
    num_tokens: int,
    b_q: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """A bound on ‖D_X f‖₂ of softmax attention for all X of ``num_tokens`` tokens of norm ``radius`` at most.

    A head has √3 ‖V‖₂ (n + ‖A‖₂²R⁴ + 4nR²(‖A‖₂R + ‖c‖₂)²)^½ with A = scale · W_kᵀW_q and c = scale · W_kᵀb_q, several
    have Σ_h ‖W_o^h‖₂ times that, or the root of the sum of squares where they are only concatenated. Our derivation,
    after the bound of Castin, Ablin and Peyré (ICML 2024), which has no query bias. Boolean masks and causality are
    covered, additive biases are not; biases of key, value and output change no difference. For softmax attention alone:
    not for RPC, scaled or other mechanisms, rope or q/k norm.

    Args:
        w_q: query weights ``[H, d, dim]``.
        w_k: key weights ``[H, d, dim]``.
        w_v: value weights ``[H, d_v, dim]``.
        w_o: each head's part of the output projection, ``[H, dim_out, d_v]``; None where heads are only concatenated.
        radius: R, the largest norm of a token.
        num_tokens: n.
        b_q: query bias ``[H, d]``, or None.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        A scalar, float64.

    Raises:
        TypeError: if a weight is no tensor, or radius or scale no number.
        ValueError: if shapes do not fit, a number is out of its limits, a weight is not finite, or the bound is not.

    Example:
        >>> import torch
        >>> from attnswap.analysis import lipschitz_bound
        >>> w_q, w_k, w_v = torch.randn(3, 2, 4, 8)  # two heads of width 4, of 8 features
        >>> bool(lipschitz_bound(w_q, w_k, w_v, radius=1.0, num_tokens=10) > 0)
        True
    """
    _check(w_q, w_k, w_v, w_o, b_q)
    if _number("radius", radius) < 0:
        raise ValueError(f"radius must be a finite number of at least 0, got {radius!r}")
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 1:
        raise ValueError(f"num_tokens must be an integer of at least 1, got {num_tokens!r}")
    w_q, w_k, w_v = (to_float64(weight.detach()) for weight in (w_q, w_k, w_v))
    scale = w_q.shape[1] ** -0.5 if scale is None else _number("scale", scale)
    # ‖W_kᵀ W_q‖₂ = ‖R_k R_qᵀ‖₂, with the triangular factors of W_kᵀ and W_qᵀ: d x d in the place of dim x dim.
    r_q, r_k = (torch.linalg.qr(weight.mT, mode="r").R for weight in (w_q, w_k))
    a = abs(scale) * torch.linalg.matrix_norm(r_k @ r_q.mT, 2)  # [H]
    c = torch.zeros_like(a)
    if b_q is not None:
        c = abs(scale) * (w_k.mT @ to_float64(b_q.detach()).unsqueeze(-1)).squeeze(-1).norm(dim=-1)
    squared = a.new_tensor(radius).square()
    inner = num_tokens + (a * squared).square() + 4 * num_tokens * squared * (a * radius + c).square()
    heads = math.sqrt(3) * torch.linalg.matrix_norm(w_v, 2) * inner.sqrt()
    bound = heads.norm() if w_o is None else (heads * torch.linalg.matrix_norm(to_float64(w_o.detach()), 2)).sum()
    if not bool(bound.isfinite()):
        raise ValueError(f"the bound is beyond float64 at radius {radius!r} and scale {scale!r}: give smaller ones")
    return bound


def layer_lipschitz_bound(layer: AttentionLayer, *, radius: float, num_tokens: int) -> Tensor:
    """:func:`lipschitz_bound` of a layer, from its own weights and biases.

    Args:
        layer: from :func:`attention_modules.hosts.attention_layers`: our ``SelfAttention``, timm's ``Attention``,
            ``nn.MultiheadAttention``, or of Hugging Face BERT, RoBERTa (both without an output projection), GPT-2 and
            ViT; plain, or with softmax attention.
        radius: R, the largest norm of a token at the layer's input.
        num_tokens: n.

    Raises:
        TypeError: if `layer` is not from `attention_layers`.
        ValueError: if the bound does not cover the layer (another mechanism, rope, q/k norm, position bias, gate, norm
            of the output), or its weights are not read; else as :func:`lipschitz_bound`. A declared layer is held
            against its projections where it runs on a sequence alone, and taken at its word where it needs more.

    Example:
        >>> import torch
        >>> from attention_modules.hosts import attention_layers
        >>> from attnswap.analysis import layer_lipschitz_bound
        >>> (layer,) = attention_layers(torch.nn.MultiheadAttention(16, 2, batch_first=True))
        >>> bool(layer_lipschitz_bound(layer, radius=4.0, num_tokens=10) > 0)
        True
    """
    if not isinstance(layer, AttentionLayer):
        raise TypeError(
            f"layer must be one of attention_layers(model), got a {type(layer).__name__}; for your own weights "
            "there is lipschitz_bound"
        )
    reason = _not_covered(layer)
    if reason is not None:
        raise ValueError(f"the bound is for plain softmax attention, and does not cover {layer.name!r}: {reason}")
    w_q, w_k = layer.qk_weights()
    heads = layer.spec.num_heads
    width = w_q.shape[0] * w_q.shape[1]
    values, out, bias = _value_and_output(layer, width)
    w_v = values.weight().unflatten(0, (heads, -1))
    w_o = None if out is None else out.weight().unflatten(1, (heads, -1)).transpose(0, 1)
    b_q = None if bias is None else bias[:width].unflatten(0, (heads, -1))
    if isinstance(layer.host, DeclaredHost) and not _is_of(layer, w_q, w_k, w_v, w_o, b_q):
        raise ValueError(
            f"the bound does not cover {layer.name!r}: alone, on [2, 5, {w_q.shape[2]}], it does not give what its "
            "declared projections give (it has a mask, residual, scale, gate, norm or bias of its own); "
            "lipschitz_bound takes weights, and bounds plain attention with them alone"
        )
    return lipschitz_bound(w_q, w_k, w_v, w_o, radius=radius, num_tokens=num_tokens, b_q=b_q, scale=layer.scale)


@torch.no_grad()
def _is_of(
    layer: AttentionLayer, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor | None, b_q: Tensor | None
) -> bool:
    """Whether a layer gives what these weights do, but for biases of values and output; true where it needs more."""
    x = torch.randn(2, 5, w_q.shape[2], generator=torch.Generator().manual_seed(0)).to(w_q)
    q, k, v = (torch.einsum("bnc,hdc->bhnd", x, weight) for weight in (w_q, w_k, w_v))
    q = q if b_q is None else q + b_q[:, None]
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=layer.spec.is_causal, scale=layer.scale)
    wanted = mixed.transpose(1, 2).flatten(2) if w_o is None else torch.einsum("bhnd,hcd->bnc", mixed, w_o)
    batch_first = layer.host.batch_first(layer.module)
    try:
        with rehearsed(layer.module):
            found, _ = output_of(layer.module(x if batch_first else x.transpose(0, 1)))
    except Exception:  # whatever a stranger's forward raises that needs more
        return True
    found = found if batch_first else found.transpose(0, 1)
    if found.shape != wanted.shape:
        return False
    bias = found - wanted
    limit = 0.01 if w_q.dtype in (torch.float32, torch.float64) else 0.2
    return bool((bias - bias[0, 0]).abs().max() <= limit * wanted.abs().max())


def _value_and_output(layer: AttentionLayer, width: int) -> tuple[Rows, Rows | None, Tensor | None]:
    """Rows of the value and of the output projection (None: there is none), and the bias that the query's begins."""
    module: Any = layer.module
    packed, dim = (2 * width, 3 * width), layer.spec.dim
    if isinstance(layer.host, DeclaredHost):
        output: Any = layer.host.output(module)
        query = layer.host.qk_rows(module)[0]
        bias = bias_of(query.owner)
        bias = None if bias is None else bias[query.features()]
        return layer.host.value_rows(module), Rows(output, 0, output.out_features), bias
    if layer.host.name in _PACKED:
        return Rows(module.qkv, *packed), Rows(module.proj, 0, module.proj.out_features), bias_of(module.qkv)
    if layer.host.name == MultiheadAttentionHost.name:
        return Rows(module, *packed, "in_proj_weight"), Rows(module.out_proj, 0, dim), module.in_proj_bias
    if "c_attn" in module._modules:
        values, out = (Rows(module.c_attn, *packed, transposed=True), Rows(module.c_proj, 0, dim, transposed=True))
        return values, out, bias_of(module.c_attn)
    if "o_proj" in module._modules:
        return Rows(module.v_proj, 0, width), Rows(module.o_proj, 0, dim), bias_of(module.q_proj)
    return Rows(module.value, 0, width), None, bias_of(module.query)


def _not_covered(layer: AttentionLayer) -> str | None:
    if layer.mechanism is not None and type(layer.mechanism) is not SoftmaxAttention:
        return f"it has {type(layer.mechanism).__name__}"
    if layer.spectrum_caveat is not None:
        return layer.spectrum_caveat
    module: Any = layer.module
    if layer.host.name == MultiheadAttentionHost.name:
        if module.in_proj_weight is None:
            return "its projections have different inputs (kdim or vdim)"
        return layer.host.limits(module).every
    if isinstance(layer.host, DeclaredHost):
        shared = "its query heads share key and value heads" if layer.host.groups(module) > 1 else None
        return shared or (None if layer.host.out else "its output projection is not declared (out=)")
    if layer.host.name == _HUGGING_FACE:
        if layer.host.groups(module) != 1:
            return "its query heads share key and value heads"
        named = [{"c_attn", "c_proj"}, {"q_proj", "v_proj", "o_proj"}, {"query", "value"}]
        held = {name for name, part in module._modules.items() if next(part.parameters(), None) is not None}
        alone = held - {"k_proj", "key"} in named and not any(each is not None for each in module._parameters.values())
        if not alone or ("c_attn" in held and not layer.host.qk_rows(module)[0].transposed):
            return f"the weights of {type(layer.module).__name__} are not read; give them to lipschitz_bound"
        return None
    if layer.host.name not in _PACKED:
        known = ", ".join((*_PACKED, MultiheadAttentionHost.name, _HUGGING_FACE))
        return (
            f"it is a layer of {layer.host.name}, and values and output are read of {known} only; "
            "give its weights to lipschitz_bound"
        )
    if module.gate is not None:
        return "it has a gate"
    if not isinstance(module.norm, nn.Identity):
        return "it normalizes the output of its heads"
    return None


def _number(name: str, value: object) -> float:
    """The number.

    Raises:
        TypeError, ValueError: if it is none, or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    number = as_float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return number


def _check(w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor | None, b_q: Tensor | None) -> None:
    for name, weight in (("w_q", w_q), ("w_k", w_k), ("w_v", w_v), ("w_o", w_o), ("b_q", b_q)):
        if not isinstance(weight, Tensor) and not (weight is None and name in ("w_o", "b_q")):
            raise TypeError(f"{name} must be a tensor, got a {type(weight).__name__}")
    if w_q.dim() != 3 or w_q.shape != w_k.shape:
        raise ValueError(f"w_q and w_k must both be [heads, d, dim], got {tuple(w_q.shape)} and {tuple(w_k.shape)}")
    heads, d, dim = w_q.shape
    if w_v.dim() != 3 or w_v.shape[0] != heads or w_v.shape[2] != dim:
        raise ValueError(f"w_v must be [heads, d_v, dim] = [{heads}, d_v, {dim}], got {tuple(w_v.shape)}")
    if w_o is not None and (w_o.dim() != 3 or w_o.shape[0] != heads or w_o.shape[2] != w_v.shape[1]):
        expected = f"[{heads}, dim_out, {w_v.shape[1]}]"
        raise ValueError(f"w_o must be [heads, dim_out, d_v] = {expected}, got {tuple(w_o.shape)}")
    if b_q is not None and b_q.shape != (heads, d):
        raise ValueError(f"b_q must be [heads, d] = [{heads}, {d}], got {tuple(b_q.shape)}")
    for name, weight in (("w_q", w_q), ("w_k", w_k), ("w_v", w_v), ("w_o", w_o), ("b_q", b_q)):
        if weight is not None and not bool(weight.isfinite().all()):
            raise ValueError(f"{name} holds NaN or infinite numbers: there is no bound")
