"""Putting a mechanism into somebody else's model, and taking it out: plan, validate, commit."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attention_modules.base import options_text
from attention_modules.function import FunctionAttention
from attention_modules.hosts import describe, may_learn
from attention_modules.hosts.base import (
    AttentionLayer,
    AttentionSwapError,
    Swapped,
    acting_mechanism,
    forward_refusal,
    hook_refusal,
    plain_type,
    query_return_refusal,
    swapped_class,
)
from attention_modules.hosts.discovery import Found, Selector, Skipped, Survey, check_module, select, survey
from attention_modules.hosts.forwards import has_other_forward
from attention_modules.hosts.model.connected import check_connections, connect_layers, shares_values
from attention_modules.hosts.model.copies import warn_of_copies
from attention_modules.hosts.model.dropped import dropped_refusals, watch_grids
from attention_modules.hosts.model.heads import SPREAD, mesh_of, spread
from attention_modules.hosts.model.held import held_forwards, warn_of_uncalled
from attention_modules.hosts.model.own_softmax import warn_of_own_softmax
from attention_modules.hosts.model.replicated import replicated_refusal
from attention_modules.hosts.model.saved import tell_when_saved
from attention_modules.hosts.model.sharded import is_sharded, sharded_refusal
from attention_modules.hosts.model.twins import Plan, equalize_copies, freeze_as_layers, warn_of_twins
from attention_modules.hosts.query import QueryPart, hooked_refusal
from attention_modules.hosts.report import SwapReport, SwapRow
from attention_modules.hosts.sdpa.layer import SDPAHost
from attention_modules.hosts.sdpa.record import Record, knowing, known, own_record, record_of
from attention_modules.hosts.sdpa.whose import keep_shown
from attention_modules.hosts.table import loaded_hosts
from attention_modules.hosts.trained import made_parameters, owned_parameters, remember_made
from attention_modules.hosts.weights import READABLE, wrapped_by_peft
from attention_modules.mechanism import AttentionMechanism, Mechanism, build_mechanism, mechanism_class
from attention_modules.mechanisms.shared.outside import refuse_outside

__all__ = ["AttentionSwapError", "SwapReport", "SwapRow", "restore_attention", "swap_attention", "swapped"]

# Wrappers that hold on to parameters or code of the layers: name of the class -> what to do first.
_WRAPPERS = {
    "DataParallel": "swap before wrapping the model in DataParallel",
    "DistributedDataParallel": "swap before wrapping the model in DistributedDataParallel",
    "FullyShardedDataParallel": "swap before wrapping the model in FullyShardedDataParallel",
    "OptimizedModule": "swap before torch.compile()",
    "ScriptModule": "swap the module that it was made of, and use torch.jit.trace() then",
}


@torch.inference_mode(False)
def swap_attention(
    model: nn.Module,
    mechanism: Mechanism,
    *,
    where: Selector | None = None,
    layers: int | Sequence[int] | None = None,
    exclude: Selector = (),
    example: Any = None,
    **mechanism_options: object,
) -> SwapReport:
    """Replace what happens between the projections of a model's attention layers, in place.

    Call it before the optimizer is built: where the mechanism uses no query, the projection becomes a new, smaller
    Parameter, and the first step of an optimizer that holds the old one is an error. Where it does, every Parameter
    stays the same object. A layer that is swapped already gets the new mechanism; :func:`restore_attention` returns to
    the original.

    New Parameters train where a Parameter of their layer does. A model may hold several networks, such as a student and
    its teacher: layers that are copies of each other get equal new Parameters, and a frozen network, a teacher or a
    metric beside one that trains is swapped only with its twin, or where a pattern of ``where`` names it alone. Layers
    draw other values of one random state in one call or in several; blocks that are each given as the ``model`` draw
    the same.

    Args:
        model: a model of any known host, or an attention layer itself.
        mechanism: short name; your own function of ``(q, k, v, ...)`` with the signature of
            :func:`torch.nn.functional.scaled_dot_product_attention`; a subclass of ``AttentionMechanism``; the import
            path of either; or a callable that takes an ``AttentionSpec`` and returns a new mechanism for each layer. A
            function need not take every one of ``attn_mask``, ``is_causal``, ``dropout_p`` and ``scale``: a layer that
            gives what it does not take is an error, when the model runs.
        where: glob (``"blocks.*.attn"``), list of globs, or callable ``(name, module) -> bool``; None = every
            self-attention. Cross-attention is swapped only where a pattern spells the last part of its name.
        layers: positions among the self-attention layers that match, counted within each network of the model, negative
            ones from the end; None = all.
        exclude: as ``where``, taken out of the selection.
        example: what the model takes: a tensor, a tuple of arguments, or a dict of arguments by name. A copy of the
            model runs it once, and shows which modules call ``scaled_dot_product_attention``, where their code does not
            name it, and with how many heads, where a layer cannot be tried alone. Where None, and nothing else helps,
            the ``example_input_array`` of a LightningModule.
        **mechanism_options: the mechanism's own arguments, for a function those after q, k and v.

    Returns:
        What was swapped, and every attention-like module that was not, with the reason.

    Raises:
        AttentionSwapError: if nothing matches, a name is unknown, a layer cannot take the mechanism, a callable returns
            one for two layers, the example does not run, or the model is wrapped (DDP, FSDP1, torch.compile), or
            sharded by ``fully_shard`` and the mechanism would change which Parameters it has. The model is then
            unchanged.
        ValueError, TypeError: from the mechanism, for an unknown name or bad options, or if ``model`` is no module. The
            model is then unchanged.

    Example:
        Your own mechanism in twelve lines. A function that passes the layer's arguments on needs no more:

        >>> import torch
        >>> from torch.nn import functional as F
        >>> from attnswap import check_mechanism, swap_attention
        >>> def cosine_attention(q, k, v, temperature=0.1, **options):
        ...     q = F.normalize(q, dim=-1) * q.shape[-1] ** 0.5 / temperature
        ...     return F.scaled_dot_product_attention(q, F.normalize(k, dim=-1), v, **options)
        >>> check_mechanism(cosine_attention)
        >>> model = torch.nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=32, batch_first=True)
        >>> report = swap_attention(model, cosine_attention, temperature=0.2)
        >>> report[0].name, report[0].mechanism
        ('self_attn', 'cosine_attention')
        >>> model(torch.randn(1, 5, 16)).shape
        torch.Size([1, 5, 16])
    """
    _refuse_wrapped(model)
    try:
        with knowing(_shown(model) if example is None else record_of(model, example)):
            return _swap(model, mechanism, where, layers, exclude, mechanism_options)
    except ValueError:
        own = None if example is not None else own_record(model)
        if own is None:
            raise
        with knowing(own):
            return _swap(model, mechanism, where, layers, exclude, mechanism_options)


def _swap(
    model: nn.Module,
    mechanism: Mechanism,
    where: Selector | None,
    layers: int | Sequence[int] | None,
    exclude: Selector,
    options: dict[str, object],
) -> SwapReport:
    prepared = _prepare(model, mechanism, where, layers, exclude, options)
    modules = {layer.name: layer.module for layer, _ in prepared.plan}
    if held := held_forwards(model, modules):
        raise AttentionSwapError(
            f"cannot swap {'; '.join(held[:3])}: what is kept would stay plain; keep the layer itself, and call it"
        )
    _warn_of_hooks(prepared.plan)
    warn_of_uncalled(modules, known().called, stacklevel=3)
    warn_of_own_softmax(prepared.plan, stacklevel=4)
    warn_of_twins(prepared.found, prepared.plan)
    warn_of_copies(model, prepared.plan, stacklevel=4)
    return _commit(model, prepared)


@torch.inference_mode(False)
def make_observable(model: nn.Module, names: Sequence[str]) -> None:
    """Put softmax attention into plain layers, for hooks to see q, k and v: no Parameter and no output changes.

    Unlike :func:`swap_attention` it takes compiled models, which compile these layers anew. Take it out with
    :func:`make_plain`.

    Args:
        model: the model.
        names: of its plain layers; without any, as where all layers are swapped, nothing is done.

    Raises:
        AttentionSwapError: as :func:`swap_attention`.
    """
    _refuse_wrapped(model, compiled=False)
    if not names:
        return
    with knowing(_needed_record(model, names)):
        _commit(model, _prepare(model, "softmax", list(names), None, (), {}))
    for layer in survey(model).layers:
        if layer.name in names:  # weights by whose steps the plain layer takes them, though nobody may read them
            layer.module.mechanism.__dict__.update(gives_weights=True, stands_in=True)  # type: ignore[union-attr]


def made_observable(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Make those of these layers observable that take softmax; returns their names."""
    try:
        make_observable(model, names)
    except ValueError:
        return [] if len(names) < 2 else [made for name in names for made in made_observable(model, [name])]
    return [*names]


