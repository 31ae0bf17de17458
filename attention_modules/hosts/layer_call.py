"""A layer's call in a model, kept as a function of its input alone: what Lipschitz constants are taken of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from attention_modules.hosts.base import Host
from attention_modules.hosts.discovery import host_of
from attention_modules.hosts.forwards import tokens_of
from attention_modules.hosts.model.inputs import CACHES, continues, copied_arguments, named
from attention_modules.hosts.torch import same_view
from attention_modules.masks import visible
from attention_modules.mechanisms.shared.unchanged import repeatable, unobserved
from attention_modules.sharing import Link

# Arguments that hold the tokens that are attended to.
_ATTENDED = ("key", "value", "key_value_states", "encoder_hidden_states")
_SAME = 1e-3  # of an output, which rounding moves by less
# Arguments that hold rotary embeddings [..., N, d]: their last dimension has no tokens, whatever its size.
_ROTARY = ("position_embeddings", "rope", "cos", "sin")


class _Hole:
    """Where the layer's input stands among its arguments."""


_HOLE = _Hole()


@dataclass
class LayerCall:
    """A layer's call on some samples and tokens, as a function of its input ``[B, N, C]`` alone.

    Values of other layers that it reads are held as they were in that call.
    """

    module: nn.Module
    x: Tensor
    tokens: int  # before the cut
    args: list[Any]
    kwargs: dict[str, Any]
    others: dict[int, Tensor] = field(default_factory=dict)
    batch_first: bool = True
    places: tuple[str, ...] = ()  # the names of args
    num_heads: int | None = None
    by_sample: frozenset[str] = frozenset()  # names of the arguments whose first dimension is that of samples

    @classmethod
    def of(
        cls,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_heads: int | None = None,
        num_samples: int | None = None,
        max_tokens: int | None = None,
        host: Host | None = None,
    ) -> LayerCall:
        """Copies of what a forward pre-hook was given, the first samples and tokens of it, in 32 bits or more.

        Args:
            module: the layer.
            args: its arguments.
            kwargs: those by name.
            num_heads: H where masks ``[B * H, N, N]`` are to be cut with the samples.
            num_samples: how many; all where None.
            max_tokens: how many at most; all where None.
            host: that of the layer, where it is known.

        Raises:
            ValueError: if its input among the arguments is no sequence of tokens, keys or values come from
                another tensor (they may depend on it all the same, and held they would leave another quantity), the
                layer continues from a cache that holds tokens, an argument cannot be copied, or some samples alone do
                not give what they give in the batch, however the arguments are cut.
        """
        host = host_of(module) if host is None else host
        given = tokens_of(module, args, kwargs) if host is None else host.tokens(module, args, kwargs)
        if given is not None and given.is_nested:
            raise ValueError(
                "its input is a nested tensor, without [batch, tokens, features]; set use_nested_tensor of the "
                "nn.TransformerEncoder to False"
            )
        if given is None or given.dim() != 3 or not given.is_floating_point():
            shape = None if given is None else tuple(given.shape)
            raise ValueError(f"its input must be [batch, tokens, features], got {shape}")
        by_name = named(module, args, kwargs)
        for name, value in by_name.items():
            if name in _ATTENDED and isinstance(value, Tensor) and not same_view(value, given):
                raise ValueError(
                    f"its {name} {tuple(value.shape)} is another tensor than its input {tuple(given.shape)} (reduced "
                    "keys, or cross-attention), so that it is no function of its input alone"
                )
        if continues(module, args, kwargs):
            raise ValueError(
                "it continues from a key-value cache, so that it is no function of its input alone: call it with an "
                "empty cache, or without one (use_cache=False)"
            )
        batch_first = bool(getattr(module, "batch_first", True)) if host is None else host.batch_first(module)
        x = given if batch_first else given.transpose(0, 1)
        batch, tokens, _ = x.shape
        dtype = torch.promote_types(x.dtype, torch.float32)
        has_cache = any(hasattr(value, "get_seq_length") for value in by_name.values())
        with_places = {value.shape[-1] for value in by_name.values() if has_cache and _has_places(value, tokens)}

        def taken(name: str, value: Any) -> Any:
            if isinstance(value, Tensor) and same_view(value, given):
                return _HOLE
            if name in CACHES or hasattr(value, "get_seq_length"):
                return None
            if isinstance(value, (tuple, list)):
                return type(value)(taken(name, part) for part in value)
            if not isinstance(value, Tensor):
                return copied_arguments(value)
            if value.dim() == 4 and value.shape[-1] in with_places and name not in _ROTARY:
                value = value[..., :tokens]
            return _own(value.to(dtype) if value.is_floating_point() else value)

        places = [name for name in by_name if name not in kwargs]
        places = places if len(places) == len(args) else [str(at) for at in range(len(args))]
        link: Link | None = getattr(module, "link", None)
        others = {} if link is None else {at: _own(value.to(dtype)) for at, value in (link.given() or {}).items()}
        by_place = [taken(name, value) for name, value in zip(places, args, strict=True)]
        by_name = {name: taken(name, value) for name, value in kwargs.items()}
        own = _own(x.to(dtype))
        whole = cls(module, own, tokens, by_place, by_name, others, batch_first, tuple(places), num_heads)
        samples = num_samples or batch
        by_sample = whole._by_sample(samples if samples < batch else 1)
        return whole._cut(slice(samples), slice(max_tokens or tokens), by_sample)

    def _by_sample(self, some: int) -> frozenset[str]:
        """Names of the arguments that have a part for each sample: with theirs, some alone give what they gave.

        Raises:
            ValueError: if none of these names tell.
        """
        usual: dict[str, bool] = {}  # of what may have some, whether it has by its shape
        for name, value in (*zip(self.places, self.args, strict=True), *self.kwargs.items()):
            for each in tree_leaves(value):
                if isinstance(each, Tensor) and each.shape[:1] == self.x.shape[:1]:
                    usual[name] = each.dim() > 1 and each.shape != (self.tokens, self.tokens)
        if len(self.x) == 1 or not usual or (whole := _output(self)) is None:
            return frozenset(name for name in usual if usual[name])
        for count in range(len(usual) + 1):
            for turned in combinations(usual, count):
                by_sample = frozenset(name for name in usual if usual[name] != (name in turned))
                out = _output(self._cut(slice(some), slice(self.tokens), by_sample))
                if out is None or out.shape != whole[:some].shape:
                    continue
                if not bool((out - whole[:some]).norm() > _SAME * whole[:some].norm()):
                    return by_sample
        raise ValueError(
            f"it does not give of {some} of {len(self.x)} samples what it gives of all, however its arguments "
            f"({', '.join(usual)}) are cut: have it in eval(), without what mixes samples"
        )

    @property
    def has_masks(self) -> bool:
        """Whether it is given what may say of each token whether it is seen."""
        given = [each for each in tree_leaves((self.args, self.kwargs)) if isinstance(each, Tensor) and each.dim() > 0]
        return any(each.shape[-1] == self.tokens or each.shape == self.x.shape[:1] for each in given)

    def among(self, seen: Tensor) -> Callable[[Tensor], Tensor]:
        """The function of these tokens alone, boolean ``[B, N]``: the others are held, and what they give is 0."""
        inside = _own(seen.unsqueeze(-1))
        return lambda x: self(x.where(inside, self.x)).where(inside, 0.0)

    def part(self, sample: int, kept: Tensor) -> LayerCall:
        """The same call on one sample, and on its tokens at these places ``[n]`` alone."""
        return self._cut(slice(sample, sample + 1), kept, self.by_sample)

    def _cut(self, samples: slice, kept: slice | Tensor, by_sample: frozenset[str]) -> LayerCall:
        def cut(name: str, value: Any) -> Any:
            if isinstance(value, (tuple, list)):
                return type(value)(cut(name, part) for part in value)
            if not isinstance(value, Tensor):
                return value
            sizes = (len(self.x), samples), (self.tokens, kept)
            return _own(_cut_mask(name, value, *sizes, self.num_heads, name in by_sample))

        args = [cut(name, value) for name, value in zip(self.places, self.args, strict=True)]
        kwargs = {name: cut(name, value) for name, value in self.kwargs.items()}
        others = {at: _own(value[samples, :, kept]) for at, value in self.others.items()}
        x = _own(self.x[samples, kept])
        return replace(self, x=x, args=args, kwargs=kwargs, others=others, by_sample=by_sample)

    def __call__(self, x: Tensor) -> Tensor:
        inner = x if self.batch_first else x.transpose(0, 1)
        state = {
            name: tensor.detach().to(x.dtype) if tensor.is_floating_point() else tensor
            for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers())
        }
        args = tuple(inner if value is _HOLE else _of_this_call(value) for value in self.args)
        kwargs = {name: inner if value is _HOLE else _of_this_call(value) for name, value in self.kwargs.items()}
        link: Link | None = getattr(self.module, "link", None)
        others = {at: value.to(x.dtype) for at, value in self.others.items()}
        try:
            with nullcontext() if link is None else link.held(others):
                out = torch.func.functional_call(self.module, state, args, kwargs)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            if x.shape[1] == self.tokens:
                raise
            raise ValueError(
                f"{type(self.module).__name__} works with the {self.tokens} tokens that the model gives it, not with "
                f"{x.shape[1]}, as its position bias, rope or windows fix their number ({error})"
            ) from error
        out = out[0] if isinstance(out, (tuple, list)) else out
        return out if self.batch_first else out.transpose(0, 1)


