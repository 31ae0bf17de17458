"""Which layers of a model read each other's values, and whether they can."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from torch import nn

from attention_modules.base import AttentionMechanism
from attention_modules.hosts.base import AttentionSwapError, acting_mechanism
from attention_modules.hosts.discovery import Found, Survey, survey
from attention_modules.hosts.model.moved import differ, differs_in_training, orders_of
from attention_modules.sharing import READS, connect, read_by, stacks

_SKIPS = ("layerdrop", "layer_drop")  # of transformers, and of torchaudio


def reads_others(mechanism: AttentionMechanism | None) -> bool:
    """Whether a mechanism reads the values of other layers."""
    return mechanism is not None and any(need in READS for need in mechanism.needs)


def shares_values(layer: nn.Module) -> bool:
    """Whether a layer reads the values of others, or did so."""
    return getattr(layer, "link", None) is not None or reads_others(_mechanism(layer))


def connect_layers(model: nn.Module) -> None:
    """Let a model's layers share values where their mechanisms read those of other layers.

    :func:`attention_modules.swap_attention` does so by itself. A model that is built of ``SelfAttention`` layers with
    such a mechanism calls it once, when it is built.

    Args:
        model: what holds the layers, and is called to run them.

    Raises:
        AttentionSwapError: if a layer reads the values of one that has no mechanism or other heads, or of none at all.
    """
    found = survey(model)
    check_connections(found, {})
    layers = {layer.name: layer for layer in found.layers if not layer.cross}
    needs = {name: mechanism.needs for name, layer in layers.items() if (mechanism := _mechanism(layer.module))}
    connect(model, {name: layer.module for name, layer in layers.items()}, needs)
    asking = [name for name, layer in layers.items() if reads_others(_mechanism(layer.module))]
    if skipping := next(filter(None, (_skipped(found, name) for name in asking)), None):
        warnings.warn(
            f"training leaves layers out at random ({skipping}), and ends with a SharedValueError where another one "
            "reads the values of such a layer: set it to 0 before you train",
            stacklevel=7,  # of swap_attention
        )


def check_connections(found: Survey, planned: Mapping[str, AttentionMechanism]) -> None:
    """Refuse a mechanism that reads another layer's values where it cannot have them.

    Args:
        found: the model's layers as they are.
        planned: the mechanisms that are to be put into some of them, by the layer's name.

    Raises:
        AttentionSwapError: if one cannot; the text names the layer and the reason.
    """
    mechanisms = {layer.name: planned.get(layer.name, _mechanism(layer.module)) for layer in found.layers}
    asking = {layer.name: layer for layer in found.layers if reads_others(mechanisms[layer.name])}
    if not asking:
        return
    names = [layer.name for layer in found.layers if not layer.cross]
    layers = {layer.name: layer for layer in found.layers}
    needs = {name: mechanism.needs for name, mechanism in mechanisms.items() if mechanism is not None}
    reads = {name: sources for stack in stacks(names).values() for name, sources in read_by(needs, stack).items()}
    stack_of = {name: stack for stack in stacks(names).values() for name in stack}
    for name, layer in asking.items():
        what = f"{type(mechanisms[name]).__name__} reads the values of"
        if layer.cross:
            _refuse(name, f"{what} other layers, and this is cross-attention: leave it out of `where`")
        for source in sorted(reads.get(name, ())):
            if mechanisms[source] is None:
                _refuse(
                    name,
                    f"{what} {source!r}, which nothing was put into: swap that layer too, with 'softmax' where it is "
                    "to stay as it is",
                )
            reason = _misfit(layer, layers[source]) or _moved(found, stack_of[name], name, source)
            if reason is not None:
                _refuse(name, f"{what} {source!r}: {reason}")
    for stack, members in stacks(names).items():
        first = next((name for name in members if name in asking), None)
        if first is None or any(name in reads for name in members):
            continue
        what = f"{type(mechanisms[first]).__name__} reads the values of an earlier layer, and this is the"
        if len(members) > 1:
            _refuse(first, f"{what} first of its stack, {stack!r}: nothing would change")
        _refuse(
            first,
            f"{what} only one of its stack: layers are of one stack where their names differ in a number between dots "
            "alone, as 'blocks.0.attn' and 'blocks.1.attn' in an nn.ModuleList"
            + (f"; leave it out by exclude={first!r}" if reads else ""),
        )


def _mechanism(layer: nn.Module) -> AttentionMechanism | None:
    return acting_mechanism(getattr(layer, "mechanism", None))


def _misfit(layer: Found, source: Found) -> str | None:
    """Why a layer cannot read the values of another, if so."""
    sizes = [
        (spec.num_heads, spec.value_dim or spec.head_dim)
        for spec in (each.host.spec(each.module, None) for each in (layer, source))
    ]
    if sizes[0] != sizes[1]:
        own, other = (f"{heads} heads of width {width}" for heads, width in sizes)
        return f"it has {own}, the other {other}"
    given = source.host.limits(source.module).sharing
    return layer.host.limits(layer.module).sharing or (given and f"there {given}")


def _skipped(found: Survey, layer: str) -> str | None:
    """By which rate what holds a layer leaves it out in training: the nearest attribute, or configuration, says."""
    parts = layer.split(".")
    around = [found.modules[".".join(parts[:depth])] for depth in reversed(range(len(parts)))]
    for holder in (*around, *(getattr(module, "config", None) for module in around)):
        rates = {name: rate for name, rate in getattr(holder, "__dict__", {}).items() if name.endswith(_SKIPS)}
        if rates:
            return ", ".join(f"{name}={rate}" for name, rate in rates.items() if rate) or None
    return None


def _moved(found: Survey, stack: Sequence[str], name: str, source: str) -> str | None:
    """Whether what is around two layers of a stack gives them their tokens in other places."""
    blocks = {each: _around(found, stack, each) for each in (name, source)}
    modules = {found.modules[each]: found.modules[block] for each, block in blocks.items() if block is not None}
    for each, block in blocks.items():
        if block is not None and differs_in_training(found.modules[each], found.modules[block]):
            return (
                f"{block!r} gives its layer other samples or tokens in training (some that it draws, or in other "
                "places), so that one would get values of another one: build the model without that, or choose another "
                "mechanism"
            )
    if len(modules) < 2 or not differ(*orders_of(found.modules[""], modules).values()):
        return None
    return (
        f"{blocks[source]!r} and {blocks[name]!r} give them their tokens in other places (one flips, rolls, cuts or "
        "transposes them otherwise), so that a token would get values of another one"
    )


def _around(found: Survey, stack: Sequence[str], name: str) -> str | None:
    """The outermost module with a forward that holds this layer of a stack, and no other of it; None for the layer."""
    parts, levels = name.split("."), zip(*(each.split(".") for each in stack), strict=False)
    first = next((depth for depth, level in enumerate(levels, 1) if len(set(level)) > 1), len(parts))
    for depth in range(first, len(parts)):
        outer = ".".join(parts[:depth])
        if type(found.modules[outer]).forward is not nn.Module.forward:
            return outer
    return None


def _refuse(name: str, reason: str) -> None:
    raise AttentionSwapError(f"cannot swap {name or 'the model'!r}: {reason}")