def _shown(model: nn.Module) -> Record:
    """As :func:`_needed_record`, of all layers; what is known where the example does not run."""
    if getattr(model, "example_input_array", None) is None:
        return known()
    try:
        return _needed_record(model, [layer.name for layer in survey(model).layers])
    except AttentionSwapError:
        return known()


def _needed_record(model: nn.Module, names: Sequence[str]) -> Record:
    """What is known; of a LightningModule's example, where the sizes of one of these layers cannot be told else."""
    example, found = getattr(model, "example_input_array", None), survey(model)
    if example is None or known().calls:
        return known()
    try:
        described = [describe(found, layer) for layer in found.layers if layer.name in names]
    except AttentionSwapError:  # a declaration that needs the example
        return record_of(model, example)
    if not all(layer.spec.told for layer in described):
        return record_of(model, example)
    return (own_record(model) if may_learn(model) else None) or known()


@torch.inference_mode(False)
def make_plain(model: nn.Module, names: Sequence[str]) -> None:
    """Undo :func:`make_observable` for these layers, whatever the model was wrapped into since.

    A layer that itself became another class meanwhile (sharded alone), or got another forward, keeps its softmax: it
    would lose that class with it.
    """
    layers = [layer for layer in survey(model).layers if layer.name in names]
    _restore(model, [layer for layer in layers if _only_swapped(layer.module)])


