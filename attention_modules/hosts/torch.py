"""``torch.nn.MultiheadAttention``, alone and inside ``nn.Transformer`` layers."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention_modules.hosts.base import Host, Swapped, has_hooks
from attention_modules.hosts.forwards import is_own_forward
from attention_modules.hosts.limits import Limits
from attention_modules.hosts.query import QueryPart, query_parts
from attention_modules.hosts.weights import Rows, quantized, trained_instead, wrapped_by_peft
from attention_modules.masks import OTHERS
from attention_modules.mechanism import AttentionMechanism, AttentionSpec
from attention_modules.mechanisms.shared.shown import ShownMap

_PADDED = "gets_padded_tensors_for_a_swap"  # an attribute of an encoder
_OTHER_QUERY = re.compile(r"Cross_?Att|Att(entio)?n\w*Pool")  # in the class around: its query is no token of the keys
_OWN_KEY = "it adds a key of its own (add_bias_kv or add_zero_attn), which no mechanism sees; build it without"
_CROSS = re.compile(r"cross_?att", re.IGNORECASE)  # in the name: open_clip's CoCa has `cross_attn.0.attn`
_LEARNED_QUERIES = ("probe", "query", "queries", "query_tokens", "latents")  # Parameters beside a layer that pools


def same_view(one: Tensor, other: Tensor) -> bool:
    """Whether these are one tensor, or two views alike of one (as wrappers make that transpose each for itself)."""
    if one is other:
        return True
    if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
        return False
    # `is_set_to` says as much, but knows no meta tensors.
    same_memory = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return bool(same_memory and one.storage_offset() == other.storage_offset())


def _merge_masks(attn_mask: Tensor | None, padding: Tensor | None, num_heads: int, dtype: torch.dtype) -> Tensor | None:
    """One mask as mechanisms take it, from nn.MultiheadAttention's two (there True = hidden).

    Args:
        attn_mask: ``[N, M]`` or ``[B * H, N, M]``, boolean or additive.
        padding: ``[B, M]``, boolean or additive.
        num_heads: H.
        dtype: of an additive result.

    Returns:
        Boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``; None where both are None.
    """
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (-1, num_heads)))
    if padding is not None:
        masks.append(padding[:, None, None, :])
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        return ~(masks[0] if len(masks) == 1 else masks[0] | masks[1])
    additive = [
        torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf")) if mask.dtype == torch.bool else mask
        for mask in masks
    ]
    return additive[0] if len(additive) == 1 else additive[0] + additive[1]


def _check_sizes(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, attn_mask: Tensor | None
) -> None:
    """Refuse what :func:`torch.nn.functional.multi_head_attention_forward` refuses, with the same kinds of errors.

    Args:
        layer: a swapped nn.MultiheadAttention.
        query: ``[N, B, C]``.
        key: ``[M, B, C]``.
        value: ``[M, B, C]``.
        padding: its mask of keys.
        attn_mask: its mask of rows.

    Raises:
        AssertionError: if widths, key and value, or the padding mask do not fit, or a mask holds integers.
        RuntimeError: if the mask of rows or the batches do not fit.
    """
    length, batch, width = query.shape
    autocasts = not query.is_meta and torch.is_autocast_enabled(query.device.type)
    for name, mask in (("key_padding_mask", padding), ("attn_mask", attn_mask)):
        if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
            raise AssertionError(f"only bool and floating types of {name} are supported, got {mask.dtype}")
        if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype) and not autocasts:
            raise RuntimeError(f"{name} is of {mask.dtype}, and must be boolean or of {query.dtype}, as the query is")
    if width != layer.embed_dim:
        raise AssertionError(f"was expecting embedding dimension of {layer.embed_dim}, but got {width}")
    compared = 2 if layer.in_proj_weight is None else 3  # kdim and vdim may differ
    if key.shape[:compared] != value.shape[:compared]:
        raise AssertionError(f"key shape {tuple(key.shape)} does not match value shape {tuple(value.shape)}")
    if key.shape[1] != batch:
        raise RuntimeError(f"query has a batch of {batch}, and key and value one of {key.shape[1]}")
    if padding is not None and padding.shape != (batch, key.shape[0]):
        raise AssertionError(
            f"expecting key_padding_mask shape of {(batch, key.shape[0])}, but got {tuple(padding.shape)}"
        )
    rows = (length, key.shape[0])
    expected = rows if attn_mask is None or attn_mask.dim() == 2 else (batch * layer.num_heads, *rows)
    if attn_mask is not None and attn_mask.shape != expected:
        raise RuntimeError(
            f"The shape of the {attn_mask.dim()}D attn_mask is {tuple(attn_mask.shape)}, but should be {expected}."
        )


def _no_fused_path(module: nn.Module, args: object) -> None:
    """A forward pre-hook that does nothing.

    nn.TransformerEncoderLayer has a fused path, which would never call a swapped layer, and takes it only where no
    module within has hooks.
    """


def _keep_from_fused_path(layer: nn.Module) -> None:
    if _no_fused_path not in layer._forward_pre_hooks.values():
        layer.register_forward_pre_hook(_no_fused_path)


def _let_into_fused_path(layer: nn.Module) -> None:
    for key in [key for key, hook in layer._forward_pre_hooks.items() if hook is _no_fused_path]:
        del layer._forward_pre_hooks[key]


class SwappedMultiheadAttention(Swapped):
    """nn.MultiheadAttention's forward, with the mechanism between the projections.

    Its steps and layouts are those of :func:`torch.nn.functional.multi_head_attention_forward`: another memory layout
    of the output would draw other masks in the dropout after it.

    Where ``need_weights`` asks for the attention weights, softmax gives them; other mechanisms have none: None.
    """

    # Read by peft, which cannot adapt a projection without its query's rows.
    _qkv_same_embed_dim = property(lambda self: self.in_proj_weight is not None and len(self.dropped_query) == 0)

    def _reset_parameters(self: Any) -> None:
        """As the plain layer, of what is left of its joint projection."""
        if not self.dropped_query:
            nn.MultiheadAttention._reset_parameters(self)
            return
        nn.init.xavier_uniform_(self.in_proj_weight)
        for bias in (self.in_proj_bias, self.out_proj.bias) if self.in_proj_bias is not None else ():
            nn.init.zeros_(bias)
        for more in (self.bias_k, self.bias_v) if self.bias_k is not None else ():
            nn.init.xavier_normal_(more)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _keep_from_fused_path(self)

    def merge_masks(self, *args: Any, **kwargs: Any) -> Any:
        """Called by nn.TransformerEncoderLayer alone, on its fused path.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "nn.TransformerEncoderLayer's fused path would pass the mechanism by, as the forward pre-hook that keeps a "
            "swapped layer from it was removed: call torch.backends.mha.set_fastpath_enabled(False), or remove hooks "
            "by the handles of those that you registered"
        )

    def _needs_own_keys(self) -> bool:
        """Whether the mechanism's equations hold for self-attention alone."""
        mechanism = self.mechanism
        return len(self.dropped_query) > 0 or not mechanism.uses_query or mechanism.one_query_per_key

    def _project(self: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v ``[B, H, N, d]`` of sequence-first inputs ``[N, B, C]``."""
        names = ("k", "v") if self.dropped_query else ("q", "k", "v")
        inputs = (key, value) if self.dropped_query else (query, key, value)
        bias = self.in_proj_bias
        if self.in_proj_weight is None:
            weights = [getattr(self, f"{name}_proj_weight") for name in names]
            found = _separately(inputs, weights, bias)
        elif all(x is inputs[0] for x in inputs):
            found = _together(inputs[0], self.in_proj_weight, bias, len(names))
        elif key is value:  # then there is a query
            size = self.embed_dim
            query_bias, pair_bias = (None, None) if bias is None else bias.split([size, 2 * size])
            query_weight, pair_weight = self.in_proj_weight.split([size, 2 * size])
            found = [F.linear(query, query_weight, query_bias), *_together(key, pair_weight, pair_bias, 2)]
        else:
            found = _separately(inputs, self.in_proj_weight.chunk(len(names)), bias)
        heads = [self._heads(x) for x in found]
        return (heads[0], *heads) if self.dropped_query else tuple(heads)

    def _heads(self: Any, x: Tensor) -> Tensor:
        """``[B, H, N, d]`` of ``[N, B, H * d]``."""
        tokens, batch, _ = x.shape
        x = x.view(tokens, batch * self.num_heads, self.head_dim).transpose(0, 1)
        return x.view(batch, self.num_heads, tokens, self.head_dim)

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested or key.is_nested or value.is_nested:
            raise RuntimeError(
                "a swapped nn.MultiheadAttention takes no nested tensors: pad them (torch.nested.to_padded_tensor) and "
                "give the mask; where an nn.TransformerEncoder made them, swap it as a whole, or set its "
                "use_nested_tensor to False"
            )
        if self.bias_k is not None or self.add_zero_attn:
            raise RuntimeError(f"a swapped nn.MultiheadAttention was changed after its swap: {_OWN_KEY}")
        if self._needs_own_keys() and not same_view(query, key):
            name, lacks = type(self.mechanism).__name__, "has no query"
            if self.mechanism.uses_query:
                lacks = "needs a query for each key"
            raise RuntimeError(
                f"{name} {lacks}, so this layer can only attend to its own input; it was called with another key: "
                "restore it, or choose a mechanism with a query that takes cross-attention"
            )
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask: give the mask too, as nn.MultiheadAttention asks")
        batched = F._mha_shape_check(query, key, value, key_padding_mask, attn_mask, self.num_heads)  # type: ignore[attr-defined]
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask[None]
        # As in the plain layer: there the hint stands for the mask, whatever it holds.
        square = query.shape[-2 if self.batch_first else 0] == key.shape[-2 if self.batch_first else 0]
        # A bool, where torch.jit.trace gives tensors for sizes.
        hinted = bool(is_causal and key_padding_mask is None and not need_weights and square)
        attn_mask = None if hinted else attn_mask
        first, second, third = self._sequence_first(query, key, value)
        _check_sizes(self, first, second, third, key_padding_mask, attn_mask)
        q, k, v = self._project(first, second, third)
        watched = not torch.compiler.is_compiling() and trained_instead(self.mechanism)._forward_pre_hooks
        if watched and not same_view(query, key):
            setattr(k, OTHERS, (query != key).any() if query.shape == key.shape else True)
        weights = ShownMap(batched=batched or average_attn_weights)
        asked = {"weights": weights} if need_weights and self.mechanism.gives_weights else {}
        mask = _merge_masks(attn_mask, key_padding_mask, self.num_heads, q.dtype)
        dropout = self.dropout if self.training else 0.0
        x = query if self.batch_first and batched else self._turned(query).transpose(0, 1)  # [B, N, C]
        out = self.mix(q, k, v, x, attn_mask=mask, is_causal=hinted, dropout_p=dropout, scale=None, **asked)
        batch, _, tokens, _ = out.shape
        out = self._put_out(out.permute(2, 0, 1, 3).flatten(2).flatten(0, 1)).unflatten(0, (tokens, batch))
        shown = weights.shown
        if shown is not None and average_attn_weights:
            shown = shown.mean(dim=1) if batched else shown.mean(dim=1).squeeze(0)
        if not batched:
            return out.squeeze(1), shown
        return (out.transpose(0, 1) if self.batch_first else out), shown

    def _put_out(self: Any, x: Tensor) -> Tensor:
        """The output projection; as the plain layer, which reads its weights, calls no hooks of it."""
        if wrapped_by_peft(self.out_proj):
            return self.out_proj(x)
        return F.linear(x, self.out_proj.weight, self.out_proj.bias)

    def _sequence_first(self: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[N, B, C]`` from whichever layout the layer was called with; what was one tensor stays one."""
        first = self._turned(query)
        # By `is`: compiled code would take an id() for a number that each call changes, and compile anew.
        second = first if key is query else self._turned(key)
        third = first if value is query else second if value is key else self._turned(value)
        return first, second, third

    def _turned(self: Any, x: Tensor) -> Tensor:
        return x.unsqueeze(1) if x.dim() == 2 else x.transpose(0, 1) if self.batch_first else x


def _together(x: Tensor, weight: Tensor, bias: Tensor | None, count: int) -> list[Tensor]:
    """The ``count`` projections of one input, each contiguous."""
    y = F.linear(x, weight, bias).unflatten(-1, (count, -1))
    return list(y.unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous())


def _separately(inputs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None) -> list[Tensor]:
    """A projection for each input."""
    biases = [None] * len(weights) if bias is None else bias.chunk(len(weights))
    return [F.linear(x, weight, each) for x, weight, each in zip(inputs, weights, biases, strict=True)]


def encoders_around(model: nn.Module, layers: Iterable[nn.Module]) -> list[nn.TransformerEncoder]:
    """The encoders of a model that hold any of these layers."""
    held = {id(layer) for layer in layers}
    encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]
    return [encoder for encoder in encoders if any(id(module) in held for module in encoder.modules())]


