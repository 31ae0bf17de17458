"""A forward pass of a copy, in which each call of ``scaled_dot_product_attention`` is written down."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attention_modules.hosts.base import AttentionSwapError
from attention_modules.hosts.sdpa.calls import TARGET
from attention_modules.mechanisms.shared.probe import unobserved

_TOKENS = 6  # of a trial: more than the heads of a small layer would hide a mistake of the axes


@dataclass(frozen=True)
class Seam:
    """What a call says of its layer; None where it cannot be told.

    Args:
        dim: width of the layer's input, C.
        heads: H.
        key_heads: heads of keys and values, which groups of query heads share.
        head_dim: width of a query.
        value_dim: width of a value.
        causal: whether it hides the future.
        cross: whether the queries are of other tokens than the keys.
        uneven: whether there is not one query for each key.
        scale: factor on the logits, 1/sqrt(d) where None.
        by_head: whether each head has its query, key and value together in the layer's projection.
        turned: whether positions turn queries and keys after the layer's projections.
        calls: how many calls one forward makes, its children's too.
    """

    dim: int | None = None
    heads: int | None = None
    key_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    causal: bool = False
    cross: bool = False
    uneven: bool = False
    scale: float | None = None
    by_head: bool = False
    turned: bool = False
    calls: int = 1


@dataclass
class Call:
    """One call, and the modules whose forward ran around it, outermost first, each with what it was given."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    scale: float | None
    around: list[tuple[nn.Module, list[Tensor]]]

    def source(self, module: nn.Module) -> Tensor | None:
        """What the module was given as a sequence ``[B, N, C]`` of the queries' length, if it was."""
        given = next(given for outer, given in self.around if outer is module)
        return next((x for x in given if x.dim() == 3 and x.shape[1] == self.q.shape[-2] and self._has_batch(x)), None)

    def _has_batch(self, x: Tensor) -> bool:
        """Whether the first dimension of ``[n, n, C]`` are samples, which queries keep apart."""
        if x.shape[0] != x.shape[1] or x.shape[0] == 1 or self.q.dim() != 4 or not self.q.requires_grad:
            return True
        with torch.inference_mode(False), torch.enable_grad():
            first = self.q[0].float().sum()
            (slope,) = torch.autograd.grad(first, x, allow_unused=True, retain_graph=True)
        return slope is None or not bool(slope[1:].any())

    def seam(self, module: nn.Module) -> Seam:
        """What it says of one of the modules around it."""
        flat, source = self.q.dim() == 3, self.source(module)
        return Seam(
            None if source is None else source.shape[-1],
            1 if flat else self.q.shape[-3],
            1 if flat else self.k.shape[-3],
            self.q.shape[-1],
            self.v.shape[-1],
            self.causal,
            self._is_cross(),
            self.k.shape[-2] != self.q.shape[-2],
            self.scale,
        )

    def _is_cross(self) -> bool:
        """Whether queries and keys are made of different tensors that the module with the projections was given."""
        for module, given in reversed(self.around):
            if next(module.parameters(), None) is not None:
                of_query, of_key = (_sources(made, given) for made in (self.q, self.k))
                if of_query and of_key and of_query.isdisjoint(of_key):
                    return True
        return self.k.shape[-2] > self.q.shape[-2]  # memory, or one token that asks all; fewer are reduced keys


def _sources(made: Tensor, given: Sequence[Tensor]) -> set[int]:
    """Which of the tensors another one depends on."""
    if not given or not made.requires_grad:
        return set()
    with torch.inference_mode(False), torch.enable_grad():
        found = torch.autograd.grad(made.float().sum(), list(given), allow_unused=True, retain_graph=True)
    return {index for index, gradient in enumerate(found) if gradient is not None}


class _Recorder(TorchFunctionMode):
    """Writes calls down."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[tuple[nn.Module, list[Tensor]]] = []
        self.calls: list[Call] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is TARGET and self.running:
            named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
            named |= kwargs
            causal = bool(named.get("is_causal")) or _hides_future(named.get("attn_mask"))
            made = named["query"], named["key"], named["value"]
            self.calls.append(Call(*made, causal, named.get("scale"), [*self.running]))
        return func(*args, **kwargs)


def _hides_future(mask: Tensor | None) -> bool:
    if mask is None or mask.is_meta or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] < 2:
        return False
    hidden = ~mask if mask.dtype == torch.bool else mask < -1e4
    above = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    return bool(hidden[..., above].all())


@dataclass
class Record:
    """The calls of one forward pass, by the modules of the model."""

    calls: dict[nn.Module, list[Call]] = field(default_factory=dict)
    """Of the innermost module whose forward ran."""
    inside: dict[nn.Module, list[Call]] = field(default_factory=dict)
    """Of any module, its children's calls too."""
    alone: dict[nn.Module, Record] = field(default_factory=dict)
    """What trials of layers showed meanwhile."""

    def each_forward(self, module: nn.Module) -> int:
        """How many calls one forward of the module makes, its children's too; it may run several times."""
        runs = [id(given) for call in self.inside.get(module, []) for outer, given in call.around if outer is module]
        return max(map(runs.count, runs), default=0)