def _only_swapped(layer: nn.Module) -> bool:
    own = isinstance(layer, Swapped) and plain_type(layer) is swapped_class(layer.host, layer.plain_class)
    return own and not has_other_forward(layer)


@dataclass(frozen=True)
class _Prepared:
    """A swap that nothing refuses, before anything is changed."""

    found: Survey
    skipped: list[Skipped]
    plan: Plan


def _prepare(
    model: nn.Module,
    mechanism: Mechanism,
    where: Selector | None,
    layers: int | Sequence[int] | None,
    exclude: Selector,
    mechanism_options: dict[str, object],
) -> _Prepared:
    found = survey(model)
    chosen, skipped = select(found, where, layers, exclude, frozen=False)
    plan = _build(model, found, chosen, mechanism, mechanism_options)
    _validate(model, found, chosen, plan)
    return _Prepared(found, skipped, plan)


def _commit(model: nn.Module, prepared: _Prepared) -> SwapReport:
    plan = prepared.plan
    before = [_count(layer.module) for layer, _ in plan]
    modules = {layer.name: layer.module for layer, _ in plan}
    owned = owned_parameters(modules)
    shared = any(map(shares_values, modules.values()))
    made: dict[int, nn.Parameter] = {}
    fixed = [_fixed_tokens(layer, built) for layer, built in plan]
    keep_shown(layer.module for layer in prepared.found.layers if isinstance(layer.host, SDPAHost))
    with _AllOrNothing(model):
        for (layer, built), tokens in zip(plan, fixed, strict=True):
            layer.host.insert(layer.module, built)
            if layer.host.spreads_heads and (mesh := mesh_of(layer.module)) is not None:
                spread(built, mesh, made)
                layer.module.head_mesh = mesh
            vars(layer.module).update(fixed_tokens=tokens, fixed_window=getattr(layer.module, "window_size", None))
        _settle(model, shared or any(map(shares_values, modules.values())))
        swapped_layer: Any
        for swapped_layer in modules.values():
            swapped_layer.note_as_made()
        new = [place.name for place in made_parameters(modules, owned)]
        _warn_of_adapters(model, new)
    remember_made(modules, owned)
    rows = [
        SwapRow(
            layer.name,
            layer.host.name,
            type(built).__name__,
            layer.spec.dim if layer.spec.told else None,
            layer.spec.num_heads if layer.spec.told else None,
            count,
            _count(layer.module),
            options_text(built),
        )
        for (layer, built), count in zip(plan, before, strict=True)
    ]
    return SwapReport(rows, prepared.skipped, new, prepared.found.networks)