def _of_this_call(value: Any) -> Any:
    """Tensors as they are; of any other object, which the layer may change, a copy."""
    return value if isinstance(value, Tensor) else copied_arguments(value)


def _own(value: Tensor) -> Tensor:
    """A copy that gradients may be taken through; validation runs in inference mode."""
    with torch.inference_mode(False):
        return value.detach().clone()


def _has_places(value: Any, tokens: int) -> bool:
    """Whether it is a mask ``[B, ..., N, M]`` of the tokens and of empty places of a cache behind them, all hidden."""
    if not isinstance(value, Tensor) or value.dim() != 4 or value.shape[-1] <= tokens:
        return False
    return not bool(visible(value[..., tokens:]).any())


def _output(call: LayerCall) -> Tensor | None:
    """What a call gives, if it does not fail."""
    with suppress(Exception), torch.no_grad(), unobserved(call.module), repeatable(call.x.device):
        return call(call.x)
    return None


def _cut_mask(
    name: str,
    value: Tensor,
    samples: tuple[int, slice],
    tokens: tuple[int, slice | Tensor],
    heads: int | None,
    by_sample: bool,
) -> Tensor:
    """A mask for fewer of both: ``[N, N]``, ``[B * H, N, N]``, ``[H, N, N]``; by sample ``[B]``, ``[B, ..., N]``."""
    batch, batch_kept = samples
    length, kept = tokens
    square = value.shape == (length, length) and not by_sample
    if by_sample and value.shape[:1] == (batch,):
        value = value[batch_kept]
    elif heads and heads > 1 and value.dim() == 3 and value.shape[0] == batch * heads:
        value = value.unflatten(0, (batch, heads))[batch_kept].flatten(0, 1)
    for dim in (-2,) if name in _ROTARY else (-2, -1):
        inner = value.dim() >= -dim and (square or value.dim() + dim > 0)
        if inner and value.shape[dim] == length:
            value = value[..., kept, :] if dim == -2 else value[..., kept]
    return value
