"""The attention maps of a model: what each layer gave the values in one forward pass."""

from __future__ import annotations

import math
import operator
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from attention_modules.analysis.maps import attention_rollout
from attention_modules.base import AttentionMechanism
from attention_modules.hosts import AttentionLayer, describe
from attention_modules.hosts.base import AttentionSwapError
from attention_modules.hosts.discovery import select, survey
from attention_modules.hosts.model.heads import refuse_spread
from attention_modules.hosts.sdpa.layer import SDPAHost
from attention_modules.hosts.sdpa.record import Record, arguments, knowing, record_of
from attention_modules.mechanisms.shared.acting import ActingMap
from attention_modules.mechanisms.shared.probe import acting_map, acting_passes
from attention_modules.mechanisms.shared.unchanged import Draw, unchanged
from attention_modules.swap import make_observable, make_plain

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
Layers = int | str | Sequence[int] | Sequence[str]
_ONE_AT_A_TIME = threading.RLock()  # a model's layers are others meanwhile


@overload
def attention_maps(
    model: nn.Module,
    inputs: Inputs,
    layers: Layers | None = None,
    heads: int | Sequence[int] | None = None,
    rows: int | Sequence[int] | None = None,
    rollout: Literal[False] = False,
    passes: bool = False,
) -> dict[str, Tensor]: ...


@overload
def attention_maps(
    model: nn.Module,
    inputs: Inputs,
    layers: Layers | None = None,
    heads: int | Sequence[int] | None = None,
    rows: int | Sequence[int] | None = None,
    *,
    rollout: Literal[True],
) -> Tensor: ...


def attention_maps(
    model: nn.Module,
    inputs: Inputs,
    layers: Layers | None = None,
    heads: int | Sequence[int] | None = None,
    rows: int | Sequence[int] | None = None,
    rollout: bool = False,
    passes: bool = False,
) -> dict[str, Tensor] | Tensor:
    """The weights that each attention layer gives the values for these inputs, whatever its mechanism.

    The model runs once, without gradients and as in evaluation (no dropout), and is as before afterwards. Layers may be
    plain or swapped, with fused kernels: a map is made beside the layer's own pass. For a mechanism it is what acts,
    not softmax(q kᵀ): map · values is what the mechanism gives (for ``rpc`` in its last pass). It need not sum to 1 in
    a row (``sigmoid``, ``sink``, ``gated``), nor be positive (``twicing``, ``scaled``, ``differential``). Some say
    what theirs is: that of ``delta``, ``gated_delta``, ``gla``, ``kda`` and ``retention`` is before the norm of their
    output; ``differential`` the difference of the two maps, before its norm (``[B, H/2, N, M]`` where heads are
    pairs); ``neutreno`` and ``value_residual`` the softmax, beside what they add to output and values.

    Args:
        model: any model with layers of a known host.
        inputs: what the model takes: a tensor, a sequence of positional arguments, or a mapping of keyword arguments.
        layers: numbers among the self-attention layers of each network (negative: from the end), or patterns of names,
            as ``layers`` and ``where`` of :func:`attnswap.swap_attention`; all self-attention where None. A pattern
            that spells the last part of its name takes cross-attention.
        heads: which; all where None.
        rows: numbers of the queries wanted (negative: from the end); all where None. No other row is held.
        rollout: give the attention rollout over these layers instead (:func:`attnswap.analysis.attention_rollout`, of
            the mean over these heads).
        passes: give every pass of a mechanism that makes several, as ``"NAME/pass_1"`` and so on (``rpc``).

    Returns:
        By name of the layer, in module order, ``[B, H, R, M]``, float32 (float64 where the model is), on the model's
        device; windows count as samples. Of a layer that is called several times it is the last call; one that is not
        called is missing. With ``rollout`` one tensor, ``[B, R, N]``.

    Raises:
        AttentionSwapError: if no layer matches, or the model is wrapped (DDP, FSDP1).
        NoMapError: if a mechanism is not linear in the values, and does not say what its map is, or continues from a
            cache that holds a state in place of keys and values; it is named.
        MemoryError: if the maps would not fit into the device's memory; before they are made.
        TypeError: if heads or rows are no integers, or there are none.
        ValueError: if a head or a row does not exist, or no layer was called, or the maps do not fit a rollout, which
            takes one pass of one call of each layer of one network.

    Example:
        >>> import attnswap, torch
        >>> model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
        >>> maps = attnswap.attention_maps(model, torch.randn(1, 5, 16))
        >>> maps["self_attn"].shape
        torch.Size([1, 2, 5, 5])
        >>> report = attnswap.swap_attention(model, "sigmoid")
        >>> attnswap.attention_maps(model, torch.randn(1, 5, 16), layers=0, rows=[0, -1])["self_attn"].shape
        torch.Size([1, 2, 2, 5])
    """
    if rollout and passes:
        raise ValueError("a rollout takes one map of each layer: leave out passes=, for the last pass, or rollout=")
    wanted = _listed("rows", rows)
    collected = _Collected(_listed("heads", heads), None if rollout else wanted, rollout, passes)
    names = see_calls(model, inputs, layers, collected.take)
    maps = {name: collected.found[name] for name in names if name in collected.found}
    if not maps:
        raise ValueError(f"none of the layers {', '.join(map(repr, names[:4]))} was called for these inputs")
    if rollout:
        if len(several := _stacks(model, list(maps))) > 1:
            shown = ", ".join(map(repr, several.values()))
            raise ValueError(f"a rollout is of one network, and these layers are of {len(several)}, e.g. {shown}")
        rolled = attention_rollout([each for of in collected.found.values() for each in of.values()])  # as called
        return rolled if wanted is None else rolled[:, _places(wanted, rolled.shape[1], "the rollout")]
    return {name + suffix: each for name, of in maps.items() for suffix, each in of.items()}


