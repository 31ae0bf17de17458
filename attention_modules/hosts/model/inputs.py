"""What a model or layer is called with: copies for further calls, and whether it continues from earlier tokens."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_map_only

# Arguments that hold keys and values of earlier tokens: a second call would add to them.
CACHES = ("past_key_value", "past_key_values", "layer_past", "cache")


class _Clones(TorchFunctionMode):
    """Inside, ``copy.deepcopy`` clones tensors, also those with a gradient function; of the same ones the same."""

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[Any, Tensor] = {}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is not Tensor.__deepcopy__:
            return function(*args, **(kwargs or {}))
        tensor = args[0]
        key: Any = id(tensor)
        with suppress(NotImplementedError, RuntimeError):  # of one without memory of its own: sparse, nested, meta
            key = tensor.data_ptr() or key, tensor.dtype, tensor.shape, tensor.stride()
        if key not in self._own:
            self._own[key] = _clone_of(tensor)
        return self._own[key]


def _clone_of(tensor: Tensor) -> Tensor:
    """A clone with the attributes that make a tensor what it is: PyTorch's causal biases hold nothing else."""
    clone = tensor.clone()
    if type(tensor) is not Tensor:  # of a plain one, they are notes of others
        for name, value in vars(tensor).items():
            vars(clone).setdefault(name, value)
    return clone


def copied_arguments(values: Any) -> Any:
    """A copy of arguments, objects such as caches among them, for a call that leaves the user's as they are.

    Modules and sentinels among them stay the same.

    Raises:
        ValueError: if an object cannot be copied.
    """
    memo: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        return value if isinstance(value, nn.Module) or type(value) is object else copy.deepcopy(value, memo)

    try:
        with _Clones():
            return tree_map(copied, values, is_leaf=lambda value: not isinstance(value, (dict, list, tuple)))
    except Exception as error:  # whatever an object of somebody's own raises
        raise ValueError(
            f"an argument cannot be copied for a second call ({type(error).__name__}: {error}): call it without that, "
            "as with use_cache=False"
        ) from error


def as_it_is(values: Any) -> Any:
    """Nested tensors that nobody changes in place any more; of the same ones the same."""
    with _Clones():
        return tree_map_only(Tensor, partial(copy.deepcopy, memo={}), values)


def named(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of the module's forward, that of its class before a swap."""
    kind = getattr(module, "plain_class", None)
    try:
        forward = module.forward if kind is None else partial(kind.forward, module)
        return {**inspect.signature(forward).bind_partial(*args).arguments, **kwargs}
    except (TypeError, ValueError):  # the call itself will say what it does not take
        return dict(kwargs)


def continues(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is given a cache that holds tokens: of this layer, or of any where the module is none."""
    index = getattr(module, "layer_idx", None)
    place = {} if index is None else {"layer_idx": index}
    return _holds_tokens(named(module, args, kwargs), place, False)


def _holds_tokens(value: Any, place: dict[str, int], is_cache: bool) -> bool:
    if callable(length := getattr(value, "get_seq_length", None)):
        try:
            held = bool(length(**place))
        except TypeError:  # of a cache of somebody's own
            held = bool(length())
        except ValueError:  # of a layer that has a state, and counts no tokens
            held = bool(value.has_previous_state())
        return held or _holds_tokens(getattr(value, "cross_attention_cache", None), place, True)
    if isinstance(value, Mapping):
        return any(_holds_tokens(each, place, is_cache or name in CACHES) for name, each in value.items())
    if isinstance(value, (tuple, list)):
        tensors = (each for each in value if isinstance(each, Tensor))
        filled = is_cache and any(each.ndim == 4 and each.numel() > 0 for each in tensors)
        return filled or any(_holds_tokens(each, place, is_cache) for each in value)
    return False
