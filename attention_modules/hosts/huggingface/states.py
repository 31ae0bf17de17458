"""A cache whose layer keeps the state of a mechanism in place of keys and values.

The cache's own object for the layer changes its class when the layer is first called with it. It then knows how many
tokens there were, as masks and positions need, stores no key, and reorders, repeats, resets and crops the state.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules.base import State
from attention_modules.hosts.base import Swapped, acting_mechanism
from attention_modules.hosts.model.attached import attach, is_of_transformers
from attention_modules.hosts.model.inputs import CACHES
from attention_modules.masks import visible

STATE = "attnswap_state"  # by which a layer hands the cache's object for it to our attention function
_READ = "attnswap_read"  # of a mask: what was read from it
_PREPARE = "_prepare_cache_for_generation"
RECALL = 128  # tokens by which a state can be taken back, once its cache was told to record
_BROKEN = (
    "the last call with this cache, or its crop(), ended in an error in layer {index}, after tokens were counted in "
    "other layers: start with an empty cache, or reset() this one; where one layer runs twice in a call, pass "
    "use_cache=False"
)
_KINDS = ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer")
_TOKENS = {"q": 2, "k": 2, "v": 2, "x": 1, "tokens": 1, "starts": 1}  # the dimension of tokens, of what is recorded


def state_layer(cache: Any, module: Any) -> Any:
    """The cache's object for the layer, ready for the tokens of one call; None where there is no cache.

    Raises:
        NotImplementedError: if it is of a kind that holds no state, or holds something else.
        RuntimeError: if the last call ended in an error, after its tokens were counted.
    """
    cache = getattr(cache, "self_attention_cache", cache)
    layers, index = getattr(cache, "layers", None), getattr(module, "layer_idx", None)
    name = _name(module)
    if layers is None or index is None or index < 0:
        raise NotImplementedError(
            f"{name} keeps a state, for which {type(cache).__name__} has no place: pass use_cache=False"
        )
    while len(layers) <= index and getattr(cache, "layer_class_to_replicate", None) is not None:
        layers.append(cache.layer_class_to_replicate())  # as the cache itself does when it is first given keys
    layer = layers[index]
    if not hasattr(layer, "state"):
        _become_state(layer, index, name)
    if layer.of not in (None, name) and layer.any_tokens:
        raise NotImplementedError(
            f"this cache holds the state of {layer.of} in layer {index}, which now has {name}: start with an empty one"
        )
    if layer.pending:
        raise RuntimeError(_BROKEN.format(index=index))
    layer.of, layer.ready = name, True
    layer.expected = next(filter(None, map(_counted, layers[:index])), None)
    return layer


def _counted(layer: Any) -> int | None:
    """How many tokens a growing layer of a cache has counted, also those of a call that has come to it.

    Keys are not counted, as some may have been taken out again.
    """
    if type(layer).__name__.removeprefix("State") not in _KINDS[:2]:
        return None
    return getattr(layer, "cumulative_length", None)


def _name(module: Any) -> str:
    """Of the mechanism's class, also where peft trains a copy of it."""
    return type(acting_mechanism(module.mechanism) or module.mechanism).__name__


@torch.compiler.disable
def _become_state(layer: Any, index: int, name: str) -> None:
    plain: Any = getattr(type(layer), "plain_class", type(layer))
    if plain.__name__ not in _KINDS or not plain.__module__.startswith("transformers."):
        raise NotImplementedError(
            f"{name} keeps a state, for which a {plain.__name__} has no place: take a DynamicCache or a StaticCache, "
            "or pass use_cache=False"
        )
    if torch.compiler.is_exporting():
        raise NotImplementedError(
            f"{name} keeps a state in the cache, which a program of torch.export would not hold: export with "
            "use_cache=False, for one number of tokens"
        )
    held = int(layer.get_seq_length())
    if held:
        raise NotImplementedError(
            f"this key-value cache holds {held} tokens of layer {index} that no layer with {name} has seen, as from "
            "before a swap or of peft's prefix tuning, and which it cannot continue from: start with an empty cache, "
            "or take prompt tuning or LoRA"
        )
    layer.__class__ = _keeping_state(plain)
    vars(layer).update(_empty() | {"index": index})
    layer.record_past = getattr(layer, "record_past", False)
    for name in ("keys", "values"):  # None, or of early_initialization
        vars(layer).pop(name, None)
    if not hasattr(layer, "cumulative_length"):
        layer.cumulative_length = 0


