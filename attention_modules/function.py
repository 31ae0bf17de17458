"""A function with the signature of :func:`torch.nn.functional.scaled_dot_product_attention` as a mechanism."""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, TypeGuard, cast
from weakref import WeakValueDictionary

from torch import Tensor, nn

from attention_modules.base import NEEDS, AttentionMechanism, AttentionSpec
from attention_modules.masks import combine_masks

AttentionFunction = Callable[..., Tensor]
FROM_THE_LAYER = ("attn_mask", "is_causal", "dropout_p", "scale")
OF_THE_SWAP = ("where", "layers", "exclude", "example")
_TAKEN = ("self", "spec", "model", "mechanism", *OF_THE_SWAP)
OUTSIDE = (
    "that trains and is no part of the swapped model: it is not trained, saved or copied with it; write a subclass of "
    "AttentionMechanism: each layer gets one of its own"
)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def is_attention_function(target: object) -> TypeGuard[AttentionFunction]:
    """Whether it is a function that must be called with queries, keys and values by position."""
    if isinstance(target, (type, nn.Module)) or not hasattr(target, "__qualname__"):
        return False
    try:
        first = list(inspect.signature(cast(Any, target)).parameters.values())[:3]
    except (TypeError, ValueError):  # builtins
        return False
    return len(first) == 3 and all(each.kind in _BY_POSITION and each.default is each.empty for each in first)


class NotTakenError(TypeError):
    """A layer gives a function what it does not take, and what would change the result."""


class FunctionAttention(AttentionMechanism):
    """The mechanism of a function; :func:`function_class` makes the subclass for each.

    The function gets q, k and v by position. Of ``attn_mask``, ``is_causal``, ``dropout_p`` and ``scale`` it gets by
    keyword those that it takes, the first two never together; and its options, likewise. Parameters named ``x``,
    ``first_value`` and ``previous_value`` are no options: they are what it ``needs`` of the layer.

    Args:
        spec: the layer that it serves.
        **options: the function's further arguments.

    Raises:
        TypeError: if the function does not take the options, the layer gives them, or one of them trains.
        ValueError: if the layer is causal, and the function takes neither ``is_causal`` nor ``attn_mask``.
    """

    function: ClassVar[AttentionFunction]
    takes: ClassVar[frozenset[str]]

    def __init__(self, spec: AttentionSpec, **options: object) -> None:
        super().__init__(spec)
        for name in (*FROM_THE_LAYER, *NEEDS):
            if name in options:
                raise TypeError(f"{name} is no option, as the layer gives it to the function: set it in the layer")
        from_the_layer = dict.fromkeys((*self.takes, *self.needs))
        inspect.signature(self.function).bind(None, None, None, **from_the_layer, **options)
        if spec.is_causal and self.takes.isdisjoint(("is_causal", "attn_mask")):
            raise ValueError(
                f"{type(self).__name__} takes neither is_causal nor attn_mask, and this layer hides the future; add "
                "is_causal=False to the function's parameters, and heed it there"
            )
        for name, value in options.items():
            tensors = value.parameters() if isinstance(value, nn.Module) else (value,)
            if any(isinstance(each, Tensor) and each.requires_grad for each in tensors):
                raise TypeError(f"the option {name!r} of {type(self).__name__} is a {type(value).__name__} {OUTSIDE}")
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        scale: float | None = None,
        **needed: Tensor | None,
    ) -> Tensor:
        """Call the function.

        Raises:
            NotTakenError: if the layer gives something that changes the result, and the function does not take it.
            TypeError: if the function returns no tensor, or one of another shape.
        """
        attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
        given = {"attn_mask": attn_mask, "is_causal": is_causal, "dropout_p": dropout_p, "scale": scale}
        if attn_mask is not None:
            self._require("attn_mask", "a mask")
        if is_causal:
            self._require("is_causal", "True")
        if dropout_p > 0.0:
            self._require("dropout_p", f"{dropout_p}, the attention dropout in training (a layer with 0 needs none)")
        if scale is not None and abs(scale * q.shape[-1] ** 0.5 - 1.0) > 1e-6:
            self._require("scale", f"{scale}, and not the usual 1/sqrt(d)")
        given = {name: given[name] for name in given if name in self.takes}
        out = self.function(q, k, v, **given, **needed, **self.options)
        expected = (*q.shape[:-1], v.shape[-1])
        if not isinstance(out, Tensor) or out.shape != expected:
            found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise TypeError(
                f"{type(self).__name__} must return one tensor [batch, heads, queries, values] = {tuple(expected)}, "
                f"got {found}"
            )
        return out

    def _require(self, parameter: str, value: str) -> None:
        if parameter not in self.takes:
            name = self.spec.layer_name
            layer = f"the layer {name!r}" if name else "the layer"
            default = inspect.signature(AttentionMechanism.forward).parameters[parameter].default
            raise NotTakenError(
                f"{type(self).__name__} does not take {parameter}, and {layer} gives it {value}; add "
                f"{parameter}={default} to the function's parameters and heed it there, as "
                "torch.nn.functional.scaled_dot_product_attention does"
            )