def swapped(
    model: nn.Module,
    mechanism: Mechanism,
    *,
    where: Selector | None = None,
    layers: int | Sequence[int] | None = None,
    exclude: Selector = (),
    example: Any = None,
    **mechanism_options: object,
) -> nn.Module:
    """The model itself after :func:`swap_attention`: for a configuration file, around what builds the network.

    As in ``_target_: attention_modules.swapped``, with the network's own ``_target_`` below ``model``.

    Example:
        >>> import torch
        >>> from attnswap import swapped
        >>> model = swapped(torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True), "symmetric")
        >>> type(model.self_attn.mechanism).__name__
        'SymmetricAttention'
    """
    swap_attention(model, mechanism, where=where, layers=layers, exclude=exclude, example=example, **mechanism_options)
    return model


@torch.inference_mode(False)
def restore_attention(model: nn.Module) -> list[str]:
    """Return every swapped layer to its original class and projection, with its current weights.

    Where the query was dropped, the kept query rows come back beside the current keys and values.

    Returns:
        Names of the restored layers; empty where none was swapped.

    Raises:
        AttentionSwapError: if the model is wrapped, or a projection can no longer take its query rows back.

    Example:
        >>> import torch
        >>> from attnswap import restore_attention, swap_attention
        >>> model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
        >>> report = swap_attention(model, "rpc")
        >>> restore_attention(model)
        ['self_attn']
    """
    _refuse_wrapped(model)
    swapped = [layer for layer in survey(model).layers if isinstance(layer.module, Swapped)]
    known, sharded = {id(layer.module) for layer in swapped}, is_sharded(model)
    for name, module in model.named_modules():
        if isinstance(module, Swapped) and id(module) not in known:
            raise AttentionSwapError(
                f"cannot restore {name!r}: another module stands in its place and calls it (peft's adapters): call "
                "merge_and_unload() first"
            )
    for layer in swapped:
        if sharded:
            _raise_for(layer.name, sharded_refusal(layer.module, None))
        changed = _changes_parameters(layer.module)
        _raise_for(layer.name, (hook_refusal(layer.module) if changed else None) or query_return_refusal(layer.module))
        _raise_for(layer.name, forward_refusal(layer.module))
    _restore(model, swapped)
    return [layer.name for layer in swapped]


def _fixed_tokens(layer: AttentionLayer, built: AttentionMechanism) -> int | None:
    """How many tokens a layer always has, where the model around it says so and the mechanism counts columns."""
    return layer.fixed_tokens if built.counts_columns or built.counts_distances else None


def _restore(model: nn.Module, swapped: Sequence[Found]) -> None:
    modules = {layer.name: layer.module for layer in swapped}
    owned = owned_parameters(modules)
    shared = any(map(shares_values, modules.values()))
    with _AllOrNothing(model):
        for layer in swapped:
            layer.host.remove(layer.module)
        _settle(model, shared)
    remember_made(modules, owned)


def _warn_of_adapters(model: nn.Module, new: Sequence[str]) -> None:
    if new and any(wrapped_by_peft(module) for module in model.modules()):
        warnings.warn(
            f"{new[0]}{f' and {len(new) - 1} more' if len(new) > 1 else ''} came after the adapters, which are saved "
            "without: swap before get_peft_model() and give it modules_to_save=['mechanism'], or save the whole "
            "state_dict()",
            stacklevel=6,
        )


def _warn_of_hooks(plan: Plan) -> None:
    silenced = [
        ".".join(filter(None, (layer.name, name)))
        for layer, built in plan
        for name in layer.host.silenced(layer.module, built.gives_weights)
    ]
    if silenced:
        warnings.warn(
            f"{silenced[0]!r}{f' and {len(silenced) - 1} more' if len(silenced) > 1 else ''}, or hooks on it, saw the "
            "attention map, and see nothing now: swapped layers make none. AttentionMapLogger draws maps, and "
            "attnswap.attention_maps(model, inputs) returns them",
            stacklevel=5,
        )


