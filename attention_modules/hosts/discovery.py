"""Finding a model's attention layers, and choosing among them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from numbers import Integral

from torch import nn

from attention_modules.hosts.base import AttentionSwapError, Host, Swapped, hook_refusal
from attention_modules.hosts.networks import Network, are_twins, networks_of
from attention_modules.hosts.sdpa.calls import calls_of
from attention_modules.hosts.table import known_hosts, known_refusal, loaded_hosts
from attention_modules.hosts.weights import wrapped_by_peft
from attention_modules.mechanism import AttentionMechanism, did_you_mean

Selector = str | Sequence[str] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Found:
    """An attention layer and the host that understands it; a shared layer has several names."""

    names: tuple[str, ...]
    module: nn.Module
    host: Host
    cross: bool

    @property
    def name(self) -> str:
        """The first name, in module order."""
        return self.names[0]


@dataclass(frozen=True)
class Skipped:
    """An attention-like module that is not swapped, and why."""

    name: str
    kind: str
    reason: str


@dataclass
class Survey:
    """What a model holds: layers that hosts understand, attention-like modules that none does, all names."""

    layers: list[Found] = field(default_factory=list)
    others: list[Skipped] = field(default_factory=list)
    modules: dict[str, nn.Module] = field(default_factory=dict)

    @cached_property
    def networks(self) -> list[Network]:
        """The networks that hold the layers, in module order."""
        return networks_of(self.modules, self.layers)

    def network_of(self, layer: str) -> Network:
        """The network that holds the layer of this name."""
        return next(network for network in self.networks if layer in network.layers)

    def twins_of(self, network: Network) -> list[Network]:
        """The networks whose stack of layers has the same Parameters by name and shape."""
        return [other for other in self.networks if are_twins(network, other, self.modules)]


def _projections(module: nn.Module) -> set[str]:
    linear = {name for name, part in module.named_children() if isinstance(part, nn.Linear)}
    return linear | {name for name, _ in module.named_parameters(recurse=False)}


class _Hosts:
    """The hosts that are loaded now, of which modules are asked about those that their class concerns.

    It serves one survey: what a class concerns is found once for all modules of the class, and nothing is kept of
    modules, so that no survey sees what an earlier one saw.
    """

    def __init__(self) -> None:
        self._loaded = loaded_hosts()
        self._by_class: dict[type[nn.Module], list[Host]] = {}

    def concerned(self, module: nn.Module) -> list[Host]:
        kind = type(module)
        if kind not in self._by_class:
            self._by_class[kind] = [host for host in self._loaded if host.concerns(kind)]
        return self._by_class[kind]

    def host_of(self, module: nn.Module, parent: nn.Module | None) -> Host | None:
        if isinstance(module, Swapped):
            return module.host
        return next((host for host in self.concerned(module) if host.understands_in(module, parent)), None)

    def layer_inside(self, module: nn.Module) -> str | None:
        """The name of the first part of a plain module that is an attention layer itself, if it has one."""
        if isinstance(module, Swapped):  # whose mechanism is such a part
            return None
        parts, read = dict(module.named_modules()), calls_of(module).attributes
        for name, part in parts.items():
            if len(_projections(part) & read - _projections(module)) > 1:  # it computes with that part's projections
                continue
            if name and (self.host_of(part, parts.get(name.rpartition(".")[0])) is not None or calls_of(part).sites):
                return name
        return None


def host_of(module: nn.Module, parent: nn.Module | None = None) -> Host | None:
    """The host that understands this plain or swapped layer (below ``parent``, where it has one), if one does."""
    return _Hosts().host_of(module, parent)


def check_module(model: object) -> None:
    """Check that a model is a module, not the name of one or a class.

    Raises:
        TypeError: if it is not.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module that is built, got {model!r} ({type(model).__name__}); build it first, "
            "for example with timm.create_model() or from_pretrained()"
        )


