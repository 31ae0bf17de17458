"""What a mechanism mixes values with: one call of it that keeps what it gives its kernel, and computes no attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attention_modules.base import AttentionMechanism
from attention_modules.kernels import taken_by
from attention_modules.mechanisms.shared.acting import (
    TOLERANCE,
    ActingMap,
    ChunkedMap,
    DenseMap,
    FactorMap,
    LinearMap,
    NoMapError,
    quasi_random,
    softmax_rows,
)
from attention_modules.mechanisms.shared.chunks import attend_by
from attention_modules.mechanisms.shared.kept import copy_of
from attention_modules.mechanisms.shared.unchanged import repeatable, unobserved

_NOT_OF_THE_MAP = ("weights", "dropout_p", "state", "plain")  # arguments of a call


class _SeveralCalls(BaseException):
    """More than one call of a kernel for the values: its result is needed."""


class _Call:
    """A call of a kernel: what its map is made of, its values, and what it gave, or a token for that."""

    def __init__(self, found: ActingMap, value: Tensor, out: Tensor) -> None:
        self.found, self.value, self.out = found, value, out
        self.given = copy_of(out)  # to the mechanism, which may change it in place
        self._made_of = [(part, _version(part)) for part in (value, *vars(found).values()) if isinstance(part, Tensor)]

    @property
    def is_kept(self) -> bool:
        """Whether nothing that the kernel was given was changed afterwards."""
        return all(_version(part) == version for part, version in self._made_of)


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 where inference mode does not count."""
    return 0 if tensor.is_inference() else tensor._version


