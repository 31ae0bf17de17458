"""Whose attention layers can be swapped, and how they are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from attention_modules.hosts.base import AttentionLayer, AttentionSwapError, Host
from attention_modules.hosts.discovery import Found, Selector, Survey, host_of, only_cross, select, survey
from attention_modules.hosts.model.heads import refuse_spread
from attention_modules.hosts.sdpa.layer import SDPAHost, SwappedSDPA
from attention_modules.hosts.sdpa.record import knowing, own_record
from attention_modules.hosts.sdpa.whose import keep_shown, would_show
from attention_modules.hosts.table import known_hosts

__all__ = ["AttentionLayer", "AttentionSwapError", "Host", "attention_layers", "host_of", "known_hosts"]


def attention_layers(
    model: nn.Module,
    where: Selector | None = None,
    layers: int | Sequence[int] | None = None,
    exclude: Selector = (),
) -> list[AttentionLayer]:
    """The self-attention layers that a host understands, plain or swapped, in module order.

    Args:
        model: any module.
        where: glob, list of globs, or callable ``(name, module) -> bool``; None = all.
        layers: positions among the self-attention layers that match, within each network (negative: from the end);
            None = all.
        exclude: as ``where``, taken out of the selection.

    Raises:
        AttentionSwapError: if nothing matches, or cross-attention alone, a pattern matches nothing, an index is out of
            range, or a declaration does not fit.
    """
    try:
        described = _described(model, where, layers, exclude)
    except AttentionSwapError:
        own = own_record(model)
        if own is None:
            raise
    else:
        told = all(layer.spec.told for layer in described) and not may_learn(model)
        own = None if told else own_record(model)
        if own is None:
            return described
    with knowing(own):
        described = _described(model, where, layers, exclude)
        keep_shown(layer.module for layer in survey(model).layers if isinstance(layer.host, SDPAHost))
        return described


def may_learn(model: nn.Module) -> bool:
    """Whether the example of a LightningModule might tell more of layers of one's own."""
    example = getattr(model, "example_input_array", None)
    own = () if example is None else [each.module for each in survey(model).layers if isinstance(each.host, SDPAHost)]
    return any(would_show(each, example) for each in own if not isinstance(each, SwappedSDPA))


def _described(
    model: nn.Module, where: Selector | None, layers: int | Sequence[int] | None, exclude: Selector
) -> list[AttentionLayer]:
    found = survey(model)
    chosen, _ = select(found, where, layers, exclude)
    selves = [layer for layer in chosen if not layer.cross]
    if not selves:
        raise AttentionSwapError(only_cross(chosen, where))
    described = [describe(found, layer) for layer in selves]
    refuse_spread(described)
    return [replace(layer, host=layer.host.bound(layer.module)) for layer in described]


def describe(found: Survey, layer: Found) -> AttentionLayer:
    """The layer with its spec, whose index counts the self-attention layers of its network."""
    selves = [other.name for other in found.layers if not other.cross]
    network = found.network_of(layer.name)
    inside = [name for name in selves if name in network.layers]
    spec = layer.host.spec(layer.module, None if layer.cross else inside.index(layer.name))
    parts = layer.name.split(".")
    ancestors = [found.modules[".".join(parts[:depth])] for depth in range(len(parts))]
    if spec.num_tokens is None:
        spec = spec.placed(num_tokens=layer.host.num_tokens(layer.module, ancestors))
    fixed = spec.num_tokens if layer.host.fixes_length(ancestors) else None
    spec = spec.placed(layer_name=layer.name or None)
    number = None if layer.cross else selves.index(layer.name)
    return AttentionLayer(layer.name, layer.module, layer.host, spec, number, network.name, fixed)