def _stacks(model: nn.Module, names: Sequence[str]) -> dict[tuple[str, bool], str]:
    """The last layer of each network, where a decoder with cross-attention and its encoder are two."""
    found = survey(model)
    decoders = {stack_of(layer.name) for layer in found.layers if layer.cross}
    return {(found.network_of(name).name, stack_of(name) in decoders): name for name in names}


def stack_of(name: str) -> str:
    """The part of a layer's name before its number."""
    return re.split(r"\.\d+\.", name)[0]


def see_calls(model: nn.Module, inputs: Inputs, layers: Layers | None, take: Callable[..., None]) -> list[str]:
    """Run a model once as :func:`attention_maps` does, and see what its layers give their mechanisms.

    Args:
        model, inputs, layers: as there.
        take: called as ``take(layer, alike, mechanism, args, kwargs)``: the :class:`.AttentionLayer`, how many of the
            chosen layers have its size, and the call of its mechanism.

    Returns:
        The names of the chosen layers, in module order.

    Raises:
        AttentionSwapError: as :func:`attention_maps`.
    """
    with _ONE_AT_A_TIME, knowing(_record(model, inputs)):
        names = _names(model, layers)
        with _observed(model, names, take), torch.no_grad(), unchanged(model), Draw(model).again(model):
            args, kwargs = arguments(inputs)
            model(*args, **kwargs)
    return names


def _listed(what: str, chosen: int | Sequence[int] | None) -> list[int] | None:
    if chosen is None:
        return None
    several: Any = chosen if isinstance(chosen, Iterable) and getattr(chosen, "ndim", 1) > 0 else [chosen]
    listed = [each.item() if getattr(each, "ndim", 1) == 0 else each for each in several]  # a bool has an index, too
    try:
        if not listed or isinstance(chosen, str) or any(isinstance(each, bool) for each in listed):
            raise TypeError
        return [operator.index(each) for each in listed]
    except TypeError:
        raise TypeError(f"{what} must be an integer or some of them, got {chosen!r}") from None


def _record(model: nn.Module, inputs: Inputs) -> Record:
    """What a pass of a copy shows, where layers have no host of their own; nothing where it fails, as this one will."""
    found = survey(model)
    if found.layers and not found.others and not any(isinstance(layer.host, SDPAHost) for layer in found.layers):
        return Record()
    try:
        return record_of(model, inputs)
    except AttentionSwapError:
        return Record()


def _names(model: nn.Module, layers: Layers | None) -> list[str]:
    found = survey(model)
    listed = [layers] if isinstance(layers, str) or not isinstance(layers, Iterable) else list(layers)
    by_name = any(isinstance(each, str) for each in listed)
    if any(isinstance(each, str) != by_name for each in listed):
        raise TypeError(f"layers must be numbers, or patterns of names, and not both, got {layers!r}")
    where: Any = listed if by_name else None
    numbers: Any = None if by_name or layers is None else listed
    try:
        chosen, _ = select(found, where, numbers, ())
    except AttentionSwapError as error:  # which speaks of a swap's arguments
        told = str(error).replace("; names and patterns go into where=", " or patterns of names")
        raise AttentionSwapError(told.replace("where=", "layers=")) from None
    return [layer.name for layer in chosen if by_name or not layer.cross]