def survey(model: nn.Module) -> Survey:
    """Every attention layer of the model, in module order, each once under all its names.

    Raises:
        TypeError: if it is no module.
    """
    check_module(model)
    found = Survey(modules=dict(model.named_modules(remove_duplicate=False)))
    by_id: dict[int, int] = {}
    inside: str | None = None  # prefix of the last layer understood: what it is made of comes next, and is its own
    strangers: dict[str, nn.Module] = {}
    beside: dict[str, str] = {}  # what calls the kernel itself, though it has a layer inside
    hosts = _Hosts()
    for name, module in found.modules.items():
        if inside is not None and name.startswith(inside):
            continue
        parent = found.modules[name.rpartition(".")[0]] if name else None
        host = hosts.host_of(module, parent)
        if parent is not None and wrapped_by_peft(parent):
            continue  # the wrapper is listed
        if host is not None and host.yields_to_parts and (part := hosts.layer_inside(module)) is not None:
            host, beside[name] = None, part
        if host is None:
            strangers[name] = module
            continue
        inside = f"{name}." if name else ""
        if id(module) in by_id:
            index = by_id[id(module)]
            known = found.layers[index]
            found.layers[index] = Found((*known.names, name), module, host, known.cross)
            continue
        by_id[id(module)] = len(found.layers)
        found.layers.append(Found((name,), module, host, host.is_cross(module, parent, name)))
    found.others = _attention_like(hosts, strangers, beside, [name for layer in found.layers for name in layer.names])
    return found


def _attention_like(
    hosts: _Hosts, strangers: dict[str, nn.Module], beside: dict[str, str], understood: list[str]
) -> list[Skipped]:
    """Modules that call themselves attention, are no mere shell around an understood layer, and that no host knows."""
    skipped: list[Skipped] = []
    refused = {kind: known_refusal(kind) for kind in {type(module) for module in strangers.values()}}
    told = {name: _why_not(each, hosts.concerned(each), refused[type(each)]) for name, each in strangers.items()}
    told |= {name: (_BESIDE.format(part=part), True) for name, part in beside.items()}
    parts = [name for name, (reason, known) in told.items() if reason and known]
    for name, module in strangers.items():
        reason, known = told[name]
        prefix = f"{name}." if name else ""
        shell = any(other.startswith(prefix) for other in understood)
        if reason is None or (shell and name not in beside and not calls_of(module).sites):
            continue
        if not known and any(part != name and part.startswith(prefix) for part in parts):
            continue  # a part of it says why
        if not any(name.startswith(f"{outer.name}.") for outer in skipped):
            skipped.append(Skipped(name, type(module).__name__, reason))
    return skipped


_BESIDE = (
    "its forward calls scaled_dot_product_attention beside its part {part!r}, an attention layer, and a mechanism "
    "stands for one call: have a part of its own call it"
)


def _why_not(module: nn.Module, hosts: Sequence[Host], refused: str | None) -> tuple[str | None, bool]:
    """Why this module cannot be swapped, None where it is no attention; and whether more than its name says so.

    Args:
        module: what no host understands.
        hosts: those that its class concerns.
        refused: why no mechanism can be put into its class, where a host says so.
    """
    kind = type(module).__name__
    near = next((text for host in hosts if (text := host.near_miss(module))), None) or refused
    if near:
        return hook_refusal(module) or near, True
    if not ("Attention" in kind or "Attn" in kind) or isinstance(module, AttentionMechanism):
        return None, False
    if wrapped_by_peft(module):
        return "wrapped by peft: call merge_and_unload() first, or swap before get_peft_model()", True
    if "Pool" in kind:
        return "attention pooling: its queries are no tokens of the sequence", True
    if "Cross" in kind:
        return "cross-attention of a kind that no host knows", False
    return f"no host knows {type(module).__module__}.{kind}", False


def _matches(names: Sequence[str], module: nn.Module, selector: Selector) -> bool:
    if callable(selector):
        return any(selector(name, module) for name in names)
    patterns = [selector] if isinstance(selector, str) else selector
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _names_cross(layer: Found, where: Selector | None) -> bool:
    """Whether a pattern spells the last component of the cross-attention's name, instead of sweeping it up."""
    if where is None or callable(where):
        return False
    patterns = [where] if isinstance(where, str) else where
    return any(
        fnmatchcase(name, pattern) and not set(pattern.rpartition(".")[2]) & set("*?[")
        for pattern in patterns
        for name in layer.names
    )


