"""What a host is, and what every swapped layer has in common."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attention_modules.base import OPAQUE
from attention_modules.hosts.forwards import has_other_forward, tokens_of
from attention_modules.hosts.limits import Limits
from attention_modules.hosts.query import QueryPart, accept_plain_layout, become, drop_query, empties, restore_query
from attention_modules.hosts.weights import Rows, quantized, trained_instead, wrapped_by_peft
from attention_modules.masks import check_columns, without_causal_bias
from attention_modules.mechanism import AttentionMechanism, AttentionSpec
from attention_modules.sharing import Link, from_the_layer

PLAN = "attnswap.json"  # beside the weights that save_pretrained writes
IN_CHECKPOINT = "saved_by_attnswap_load_with_load_swapped"  # of a layer without Parameters of its own, in Lightning's
READS_SWAPPED = "reads_the_swapped_layout"  # set on a hook of loading that comes after the plain layout is accepted
MARK = "saved_by_attnswap_load_with_load_pretrained"  # key, below "mechanism.", of a swapped layer's file


class Swapped(nn.Module):
    """Mixed in before a host's class when a layer is swapped: the object stays, its class changes.

    The Parameters, hooks, names and parents of the layer are untouched; to restore is to set the class back.
    """

    host: ClassVar[Host]
    plain_class: ClassVar[type[nn.Module]]
    mechanism: AttentionMechanism
    dropped_query: tuple[QueryPart, ...]
    link: Link | None = None
    head_mesh: Any = None
    """The processes over which its heads are spread (tensor parallelism), if so."""
    fixed_tokens: int | None = None
    """How many tokens each call has, where the model fixes it and the mechanism counts columns."""
    fixed_window: Any = None
    """The rows and columns in which these lay at the swap, where the layer says so."""
    masks_tokens: ClassVar[bool] = True
    """Whether its masks hide tokens of a sequence, and the host does not check itself what they say of positions."""
    emptied = False
    """Whether ``to_empty`` took the values of the mechanism's Parameters."""

    @classmethod
    def members(cls, plain: type[nn.Module]) -> dict[str, Any]:
        """What a swapped class of this plain one has of its own, beside its forward."""
        return {}

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **given: Any) -> Tensor:
        """The mechanism's output, with what it needs beside q, k and v.

        Args:
            q: queries ``[B, H, N, d]``.
            k: keys ``[B, H, M, d]``.
            v: values ``[B, H, M, d]``.
            x: what the queries were made of, ``[B, N, C]``.
            **given: of the mechanism's other arguments.

        Raises:
            RuntimeError: if the mechanism counts columns, and these are not all of the model's positions.
            ValueError: if it does, and the mask says that columns are no positions.
        """
        mask, is_causal = without_causal_bias(given.get("attn_mask"), given.get("is_causal", False), q)
        if mask is not given.get("attn_mask"):
            given |= {"attn_mask": mask, "is_causal": is_causal}
        window = None if self.fixed_tokens is None else getattr(self, "window_size", None)
        if self.fixed_tokens is not None and (q.shape[2] != self.fixed_tokens or window != self.fixed_window):
            windows = "" if window is None else f", in windows of {window} (at the swap {self.fixed_window})"
            raise RuntimeError(
                f"{type(self.mechanism).__name__} counts columns, and the model had positions for {self.fixed_tokens} "
                f"tokens at the swap, of which this layer is given {q.shape[2]}{windows}: which ones they are is not "
                "known (masked autoencoders, dropped patches, another image size); give it all, choose another "
                "mechanism, or after set_input_size() restore and swap anew"
            )
        if self.mechanism.counts_columns and self.masks_tokens and given.get("attn_mask") is not None:
            check_columns(type(self.mechanism).__name__, given["attn_mask"])
        return self.mechanism(q, k, v, **given, **from_the_layer(self, self.mechanism.needs, x, v))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__" and not issubclass(value, Swapped):
            raise AttentionSwapError(
                f"this {self.plain_class.__name__} is swapped, and as a {value.__name__} would compute without its "
                f"{type(self.mechanism).__name__}: call restore_attention() before what changes classes (token merging)"
            )
        super().__setattr__(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kept = [part for part in self.dropped_query if part.filled(self)]
        super()._apply(fn, recurse)
        with torch.no_grad():
            for part in kept:
                part.change_in(self, fn)
        if empties(fn):
            self.note_as_made()
            self.emptied = True
        return self

    def _load_from_state_dict(self, state_dict: Any, *rest: Any) -> None:
        """Accept the plain layout beside the swapped one, strictly; what converts older layouts comes before."""
        hooks = self._load_state_dict_pre_hooks
        after = {key for key, hook in hooks.items() if getattr(getattr(hook, "hook", hook), READS_SWAPPED, False)}
        converters = [(key, hook) for key, hook in hooks.items() if key not in after]
        self._load_state_dict_pre_hooks = OrderedDict(
            [*converters, (-1, self._accept), *((key, hooks[key]) for key in hooks if key in after)]
        )
        try:
            super()._load_from_state_dict(state_dict, *rest)
        finally:
            self._load_state_dict_pre_hooks = hooks

    def _accept(self, state_dict: Any, prefix: str, local_metadata: Any, _: bool, missing: list[str], *__: Any) -> None:
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        state_dict.pop(f"{prefix}mechanism.{IN_CHECKPOINT}", None)
        marked = state_dict.pop(f"{prefix}mechanism.{MARK}", None) is not None  # then its tensors must be there
        parameters = {f"{prefix}mechanism.{key}": each for key, each in self.mechanism.named_parameters()}
        found = parameters.keys() & state_dict.keys()
        blank = assign and any(each.is_meta for each in parameters.values())  # has no values to keep
        if not marked and not blank and self._is_there(state_dict, prefix):
            given = {*state_dict}
            self.accept_plain_mechanism(state_dict, prefix + "mechanism.")
            kept = state_dict.keys() - given
            tied = _note_loaded(missing, parameters, found, kept)
            if kept and not tied and not self.emptied and self._has_changed():
                self._warn_of_a_mixture()
            elif kept:
                self.note_as_made(copies=1)  # onto themselves
            self.emptied = False
        self.emptied = self.emptied and not found
        accept_plain_layout(self, self.dropped_query, state_dict, prefix, assign)

    def note_as_made(self, copies: int = 0) -> None:
        """Note that the mechanism's Parameters are as they were made, once they are copied so many times."""
        self.__dict__["made_at"] = {name: at + copies for name, at in self._versions().items()}

    def _versions(self) -> dict[str, int]:
        named = self.mechanism.named_parameters()
        return {name: parameter._version for name, parameter in named if not parameter.is_inference()}

    def _has_changed(self) -> bool:
        """Whether the mechanism's Parameters were changed in place since they were made; not known of a copy."""
        made: Mapping[str, int] = self.__dict__.get("made_at", {})
        return any(version > made.get(name, version) for name, version in self._versions().items())

    def _warn_of_a_mixture(self) -> None:
        """Say that plain weights come to what the mechanism learned with others."""
        warnings.warn(
            "a state dict of plain attention (or of a folder that a plain class read) has nothing for the "
            f"{type(self.mechanism).__name__}, which has changed since the swap and keeps its values: load a state "
            "dict of the swapped model, or swap anew",
            stacklevel=10,
        )

    def _is_there(self, state: dict[str, Tensor], prefix: str) -> bool:
        """Whether ``state`` has all weights of the layer itself, and is no part of a checkpoint without this layer."""
        own = (name for name, _ in self.named_parameters() if not name.startswith("mechanism."))
        return all(prefix + name in state for name in own)

    def accept_plain_mechanism(self, state: dict[str, Tensor], prefix: str) -> None:
        """A checkpoint from before the swap has nothing for the mechanism: it keeps its values, or gets new ones."""
        if any(key.startswith(prefix) for key in state):
            return
        self.fill_state(state, prefix)

    def fill_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Give a state dict the mechanism's own tensors; new ones where ``to_empty`` took them and nobody made others.

        Raises:
            RuntimeError: if a callable built the mechanism, whose arguments are not known.
        """
        sharded = any(hasattr(each, "full_tensor") for each in self.mechanism.parameters())
        if self.emptied and not self._has_changed() and not sharded:
            with torch.random.fork_rng(devices=[]):
                self.mechanism.reset_parameters()
        self.mechanism.state_dict(destination=state, prefix=prefix)

    def __prepare_scriptable__(self) -> Any:
        """Called by :func:`torch.jit.script`, also of a model that holds the layer.

        Raises:
            AttentionSwapError: always.
        """
        raise AttentionSwapError(
            f"torch.jit.script() cannot compile a swapped {self.plain_class.__name__}, whose mechanism "
            f"({type(self.mechanism).__name__}) is no TorchScript: use torch.jit.trace(), torch.export.export() or "
            "torch.compile(), or call restore_attention() first"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.plain_class.__new__(self.plain_class)  # copied and pickled as its class does it
        return _swapped_blank, (type(self).host, plain), self.__getstate__()


@dataclass
class _Loading:
    """What swapped layers found, and what they filled themselves, in a call of ``load_state_dict``: keys and ids."""

    missing: list[str]  # by which the call is known
    found: dict[str, int]
    filled: dict[str, int]
    told: bool = False


_LOADINGS: deque[_Loading] = deque(maxlen=8)  # calls may be nested, by hooks


def _note_loaded(
    missing: list[str], parameters: Mapping[str, Tensor], found: Collection[str], filled: Collection[str]
) -> bool:
    """Note a layer's keys; say so where a state dict has tensors for the mechanisms of some layers alone.

    Of one that is the same Parameter as another layer's, which was found, the key is missing, as in any model: files
    hold such a Parameter once, and loaders that know it ask for this.

    Returns:
        Whether all that the layer filled were found under other names.
    """
    known = next((each for each in [*_LOADINGS] if each.missing is missing), None)
    if known is None:
        known = _Loading(missing, {}, {})
        _LOADINGS.append(known)
    known.found |= {key: id(parameters[key]) for key in found}
    known.filled |= {key: id(parameters[key]) for key in filled if key in parameters}
    tied = [key for key, each in known.filled.items() if each in known.found.values()]
    missing += tied
    known.filled = {key: each for key, each in known.filled.items() if key not in tied}
    if known.found and known.filled and not known.told:
        known.told = True
        warnings.warn(
            f"the state dict has tensors for the mechanisms of some layers ({min(known.found)}) and none for others "
            f"({min(known.filled)}), which keep the values that they have: right where these were swapped later, or "
            "their weights are of a plain model; else the file is not whole",
            stacklevel=11,
        )
    return all(key in tied for key in filled)


_SWAPPED_CLASSES: dict[tuple[Host, type[nn.Module]], type[Swapped]] = {}


def swapped_class(host: Host, plain: type[nn.Module]) -> type[Swapped]:
    """The one subclass of ``plain`` whose forward calls ``self.mechanism``."""
    if (host, plain) not in _SWAPPED_CLASSES:
        own = {"host": host, "plain_class": plain, "__module__": host.mixin.__module__}
        members = {**host.mixin.members(plain), **own}
        _SWAPPED_CLASSES[host, plain] = type(f"Swapped{plain.__name__}", (host.mixin, plain), members)
    return _SWAPPED_CLASSES[host, plain]


def _swapped_blank(host: Host, plain: nn.Module) -> nn.Module:
    """An empty swapped layer from an empty plain one, for copying and unpickling to fill."""
    plain.__class__ = swapped_class(host, type(plain))
    return plain


def plain_type(layer: nn.Module) -> type[nn.Module]:
    """The layer's class, without the one that parametrizations of its own tensors put over it."""
    return type(layer).__bases__[0] if parametrize.is_parametrized(layer) else type(layer)


def _set_class(layer: nn.Module, cls: type[nn.Module]) -> None:
    """Give the layer a class, under the one that parametrizations of its own tensors put over it."""
    if parametrize.is_parametrized(layer):
        over = {name: value for name, value in vars(type(layer)).items() if name not in ("__dict__", "__weakref__")}
        cls = type(f"Parametrized{cls.__name__}", (cls,), over)
    become(layer, cls)


class Host(ABC):
    """Knows one family of attention layers: how to find, read, swap and restore them.

    Hosts carry no state: two of the same class are equal.
    """

    name: ClassVar[str]
    mixin: ClassVar[type[Swapped]]
    spreads_heads: ClassVar[bool] = False
    """Whether its layers, as they are when swapped, may hold some of their heads only (tensor parallelism)."""
    tells_causality: ClassVar[bool] = False
    """Whether a layer whose spec is not causal sees the future, and not only may."""
    yields_to_parts: ClassVar[bool] = False
    """Whether a module with attention layers inside is none of its layers, but these are."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def concerns(self, kind: type[nn.Module]) -> bool:
        """Whether this host has anything to say of modules of the class; where not, it is asked about none of them."""
        return True

    @abstractmethod
    def understands(self, module: nn.Module) -> bool:
        """Whether this plain module is one of this host's layers, with the host's own forward."""

    def understands_in(self, module: nn.Module, parent: nn.Module | None) -> bool:
        """As `understands`, where the module stands below ``parent`` in the model."""
        return self.understands(module)

    @abstractmethod
    def spec(self, layer: Any, layer_index: int | None) -> AttentionSpec:
        """What a mechanism is told about the layer."""

    @abstractmethod
    def query_parts(self, layer: Any) -> tuple[QueryPart, ...]:
        """Where a plain layer holds its query rows."""

    @abstractmethod
    def qk_rows(self, layer: Any) -> tuple[Rows, Rows]:
        """The query's and the key's rows of the projection, as the layer is now."""

    def near_miss(self, module: nn.Module) -> str | None:
        """Why a module that looks like this host's is none, if so."""
        return None

    def is_cross(self, layer: nn.Module, parent: nn.Module | None, name: str) -> bool:
        """Whether the queries of the layer, which has this name in the model, are no tokens of its keys' sequence."""
        return False

    def bound(self, layer: nn.Module) -> Host:
        """This host with what a call showed of the layer, for as long as that is read."""
        return self

    def batch_first(self, layer: nn.Module) -> bool:
        """Whether the layer is given ``[B, N, C]``, and not ``[N, B, C]``."""
        return bool(getattr(layer, "batch_first", True))

    def tokens(self, layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """The layer's input among the arguments of a call; None where there is no tensor."""
        return tokens_of(layer, args, kwargs)

    def num_tokens(self, layer: Any, ancestors: Sequence[nn.Module]) -> int | None:
        """The sequence length where the model around the layer fixes it (``ancestors``: outermost first)."""
        return None

    def fixes_length(self, ancestors: Sequence[nn.Module]) -> bool:
        """Whether each call has as many tokens as `num_tokens` says, neither fewer nor more."""
        return False

    def groups(self, layer: Any) -> int:
        """Query heads that share one key head."""
        return 1

    def scale(self, layer: Any) -> float | None:
        """Factor on q kᵀ of what its projections give; None for 1/sqrt(d)."""
        return None

    def qk_biases(self, layer: Any) -> tuple[Rows | None, Rows | None]:
        """The query's and the key's rows of the projection's bias, as the layer is now; None where it has none."""
        query, key = (_bias_of(rows) for rows in self.qk_rows(layer))
        return query, key

    def norm(self, layer: Any) -> str | None:
        """What normalizes queries and keys before their product, so that the scale of W_q and W_k is lost, if so."""
        return None

    def caveat(self, layer: Any) -> str | None:
        """Why the spectrum of W_qᵀ W_k is not that of the logits, if so."""
        norm = self.norm(layer)
        return norm and f"{norm}: the logits do not have the spectrum of W"

    def weights_refusal(self, layer: Any) -> str | None:
        """Why W_q and W_k cannot be given, if so."""
        return None

    def limits(self, layer: Any) -> Limits:
        """What this plain or swapped layer takes."""
        groups = self.groups(layer)
        return Limits(
            without_query=None
            if groups < 2
            else f"{groups} query heads share each key head (grouped keys), so without a query all heads of a group "
            "would be identical; use a mechanism with a query, or a model with as many key as query heads"
        )

    def map_modules(self, layer: Any) -> list[str]:
        """Names of the modules in a plain layer that its forward calls with attention maps."""
        return []

    def silenced(self, layer: Any, gives_weights: bool) -> list[str]:
        """Those of them with hooks, which see nothing where a mechanism acts (that gives its map)."""
        return [name for name in self.map_modules(layer) if has_hooks(layer.get_submodule(name))]

    def settle(self, model: nn.Module) -> None:
        """Bring what surrounds the layers in line with which of them are swapped."""
        return None

    def insert(self, layer: Any, mechanism: AttentionMechanism) -> None:
        """Put a mechanism into a plain or swapped layer."""
        if not isinstance(layer, Swapped):
            _set_class(layer, swapped_class(self, plain_type(layer)))
            layer.dropped_query = ()
            layer.__dict__["__module__"] = OPAQUE
        if mechanism.uses_query:
            self._restore_query(layer)
        elif not layer.dropped_query:
            self._drop_query(layer)
        layer.mechanism = mechanism

    def remove(self, layer: Any) -> None:
        """Make a swapped layer plain again."""
        self._restore_query(layer)
        del layer.dropped_query
        for own in ("link", "head_mesh", "fixed_tokens", "fixed_window", "made_at", "emptied", "__module__"):
            layer.__dict__.pop(own, None)
        self._take_mechanism(layer)
        _set_class(layer, layer.plain_class)

    def _take_mechanism(self, layer: Any) -> None:
        del layer.mechanism

    def _drop_query(self, layer: Any) -> None:
        parts = self.query_parts(layer)
        drop_query(layer, parts)
        layer.dropped_query = parts

    def _restore_query(self, layer: Any) -> None:
        restore_query(layer, layer.dropped_query)
        layer.dropped_query = ()


def _bias_of(rows: Rows) -> Rows | None:
    name = rows.tensor.replace("weight", "bias")
    return replace(rows, tensor=name) if getattr(rows.owner, name, None) is not None else None


def plain_linear_refusal(layer: nn.Module, owners: Mapping[str, type[nn.Module]]) -> str | None:
    """Why the query rows of these projections cannot be split off, if so."""
    for path, wanted in owners.items():
        owner = layer.get_submodule(path)
        if wrapped_by_peft(owner):
            return (
                f"its projection {path!r} is wrapped by peft ({type(owner).__name__}): call merge_and_unload() first, "
                "or swap before get_peft_model(), with target_modules that leave out the query's projection"
            )
        if plain_type(owner) is not wanted:
            found = f"{type(owner).__module__}.{type(owner).__qualname__}"
            return f"its projection {path!r} is a {found}, and only a plain {wanted.__name__} can be split"
        made = [name for name in ("weight", "bias") if name not in owner._parameters]
        if made:
            return (
                f"the {' and '.join(made)} of its projection {path!r} is computed at each call (SigmaReparam, "
                "pruning, weight_norm or spectral_norm), and only Parameters can be split: list SwapAttention before "
                "SigmaReparam, or make it permanent first, as prune.remove() and remove_weight_norm() do"
            )
        if codes := quantized(owner):
            return f"its projection {path!r} cannot be split: {codes}"
        if has_other_forward(owner):
            return f"in its projection {path!r} {_REPLACED}"
    return None


def query_return_refusal(layer: Any) -> str | None:
    """Why a swapped layer cannot take its kept query rows back, if so."""
    for part in layer.dropped_query:
        owner, key = layer.get_submodule(part.owner), part.key("")
        if wrapped_by_peft(owner):
            return f"its projection {part.owner!r} is wrapped by peft: call merge_and_unload() first"
        if owner is not layer and has_other_forward(owner):
            return f"in its projection {part.owner!r} {_REPLACED}"
        if parametrize.is_parametrized(owner, part.tensor):
            return (
                f"its projection {key!r} is computed at each call (a parametrization such as SigmaReparam): remove "
                "that first (torch.nn.utils.parametrize.remove_parametrizations, "
                "attention_modules.stabilizers.sigma.remove_sigma_reparam)"
            )
        if not part.filled(layer):
            return (
                f"the kept query rows of {key!r} are gone: the projection was replaced after the swap, or a swapped "
                "checkpoint, which holds none, was assigned to a model on the meta device, or load_pretrained read "
                "what such a model saved"
            )
        rest = owner._parameters.get(part.tensor)
        if rest is not None and (codes := quantized(owner, part.tensor)):
            return f"its projection {key!r} takes no rows: {codes}"
        if rest is None and part.full > part.size:
            return (
                f"its projection {key!r} is no Parameter any more, but computed at each call (pruning, weight_norm or "
                "spectral_norm): make it permanent first, as prune.remove() and remove_weight_norm() do"
            )
        if rest is not None and rest.shape[part.dim] != part.full - part.size:
            return (
                f"its projection {key!r} has {rest.shape[part.dim]} features, and without the query's it had "
                f"{part.full - part.size}: it was replaced after the swap"
            )
        if hooked := part.hooked(layer):
            return hooked
    return None


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody reads or changes what goes into the module, or comes out of it."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(kinds)


def hook_refusal(layer: nn.Module) -> str | None:
    """Why a layer cannot be changed of which accelerate dispatched or offloads a part, if so."""
    held = next((part for part in layer.modules() if "_hf_hook" in part.__dict__), None)
    if held is None:
        return None
    return (
        f"accelerate keeps the {type(held).__name__}'s forward and weights as they are (device_map, dispatch_model "
        "or offloading): call accelerate.hooks.remove_hook_from_module(model, recurse=True), swap, and dispatch again"
    )


_REPLACED = (
    "the forward was replaced on the object (by hooks of accelerate or diffusers, or by hand), and would stay as it "
    "is: remove the hooks first"
)


def forward_refusal(layer: nn.Module) -> str | None:
    """Why a layer cannot change its class, if its forward is not its class's."""
    if not has_other_forward(layer):
        return None
    return f"here {_REPLACED}"


def acting_mechanism(found: Any) -> AttentionMechanism | None:
    """The mechanism, or the copy that peft trains in its place (``modules_to_save``); None where it is neither."""
    found = trained_instead(found)
    return found if isinstance(found, AttentionMechanism) else None


@dataclass(frozen=True)
class AttentionLayer:
    """A self-attention layer that a host understands.

    Args:
        name: the layer's name in the model ("" where it is the model).
        module: the layer.
        host: the host that understands it.
        spec: what a mechanism is told about it.
        number: its place among all self-attention layers of the model, whatever their network; None if it is none.
        network: name of the network that holds it ("" where the model is one).
        fixed_tokens: how many tokens the model around it gives it in each call, where it fixes that.
    """

    name: str
    module: nn.Module
    host: Host
    spec: AttentionSpec
    number: int | None = None
    network: str = ""
    fixed_tokens: int | None = None

    @property
    def mechanism(self) -> AttentionMechanism | None:
        """The layer's mechanism; None where the layer is plain."""
        return acting_mechanism(getattr(self.module, "mechanism", None))

    @property
    def spectrum_caveat(self) -> str | None:
        """Why the spectrum of W_qᵀ W_k is not that of the logits (rope, q/k norm), if so."""
        return self.host.caveat(self.module)

    @property
    def scale(self) -> float:
        """Factor on q kᵀ of what its projections give."""
        factor = self.host.scale(self.module)
        return self.spec.head_dim**-0.5 if factor is None else factor

    def _rows(self) -> tuple[Rows, Rows]:
        reason = self.host.weights_refusal(self.module)
        if reason is not None:
            raise ValueError(f"{self.name or 'the model'!r} has no query and key weights to read: {reason}")
        return self.host.qk_rows(self.module)

    def _shares_rows(self) -> bool:
        mechanism = self.mechanism
        return mechanism is not None and not mechanism.uses_query

    def qk_weights(self) -> tuple[Tensor, Tensor]:
        """W_q and W_k ``[H, d, dim]``: differentiable views of the current Parameters.

        Without a query W_q is W_k; grouped keys are repeated, one for each query head.

        Raises:
            ValueError: if queries and keys are no linear function of the input.
        """
        query, key = self._rows()
        w_k = key.weight().unflatten(0, (-1, self.spec.head_dim)).repeat_interleave(self._groups, 0)
        if self._shares_rows():
            return w_k, w_k
        return query.weight().unflatten(0, (-1, self.spec.head_dim)), w_k

    @property
    def _groups(self) -> int:
        return self.host.groups(self.module)

    def qk_parameters(self) -> list[nn.Parameter]:
        """The Parameters that :meth:`qk_weights` reads, each once.

        Raises:
            ValueError: if there are none, or a weight is computed at each call.
        """
        found = self.parameters_of(*self._rows()[self._shares_rows() :])
        return list({id(parameter): parameter for parameter in found}.values())

    def parameters_of(self, *rows: Rows) -> list[nn.Parameter]:
        """The Parameters of weights of the layer; an error names it."""
        try:
            return [parameter for each in rows for parameter in each.parameters()]
        except ValueError as error:
            raise ValueError(f"the query and key weights of {self.name or 'the model'!r}: {error}") from error


class AttentionSwapError(ValueError):
    """A swap or its undoing was refused; nothing of the model was changed.

    Example:
        >>> import torch
        >>> import attnswap
        >>> try:
        ...     attnswap.swap_attention(torch.nn.Linear(4, 4), "softmax")
        ... except attnswap.AttentionSwapError as error:
        ...     print(str(error).partition(" (")[0])
        the model has no attention layer of a known host
    """