class _FunctionType(type):
    """Type of the classes of functions: they pickle by their function, which the module has under their name."""

    function: AttentionFunction


def _reduce(cls: _FunctionType) -> tuple[Any, ...]:
    return function_class, (cls.function,)


copyreg.pickle(cast(Any, _FunctionType), cast(Any, _reduce))


# A class holds its function, so that its identity is taken by no other while the class is there.
_classes: WeakValueDictionary[tuple[int, int], type[FunctionAttention]] = WeakValueDictionary()


def function_class(function: AttentionFunction) -> type[FunctionAttention]:
    """The mechanism of a function, under the function's name: the same class for the same function.

    Raises:
        TypeError: if an option of the function cannot be given, or it is a method of a module.
    """
    owner = getattr(function, "__self__", None)
    key = id(owner), id(getattr(function, "__func__", function))
    known = _classes.get(key)
    if known is None:
        known = _classes[key] = _new_class(function, owner)
    return known


def _new_class(function: AttentionFunction, owner: object) -> type[FunctionAttention]:
    if isinstance(owner, nn.Module):
        raise TypeError(
            f"{function.__qualname__} is a method of a module ({type(owner).__name__}), whose parameters the swapped "
            "model would not have; write a subclass of AttentionMechanism: each layer gets one of its own"
        )
    parameters = list(inspect.signature(function).parameters.values())[3:]
    taken = [each.name for each in parameters if each.name in _TAKEN and each.kind is not each.VAR_KEYWORD]
    if taken:
        raise TypeError(
            f"{function.__qualname__} has a parameter {taken[0]!r}, which is an argument of the swap "
            f"({', '.join(_TAKEN[1:])}); give it another name"
        )
    everything = any(each.kind is each.VAR_KEYWORD for each in parameters)
    needs = tuple(name for name in NEEDS if name in {each.name for each in parameters})
    spec = inspect.Parameter("spec", inspect.Parameter.POSITIONAL_ONLY)
    options = [
        each if each.kind is each.VAR_KEYWORD else each.replace(kind=each.KEYWORD_ONLY)
        for each in parameters
        if each.kind not in (each.VAR_POSITIONAL, each.POSITIONAL_ONLY) and each.name not in (*FROM_THE_LAYER, *NEEDS)
    ]
    options.sort(key=lambda each: each.kind)
    members = {
        "function": staticmethod(function),
        "needs": needs,
        "per_head": getattr(function, "per_head", None),
        "takes": frozenset(FROM_THE_LAYER)
        & (set(FROM_THE_LAYER) if everything else {each.name for each in parameters}),
        "__signature__": inspect.Signature([spec, *options]),
        **{name: getattr(function, name) for name in ("__module__", "__qualname__", "__doc__")},
    }
    return cast(type[FunctionAttention], _FunctionType(function.__name__, (FunctionAttention,), members))