def recorded(model: nn.Module, example: Any) -> Record:
    """The calls of one forward pass of a copy of the model.

    The copy shares Parameters with the model and has buffers, lists and dicts of its own, no hooks, and is in
    evaluation mode: nothing of the model changes, nor does the state of random numbers.

    Args:
        model: any module.
        example: what it takes: a tensor, a tuple of arguments, or a dict of arguments by name.
    """
    of: dict[nn.Module, nn.Module] = {}
    twin = _copy(model, of)
    recorder, found = _Recorder(), Record()
    for module in twin.modules():
        module.register_forward_pre_hook(_entering(recorder), with_kwargs=True)
        module.register_forward_hook(_leaving(recorder), always_call=True)
    args, kwargs = arguments(example)
    devices = {tensor.device.index for tensor in model.parameters() if tensor.device.type == "cuda"}
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=sorted(devices)), recorder:
        twin(*args, **kwargs)
    for call in recorder.calls:
        call.around = [(of[module], given) for module, given in call.around]
        found.calls.setdefault(call.around[-1][0], []).append(call)
        for module, _ in call.around:
            found.inside.setdefault(module, []).append(call)
    return found


def record_of(model: nn.Module, example: Any) -> Record:
    """As :func:`recorded`; empty without an example.

    Raises:
        AttentionSwapError: if the model does not run it.
    """
    if example is None:
        return Record()
    try:
        return recorded(model, example)
    except Exception as error:  # whatever a stranger's forward raises
        raise AttentionSwapError(
            f"the example does not run: {type(model).__name__} raised {type(error).__name__}: {error}; give example= "
            "what the model takes, as a tensor, a tuple of arguments or a dict of arguments by name"
        ) from error


def own_record(model: nn.Module) -> Record | None:
    """What the ``example_input_array`` of a LightningModule shows; None where it has none, or does not run it."""
    example = getattr(model, "example_input_array", None)
    try:
        return None if example is None else record_of(model, example)
    except AttentionSwapError:
        return None


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example as positional and named arguments."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, (tuple, list)) else ((example,), {})


def _entering(recorder: _Recorder) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Copies of its own, so that what queries and keys are made of can be told; one for `given`, as some layers
        # change their input in place.
        own = {id(x): _tracked(x) for x in (*args, *kwargs.values()) if _features(x)}
        recorder.running.append((module, list(own.values())))
        passed = {at: x.clone() for at, x in own.items()}
        return tuple(passed.get(id(x), x) for x in args), {name: passed.get(id(x), x) for name, x in kwargs.items()}

    return hook


def _tracked(x: Tensor) -> Tensor:
    return x.clone() if x.requires_grad else x.detach().clone().requires_grad_()


def _leaving(recorder: _Recorder) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        recorder.running.pop()

    return hook


def _features(value: object) -> bool:
    """Whether it may be what queries and keys are made of: no mask ``[B, N]`` and no number per sample."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 2


def _copy(module: nn.Module, of: dict[nn.Module, nn.Module], known: dict[int, nn.Module] | None = None) -> nn.Module:
    """The module without hooks and in evaluation mode, with the same Parameters and buffers of its own."""
    known = {} if known is None else known
    if id(module) in known:
        return known[id(module)]
    twin = known[id(module)] = object.__new__(type(module))
    vars(twin).update({name: _own(value) for name, value in vars(module).items()})
    for name, value in vars(twin).items():
        if isinstance(value, dict) and (name.endswith("_hooks") or "_hooks_" in name):
            vars(twin)[name] = OrderedDict()
    vars(twin)["training"] = False
    vars(twin)["_buffers"] = {name: None if held is None else held.clone() for name, held in module._buffers.items()}
    vars(twin)["_modules"] = {
        name: None if child is None else _copy(child, of, known) for name, child in module._modules.items()
    }
    of[twin] = module
    return twin


def _own(value: Any, known: dict[int, Any] | None = None) -> Any:
    """The value with containers and tensors of its own; modules, Parameters and other objects stay the same."""
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)]
    own = value
    if isinstance(value, (dict, list, set, deque)):
        own = known[id(value)] = copy.copy(value)
        if isinstance(own, (dict, list)):
            for key, part in own.items() if isinstance(own, dict) else enumerate(own):
                own[key] = _own(part, known)
    elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        own = known[id(value)] = value.clone()
    return own


def tried(layer: nn.Module) -> Record:
    """The record of a layer that runs alone on a sequence, once in a swap; empty where it needs more than that."""
    record = known()
    if layer not in record.alone:
        record.alone[layer] = _tried(layer)
    return record.alone[layer]


def _tried(layer: nn.Module) -> Record:
    width = next((part.in_features for part in layer.modules() if isinstance(part, nn.Linear)), None)
    parameter = next((p for p in layer.parameters() if p.is_floating_point()), None)
    if width is None or parameter is None:
        return Record()
    x = torch.zeros(2, _TOKENS, width, device=parameter.device, dtype=parameter.dtype)
    if not parameter.is_meta:
        x = x + torch.linspace(-9, 9, x.numel(), device=x.device).sin().view_as(x).to(x.dtype)
    try:
        with unobserved(layer):  # of which the copy that runs has the users' hooks
            return recorded(layer, x)
    except Exception:  # whatever a stranger's forward raises where it is given too little
        return Record()


_RECORD: ContextVar[Record | None] = ContextVar("record", default=None)  # while a swap looks at its model


@contextmanager
def knowing(record: Record) -> Iterator[None]:
    """Let hosts know what a forward pass of the model called; in this thread, and inside."""
    token = _RECORD.set(record)
    try:
        yield
    finally:
        _RECORD.reset(token)


def known() -> Record:
    """What a forward pass of the model called, where one was recorded; a new, empty one elsewhere."""
    return _RECORD.get() or Record()