def select(
    found: Survey,
    where: Selector | None,
    layers: int | Sequence[int] | None,
    exclude: Selector,
    frozen: bool = True,
) -> tuple[list[Found], list[Skipped]]:
    """The chosen layers, and what is left out with the reason.

    Args:
        found: the model's layers.
        where: as :func:`attention_modules.swap_attention` takes it.
        layers: positions within each network.
        exclude: as ``where``.
        frozen: whether frozen networks, and teachers, are chosen too that nothing names and that have no twin.

    Raises:
        AttentionSwapError: if nothing matches, a pattern matches nothing, or an index is out of range.
    """
    _check_patterns(found, "where", where)
    _check_patterns(found, "exclude", exclude)
    if not found.layers:
        raise AttentionSwapError(_nothing_known(found))
    matched = [layer for layer in found.layers if where is None or _matches(layer.names, layer.module, where)]
    crosses = [layer for layer in matched if layer.cross and layers is None and _names_cross(layer, where)]
    selves = [layer for layer in matched if not layer.cross]
    if matched and not selves and not crosses:
        refused = f". {_reasons(found)}" if found.others and where is None else ""
        raise AttentionSwapError(only_cross(matched, where) + refused)
    if not selves and not crosses:
        raise AttentionSwapError(
            f"where={where!r} selects no self-attention layer; the model has: {_listed(_self_names(found))}"
        )
    apart = set() if frozen else left_apart(found, where, selves)
    selves = [layer for layer in selves if layer.name not in apart]
    if layers is not None:
        selves = _at(found, selves, layers)
    wanted = {id(layer) for layer in (*selves, *crosses)}
    if not callable(exclude) and not exclude:
        excluded: set[int] = set()
    else:
        excluded = {id(layer) for layer in found.layers if _matches(layer.names, layer.module, exclude)}
    chosen = [layer for layer in found.layers if id(layer) in wanted - excluded]
    if not chosen:
        raise AttentionSwapError(f"exclude={exclude!r} leaves none of the {len(wanted)} selected attention layers")
    left = [
        _left_out(layer, id(layer) in excluded, layer.name in apart) for layer in found.layers if layer not in chosen
    ]
    return chosen, [*left, *found.others]


def left_apart(found: Survey, where: Selector | None, selves: Sequence[Found]) -> set[str]:
    """Names of matched layers that stay beside others, unless `where` names them.

    They are those of networks that stay, unless a twin does not, and of metrics. A callable names what it chooses; a
    pattern names such layers where it matches none but them.
    """
    stay = [network for network in found.networks if network.stays]
    apart = {layer.name for layer in selves if all(_is_in_metric(found, name) for name in layer.names)}
    if len(stay) < len(found.networks):
        apart.update(*(each.layers for each in stay if all(twin.stays for twin in found.twins_of(each))))
    if callable(where) or apart >= {layer.name for layer in selves}:
        return set()
    for pattern in [where] if isinstance(where, str) else where or ():
        matched = {layer.name for layer in selves if _matches(layer.names, layer.module, pattern)}
        if matched <= apart:
            apart = apart - matched
    return apart & {layer.name for layer in selves}


def _is_in_metric(found: Survey, layer: str) -> bool:
    """Whether the layer is part of a metric of torchmetrics, which would be another one after a swap."""
    parts = layer.split(".")
    around = (found.modules.get(".".join(parts[:depth])) for depth in range(len(parts)))
    return any(kind.__module__.startswith("torchmetrics.") for each in around for kind in type(each).__mro__)


def _at(found: Survey, selves: Sequence[Found], layers: int | Sequence[int]) -> list[Found]:
    """The layers at these positions of each network.

    Raises:
        AttentionSwapError: if an index is no integer, or out of range.
    """
    by_network: dict[str, list[Found]] = {}
    for layer in selves:
        by_network.setdefault(found.network_of(layer.name).name, []).append(layer)
    several = len(by_network) > 1
    return [
        members[index]
        for name, members in by_network.items()
        for index in _indices(layers, len(members), f" of network {name or 'the model'!r}" if several else "")
    ]


def _left_out(layer: Found, excluded: bool, apart: bool) -> Skipped:
    kind = getattr(layer.module, "plain_class", type(layer.module)).__name__
    if excluded:
        return Skipped(layer.name, kind, "excluded")
    if apart:
        reason = "its network is frozen, a teacher or a metric, beside others: swapped where `where` names it"
        return Skipped(layer.name, kind, reason)
    if layer.cross:
        return Skipped(layer.name, kind, "cross-attention: swapped only where a pattern of `where` spells its name")
    held = f": it keeps {type(layer.module.mechanism).__name__}" if isinstance(layer.module, Swapped) else ""
    return Skipped(layer.name, kind, f"not selected{held}")


def _indices(layers: int | Sequence[int], count: int, of: str = "") -> list[int]:
    wanted = list(layers) if isinstance(layers, Iterable) else [layers]
    for index in wanted:
        if isinstance(index, bool) or not isinstance(index, Integral):
            raise AttentionSwapError(f"layers takes integers, got {layers!r}; names and patterns go into where=")
        if not -count <= index < count:
            raise AttentionSwapError(
                f"layers: {index} is out of range, {count} self-attention layers{of} match (0 to {count - 1}, or "
                f"-{count} to -1 from the end)" + ("; name one network by where=" if of else "")
            )
    if not wanted:
        raise AttentionSwapError("layers is empty: give indices, or None for all")
    return sorted({int(index) % count for index in wanted})