def _refuse_wrapped(model: nn.Module, compiled: bool = True) -> None:
    check_module(model)
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ == "OptimizedModule" and not compiled:
                continue
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
                raise AttentionSwapError(
                    f"{name or 'the model'} is of {kind.__name__}, which keeps the layers as they are: "
                    f"{_WRAPPERS[kind.__name__]}"
                )
        if compiled and module._compiled_call_impl is not None:
            raise AttentionSwapError(f"{name or 'the model'} is compiled: swap before calling its compile()")


def _build(
    model: nn.Module, found: Survey, chosen: list[Found], mechanism: Mechanism, options: dict[str, object]
) -> Plan:
    """The mechanisms, each where and how its layer is, without moving the global random state."""
    if isinstance(mechanism, str):
        mechanism_class(mechanism)  # an unknown name is no fault of a layer
    layers = [describe(found, layer) for layer in chosen]
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(device.index for device in devices)), _initialized(model):
        _draw_others(found, chosen)
        plan = [(layer, _build_one(layer, mechanism, options)) for layer in layers]
    _refuse_shared(found, plan)  # before one that acts elsewhere is moved to another device or dtype
    plan = [(layer, _alike(built, layer.module)) for layer, built in plan]
    functions = [(layer, built) for layer, built in plan if isinstance(built, FunctionAttention)]
    kinds = {(type(built), built.spec.placed(layer_index=None)): (layer, built) for layer, built in functions}
    for layer, built in kinds.values():
        refuse_outside(built, layer.module)
    freeze_as_layers(plan)
    if found.networks[1:]:
        equalize_copies(found, plan)
    return plan


def _draw_others(found: Survey, chosen: list[Found]) -> None:
    """Draw other values than earlier swaps, of other layers of the same networks, drew from the same random state."""
    names = {layer.name for layer in chosen}
    beside = {name for network in found.networks if names & {*network.layers} for name in network.layers} - names
    modules = [each.module for each in found.layers if each.name in beside]
    if count := sum(isinstance(module, Swapped) and bool(module.mechanism.state_dict()) for module in modules):
        place = next(
            network.layers.index(name) for network in found.networks for name in network.layers if name in names
        )
        torch.default_generator.manual_seed(int(torch.randint(1 << 62, (count,), device="cpu")[-1]) + place)


def _initialized(model: nn.Module) -> AbstractContextManager[object]:
    """Without modes in which functions of torch.nn.init do nothing, as Lightning's ``init_module(empty_init=True)``."""
    empty = any(parameter.is_meta for parameter in model.parameters())
    return nullcontext() if empty else torch._C.DisableTorchFunction()


def _refuse_shared(found: Survey, plan: Plan) -> None:
    """Refuse a mechanism that would act in two layers, as a callable may return one again and again."""
    swapped = {layer.name for layer, _ in plan}
    holders = {
        id(held): place.name
        for place in found.layers
        if place.name not in swapped
        and (held := acting_mechanism(getattr(place.module, "mechanism", None))) is not None
    }
    for layer, built in plan:
        if (other := holders.setdefault(id(built), layer.name)) != layer.name:
            _raise_for(
                layer.name,
                f"the callable returned the {type(built).__name__} of {other!r}, and one for several layers would mix "
                "up what is seen and penalized of each; return a new one for each layer, which may hold the same "
                "Parameter",
            )


def _build_one(layer: AttentionLayer, mechanism: Mechanism, options: dict[str, object]) -> AttentionMechanism:
    """The mechanism for a layer; what refuses its options names the layer."""
    try:
        return build_mechanism(mechanism, layer.spec, **options)
    except ValueError as error:
        raise ValueError(f"cannot swap {layer.name or 'the model'!r}: {error}") from error


def _alike(built: AttentionMechanism, layer: nn.Module) -> AttentionMechanism:
    """The mechanism on the layer's device, in its dtype and train flag; float8 is no dtype to compute in."""
    tensor = next((tensor for tensor in layer.parameters() if tensor.is_floating_point()), None)
    if tensor is not None:
        built = built.to(tensor.device, tensor.dtype if tensor.dtype in READABLE else None)
    return built.train(layer.training)


