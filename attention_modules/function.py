"""A function with the signature of :func:`torch.nn.functional.scaled_dot_product_attention` as a mechanism."""

from __future__ import annotations

import copyreg
import dis
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from itertools import pairwise
from types import CodeType, FunctionType, MethodType
from typing import Any, ClassVar, TypeGuard, cast
from weakref import WeakValueDictionary

from torch import Tensor, nn

from attention_modules.base import NEEDS, AttentionMechanism, AttentionSpec
from attention_modules.masks import combine_masks

AttentionFunction = Callable[..., Tensor]
FROM_THE_LAYER = ("attn_mask", "is_causal", "dropout_p", "scale")
OF_THE_SWAP = ("where", "layers", "exclude", "example")
_TAKEN = ("self", "spec", "model", "mechanism", *OF_THE_SWAP)
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
            _refuse_trained(f"the option {name!r} of {type(self).__name__} is a module or tensor that trains", value)
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
        TypeError: if an option of the function cannot be given, it is a method of a module, or it takes a module or
            tensor that trains from its closure, its module or what it is bound to.
    """
    owner = getattr(function, "__self__", None)
    key = id(owner), id(getattr(function, "__func__", function))
    known = _classes.get(key)
    if known is None:
        known = _classes[key] = _new_class(function, owner)
    return known


def _trains(value: object) -> bool:
    tensors = value.parameters() if isinstance(value, nn.Module) else [value] if isinstance(value, Tensor) else ()
    return any(each.requires_grad for each in tensors)


def _refuse_trained(what: str, value: object, names: set[str] | None = None) -> None:
    """Refuse modules and tensors that train, as the value itself or, where given, as attributes of these names."""
    held = [value]
    if names is not None:
        has = {**vars(value), **(value._parameters | value._modules)} if isinstance(value, nn.Module) else vars(value)
        held = [has[name] for name in names & has.keys()]
    trained = (each for each in held if _trains(each))
    if (found := next(trained, None)) is not None:
        raise TypeError(
            f"{what} ({type(found).__name__}), which is no part of the swapped model: it is not trained, saved or "
            "copied with it; write a subclass of AttentionMechanism: each layer gets one of its own"
        )


def _new_class(function: AttentionFunction, owner: object) -> type[FunctionAttention]:
    if isinstance(owner, nn.Module):
        raise TypeError(
            f"{function.__qualname__} is a method of a module ({type(owner).__name__}), whose parameters the swapped "
            "model would not have; write a subclass of AttentionMechanism: each layer gets one of its own"
        )
    for value, names in held_by_function(function):
        if names is None or hasattr(value, "__dict__"):
            _refuse_trained(f"{function.__qualname__} takes a module or tensor that trains from outside", value, names)
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


def held_by_function(function: Any) -> Iterator[tuple[Any, set[str] | None]]:
    """What a function is bound to, was given before its call, or loads of its closure and module.

    Beside it the names of attributes that its code reads there; None where it takes the whole.
    """
    if isinstance(function, partial):
        yield from ((each, None) for each in (*function.args, *function.keywords.values()))
        yield from held_by_function(function.func)
    elif isinstance(function, MethodType):
        of: Any = function.__func__
        if isinstance(of, FunctionType):
            yield function.__self__, _loads(of.__code__).get(of.__code__.co_varnames[0])
        yield from held_by_function(of)
    elif isinstance(function, FunctionType):
        given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        yield from ((each, None) for each in given)
        loads = _loads(function.__code__)
        held = {name: value for name, value in function.__globals__.items() if f"global {name}" in loads}
        yield from ((value, loads[f"global {name}"]) for name, value in held.items())
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # not filled yet
                yield cell.cell_contents, loads.get(name, set())


@lru_cache(maxsize=1_000)
def _loads(code: CodeType) -> dict[str, set[str] | None]:
    """By variable (a global as "global NAME"), which attributes are read of it; None where it is taken whole."""
    found: dict[str, set[str] | None] = {}
    for load, then in pairwise(dis.get_instructions(code)):
        if load.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_FAST", "LOAD_FAST_BORROW"):
            name = f"global {load.argval}" if load.opname == "LOAD_GLOBAL" else load.argval
            names = found.setdefault(name, set())
            if then.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                found[name] = None
            elif names is not None:
                names.add(str(then.argval))
    return found