class _Collected:
    """Takes the map of each layer as it is called."""

    def __init__(self, heads: list[int] | None, rows: list[int] | None, mean: bool, passes: bool) -> None:
        self.heads, self.rows, self.mean, self.passes = heads, rows, mean, passes
        self.found: dict[str, dict[str, Tensor]] = {}

    def take(
        self,
        layer: AttentionLayer,
        alike: int,
        mechanism: AttentionMechanism,
        args: tuple[Tensor, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """A forward pre-hook of a layer's mechanism; ``alike`` layers have maps of this size."""
        if self.mean and layer.name in self.found:
            raise ValueError(f"a rollout takes one map of each layer, and {layer.name!r} is called several times")
        several = acting_passes(mechanism, *args, **kwargs) if self.passes else [acting_map(mechanism, *args, **kwargs)]
        number = alike * len(several)
        size = 8 if args[2].dtype == torch.float64 else 4
        maps = [self._dense(each, layer.name, number, size) for each in several]
        suffixes = [f"/pass_{place + 1}" for place in range(len(maps))] if len(maps) > 1 else [""]
        self.found[layer.name] = dict(zip(suffixes, maps, strict=True))

    def _dense(self, acting: ActingMap, name: str, number: int, size: int) -> Tensor:
        if self.heads is not None:
            acting = acting.of_heads(_places(self.heads, acting.shape[1], name, "head"))
        batch, heads, tokens, columns = acting.shape
        rows = None
        if self.rows is not None:
            rows = torch.tensor(_places(self.rows, tokens, name), dtype=torch.long, device=acting.device)
        shape = (batch, 1 if self.mean else heads, tokens if rows is None else len(rows), columns)
        _check_memory((size, *shape), number, acting.device, name)
        if not self.mean:
            return acting.dense(rows)
        wide = torch.float64 if size == 8 else torch.float32
        found = torch.zeros(batch, tokens, columns, dtype=wide, device=acting.device)
        for place, column, part in acting.blocks():
            found[:, place, column] = part.mean(1)
        return found


def _places(chosen: list[int], number: int, name: str, what: str = "row") -> list[int]:
    for each in chosen:
        if not -number <= each < number:
            raise ValueError(f"there is no {what} {each} in {name!r}, which has {number}, counted from 0")
    return [each % number for each in chosen]


def _check_memory(shape: tuple[int, ...], number: int, device: torch.device, name: str) -> None:
    needed = number * math.prod(shape)  # the first is the bytes of a number
    free = _free_bytes(device)
    if free is not None and needed > free:
        raise MemoryError(
            f"attention maps {list(shape[1:])} of {number} layers, {name!r} first, take {needed:,} bytes, and {free:,} "
            "are free: ask for some rows (rows=[0]), some layers (layers=[-1]) or some heads"
        )


def _free_bytes(device: torch.device) -> int | None:
    """What is free on a device, or None where nothing says so."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return kilobytes[0] * 1024 if kilobytes and device.type == "cpu" else None


@contextmanager
def _observed(model: nn.Module, names: list[str], take: Callable[..., None]) -> Iterator[None]:
    """Have the calls of layers of these names seen, in evaluation and without compiled code."""
    training = [(module, module.training) for module in model.modules()]
    found = survey(model)
    wanted = [describe(found, layer) for layer in found.layers if layer.name in names]
    refuse_spread(wanted)
    plain = [layer.name for layer in wanted if layer.mechanism is None]
    with ExitStack() as back:
        if plain:
            make_observable(model, plain)
            back.callback(make_plain, model, plain)
            found = survey(model)
        back.callback(_set_training, training)
        model.eval()
        described = [describe(found, layer) for layer in found.layers if layer.name in names]
        sizes = [(layer.spec.num_heads, layer.spec.dim) if layer.spec.told else None for layer in described]
        for layer, size in zip(described, sizes, strict=True):
            mechanism = layer.mechanism
            if mechanism is not None:
                hook = partial(take, layer, sizes.count(size))
                back.callback(mechanism.register_forward_pre_hook(hook, with_kwargs=True).remove)
        if "torch._dynamo" in sys.modules:
            back.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _set_training(flags: list[tuple[nn.Module, bool]]) -> None:
    for module, flag in flags:
        module.training = flag