def _check_patterns(found: Survey, argument: str, selector: Selector | None) -> None:
    """Each pattern must match an attention layer, and a callable take a name and a module."""
    if isinstance(selector, nn.Module):
        kind = type(selector).__name__
        raise AttentionSwapError(f"{argument} takes name patterns or a callable, got a {kind} itself: give its name")
    if callable(selector):
        return _check_callable(argument, selector)
    if selector is None:
        return
    if not isinstance(selector, Iterable):
        raise AttentionSwapError(f"{argument} takes name patterns or a callable, got {selector!r}")
    for pattern in [selector] if isinstance(selector, str) else selector:
        if not isinstance(pattern, str):
            raise AttentionSwapError(f"{argument} takes name patterns or a callable, got {pattern!r}")
        if not any(_matches(layer.names, layer.module, pattern) for layer in found.layers):
            raise AttentionSwapError(f"{argument}={pattern!r} {_why_no_match(found, pattern)}")


def _check_callable(argument: str, selector: Callable[..., object]) -> None:
    cached = hasattr(selector, "cache_info")  # by functools, which tells the signature of the function inside alone
    try:
        signature = inspect.signature(selector, follow_wrapped=cached)
    except (TypeError, ValueError):  # of a builtin, which has none
        return
    try:
        signature.bind("name", nn.Module)
    except TypeError as error:
        raise AttentionSwapError(f"{argument} is called with a name and a module, which it refuses: {error}") from error


def _why_no_match(found: Survey, pattern: str) -> str:
    """An attention layer that no host knows, a module that is no attention, or no module at all."""
    names = _all_names(found)
    here = f"attention layers here: {_listed(names)}"
    hit = next((name for name in found.modules if fnmatchcase(name, pattern)), None)
    around = next((other for other in found.others if hit is not None and hit.startswith(f"{other.name}.")), None)
    stranger = next((other for other in found.others if fnmatchcase(other.name, pattern)), around)
    if stranger is not None:
        return (
            f"names {stranger.name!r} ({stranger.kind}), an unsupported host: {stranger.reason}. "
            f"Known hosts: {', '.join(known_hosts())}"
        )
    if hit is not None:
        kind = type(found.modules[hit]).__name__
        return (
            f"names {hit!r} ({kind}), which is no attention layer of a known host ({', '.join(known_hosts())}); {here}"
        )
    hint = did_you_mean(pattern, names, cutoff=0.5)
    return f"matches no module name.{hint} Patterns match whole names, such as 'blocks.*.attn'; {here}"


def only_cross(matched: Sequence[Found], where: Selector | None) -> str:
    """What matched is cross-attention: who leaves it out, and how to name it where it is swapped."""
    outer, _, last = matched[0].name.rpartition(".")
    names = _listed([layer.name or "the model" for layer in matched])
    selects = "the model has" if where is None else f"where={where!r} selects"
    return (
        f"{selects} cross-attention only ({names}), which monitors and stabilizers leave out, and which "
        "is swapped only where a pattern spells the last part of its name, and without layers=: "
        f"where={'*.' + last if outer else last!r}"
    )


_OWN_CLASS = (
    "A layer of your own class fits where its forward calls F.scaled_dot_product_attention once (where its code does "
    "not name it, pass example=, what the model takes); for any other there is attnswap.register_host"
)


def _nothing_known(found: Survey) -> str:
    if not found.others:
        return f"the model has no attention layer of a known host (docs/hosts.md lists them). {_OWN_CLASS}"
    return f"{_reasons(found)}. {_OWN_CLASS}"


def _reasons(found: Survey) -> str:
    names: dict[tuple[str, str], list[str]] = {}
    for other in found.others:
        names.setdefault((other.kind, other.reason), []).append(other.name or "the model")
    reasons = "; ".join(f"{_listed(of)} ({kind}): {reason}" for (kind, reason), of in [*names.items()][:5])
    return f"no host (docs/hosts.md) knows the model's attention layers: {reasons}"


def _all_names(found: Survey) -> list[str]:
    return [name for layer in found.layers for name in layer.names]


def _self_names(found: Survey) -> list[str]:
    return [layer.name for layer in found.layers if not layer.cross]


def _listed(names: Sequence[str], limit: int = 6) -> str:
    shown = ", ".join(repr(name) for name in names[:limit]) or "none"
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
