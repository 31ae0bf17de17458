"""Any layer whose forward calls ``scaled_dot_product_attention``: a mechanism takes the place of that call."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from attention_modules.base import AttentionSpec
from attention_modules.hosts.base import Host, Swapped
from attention_modules.hosts.forwards import definer, has_other_forward
from attention_modules.hosts.limits import Limits
from attention_modules.hosts.query import QueryPart
from attention_modules.hosts.sdpa.calls import TARGET, Calls, calls_of, other_entries
from attention_modules.hosts.sdpa.record import Record, knowing, known
from attention_modules.hosts.sdpa.seam import ORDER, Seam
from attention_modules.hosts.sdpa.taken import taken
from attention_modules.hosts.sdpa.trial import others_of, tried, with_values
from attention_modules.hosts.sdpa.whose import whose
from attention_modules.hosts.torch import same_view
from attention_modules.hosts.weights import Rows
from attention_modules.kernels import transforms_active
from attention_modules.masks import without_causal_bias
from attention_modules.mechanism import AttentionMechanism
from attention_modules.sharing import READS

_CHECKPOINT = torch.utils.checkpoint.checkpoint.__code__.co_filename
# Of whose layers other hosts say what fits.
LIBRARIES = ("attention_modules", "mmcv", "mmseg", "timm", "torch", "transformers")

_MOVED = (
    "its {} are not of the tokens in their places (it flips, rolls, sorts or mixes them), and what a mechanism reads "
    "of a token would act for another one; choose a mechanism that needs no input"
)

Given = tuple[tuple[Any, ...], dict[str, Any]]  # a call's arguments


class _Acting(TorchFunctionMode):
    """While a layer's forward runs, its mechanism stands for ``scaled_dot_product_attention``."""

    def __init__(self, layer: SwappedSDPA, given: Given) -> None:
        super().__init__()
        self.layer = layer
        self.given = given
        self.calls = 0
        self.trains = torch.is_grad_enabled()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the layer's own function gives."""
        with self:
            return function(*args, **kwargs)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not TARGET or _acted_already():
            return func(*args, **(kwargs or {}))
        self.calls += 1
        if self.trains and not torch.compiler.is_compiling() and _runs_again():
            raise RuntimeError(
                f"{self.layer._shown()} calls scaled_dot_product_attention inside a checkpoint (or an "
                "autograd.Function) of its own forward, whose backward would run it again without the mechanism: put "
                "the checkpoint around the layer, or turn the layer's own off"
            )
        return self.layer.act(self.given, *args, **(kwargs or {}))


def _acted_already() -> bool:
    """Whether the call stands in a graph that TorchDynamo made of a part of the layer, with the mechanism in it.

    Most backends lower such a graph; ``backend="eager"`` runs it as it is, in this mode.
    """
    if torch.compiler.is_compiling():
        return False
    graph: Any = sys._getframe(2)
    made = graph.f_code.co_filename.startswith("<eval_with_key>") and graph.f_back is not None
    return bool(made and graph.f_back.f_code.co_filename.endswith("eval_frame.py"))


def _runs_again() -> bool:
    """Whether a checkpoint or an autograd.Function stands between the layer's forward and its call."""
    functions = set() if torch.is_grad_enabled() else _forwards(torch.autograd.Function)  # which run without gradients
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code is not _Acting.run.__code__:
        if frame.f_code.co_filename == _CHECKPOINT or frame.f_code in functions:
            return True
        frame = frame.f_back
    return False


def _forwards(kind: Any) -> set[CodeType]:
    """The code of the forwards of all classes that are derived from one."""
    derived: list[Any] = kind.__subclasses__()
    own = (getattr(inspect.unwrap(each.forward), "__code__", None) for each in derived)
    return {code for code in own if code is not None}.union(*map(_forwards, derived))


# In the names of what is around a layer: not of a `cross_encoder`, nor of what is `crossmodal`.
_CROSS = re.compile(r"(^|\.)cross(\.|$)|cross_?(att|block|layer)|(?<![a-z])x_?attn|att(entio)?n_?pool|pooler")