class _Capture(TorchFunctionMode):
    """Keeps what attention is called with.

    Args:
        token: which numbers a single call gives in place of its output, as large as values are; 0 for attention.
        values: where given, a later call for others than these, which no map of it would fit, gives numbers too.
    """

    def __init__(self, token: int, values: Tensor | None = None) -> None:
        super().__init__()
        self.token = token
        self.values = values
        self.calls: list[_Call] = []
        self.drops = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._kernel(partial(func, *args, **kwargs), *args, **kwargs)
        return func(*args, **kwargs)

    def _kernel(
        self,
        compute: Callable[[], Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        self.drops = dropout_p > 0.0
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        return self._keep(FactorMap(query, key, attn_mask, is_causal, scale), value, compute)

    def chunked(self, weights: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        """Take a call of :func:`.attend_by`."""
        attn_mask, is_causal, scale = rest

        def compute() -> Tensor:
            with taken_by(None):
                return attend_by(weights, q, k, v, attn_mask, is_causal, 0.0, scale)

        return self._keep(ChunkedMap(weights, q, k, attn_mask, is_causal, scale), v, compute)

    def _keep(self, found: ActingMap, value: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        if not self.token:
            out = compute()
        elif self.calls and not self._is_of_others(value):
            raise _SeveralCalls
        else:
            with torch.no_grad():
                size = value.abs().amax() if value.numel() else value.new_ones(())
                place = value.new_empty(*found.q.shape[:-1], value.shape[-1])  # type: ignore[attr-defined]
                out = quasi_random(place, self.token) * torch.where(size.isfinite() & (size > 0), size, 1.0)
        self.calls.append(_Call(found, value, out))
        return self.calls[-1].given

    def _is_of_others(self, value: Tensor) -> bool:
        """Whether a call mixes values made of an earlier one's output, say, and not those of the mechanism."""
        of = self.values
        return of is not None and value.shape == of.shape and isinstance(_ratio(value, of), bool)


class _FewRows(_Capture):
    """Lets kernels take the gradient of few rows of their output, for their values, from these rows alone."""

    def __init__(self) -> None:
        super().__init__(token=0)

    def _keep(self, found: ActingMap, value: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        out = compute()
        plain = isinstance(found, FactorMap) and out.dim() == 4 and not self.drops
        return _OfFewRows.apply(found, out, value) if plain else out


class _OfFewRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, found: FactorMap, out: Tensor, value: Tensor) -> Tensor:
        ctx.found, ctx.dtype = found, value.dtype
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Any:
        rows = above.ne(0).any(-1).flatten(0, 1).any(0).nonzero().squeeze(-1)
        if 8 * len(rows) > above.shape[2]:
            return None, above, None
        weights = softmax_rows(ctx.found, rows)
        return None, None, (weights.mT @ above[:, :, rows].to(weights.dtype)).to(ctx.dtype)


@contextmanager
def other_parameters(module: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, a module has other tensors as its Parameters of these names."""
    with ExitStack() as back:
        for name, new in parameters.items():
            path, _, leaf = name.rpartition(".")
            held = module.get_submodule(path)._parameters
            back.callback(held.__setitem__, leaf, held[leaf])
            held[leaf] = new  # type: ignore[assignment]
        yield


def acting_map(mechanism: AttentionMechanism, q: Tensor, k: Tensor, v: Tensor, *args: Any, **given: Any) -> ActingMap:
    """The map by which a mechanism mixes these values; its arguments are those of its ``forward``.

    Where it calls a kernel once, for softmax or in chunks of rows, the kernel's arguments are kept and nothing is
    computed: if its output is the mechanism's, and its values are the mechanism's, but for one number per row and per
    key, the map is known. Elsewhere it is the matrix of the mechanism as a function of the values, column by column.
    What a mechanism says itself (``own_map``) comes first. Hooks see nothing of it, and random states stay.

    Returns:
        The map, of which some rows or columns are made at a time.

    Raises:
        NoMapError: if a state stands for earlier tokens; if output and values show, when the map is made, that there
            is none.
    """
    given = _of_the_map(mechanism, args, given)
    with unobserved(mechanism), repeatable(q.device):
        own = _on_copies(mechanism.own_map, q, k, v, **given)
    if own is None:
        call = partial(_mixed, mechanism, q, k, given)
        found = probe(call, v, type(mechanism).__name__, mechanism)
    else:
        found = DenseMap(own) if isinstance(own, Tensor) else own
    without = getattr(v, "keys_without_value", 0)  # which a layer has put behind its own
    return found.of_first_keys(v.shape[2] - without) if without else found


def probe(function: Callable[[Tensor], Tensor], v: Tensor, name: str, module: nn.Module) -> ActingMap:
    """The map of a function of values, as :func:`acting_map` finds it.

    Args:
        function: of values ``[B, H, M, d]``, which it may change in place.
        v: the values.
        name: for errors.
        module: whose hooks are not to see it.
    """
    with unobserved(module), repeatable(v.device) as again:
        out, calls, given = _calls(function, v, again, v)
        found = _known(out, calls, v, given) if calls else None
        if isinstance(found, FactorMap) and found.gain is not None and len(calls) == 1:
            again()
            out, calls, given = _captured(function, v, token=2)
            other = _known(out, calls, v, given)
            if not isinstance(other, FactorMap) or not _alike(found.gain, other.gain):
                again()  # one number per row, but another for other outputs: a norm
                out, calls, given = _captured(function, v, token=0)
                found = _known(out, calls, v, given)
        if found is not None:
            return found

    def mix(values: Tensor) -> Tensor:
        with torch.no_grad(), unobserved(module), repeatable(v.device):
            return function(copy_of(values))

    def slope(above: Tensor) -> tuple[Tensor, Tensor] | None:
        if getattr(module, "surrogate_gradient", False):
            return None
        with torch.inference_mode(False), torch.enable_grad(), unobserved(module), repeatable(v.device):
            values = copy_of(v).detach().requires_grad_()
            try:
                with _FewRows():
                    out = function(values.clone())
                return out.detach(), torch.autograd.grad(out, values, copy_of(above))[0]
            except RuntimeError:  # without a gradient, or none of these values
                return None

    return LinearMap(mix, slope, v.detach(), out.detach(), name)


def _on_copies(function: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """What a function gives for copies of its arguments, which it may change in place."""
    return function(*map(copy_of, args), **{name: copy_of(value) for name, value in given.items()})


def _mixed(mechanism: AttentionMechanism, q: Tensor, k: Tensor, given: Mapping[str, Any], values: Tensor) -> Tensor:
    """What a mechanism gives for these values themselves, and copies of all else."""
    return _on_copies(lambda q, k, **given: mechanism.forward(q, k, values, **given), q, k, **given)


def acting_passes(
    mechanism: AttentionMechanism, q: Tensor, k: Tensor, v: Tensor, *args: Any, **given: Any
) -> list[ActingMap]:
    """The map of each pass over the values of a mechanism that makes several, first to last; else its map alone."""
    given = _of_the_map(mechanism, args, given)
    with unobserved(mechanism), repeatable(q.device) as again:
        own = _on_copies(mechanism.own_map, q, k, v, **given)
        call = partial(_mixed, mechanism, q, k, given)
        calls = [] if own is not None else _calls(call, v, again)[1]
    over = [call.found for call in calls if call.value.shape == v.shape and bool((call.value == v).all())]
    return over if len(over) > 1 and len(over) == len(calls) else [acting_map(mechanism, q, k, v, **given)]


def _of_the_map(mechanism: AttentionMechanism, args: tuple[Any, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call after q, k and v that its map depends on, by name.

    Raises:
        NoMapError: if a state stands for earlier tokens.
    """
    if given.get("state"):
        raise NoMapError(
            f"{type(mechanism).__name__} has no attention map of a call that continues from a cache: this holds a "
            "state of the earlier tokens, from which their weights cannot be told; pass all tokens in one call, with "
            "use_cache=False"
        )
    named = dict(zip(("attn_mask", "is_causal", "dropout_p", "scale"), args, strict=False))
    return {name: value for name, value in {**named, **given}.items() if name not in _NOT_OF_THE_MAP}


def kernel_maps(mechanism: AttentionMechanism, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> list[ActingMap]:
    """The map of each call that a mechanism makes of a kernel, whatever becomes of values and outputs.

    Arguments as :func:`acting_map`; a mechanism that scales or adds to what its map has mixed states its map by it.
    """
    with unobserved(mechanism), repeatable(q.device) as again:
        call = partial(_mixed, mechanism, q, k, given)
        return [each.found for each in _calls(call, v, again)[1]]


_Captured = tuple[Tensor, list[_Call], Tensor]


def _calls(
    function: Callable[[Tensor], Tensor], v: Tensor, again: Callable[[], None], values: Tensor | None = None
) -> _Captured:
    """As :func:`_captured`, with a token in the output where a single kernel is called, or one for other values."""
    try:
        return _captured(function, v, 1, values)
    except _SeveralCalls:
        again()
        return _captured(function, v, token=0)


def _alike(x: Tensor, y: Tensor | None) -> bool:
    return y is not None and bool(torch.isclose(x, y, rtol=TOLERANCE[x.dtype], equal_nan=True).all())


def _captured(function: Callable[[Tensor], Tensor], v: Tensor, token: int, values: Tensor | None = None) -> _Captured:
    """The output, the calls of kernels, and the values that the function was given, a copy."""
    given, grad = copy_of(v), torch.is_grad_enabled()
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(grad),
        _Capture(token, values) as capture,
        taken_by(capture.chunked),
    ):
        out = function(given)
    return out, capture.calls, given


def _known(out: Tensor, calls: list[_Call], v: Tensor, given: Tensor) -> ActingMap | None:
    """The map of the last call, if the mechanism does nothing else with values and output than to scale them."""
    last = calls[-1]
    token, value, found = last.out, last.value, last.found
    if not last.is_kept:
        return None
    if out is last.given and value is given and _version(out) == _version(given) == 0:
        return found  # without looking at numbers, for which a device would be waited for
    if token.dim() != 4 or value.dim() != 4 or out.dim() != 4 or token.shape[:2] != out.shape[:2]:
        return None
    (rows, width), keys = out.shape[2:], v.shape[2]
    before, extra = token.shape[2] - rows, value.shape[2] - keys
    if min(before, extra, token.shape[3] - width, value.shape[3] - v.shape[3]) < 0 or v.shape[:2] != value.shape[:2]:
        return None
    inside = value[:, :, extra:, : v.shape[3]]
    if before != (extra if isinstance(found, FactorMap) and found.is_causal else 0):
        return None
    if extra and bool(value[:, :, :extra].any()):
        return None
    gain, weight = _ratio(out, token[:, :, before:, :width]), _ratio(inside, v)
    if isinstance(gain, bool) or isinstance(weight, bool):
        return None
    if not isinstance(found, FactorMap):
        return found if gain is weight is None and not extra else None
    q, mask = found.q, found.attn_mask
    if before:
        q = q[:, :, before:]
        if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
            mask = mask[..., before:, :]
    weight = None if weight is None else weight.squeeze(-1)
    return FactorMap(q, found.k, mask, found.is_causal, found.scale, extra, gain, weight)


def _ratio(x: Tensor, y: Tensor) -> Tensor | bool | None:
    """None where x is y, one number per row ``[..., 1]`` where it is y times that, else False."""
    y = y.to(x.dtype)
    if torch.equal(x, y) or (x.sum().isnan() and bool(((x == y) | (x.isnan() & y.isnan())).all())):
        return None
    if x.shape[-1] == 1:
        return False
    rounding, wide = TOLERANCE[x.dtype] / 10, torch.promote_types(x.dtype, torch.float32)
    x, y = x.to(wide), y.to(wide)
    number = (x * y).sum(-1, keepdim=True) / y.square().sum(-1, keepdim=True).clamp(min=torch.finfo(wide).tiny)
    with torch.no_grad():
        miss = torch.linalg.vector_norm(x - number * y, dim=-1)
        return number if bool((miss <= rounding * torch.linalg.vector_norm(x, dim=-1)).all()) else False