def _validate(model: nn.Module, found: Survey, chosen: list[Found], plan: Plan) -> None:
    """Refuse, before anything changes, what any layer cannot take."""
    paths = _paths(model)
    sharded, replicated = is_sharded(model), replicated_refusal(model)
    dropped = dropped_refusals(found.modules, [each.name for each in found.layers])
    check_connections(found, {place.name: built for place, (_, built) in zip(chosen, plan, strict=True)})
    for place, (layer, built) in zip(chosen, plan, strict=True):
        host, module = layer.host, layer.module
        swapped = isinstance(module, Swapped)
        limits = host.limits(module)
        sees_the_future = host.tells_causality and not layer.spec.is_causal
        for reason in limits.reasons(built, place.cross, sees_the_future):
            _raise_for(layer.name, reason)
        changed = not built.uses_query or _has_parameters(built) or (swapped and _changes_parameters(module))
        _raise_for(layer.name, hook_refusal(module) or replicated if changed else None)
        _raise_for(layer.name, hooked_refusal(module.mechanism) if swapped else None)
        _raise_for(layer.name, SPREAD if not (sharded or host.spreads_heads) and mesh_of(module) is not None else None)
        _raise_for(layer.name, dropped.get(layer.name) if built.counts_columns or built.counts_distances else None)
        if sharded:
            _raise_for(layer.name, sharded_refusal(module, built))
        if built.uses_query:
            _raise_for(layer.name, query_return_refusal(module) if swapped else None)
        elif not (swapped and module.dropped_query):
            _raise_for(layer.name, limits.without_query)
            parts = host.query_parts(module)
            _raise_for(layer.name, _tied(parts, place, paths))
            for part in parts:
                _raise_for(layer.name, part.hooked(module) or part.watched(module))


def _changes_parameters(layer: Any) -> bool:
    """Whether a swapped layer has other Parameters than the plain one."""
    return bool(layer.dropped_query) or _has_parameters(layer.mechanism)


def _has_parameters(mechanism: nn.Module) -> bool:
    return next(mechanism.parameters(), None) is not None


def _paths(model: nn.Module) -> dict[int, list[str]]:
    """All names of each Parameter, by id: those of tied Parameters, and of shared modules."""
    paths: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(name)
    return paths


def _tied(parts: Iterable[QueryPart], place: Found, paths: dict[int, list[str]]) -> str | None:
    """Whether a Parameter has a place besides the layer's own one; a shared layer has that one under all its names."""
    for part in parts:
        tensor = place.module.get_submodule(part.owner)._parameters[part.tensor]
        own = {part.key(f"{name}." if name else "") for name in place.names}
        others = [path for path in paths.get(id(tensor), ()) if path not in own]
        if others:
            return (
                f"its {part.key('')} is tied to another module ({others[0]}), which would keep the query rows; untie "
                "it first"
            )
    return None


def _raise_for(name: str, reason: str | None) -> None:
    if reason is not None:
        raise AttentionSwapError(f"cannot swap {name or 'the model'!r}: {reason}")


def _settle(model: nn.Module, shared: bool) -> None:
    """Bring the model in line with its layers; ``shared``: some read the values of others, or did so before."""
    for host in loaded_hosts():
        host.settle(model)
    tell_when_saved(model)
    found = survey(model)
    watch_grids(model, found.modules, [each.name for each in found.layers])
    if shared:
        connect_layers(model)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass
class _AllOrNothing:
    """Put every module back as it was, should anything fail inside."""

    model: nn.Module

    def __enter__(self) -> None:
        self.before = [
            (module, type(module), {key: (value, _content(value)) for key, value in module.__dict__.items()})
            for module in self.model.modules()
        ]

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            for module, cls, state in self.before:
                object.__setattr__(module, "__class__", cls)
                module.__dict__.clear()
                for key, (value, content) in state.items():
                    if content is not None:  # in the same object, as handles of the user's hooks refer to it
                        value.clear()
                        value.update(content)
                    module.__dict__[key] = value


def _content(value: Any) -> Any:
    """A copy of what modules hold their parts, tensors and hooks in; a user's own kinds of containers are not ours."""
    return copy.copy(value) if type(value) in (dict, OrderedDict, set) else None
