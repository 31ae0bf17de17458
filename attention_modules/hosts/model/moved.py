"""Whether the modules around two attention layers give them the same tokens in the same places."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules.hosts.sdpa.record import arguments, copied, known
from attention_modules.hosts.sdpa.rehearsed import rehearsed
from attention_modules.hosts.sdpa.trial import with_values
from attention_modules.mechanisms.shared.kept import default_states

_LEVELS = 1.2 ** torch.arange(-8.0, 8.0)  # apart enough that half precision tells them from each other
_SHAPES = ((2, 64), (2, 8, 8))  # of a trial, before the features
_DRAWS = 8  # trials in training, where they draw

Order = tuple[torch.Size, Tensor]  # the shape of a layer's input, and where the entries of what a block is given go


class _Arrived(Exception):
    """The layer is reached, and the rest of a trial tells nothing."""


def orders_of(model: nn.Module, blocks: Mapping[nn.Module, nn.Module]) -> dict[nn.Module, Order | None]:
    """Where the tokens of layers come from, each in what the block around it is given; None where it cannot be told.

    A weight is drawn for each token of the layer; by the gradient each entry of the block's input has the weight of the
    token that it goes to. What is mixed on the way cannot be told.

    Args:
        model: all of it.
        blocks: by layer, what is around it: in the model, as its example is known, or alone on a trial.

    Returns:
        Numbers of weights in the shape of the block's input, -1 where it does not matter.
    """
    record = known()
    own = getattr(model, "example_input_array", None)
    example = record.example or (None if own is None else arguments(own))
    missing = {layer: block for layer, block in blocks.items() if layer not in record.orders}
    if missing and example is not None:
        record.orders.update(_run(model, missing, *example))
    for layer, block in missing.items():
        if layer not in record.orders:
            record.orders[layer] = None if example is not None else _alone(layer, block)
    return {layer: record.orders[layer] for layer in blocks}


def differ(one: Order | None, other: Order | None) -> bool:
    """Whether two such orders are known and not the same."""
    if one is None or other is None or one[0] != other[0] or one[1].shape != other[1].shape:
        return False  # where shapes differ, so do those of values, which the forward refuses
    moved = (one[1] != other[1]) & (one[1] >= 0) & (other[1] >= 0)
    return bool(moved.sum() > 1)  # of a move at least two; half precision may mistake one


def differs_in_training(layer: nn.Module, block: nn.Module) -> bool:
    """Whether a block alone gives its layer other samples or tokens in training, or in other places."""
    told = known().moved
    if layer not in told:
        evaluated = _alone(layer, block)
        told[layer] = evaluated is not None and any(_is_other(evaluated, one) for one in _in_training(layer, block))
    return told[layer]


def _is_other(one: Order, other: Order | None) -> bool:
    return other is not None and (one[0] != other[0] or differ(one, other))


def _in_training(layer: nn.Module, block: nn.Module) -> Iterator[Order | None]:
    """The orders of several trials where they draw, each other numbers; else of one."""
    for seed in range(_DRAWS):
        draws = _Draws(seed)
        yield _alone(layer, block, draws)
        if not draws.any:
            return


class _Draws:
    """Random states on the CPU of a trial in training, which begin with a seed."""

    any = False

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Inside, notes whether anything is drawn."""
        torch.default_generator.manual_seed(self.seed)  # not those of devices, which nobody would put back
        random.seed(self.seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(self.seed)
        before = _states()
        try:
            yield
        finally:
            self.any = before != _states()


def _states() -> bytes:
    return pickle.dumps([torch.get_rng_state().tolist(), *(state for _, state in default_states())])


def _alone(layer: nn.Module, block: nn.Module, draws: _Draws | None = None) -> Order | None:
    width = next((part.in_features for part in block.modules() if isinstance(part, nn.Linear)), None)
    parameter = next((p for p in block.parameters() if p.is_floating_point()), None)
    if width is None or parameter is None:
        return None
    if parameter.is_meta:
        path = next(name for name, each in block.named_modules() if each is layer)
        with contextlib.suppress(Exception):  # whatever a stranger's copy raises
            twin = with_values(block)
            return _alone(twin.get_submodule(path), twin, draws)
        return None
    for shape in _SHAPES:
        wave = torch.linspace(-9, 9, 128 * width, device=parameter.device).sin()
        found = _run(block, {layer: block}, (wave.view(*shape, width).to(parameter.dtype),), {}, _Arrived, draws)
        if layer in found:
            return found[layer]
    return None


def _run(
    module: nn.Module,
    blocks: Mapping[nn.Module, nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    end: type[Exception] | None = None,
    draws: _Draws | None = None,
) -> dict[nn.Module, Order | None]:
    """The orders that one forward on trial shows; ``end`` is raised at the first layer."""
    found: dict[nn.Module, Order | None] = {}
    given: dict[nn.Module, list[Tensor]] = {}
    with rehearsed(module, training=draws is not None) as parts, draws.seen() if draws else contextlib.nullcontext():
        for part in parts:
            if part in blocks:
                part.register_forward_pre_hook(_arriving(part, blocks[part], given, found, end), with_kwargs=True)
            if part in blocks.values():
                part.register_forward_pre_hook(_entering(part, given), with_kwargs=True)
        # Whatever a stranger's forward raises where it is given too little.
        with contextlib.suppress(Exception), torch.inference_mode(False), torch.enable_grad():
            module(*copied(args), **copied(kwargs))
    return found


def _entering(block: nn.Module, given: dict[nn.Module, list[Tensor]]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = {id(x): x.detach().clone().requires_grad_() for x in (*args, *kwargs.values()) if _tokens(x)}
        given[block] = list(own.values())
        passed = {at: x.clone() for at, x in own.items()}  # some layers change their input in place
        return tuple(passed.get(id(x), x) for x in args), {name: passed.get(id(x), x) for name, x in kwargs.items()}

    return hook


def _arriving(
    layer: nn.Module,
    block: nn.Module,
    given: dict[nn.Module, list[Tensor]],
    found: dict[nn.Module, Order | None],
    end: type[Exception] | None,
) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next((x for x in (*args, *kwargs.values()) if _tokens(x)), None)
        if layer not in found and x is not None and given.get(block):
            found[layer] = _order(x, given[block])
        if end is not None:
            raise end

    return hook


def _tokens(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 2


def _order(x: Tensor, given: Sequence[Tensor]) -> Order | None:
    """The number of the weight of the token of ``x`` that each entry of the first input it is made of goes to."""
    if not x.requires_grad:
        return None
    drawn = torch.Generator().manual_seed(0)
    levels = torch.randint(len(_LEVELS), x.shape[:-1], generator=drawn)
    features = torch.randn(x.shape[-1], generator=drawn).to(x.device)
    readings = [levels, levels[:, :1]] if x.dim() == 4 else [levels]  # of an image, and of heads, which are mixed
    for source in given:
        weights = [torch.ones(1), *(_LEVELS[numbers].unsqueeze(-1) for numbers in readings)]
        plain, *weighed = (
            torch.autograd.grad(
                (x.float() * by.to(x.device) * features).sum(), source, allow_unused=True, retain_graph=True
            )[0]
            for by in weights
        )
        if plain is not None:
            shown = (_numbers(plain.float(), each.float()) for each in weighed if each is not None)
            numbers = next((each for each in shown if each is not None), None)
            return None if numbers is None else (x.shape, numbers)
    return None


def _numbers(plain: Tensor, weighed: Tensor) -> Tensor | None:
    """By which weight a gradient was multiplied in each token, -1 where it does not matter; None where it was mixed."""
    matters = plain.abs() > 0.5 * plain.abs().amax(-1, keepdim=True)  # what half precision rounds less
    ratio = (weighed / plain).where(matters, 1.0).unsqueeze(-1) / _LEVELS.to(plain.device)
    apart, number = (ratio - 1).abs().min(-1)
    clear = matters & (apart < 0.05)
    if clear.sum() <= 0.9 * matters.sum():
        return None
    for features in (-1, 1):  # which of them matter is another matter in each layer
        most = number.where(clear, -1).amax(features, keepdim=True)
        alike = most == number.where(clear, most).amin(features, keepdim=True)
        if alike.float().mean() > 0.9:
            return most.where(alike, -1)
    return None