_FLAGS = ("ready", "any_tokens", "stale", "pending")


def _empty() -> dict[str, Any]:
    """What such a layer of a cache keeps, before it is called."""
    nothing = dict.fromkeys(("of", "hidden", "index", "expected"))
    return {"state": {}, "base": {}, "recent": {}} | nothing | dict.fromkeys(_FLAGS, False)


def attach_states(model: nn.Module) -> None:
    """Have each model that generates make caches ready for the states of its layers, before it asks them to record."""
    attach(model, _PREPARE, _prepared, is_of_transformers)


def _prepared(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's own preparation of a cache, and that of what will keep a state there.

    Raises:
        NotImplementedError: if the cache is of a kind that holds no state, or holds something else.
    """
    method = getattr(type(model), _PREPARE)
    done = method(model, *args, **kwargs)
    given = inspect.signature(method).bind(model, *args, **kwargs).arguments
    cache = next((given["model_kwargs"][name] for name in CACHES if given["model_kwargs"].get(name) is not None), None)
    own = getattr(cache, "self_attention_cache", cache)
    for module in model.modules() if hasattr(own, "layers") else ():
        if isinstance(module, Swapped) and module.mechanism.cache == "state" and not _left_out(own, module):
            state_layer(cache, module).ready = False
    if cache is not None and getattr(given.get("generation_config"), "is_assistant", False):
        cache.activate_past_recording()
    return done


def _left_out(cache: Any, module: Any) -> bool:
    """Whether the cache has no place for the layer: one of an encoder, or behind an assistant's early exit."""
    if not module.mechanism.spec.is_causal:
        return True
    grows = getattr(cache, "layer_class_to_replicate", None) is not None
    return not grows and (getattr(module, "layer_idx", None) or 0) >= len(cache.layers)


def mixed(
    module: Any,
    layer: Any,
    given: dict[str, Any],
    mask: Tensor | None,
    positions: Tensor | None,
    causal: bool,
    **rest: Any,
) -> Tensor:
    """The mechanism's output for new tokens, ``[B, H, N, d]``, with the state of earlier ones, which it changes.

    Args:
        module: the layer.
        layer: of the cache, or None.
        given: q, k, v ``[B, H, N, d]``, and x ``[B, N, C]`` or None.
        mask: boolean or additive ``[B, 1 or H, N, M]``, or None.
        positions: of the new tokens, ``[1 or B, N]``, where they are known.
        causal: whether the future is hidden.
        **rest: of the mechanism's other arguments.
    """
    tokens, starts = new_tokens(module, layer, given["q"], mask, positions, causal)
    given = {**given, "tokens": tokens, "starts": starts}

    def call(given: dict[str, Any], state: State | None, mix: Callable[..., Tensor] = module.mix) -> Tensor:
        tokens, starts = given["tokens"], given["starts"]
        mask = None if tokens is None else tokens[:, None, None]
        more = {} if starts is None else {"starts": starts}
        heads = (given[name] for name in "qkvx")
        filled: Any = None if state is None else _Filled(state)
        return mix(*heads, attn_mask=mask, is_causal=causal, state=filled, **more, **rest)

    if layer is None:
        return call(given, None)
    if layer.stale:
        layer.catch_up(module.mechanism, call)
    if not layer.record_past:
        layer.base, layer.recent = {}, {}
        state = dict(layer.state) if layer.any_tokens else {}
        out = call(given, state)
        layer.keep(state)
    else:
        out = layer.recorded(module.mechanism, call, given)
    layer.pending = False
    return out


class _Filled:
    """A dict that a mechanism fills, and no Mapping: hooks of accelerate's offloading and of FSDP2 copy these."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def __getitem__(self, name: str) -> Tensor:
        return self._state[name]

    def __setitem__(self, name: str, x: Tensor) -> None:
        self._state[name] = x

    def __contains__(self, name: str) -> bool:
        return name in self._state

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def new_tokens(
    module: Any, layer: Any, q: Tensor, mask: Tensor | None, positions: Tensor | None, causal: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Which of the new tokens are seen, and before which a sequence begins: boolean ``[B, N]``, or None.

    On a GPU checked without a sync.

    Raises:
        RuntimeError: if the mask is a bias, or does not hide the future alone, and the same earlier tokens as when they
            came.
    """
    name, number = _name(module), q.shape[2]
    if mask is None:
        if layer is not None and layer.hidden is not None:
            torch._assert_async((layer.hidden == 0).all(), _OTHER.format(name=name))
        return None, None
    seen = visible(mask).expand(q.shape[0], -1, -1, -1)
    if not causal:
        _check_unbiased(name, mask)
        torch._assert_async((seen == seen[:, :1, :1]).all(), _ROWS.format(name=name))
        return seen[:, 0, 0], None
    first = None
    if layer is not None and layer.is_static:  # whose mask has columns beyond the new tokens
        first = torch.as_tensor(layer.get_seq_length() - number, device=q.device)
    tokens, starts, shown, telling = _read(name, mask, seen, number, first, positions)
    if layer is not None:
        was = 0 if layer.hidden is None else layer.hidden
        held = mask.shape[-1] - number if first is None else first
        torch._assert_async(((held - shown == was) | ~telling).all(), _OTHER.format(name=name))
        layer.hidden = was + (~tokens).sum(-1)
    return tokens, starts


def _read(
    name: str, mask: Tensor, seen: Tensor, number: int, first: Tensor | None, positions: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """What a mask says of new tokens and how many earlier ones are seen; once for all layers that are handed it."""
    # A static cache may be given one mask at several places.
    # What is made in inference mode is of no use to a later call with gradients.
    kept = first is None and not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled()
    kept = kept and not mask.is_inference()
    known = getattr(mask, _READ, None) if kept else None
    if known is not None and known[0] is positions and known[1] == (number, mask._version, len(seen)):
        return known[2]
    _check_unbiased(name, mask)
    rows = torch.arange(number, device=mask.device)
    columns = torch.arange(mask.shape[-1], device=mask.device)
    own = rows + (mask.shape[-1] - number if first is None else first)
    tokens = seen[:, 0, rows, own]  # a token that is there sees itself
    starts = None
    if positions is not None and positions.dim() == 2 and positions.shape[-1] == number and number > 1:
        starts = tokens & (positions == 0)
    begun = torch.zeros_like(tokens, dtype=torch.long) if starts is None else starts.long().cumsum(1)
    telling = seen[:, 0].any(-1)  # rows of padding may see nothing
    before = seen[:, 0].any(1) & (columns < own[:1])
    expected = (before[:, None] & (begun == 0)[..., None]).expand(-1, -1, mask.shape[-1])
    within = (rows[:, None] >= rows) & (begun[..., None] == begun[:, None]) & tokens[:, None]
    expected = expected.index_copy(2, own, within)
    right = (seen == expected[:, None]).all(-1) | ~telling[:, None]
    torch._assert_async(right.all(), _TREE.format(name=name))
    found = tokens, starts, before.sum(-1), telling.any(-1)
    if kept:
        setattr(mask, _READ, (positions, (number, mask._version, len(seen)), found))
    return found


def _check_unbiased(name: str, mask: Tensor) -> None:
    if mask.requires_grad:  # it may be 0 before it is trained
        raise RuntimeError(_BIAS.format(name=name))
    if mask.dtype != torch.bool:
        torch._assert_async(((mask == 0) | ~visible(mask)).all(), _BIAS.format(name=name))


_ROWS = (
    "{name} takes masks of padding alone, and this one has other rows; where it hides the future, set the layer's "
    "is_causal = True before the swap"
)
_BIAS = (
    "{name} has no logits to which a bias could be added, and this mask is one (relative positions, ALiBi): restore "
    "this layer, or choose another mechanism"
)
_TREE = (
    "{name} keeps a state, so it takes masks that hide the future and padding alone, and this one hides more or less "
    "(a tree, a sliding window, or a prefix that sees itself): restore this layer, or choose another mechanism"
)
_OTHER = (
    "{name} keeps a state of the tokens that were seen when they came, and this mask hides others of them (or none): "
    "pass the same attention_mask with one more column for each new token, or start with an empty cache"
)


@functools.cache
def _keeping_state(plain: type) -> type:
    """A class of cache layers that keep a state in place of keys and values."""
    static = plain.__name__.startswith("Static")
    members: dict[str, Any] = {
        name: value for name, value in vars(_State).items() if name not in ("__dict__", "__weakref__", "__module__")
    }
    members |= {"__module__": __name__, "_layer_type": None, "plain_class": plain, "is_static": static}
    if not static and not plain.is_sliding:  # type: ignore[attr-defined]
        members["get_seq_length"] = lambda self: self.cumulative_length
    if static:
        for name in ("crop", "batch_repeat_interleave", "batch_select_indices", "activate_past_recording"):
            if not hasattr(plain, name):
                del members[name]
    # A class with a layer type would take the plain one's place in transformers' table.
    return type(f"State{plain.__name__}", (plain,), members)


class _State:
    """What a cache layer does that keeps a state: the members of each class of :func:`_keeping_state`."""

    plain_class: Any
    is_static: bool
    cumulative_length: Any
    state: State
    base: State
    recent: dict[str, Any]
    hidden: Tensor | None

    @property
    def keys(self: Any) -> Any:
        """None are kept: a cache that is rebuilt from keys and values would have lost what came before.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(
            f"this layer of the cache keeps the state of {self.of} in place of keys and values: copy the cache itself "
            "(copy.deepcopy, pickle), or pass use_cache=False where a tool takes caches apart, as DataParallel does"
        )

    values = keys

    def update(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Note how many tokens there are, and give the new keys and values alone."""
        if not self.ready:
            if self.any_tokens:
                raise NotImplementedError(
                    f"this cache holds the state of {self.of}, and no keys and values for another layer: start with an "
                    "empty cache"
                )
            self._become_plain()
            return self.update(key_states, value_states, *args, **kwargs)
        self.ready = False
        number = key_states.shape[-2]
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            if self.is_static:
                self.batch_size = key_states.shape[0]
                self.cumulative_length = self.cumulative_length.to(self.device)
            self.is_initialized = True
        if getattr(self, "is_sliding", False):
            self._check_window(number)
        if isinstance(self.cumulative_length, Tensor):
            self.cumulative_length.add_(number)
        else:
            self.cumulative_length += number
            if self.expected not in (None, self.cumulative_length):  # more, or an error came between two layers
                raise RuntimeError(_BROKEN.format(index=self.index))
        self.pending = True
        return key_states, value_states

    def _check_window(self: Any, number: int) -> None:
        """Count the tokens of a layer whose mask hides those beyond a window, which a state does not forget."""
        window = self.max_cache_len if self.is_static else self.sliding_window
        held = self.cumulative_length_int if self.is_static else self.cumulative_length
        if held + number > window:
            raise NotImplementedError(
                f"{self.of} keeps a state of all tokens, and this layer's mask hides those beyond {window}: generate "
                "no more than that, or leave the layer out of the swap"
            )
        if self.is_static:
            self.cumulative_length_int += number

    def _become_plain(self: Any) -> None:
        self.__class__ = self.plain_class
        for name in _empty():
            delattr(self, name)
        self.keys = self.values = None
        self.is_initialized = False

    def keep(self: Any, state: State) -> None:
        """Take a state; a static cache writes it into the tensors that it has."""
        for name, new in state.items():
            old = self.state.get(name)
            if self.is_static and old is not None and _alike(old, new):
                with torch.no_grad():
                    old.copy_(new)
            elif self.is_static:
                self.state[name] = new.detach().clone()
                if not torch.compiler.is_compiling():
                    torch._dynamo.mark_static_address(self.state[name])
            else:
                self.state[name] = new
        self.any_tokens = True

    def recorded(self: Any, mechanism: Any, call: Callable[..., Tensor], given: dict[str, Any]) -> Tensor:
        """The output for new tokens, with what is needed to take the last ones back."""
        outs, more = [], given["q"].shape[2]
        state = dict(self.state) if self.any_tokens else {}
        if more > RECALL:  # the state before the last of them is where a crop may go back to
            outs.append(call(_part(given, slice(0, more - RECALL)), state))
            self.base, self.recent = dict(state), {}
            given = _part(given, slice(more - RECALL, None))
        elif not self.recent:
            self.base = dict(state)
        outs.append(call(given, state))
        self.recent = _joined(self.recent, given)
        held = self.recent["q"].shape[2]
        if held > 2 * RECALL:
            self._advance(mechanism, call, self.base, _part(self.recent, slice(0, held - RECALL)))
            self.recent = _part(self.recent, slice(held - RECALL, None))
        self.keep(state)
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    def catch_up(self: Any, mechanism: Any, call: Callable[..., Tensor]) -> None:
        """Make the state of a cropped cache from the one before its last tokens."""
        state = dict(self.base)
        if self.recent:
            self._advance(mechanism, call, state, self.recent)
        self.state, self.stale = {}, False
        self.keep(state)
        self.any_tokens = bool(state)

    def _advance(self: Any, mechanism: Any, call: Callable[..., Tensor], state: State, given: dict[str, Any]) -> None:
        """Let a state take in tokens whose outputs nobody needs; past the hooks of the mechanism."""

        def forward(q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, **rest: Any) -> Tensor:
            return mechanism.forward(q, k, v, **{**rest, "dropout_p": 0.0}, **({} if x is None else {"x": x}))

        call(given, state, forward)

    def activate_past_recording(self: Any) -> None:
        """Keep from now on what :meth:`crop` needs, as assisted decoding asks."""
        self.record_past = True

    def crop(self: Any, number: int) -> None:
        """Take the last tokens back: so many where ``number`` is negative, else all but so many.

        Raises:
            NotImplementedError: if that many were not recorded.
        """
        held = int(self.get_seq_length())
        gone = min(held, -number if number <= 0 else max(0, held - number))
        if gone == 0:
            return
        known = self.recent["q"].shape[2] if self.recent else 0
        if gone > known:
            self.pending = True  # the layers before this one are cropped
            raise NotImplementedError(
                f"the state of {self.of} cannot be taken back by {gone} tokens, of which {known} were recorded: call "
                "cache.activate_past_recording() before them and after the cache's first token, which keeps the last "
                f"{RECALL}; or start with an empty cache"
            )
        lost = self.recent["tokens"]
        if self.hidden is not None and lost is not None:
            self.hidden = self.hidden - (~lost[:, -gone:]).sum(-1)
        self.recent = _part(self.recent, slice(0, known - gone)) if gone < known else {}
        self.cumulative_length -= gone
        self.stale = True

    def reset(self: Any) -> None:
        """Begin anew; a static cache keeps its tensors."""
        if not self.is_static:
            self.state = {}
        if isinstance(self.cumulative_length, int):
            self.cumulative_length = 0
        else:
            self.cumulative_length.zero_()
        if hasattr(self, "cumulative_length_int"):
            self.cumulative_length_int = 0
        self.base, self.recent, self.hidden = {}, {}, None
        self.stale = self.any_tokens = self.ready = self.pending = False

    def reorder_cache(self: Any, rows: Tensor) -> None:
        self._each(lambda x: x.index_select(0, rows.to(x.device)))

    def batch_repeat_interleave(self: Any, repeats: int) -> None:
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self: Any, rows: Tensor) -> None:
        self._each(lambda x: x[rows])

    def _each(self: Any, of: Callable[[Tensor], Tensor]) -> None:
        """Change the samples of all that is kept."""
        for kept in (self.state, self.base, self.recent):
            kept.update({name: x if x is None else of(x) for name, x in kept.items()})
        self.hidden = self.hidden if self.hidden is None else of(self.hidden)

    def offload(self: Any) -> None:
        """A state is small, and stays where it is."""

    def prefetch(self: Any) -> None:
        """A state is small, and stays where it is."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _blank, (self.plain_class,), vars(self).copy()


def _blank(plain: type) -> Any:
    """An empty layer of a cache that keeps a state, for copying and unpickling to fill."""
    return object.__new__(_keeping_state(plain))


def _alike(old: Tensor, new: Tensor) -> bool:
    return old.shape == new.shape and old.dtype == new.dtype and old.device == new.device


def _part(given: dict[str, Any], tokens: slice) -> dict[str, Any]:
    """What was given of some tokens."""
    whole = slice(None)
    return {name: x if x is None else x[(whole,) * _TOKENS[name] + (tokens,)] for name, x in given.items()}


def _joined(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """What was given of some tokens and of those after them; all are seen, and none starts, where nothing is said."""
    if not first:
        return {name: x if x is None else x.detach().clone() for name, x in then.items()}
    joined: dict[str, Any] = {}
    for name, dim in _TOKENS.items():
        pair = [first[name], then[name]]
        if pair[0] is not None or pair[1] is not None:
            for at, given in enumerate((first, then)):
                if pair[at] is None:
                    shape = (given["q"].shape[0], given["q"].shape[2])
                    pair[at] = torch.full(shape, name == "tokens", device=given["q"].device)
            joined[name] = torch.cat([x.detach() for x in pair], dim)
        else:
            joined[name] = None
    return joined