class SwappedSDPA(Swapped):
    """A layer that runs its own forward, in which the mechanism acts."""

    host: ClassVar[SDPAHost]  # type: ignore[misc]
    seam: Seam

    @classmethod
    def members(cls, plain: type[nn.Module]) -> dict[str, Any]:
        """Methods beside the forward that call the function, as ``forward_list``: the mechanism acts there too."""
        return {name: _acted_in(method) for name, method in other_entries(plain).items()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own.

        Raises:
            RuntimeError: if it did not call ``scaled_dot_product_attention`` exactly once.
        """
        acting = _Acting(self, (args, kwargs))
        out = acting.run(super().forward, *args, **kwargs)
        if acting.calls != 1:
            raise RuntimeError(
                f"{self._shown()} called scaled_dot_product_attention {acting.calls} times in this forward, and its "
                f"mechanism, {type(self.mechanism).__name__}, stands for one call: leave the layer out (exclude=), or "
                "have its forward call the function once"
            )
        return out

    def act(
        self,
        given: Given,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The mechanism's output for what ``scaled_dot_product_attention`` is given.

        Args:
            given: the layer's own arguments.
            query: ``[..., H, N, d]``, or ``[B, N, d]``.
            key: ``[..., H / groups, M, d]``.
            value: likewise.
            attn_mask: as that function takes it.
            dropout_p: likewise.
            is_causal: likewise.
            scale: likewise.
            enable_gqa: likewise.

        Raises:
            NotImplementedError: if the mechanism needs a query for each key, and there are others (a key-value
                cache), or the layer is given another sequence, of which no example told; if it needs the layer's
                input, which is not known.
            Exception: what PyTorch raises, of a call that it refuses.
        """
        mechanism, mask, causal = self.mechanism, attn_mask, is_causal
        own: dict[str, Any] = {"attn_mask": mask, "dropout_p": dropout_p, "is_causal": causal, "scale": scale}
        own |= {"enable_gqa": True} if enable_gqa else {}
        made = taken(query, key, value, **own)
        shape = made[0].shape
        attn_mask, is_causal = without_causal_bias(attn_mask, is_causal, query)
        alone = len(shape) == 3 and shape[0] == self.seam.heads != 1  # one sample, without a batch
        if len(shape) == 3 and not alone and not torch.compiler.is_compiling():
            self._warn_of_folded_heads(given, shape)
        q, k, v = (each[None] if alone else _with_heads(each) for each in made)
        if attn_mask is not None and attn_mask.dim() > 2:
            outer = () if len(shape) == 3 else shape[:-3]  # a mask broadcasts from its end, [H, N, M] over samples
            attn_mask = attn_mask.expand(*outer, *attn_mask.shape[-3:])
            attn_mask = attn_mask[None] if alone else _with_heads(attn_mask)
        asking = None if self.seam.asking is None else self.seam.asking.of(*given)
        self._check_keys(given, asking, q, k)
        x: Any = self._input(asking, q) if "x" in mechanism.needs else None
        if x is None and "x" in mechanism.needs:
            raise NotImplementedError(
                f"{type(mechanism).__name__} needs the input [B, N, C] of which the queries are made, and "
                f"{self._shown()} is not known to be given it; declare the layer around it (attnswap.declare_host), "
                "or pass example= to swap_attention"
            )
        asked: dict[str, Any] = {}
        if mechanism.stands_in:

            def plain(*handed: Tensor) -> Tensor | None:
                if any(one is not other for one, other in zip(handed, (q, k, v), strict=True)):
                    return None  # a penalty has put others in their place
                # Of the very tensors that the mechanism was given, so that a gradient reaches these too.
                pairs = zip(handed, (query, key, value), strict=True)
                sent = [x.reshape(of.shape) if x.numel() == of.numel() else of for x, of in pairs]
                out = TARGET(sent[0], sent[1], sent[2], **own)
                return out.reshape(*q.shape[:-1], out.shape[-1])

            asked = {"plain": plain}
        out = self.mix(
            q if mechanism.uses_query else k,
            k,
            v,
            x,
            attn_mask=attn_mask,
            is_causal=is_causal,
            dropout_p=dropout_p,
            scale=scale,
            **asked,
        )
        return out.reshape(*shape[:-1], out.shape[-1])

    def _check_keys(self, given: Given, asking: Any, q: Tensor, k: Tensor) -> None:
        mechanism, name = self.mechanism, type(self.mechanism).__name__
        pairs = mechanism.one_query_per_key or not mechanism.uses_query
        if pairs and q.shape[2] != k.shape[2]:
            raise NotImplementedError(
                f"{name} needs a query for each key, and {self._shown()} gave it {q.shape[2]} "
                f"queries and {k.shape[2]} keys (a key-value cache, or cross-attention): run it without a cache, or "
                "choose another mechanism"
            )
        refused = pairs or any(need in READS for need in mechanism.needs)
        if self.seam.cross or (torch.compiler.is_compiling() and not refused):
            return
        if self.seam.others is None:
            new: Iterator[tuple[Any, Any]] = self._alike(given, asking, k) if pairs else iter(())
        else:
            new = ((own.of(*given), place.of(*given)) for own, place in self.seam.others)
        both = ((own, x) for own, x in new if isinstance(own, Tensor) and isinstance(x, Tensor))
        second = next((x for own, x in both if not _is_same(x, own)), None)
        if second is None:
            return
        if refused:
            raise NotImplementedError(
                f"{name} needs {'a query for each key' if pairs else 'values of its own tokens'}, and {self._shown()} "
                f"was given a second sequence {tuple(second.shape)}, which may hold its keys (cross-attention), and "
                "which it had not when it was swapped: pass example= with both to swap_attention, or choose another "
                "mechanism"
            )
        if not self.host.is_cross(self, None, mechanism.spec.layer_name or ""):
            warnings.warn(
                f"{self.plain_class.__name__} was given a second sequence, of which it makes its keys: that is "
                "cross-attention, and it counts as self-attention, in monitors and penalties too; restore it, and pass "
                "example= with both to swap_attention (in Lightning: example_input_array), or leave it out (exclude=)",
                stacklevel=3,
            )

    def _alike(self, given: Given, asking: Any, k: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """What asks, with what may be a second sequence, by sizes, of a layer that did not run alone."""
        args, kwargs = given
        places = {place.position for place in self.seam.given}, {place.name for place in self.seam.given}
        new = [args[at] for at in range(len(args)) if at not in places[0]]
        new += [value for at, value in kwargs.items() if at not in places[1]]
        new = [x for x in new if isinstance(x, Tensor) and x is not asking]
        alike = isinstance(asking, Tensor)
        if not alike:  # no trial told, and the first counts as what queries are made of
            asking = next((x for x in new if x.dim() == 3 and x.is_floating_point()), None)
        for x in new:
            if asking is not None and self._may_hold_keys(x, asking, k, alike):
                yield asking, x

    def _may_hold_keys(self, x: Tensor, asking: Tensor, k: Tensor, alike: bool) -> bool:
        """Whether a tensor is as the queries' input, or as many tokens of a width of which the layer makes keys."""
        if x.shape == asking.shape:
            return alike
        if x.dim() != 3 or asking.dim() != 3 or x.shape[:2] != asking.shape[:2]:
            return False
        made = k.shape[1] * k.shape[3]
        parts = (part for part in self.modules() if isinstance(part, nn.Linear))
        return any(x.shape[2] == part.in_features and part.out_features % made == 0 for part in parts)

    def _input(self, asking: Any, q: Tensor) -> Tensor | None:
        """What the queries were made of, ``[B, N, C]``; None where this call does not give it."""
        if isinstance(asking, Tensor) and asking.dim() == 2 and q.shape[0] == 1:
            return asking[None] if len(asking) == q.shape[2] else None
        if not isinstance(asking, Tensor) or asking.dim() != 3:
            return None
        x = asking if self.seam.batch_first else asking.transpose(0, 1)
        return x if x.shape[:2] == (q.shape[0], q.shape[2]) else None

    def _warn_of_folded_heads(self, given: Given, shape: torch.Size) -> None:
        for x in (*given[0], *given[1].values()):
            if isinstance(x, Tensor) and x.dim() == 3 and shape[1] in x.shape[:2]:
                batch = x.shape[0] if x.shape[1] == shape[1] else x.shape[1]
                if shape[0] > batch and shape[0] % batch == 0:
                    warnings.warn(
                        f"{self._shown()} gave {shape[0]} sequences for {batch} samples: its heads lie in the batch, "
                        "and count as one head with the same Parameters in maps and statistics; give the function "
                        "[B, H, N, d] where heads are to be told apart",
                        stacklevel=3,
                    )
                return

    def _shown(self) -> str:
        name = self.mechanism.spec.layer_name
        return f"{self.plain_class.__name__} {name!r}" if name else self.plain_class.__name__


def _is_same(x: Tensor, asking: Tensor) -> bool:
    """Whether a sequence is that of the queries, or one that was computed alike; within a transform, may be."""
    if x is asking or x.shape != asking.shape:
        return x is asking
    if transforms_active() or isinstance(x, FakeTensor):
        return True
    if torch.compiler.is_compiling() or x.is_meta or same_view(x, asking):
        return same_view(x, asking)
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return bool(((x == asking) | (x.isnan() & asking.isnan())).all())


def _acted_in(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a layer that is called beside its forward; the mechanism acts in each call that it makes."""

    @functools.wraps(method)
    def acted_in(self: SwappedSDPA, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and any(
            isinstance(mode, _Acting) and mode.layer is self for mode in _get_current_function_mode_stack()
        ):  # called by another one
            return method(self, *args, **kwargs)
        return _Acting(self, ((), {})).run(method, self, *args, **kwargs)

    return acted_in


def _with_heads(tensor: Tensor) -> Tensor:
    """``[B, H, N, d]``: of two or three dimensions with one head, of more with the first ones as one."""
    if tensor.dim() == 2:
        return tensor[None, None]
    return tensor.unsqueeze(1) if tensor.dim() == 3 else tensor.flatten(0, -4)


class UnknownSizes(AttentionSpec):
    """The spec of a layer whose sizes cannot be told; to read one is an error that says what to do."""

    told = False
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, kind: type[nn.Module], **told: Any) -> None:
        fields = {"num_tokens": None, "is_causal": False, "layer_index": None, "value_dim": None, "layer_name": None}
        vars(self).update({**fields, "mixes_heads": False, **told, "kind": kind})

    def placed(self, **changes: Any) -> AttentionSpec:
        known = {name: value for name, value in vars(self).items() if name != "kind"}
        return UnknownSizes(vars(self)["kind"], **{**known, **changes})

    def _unknown(self, name: str) -> int:
        kind = vars(self)["kind"]
        where = f"{kind.__name__} {self.layer_name!r}" if self.layer_name else kind.__name__
        raise ValueError(
            f"{name} of {where} cannot be told from its code, nor from a call with one short sequence: pass "
            "example=, what the model takes, to swap_attention (in Lightning: example_input_array), or declare the "
            f"class: attnswap.declare_host({kind.__name__}, qkv=..., heads=...)"
        )

    @property
    def dim(self) -> int:  # type: ignore[override]
        return self._unknown("the width of the input")

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        return self._unknown("the number of heads")

    @property
    def head_dim(self) -> int:  # type: ignore[override]
        return self._unknown("the width of a head")


class SDPAHost(Host):
    """Any module in whose own forward, not a child's, ``scaled_dot_product_attention`` is called."""

    name = "scaled_dot_product_attention"
    mixin = SwappedSDPA
    yields_to_parts = True
    _known: Seam | None = None  # of the layer that it is bound to

    def bound(self, layer: nn.Module) -> Host:
        bound = copy.copy(self)
        object.__setattr__(bound, "_known", self.seam(layer))  # a frozen dataclass may be below
        return bound

    def concerns(self, kind: type[nn.Module]) -> bool:
        known = definer(kind).__module__.partition(".")[0] in LIBRARIES
        return not known and not issubclass(kind, AttentionMechanism)

    def understands(self, module: nn.Module) -> bool:
        if has_other_forward(module):
            return False
        if known().calls.get(module):
            return known().each_forward(module) == 1
        found = calls_of(module)
        return bool(found.sites) and not found.ambiguous

    def near_miss(self, module: nn.Module) -> str | None:
        found = calls_of(module)
        if known().calls.get(module) and (calls := known().each_forward(module)) > 1:
            return f"its forward calls scaled_dot_product_attention {calls} times, and a mechanism stands for one"
        if found.sites and has_other_forward(module):
            return "its forward was replaced on the object; give the class that forward"
        if found.unreached and not found.sites:
            return (
                f"a setting of its own keeps its forward from scaled_dot_product_attention ({found.unreached[0]}): "
                "build the model with the setting that takes it"
            )
        if found.ambiguous:
            lines = ", ".join(map(str, found.sites))
            return (
                f"its forward may call scaled_dot_product_attention several times ({lines}), and a mechanism stands "
                "for one call: pass example=, what the model takes, if one forward calls it once"
            )
        return other_kernel(module, found)

    def scale(self, layer: nn.Module) -> float | None:
        return self.seam(layer).scale

    def seam(self, layer: nn.Module) -> Seam:
        """What is known of the layer, of a recorded or tried call; of a swapped one what was when it was swapped."""
        if isinstance(layer, SwappedSDPA):
            return layer.seam
        if self._known is not None:
            return self._known
        record = known() if layer in known().calls else tried(layer)
        if not record.has_batch(layer) and tried(layer).has_batch(layer):  # the example is of one sample alone
            record = tried(layer)
        (cross, own), calls = whose(layer), record.calls.get(layer)
        if not calls:
            return Seam(cross=cross, own=own)
        seam = replace(calls[0].seam(layer), cross=cross, own=own, calls=record.each_forward(layer))
        return self._with_order(layer, seam) if any(getattr(seam, name) is None for name in ORDER) else seam

    def _with_order(self, layer: nn.Module, seam: Seam) -> Seam:
        """With the order of tokens where the layer does not show it, being without values, or its projections zeros."""
        if layer not in (seams := known().seams):
            seams[layer] = Seam()
            with knowing(Record()), contextlib.suppress(Exception):  # whatever a stranger's copy raises
                calls = tried(twin := with_values(layer)).calls.get(twin, [])
                seams[layer] = calls[0].seam(twin) if calls else Seam()
        return replace(seam, **{name: getattr(seams[layer], name) for name in ORDER if getattr(seam, name) is None})

    def spec(self, layer: Any, layer_index: int | None) -> AttentionSpec:
        seam = self.seam(layer)
        kind = getattr(layer, "plain_class", type(layer))
        if seam.heads is None or seam.head_dim is None:
            return UnknownSizes(kind, is_causal=seam.causal, layer_index=layer_index)
        value_dim = None if seam.value_dim == seam.head_dim else seam.value_dim
        width = seam.dim or seam.heads * seam.head_dim
        return AttentionSpec(
            width, seam.heads, seam.head_dim, None, seam.causal, layer_index=layer_index, value_dim=value_dim
        )

    def is_cross(self, layer: nn.Module, parent: nn.Module | None, name: str) -> bool:
        seam = self.seam(layer)
        if getattr(layer, "is_cross_attention", False) is True or seam.cross:
            return True
        if seam.own:  # which says more than a name
            return False
        called = f"{getattr(layer, 'plain_class', type(layer)).__name__} {name.rpartition('.')[2]}".lower()
        return "cross" in called or "pool" in called or _CROSS.search(name.lower()) is not None

    def batch_first(self, layer: nn.Module) -> bool:
        return bool(getattr(layer, "batch_first", self.seam(layer).batch_first))

    def tokens(self, layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        asking = self.seam(layer).asking
        given = None if asking is None else asking.of(args, kwargs)
        return given if isinstance(given, Tensor) else super().tokens(layer, args, kwargs)

    def groups(self, layer: Any) -> int:
        seam = self.seam(layer)
        return (seam.heads or 1) // (seam.key_heads or 1)

    def query_parts(self, layer: Any) -> tuple[QueryPart, ...]:
        return ()

    def qk_rows(self, layer: Any) -> tuple[Rows, Rows]:
        raise ValueError(self._undeclared(layer))

    def weights_refusal(self, layer: Any) -> str | None:
        return self._undeclared(layer)

    def limits(self, layer: Any) -> Limits:
        calls = self.seam(layer).calls
        several = f"its forward calls scaled_dot_product_attention {calls} times, and a mechanism stands for one"
        return Limits(
            every=several if calls > 1 else None,
            of=self._uneven(layer),
            with_input=self._inputless(layer),
            without_query=self._undeclared(layer),
            sharing=self._unordered(layer),
        )

    def _unordered(self, layer: nn.Module) -> str | None:
        """Why its values are not those of the tokens that other layers' are of."""
        if self.seam(layer).ordered_values is not False:
            return None
        return "it moves its tokens (flips, rolls, sorts, cuts, mixes them) before it makes values of them"

    def _inputless(self, layer: nn.Module) -> str | None:
        """Why mechanisms that need the layer's input have none, where that is known before the call."""
        seam = self.seam(layer)
        if seam.ordered is False:
            return _MOVED.format("queries")
        if seam.heads is None or seam.dim is not None:
            return None
        return (
            "it is not given the tokens [B, N, C] of which its queries are made; declare the layer around it "
            "(attnswap.declare_host), or choose a mechanism that needs none"
        )

    def _uneven(self, layer: nn.Module) -> Callable[[AttentionMechanism], str | None]:
        """What refuses mechanisms that need a query for each key, where there is none; cross-attention says more."""
        seam = self.seam(layer)
        uneven = seam.uneven and not seam.cross

        def refusal(built: AttentionMechanism) -> str | None:
            if "x" in built.needs and built.one_query_per_key and seam.ordered_keys is False and not seam.cross:
                return _MOVED.format("keys")
            if not uneven or (built.uses_query and not built.one_query_per_key):
                return None
            return f"it has other numbers of keys than of queries, and {type(built).__name__} needs one query for each"

        return refusal

    def _undeclared(self, layer: nn.Module) -> str:
        kind = getattr(layer, "plain_class", type(layer)).__name__
        linear = ", ".join(name for name, child in layer.named_children() if isinstance(child, nn.Linear))
        return (
            f"which projections give its queries and keys is not known; say so: attnswap.declare_host({kind}, "
            'qkv="...", heads="..."), or q= with kv=, or with k= and v=, with the names of its linear layers'
            f"{linear and f' (it has {linear})'} and of what holds the number of its heads"
        )

    def insert(self, layer: Any, mechanism: AttentionMechanism) -> None:
        seam = layer.seam if isinstance(layer, SwappedSDPA) else replace(self.seam(layer), others=others_of(layer))
        super().insert(layer, mechanism)
        layer.seam = seam

    def remove(self, layer: Any) -> None:
        super().remove(layer)
        del layer.seam


def other_kernel(module: nn.Module, found: Calls) -> str | None:
    """Why a module that computes attention by other means takes no mechanism, if it is one."""
    if found.sites:
        return None
    if found.kernels:
        return (
            f"its forward calls {found.kernels[0]}, a kernel with no place for another mechanism; have the model use "
            "scaled_dot_product_attention (most libraries have an option)"
        )
    kind = type(module).__name__
    if found.softmax and (found.products > 1 or "Attention" in kind or "Attn" in kind):
        return (
            f"it writes its softmax itself ({found.softmax[0]}); with\n"
            "    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p if self.training else 0.0)\n"
            "in its place, q, k and v [B, H, N, d], it takes any mechanism"
        )
    return None
