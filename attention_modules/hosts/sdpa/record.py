"""A forward pass on trial, in which each call of ``scaled_dot_product_attention`` is written down."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from attention_modules.hosts.base import AttentionSwapError
from attention_modules.hosts.sdpa.calls import TARGET
from attention_modules.hosts.sdpa.rehearsed import rehearsed
from attention_modules.hosts.sdpa.seam import Call, Place, Seam
from attention_modules.masks import visible, without_causal_bias

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _Recorder(TorchFunctionMode):
    """Writes calls down."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[tuple[nn.Module, dict[Place, Tensor]]] = []
        self.calls: list[Call] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is TARGET and self.running:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")[: len(args)]
            named = {**dict(zip(names, args, strict=True)), **kwargs}  # torch 2.9 compiles no other zip
            given = bool(named.get("is_causal"))
            mask, causal = without_causal_bias(named.get("attn_mask"), given, named["query"])
            causal = causal or _hides_future(mask)
            made = named["query"], named["key"], named["value"]
            asked = made[0].view_as(made[0])
            self.calls.append(Call(*made, causal, named.get("scale"), [*self.running], asked, mask))
            args, kwargs = ((asked, *args[1:]), kwargs) if args else (args, {**kwargs, "query": asked})
        return func(*args, **kwargs)


def _hides_future(mask: Tensor | None) -> bool:
    if mask is None or mask.is_meta or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] < 2:
        return False
    above = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    return not bool(visible(mask)[..., above].any())


@dataclass
class Record:
    """The calls of one forward pass, by the modules of the model."""

    calls: dict[nn.Module, list[Call]] = field(default_factory=dict)
    """Of the innermost module whose forward ran."""
    inside: dict[nn.Module, list[Call]] = field(default_factory=dict)
    """Of any module, its children's calls too."""
    trials: dict[nn.Module, tuple[list[Record], Iterator[Record]]] = field(default_factory=dict)
    """What trials of layers showed meanwhile, and what more would."""
    seams: dict[nn.Module, Seam] = field(default_factory=dict)
    """What copies with values showed of layers without."""
    example: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """What the model was given."""
    called: set[nn.Module] = field(default_factory=set)
    """The modules whose forward ran."""
    orders: dict[nn.Module, tuple[torch.Size, Tensor] | None] = field(default_factory=dict)
    """Where layers have their tokens from (:mod:`attention_modules.hosts.model.moved`)."""
    moved: dict[nn.Module, bool] = field(default_factory=dict)
    """Whether they have others in training."""

    def has_batch(self, module: nn.Module) -> bool:
        """Whether its calls have a dimension of samples for sure; of three, one may be that of the heads."""
        return any(call.q.dim() > 3 for call in self.calls.get(module, []))

    def each_forward(self, module: nn.Module) -> int:
        """How many calls one forward of the module makes, its children's too; it may run several times."""
        runs = [id(given) for call in self.inside.get(module, []) for outer, given in call.around if outer is module]
        return max(map(runs.count, runs), default=0)


def recorded(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
    """The calls of one forward pass of the model, of which nothing changes, nor does the state of random numbers."""
    recorder, found = _Recorder(), Record(example=(args, kwargs))
    args, kwargs = copied((args, kwargs))
    with rehearsed(model) as modules, torch.inference_mode(False), torch.enable_grad(), recorder:
        for module in modules:
            module.register_forward_pre_hook(lambda module, args: found.called.add(module))
            module.register_forward_pre_hook(_entering(recorder), with_kwargs=True)
            module.register_forward_hook(_leaving(recorder), always_call=True)
        model(*args, **kwargs)
    for call in recorder.calls:
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
        return recorded(model, *arguments(example))
    except Exception as error:  # whatever a stranger's forward raises
        raise AttentionSwapError(
            f"the example does not run: {type(model).__name__} raised {type(error).__name__}: {error}; give example= "
            "what the model takes, as a tensor, a tuple of arguments or a dict of arguments by name"
        ) from error


def own_record(model: nn.Module) -> Record | None:
    """What the ``example_input_array`` of a LightningModule shows; None where it has none, or does not run it.

    As Lightning does, it is moved to where the module is.
    """
    example = getattr(model, "example_input_array", None)
    if (parameter := next(model.parameters(), None)) is not None:
        example = tree_map_only(Tensor, lambda tensor: tensor.to(parameter.device), example)
    try:
        return None if example is None else record_of(model, example)
    except AttentionSwapError:
        return None


def copied(inputs: Any) -> Any:
    """A copy, as a pass adds to a cache that it is given; where there can be none, the same."""
    try:
        return copy.deepcopy(inputs)
    except Exception:  # whatever an object of somebody's own raises
        return inputs


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example as positional and named arguments."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, (tuple, list)) else ((example,), {})


def _entering(recorder: _Recorder) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Copies of its own, so that what queries and keys are made of can be told; one for `given`, as some layers
        # change their input in place.
        places = [(place, x) for place, x in _placed(module, args, kwargs) if _features(x)]
        own = {id(x): _tracked(x) for _, x in places}
        first = {id(x): place for place, x in reversed(places)}  # of a tensor that is given twice
        recorder.running.append((module, {first[at]: x for at, x in own.items()}))
        passed = {at: x.clone() for at, x in own.items()}
        return tuple(passed.get(id(x), x) for x in args), {name: passed.get(id(x), x) for name, x in kwargs.items()}

    return hook


def _placed(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    """The arguments of a module's forward."""
    names = named_arguments(module)
    for position, x in enumerate(args):
        yield Place(position, names[position] if position < len(names) else ""), x
    for name, x in kwargs.items():
        yield Place(names.index(name) if name in names else None, name), x


def named_arguments(module: nn.Module) -> list[str]:
    """Names of a forward's arguments that may be given by position."""
    return [each.name for each in parameters_of(module) if each.kind in _BY_PLACE]


def parameters_of(module: nn.Module) -> list[inspect.Parameter]:
    """What a module's forward takes."""
    try:
        return [*inspect.signature(module.forward).parameters.values()]
    except (TypeError, ValueError):  # of a forward that is no function of Python's
        return []


def _tracked(x: Tensor) -> Tensor:
    return x.clone() if x.requires_grad else x.detach().clone().requires_grad_()


def _leaving(recorder: _Recorder) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        _, given = recorder.running.pop()
        for call in recorder.calls:
            if any(each is given for _, each in call.around):
                call.outs[module] = out

    return hook


def _features(value: object) -> bool:
    """Whether it may be what queries and keys are made of: no mask ``[B, N]`` and no number per sample."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 2


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