def let_get_nested(encoder: nn.TransformerEncoder, nested: bool) -> None:
    """Let an encoder's layers get nested tensors in evaluation, or padded ones; its own output is the same."""
    encoder.use_nested_tensor = nested
    encoder.__dict__.pop(_PADDED, None)
    for key in [key for key, hook in encoder._forward_hooks.items() if hook is _zero_padding]:
        del encoder._forward_hooks[key], encoder._forward_hooks_with_kwargs[key]
    if not nested:
        encoder.__dict__[_PADDED] = True
        if is_own_forward(encoder, nn.TransformerEncoder.forward):
            encoder.register_forward_hook(_zero_padding, prepend=True, with_kwargs=True)


def _zero_padding(encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
    """A forward hook that puts zeros, as they come out of the encoder's norm, where padding behind a sequence hides.

    So do nested tensors, which torch's encoder makes under these conditions: in evaluation, without gradients. Where
    its norm is not one of each token, whose hooks see nothing of them, the output stays as it is.
    """
    names = ("src", "mask", "src_key_padding_mask")[: len(args)]
    given = {**dict(zip(names, args[: len(names)], strict=True)), **kwargs}  # torch 2.9 compiles no other zip
    hidden: Tensor | None = given.get("src_key_padding_mask")
    norm, first = encoder.norm, encoder.layers[0]
    alone = type(norm) in (nn.LayerNorm, nn.RMSNorm) and len(norm.normalized_shape) == 1 and not has_hooks(norm)
    if (
        hidden is None
        or given.get("mask") is not None
        or output.dim() != 3
        or first.training
        or not (alone or norm is None)
    ):
        return None
    own = [each for name, each in first.named_parameters() if ".mechanism." not in name]
    if torch.is_grad_enabled() and any(each.requires_grad for each in (given["src"], *own)):
        return None
    if torch.is_autocast_enabled() or not torch.backends.mha.get_fastpath_enabled():
        return None
    if getattr(encoder, "mask_check", True):
        if torch.compiler.is_compiling():
            return None
        hidden = hidden.bool() & (hidden[:, 1:].bool() >= hidden[:, :-1].bool()).all()
    zeros = output.new_zeros(output.shape[-1])
    return torch.where(hidden.bool()[..., None], zeros if norm is None else norm.forward(zeros), output)


class MultiheadAttentionHost(Host):
    """``torch.nn.MultiheadAttention``."""

    name = "torch MultiheadAttention"
    mixin = SwappedMultiheadAttention

    def concerns(self, kind: type[nn.Module]) -> bool:
        return issubclass(kind, nn.MultiheadAttention)

    def understands(self, module: nn.Module) -> bool:
        return isinstance(module, nn.MultiheadAttention) and is_own_forward(module, nn.MultiheadAttention.forward)

    def near_miss(self, module: nn.Module) -> str | None:
        if isinstance(module, nn.MultiheadAttention) and not self.understands(module):
            return f"unsupported subclass: {type(module).__name__} is a {self.name} with a forward of its own"
        return None

    def is_cross(self, layer: Any, parent: nn.Module | None, name: str) -> bool:
        attribute = name.rpartition(".")[2]
        if (layer.kdim, layer.vdim) != (layer.embed_dim, layer.embed_dim):
            return True
        if "cross" in attribute.lower() or _CROSS.search(name):
            return True
        if parent is None or "self" in attribute.lower():
            return False
        # The layer itself cannot tell: what is around it does, in other people's decoders and pooling heads.
        kind = type(parent).__name__
        if attribute == "multihead_attn" and (isinstance(parent, nn.TransformerDecoderLayer) or "Decoder" in kind):
            return True
        return bool(_OTHER_QUERY.search(kind)) or any(each in parent._parameters for each in _LEARNED_QUERIES)

    def spec(self, layer: Any, layer_index: int | None) -> AttentionSpec:
        return AttentionSpec(layer.embed_dim, layer.num_heads, layer.head_dim, layer_index=layer_index)

    def num_tokens(self, layer: Any, ancestors: Sequence[nn.Module]) -> int | None:
        """The length that torchvision's VisionTransformer fixes, class token included."""
        library = sys.modules.get("torchvision.models.vision_transformer")
        if library is None:
            return None
        found = (outer.seq_length for outer in reversed(ancestors) if isinstance(outer, library.VisionTransformer))
        return next(found, None)

    def fixes_length(self, ancestors: Sequence[nn.Module]) -> bool:
        return True

    def query_parts(self, layer: Any) -> tuple[QueryPart, ...]:
        return query_parts(layer, "", layer.embed_dim, {"in_proj_weight": 0, "in_proj_bias": 0})

    def qk_rows(self, layer: Any) -> tuple[Rows, Rows]:
        width = layer.embed_dim
        if layer.in_proj_weight is None:
            return Rows(layer, 0, width, "q_proj_weight"), Rows(layer, 0, width, "k_proj_weight")
        start = 0 if getattr(layer, "dropped_query", ()) else width
        return Rows(layer, 0, width, "in_proj_weight"), Rows(layer, start, start + width, "in_proj_weight")

    def qk_biases(self, layer: Any) -> tuple[Rows | None, Rows | None]:
        if layer.in_proj_bias is None:
            return None, None
        width = layer.embed_dim
        start = 0 if getattr(layer, "dropped_query", ()) else width
        query, key = (Rows(layer, begin, begin + width, "in_proj_bias") for begin in (0, start))
        return query, key

    def limits(self, layer: Any) -> Limits:
        every = query = None
        if layer.bias_k is not None or layer.add_zero_attn:
            every = _OWN_KEY
        if layer._parameters.get("in_proj_weight") is None:
            query = (
                "its in_proj_weight is no plain Parameter (parametrized, or kdim/vdim differ), so it cannot be split; "
                "list SwapAttention before SigmaReparam"
            )
        elif layer.in_proj_bias is not None and layer._parameters.get("in_proj_bias") is None:
            query = (
                "its in_proj_bias is computed at each call (pruning, a parametrization), so it cannot be split: make "
                "it permanent first, as prune.remove() does"
            )
        elif codes := quantized(layer, "in_proj_weight"):
            query = f"its in_proj_weight cannot be split: {codes}"
        return Limits(every, without_query=query)

    def insert(self, layer: Any, mechanism: AttentionMechanism) -> None:
        super().insert(layer, mechanism)
        _keep_from_fused_path(layer)

    def remove(self, layer: Any) -> None:
        super().remove(layer)
        _let_into_fused_path(layer)

    def settle(self, model: nn.Module) -> None:
        """Nested tensors belong to the fused path: the layers of each encoder that holds a swapped one get none."""
        for encoder in model.modules():
            if isinstance(encoder, nn.TransformerEncoder):
                swapped = any(isinstance(module, SwappedMultiheadAttention) for module in encoder.modules())
                if encoder.use_nested_tensor if swapped else encoder.__dict__.get(_PADDED):
                    let_get_nested(encoder, not swapped)


HOSTS: tuple[Host, ...] = (MultiheadAttentionHost(),)
