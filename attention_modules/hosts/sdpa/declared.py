"""A class of the user's own, of which she says where its projections are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isinf, prod
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attention_modules.base import AttentionSpec
from attention_modules.hosts.base import AttentionSwapError
from attention_modules.hosts.forwards import has_other_forward
from attention_modules.hosts.limits import Limits
from attention_modules.hosts.projections import Projections, Widths
from attention_modules.hosts.query import QueryPart, WithoutQuery, become
from attention_modules.hosts.sdpa.calls import calls_of
from attention_modules.hosts.sdpa.layer import SDPAHost, SwappedSDPA, other_kernel
from attention_modules.hosts.sdpa.record import Record, knowing, known
from attention_modules.hosts.sdpa.seam import Call, Seam, Source
from attention_modules.hosts.sdpa.trial import tried, with_values
from attention_modules.hosts.sdpa.whose import whose
from attention_modules.hosts.table import register_host
from attention_modules.hosts.weights import Rows
from attention_modules.mechanism import did_you_mean
from attention_modules.mechanisms.shared.unchanged import unobserved


def declare_host(
    kind: type[nn.Module] | str,
    *,
    heads: str | int,
    qkv: str | None = None,
    q: str | None = None,
    k: str | None = None,
    v: str | None = None,
    kv: str | None = None,
    out: str | None = None,
    kv_heads: str | int | None = None,
    causal: bool | None = None,
    query_norm: str | None = None,
) -> None:
    """Say where the projections of your attention class are, which calls ``scaled_dot_product_attention`` once.

    Without it a mechanism that uses queries acts in such a class already. With it those without a query do, and
    spectra, LocAteR, QKClip and DriftMonitor read its weights. Before a layer is swapped, one call of it is compared
    with what the declared projections give: of ``[B, N, C]`` or ``[N, B, C]``, and each of them of the input that the
    call used, so that cross-attention shows itself. Mechanisms without a query are refused where the layer's queries,
    or Parameters of theirs, do more than ask the keys (a residual, a bias, a temperature), as far as gradients of
    Parameters that train tell.

    Args:
        kind: the class, or its import path; its subclasses are of it.
        heads: attribute that holds the number of heads, such as ``"n_head"`` or ``"config.n_head"``, or the number.
        qkv: name of the linear layer of queries, keys and values, in this order, and nothing else: ``[q | k | v]``, or
            head by head.
        q, k, v: names of the three, where they are apart; each may project another input.
        kv: of keys and values together, beside ``q``.
        out: of the output projection, for :func:`attnswap.analysis.layer_lipschitz_bound`.
        kv_heads: as ``heads``, where groups of query heads share keys and values.
        causal: whether it hides the future; where None, as the layer's call says.
        query_norm: of the module that normalizes queries after the projection, if there is one.

    Raises:
        TypeError: if ``kind`` is no module's class, or one of PyTorch's own, the projections are neither ``qkv``, nor
            ``q`` and ``kv``, nor ``q``, ``k`` and ``v``, or a name or a number is none.
        ValueError: if the import path names nothing.

    Example:
        >>> import torch
        >>> import attnswap
        >>> from torch.nn import functional as F
        >>> class Attention(torch.nn.Module):
        ...     def __init__(self, width, n_head):
        ...         super().__init__()
        ...         self.n_head, self.c_attn = n_head, torch.nn.Linear(width, 3 * width)
        ...     def forward(self, x):
        ...         heads = (t.unflatten(2, (self.n_head, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, 2))
        ...         return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        >>> attnswap.declare_host(Attention, qkv="c_attn", heads="n_head")
        >>> report = attnswap.swap_attention(torch.nn.Sequential(Attention(16, 2)), "symmetric")
        >>> report[0].host, report[0].before - report[0].after
        ('declared Attention', 272)
    """
    if isinstance(kind, str):
        try:
            kind = resolve_name(kind)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"kind={kind!r} is no import path of a class: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"kind must be a class of modules, or its import path, got {kind!r}")
    if kind.__module__.partition(".")[0] == "torch":
        raise TypeError(f"kind must be your attention class; all kinds of models are made of {kind.__qualname__}")
    named = {"qkv": qkv, "q": q, "k": k, "v": v, "kv": kv}
    given = {letters: path for letters, path in named.items() if path is not None}
    if set(given) not in ({"qkv"}, {"q", "kv"}, {"q", "k", "v"}):
        raise TypeError(f"declare qkv=, or q= and kv=, or q=, k= and v=; got {', '.join(given) or 'none'}")
    for argument, name in {**named, "out": out, "query_norm": query_norm}.items():
        if name is not None and (not isinstance(name, str) or not name):
            raise TypeError(f"{argument} must be the name of a part of {kind.__name__}, a string, got {name!r}")
    for argument, of in {"heads": heads, "kv_heads": heads if kv_heads is None else kv_heads}.items():
        if not of or not isinstance(of, (int, str)) or isinstance(of, bool) or (isinstance(of, int) and of < 1):
            raise TypeError(f"{argument} must be a number of at least 1, or the attribute that holds it, got {of!r}")
    if causal is not None and not isinstance(causal, bool):
        raise TypeError(f"causal must be True, False or None, got {causal!r}")
    parts = tuple((path, letters) for letters, path in given.items())
    register_host(DeclaredHost(kind, parts, heads, heads if kv_heads is None else kv_heads, out, causal, query_norm))


_LETTERS = {"q": "queries", "k": "keys", "v": "values"}


@dataclass(frozen=True)
class _Fit:
    """How far q, k or v of a call are from what a declared projection gives, as shares of the largest entry."""

    source: Source
    apart: float
    lengths: float  # of their vectors, which rotary positions keep
    factor: float = 1.0  # on these lengths, where it is one for all

    @property
    def told(self) -> str:
        if self.factor != 1:
            return f"is {self.factor:.4g} times as long"
        return "has another shape" if isinf(self.apart) else f"differs by {self.apart:.2g} of its largest entry"


class JointWithoutQuery(WithoutQuery):
    """A joint projection without its query rows, which gives zeros in their place: the layer's own code splits it."""

    weight: Tensor
    bias: Tensor | None
    dropped: tuple[int, int]  # features of the query, and the blocks that they lie in
    reset_parameters: Any = nn.Linear.reset_parameters

    def forward(self, input: Tensor) -> Tensor:
        rest = nn.functional.linear(input, self.weight, self.bias)
        size, blocks = self.dropped
        zeros = rest.new_zeros(()).expand(*rest.shape[:-1], blocks, size // blocks)
        return torch.cat([zeros, rest.unflatten(-1, (blocks, -1))], -1).flatten(-2)


@dataclass(frozen=True, eq=True)
class DeclaredHost(SDPAHost):
    """The host of a declared class; arguments as of :func:`declare_host`, the projections in ``parts``."""

    yields_to_parts: ClassVar[bool] = False

    kind: type[nn.Module]
    parts: tuple[tuple[str, str], ...]
    heads: str | int
    key_heads: str | int
    out: str | None = None
    causal: bool | None = None
    query_norm: str | None = None

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"declared {self.kind.__name__}"

    def concerns(self, kind: type[nn.Module]) -> bool:
        return issubclass(kind, self.kind)

    def understands(self, module: nn.Module) -> bool:
        own = isinstance(module, self.kind) and not has_other_forward(module)
        return own and not calls_of(module).ambiguous

    def near_miss(self, module: nn.Module) -> str | None:
        return super().near_miss(module) if isinstance(module, self.kind) else None

    def seam(self, layer: nn.Module) -> Seam:
        """As of any host; checked.

        Raises:
            AttentionSwapError: if the declared names are not there, or do not give what the layer's call got.
        """
        if isinstance(layer, SwappedSDPA):
            return layer.seam
        if self._known is not None:
            return self._known
        seams = known().seams
        if any(each.is_meta for each in layer.parameters()) and layer not in seams:
            with knowing(Record()):
                seams[layer] = self._shown(with_values(layer))
        seam = seams[layer] if layer in seams else self._shown(layer)
        cross, own = whose(layer)
        return replace(seam, cross=cross, own=own)

    def _shown(self, layer: nn.Module) -> Seam:
        """What a call of the layer shows, checked."""
        widths = self._widths(layer)
        for path in filter(None, (self.out, self.query_norm)):
            self._at(layer, path)
        record = known() if layer in known().inside else tried(layer, self._inputs(layer))
        calls, times = record.inside.get(layer, []), record.each_forward(layer)
        if times != 1:
            raise self._unchecked(f"it calls scaled_dot_product_attention {times} times" if calls else _no_call(layer))
        if not calls[0].tells(layer):
            calls = tried(layer, self._inputs(layer)).inside.get(layer, [])
            if not calls or not calls[0].tells(layer):
                raise self._unchecked("the example gives it nothing but zeros, or numbers that are not finite")
        return self._checked(layer, calls[0], widths)

    def _unchecked(self, reason: str) -> AttentionSwapError:
        return AttentionSwapError(f"the declaration of {self.kind.__name__} cannot be checked, as {reason}")

    def _inputs(self, layer: nn.Module) -> list[int]:
        """Widths of the sequences of which queries and keys are made."""
        return [Projections(self.parts).input_width(layer, letter) for letter in "qk"]

    def _checked(self, layer: nn.Module, call: Call, widths: Widths) -> Seam:
        closest: list[_Fit] = []
        for by_head in (False, True) if self.parts[0][1] == "qkv" else (False,):
            q, k, v = fits = [self._fit(layer, call, letter, widths, by_head) for letter in "qkv"]
            close, normed = torch.finfo(q.source.x.dtype).eps ** 0.5, self.query_norm is not None
            if v.apart <= close and (normed or max(q.lengths, k.lengths) <= close):
                seam = call.seam(layer)
                return replace(
                    seam,
                    dim=q.source.x.shape[-1],
                    by_head=by_head,
                    turned=not normed and max(q.apart, k.apart) > close,
                    batch_first=q.source.batch_first,
                    asking=q.source.place,
                    asks_more=self._asks_more(layer, call, widths, by_head),
                )
            if not closest or v.apart < closest[2].apart:
                closest = fits
        paths = ", ".join(path for path, _ in self.parts)
        factors = closest[0].factor, closest[1].factor
        scale = prod(factors) * (call.scale if call.scale is not None else call.q.shape[-1] ** -0.5)
        cure = "" if factors == (1, 1) else f"leave the factor to the call (scale={scale:.4g}), or else "
        shown = ", ".join(f"{letter} {fit.told}" for letter, fit in zip("qkv", closest, strict=True))
        raise AttentionSwapError(
            f"the declaration of {self.kind.__name__} does not fit: what {paths} gives in {widths.heads} heads is not "
            f"what scaled_dot_product_attention got ({shown}); {cure}name its projections, its number of heads "
            "(kv_heads= where keys have fewer), and query_norm= where it normalizes queries; a joint one holds q, k "
            "and v in this order, each in one piece or head by head, and nothing else, such as a gate (for any other "
            "there is attnswap.register_host)"
        )

    def _asks_more(self, layer: nn.Module, call: Call, widths: Widths, by_head: bool) -> str | None:
        rows = Projections(self.parts, by_head).rows(layer, "q", widths)
        return call.asks_more(layer, rows.owner, rows.features())

    def _fit(self, layer: nn.Module, call: Call, letter: str, widths: Widths, by_head: bool) -> _Fit:
        """Of q, k or v, what its declared projection gives of the input from which it is least apart."""
        its: Tensor = getattr(call, letter)
        path, letters = next(part for part in self.parts if letter in part[1])
        fits = []
        for source in call.sources(layer, its):
            try:
                with torch.no_grad(), unobserved(layer):
                    mine = Projections(self.parts, by_head).made(layer, path, letters, source.x, widths)[letter]
            except RuntimeError:  # its features cannot be split into these heads, or it takes another width
                fits.append(_Fit(source, float("inf"), float("inf")))
                continue
            norms = [made.norm(dim=-1, keepdim=True) for made in (mine, its)]
            fits.append(_Fit(source, _apart(mine, its), _apart(*norms), _factor(*norms)))
        if not fits:
            raise self._unchecked(
                f"its {_LETTERS[letter]} are made of none of its inputs [B, N, C] or [N, B, C]; undeclared, mechanisms "
                "with a query work"
            )
        return min(fits, key=lambda fit: (fit.lengths, fit.apart))

    def _widths(self, layer: nn.Module) -> Widths:
        heads, key_heads = (self._number(layer, of) for of in (self.heads, self.key_heads))
        sizes = {letters: self._size(layer, path) for path, letters in self.parts}
        if "qkv" in sizes:
            width = sizes["qkv"] // (heads + 2 * key_heads)
            return Widths(heads, width, width, key_heads)
        if "kv" in sizes:
            width = sizes["q"] // heads
            return Widths(heads, width, sizes["kv"] // key_heads - width, key_heads)
        return Widths(heads, sizes["q"] // heads, sizes["v"] // key_heads, key_heads)

    def _size(self, layer: nn.Module, path: str) -> int:
        """Output features of a projection, those of a dropped query included."""
        owner: Any = self._at(layer, path)
        features = getattr(owner, "out_features", None)
        if not isinstance(features, int):
            raise AttentionSwapError(
                f"{self.kind.__name__}.{path} is no linear layer, but a {type(owner).__name__}: use nn.Linear in its "
                "place, or leave the class undeclared, where mechanisms with a query act; or write a host "
                "(attnswap.register_host)"
            )
        return features + (owner.dropped[0] if isinstance(owner, JointWithoutQuery) else 0)

    def _number(self, layer: nn.Module, of: str | int) -> int:
        value = of if isinstance(of, int) else self._at(layer, of)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise AttentionSwapError(
                f"the number of heads of {self.kind.__name__} must be an integer of at least 1, or name one; {of!r} is "
                f"{value!r}"
            )
        return value

    def _at(self, layer: nn.Module, path: str) -> Any:
        try:
            return attrgetter(path)(layer)
        except AttributeError as error:
            names = [*vars(layer), *layer._modules]
            raise AttentionSwapError(
                f"{self.kind.__name__} has no {path!r}, which its declaration names.{did_you_mean(path, names)}"
            ) from error

    def projections(self, layer: nn.Module) -> Projections:
        """Where the layer holds its queries, keys and values."""
        return Projections(self.parts, self.seam(layer).by_head)

    def is_cross(self, layer: nn.Module, parent: nn.Module | None, name: str) -> bool:
        try:
            return super().is_cross(layer, parent, name)
        except AttentionSwapError:  # said where the layer is chosen
            return False

    def spec(self, layer: Any, layer_index: int | None) -> AttentionSpec:
        widths, seam = self._widths(layer), self.seam(layer)
        return AttentionSpec(
            seam.dim or self._inputs(layer)[0],
            widths.heads,
            widths.head_dim,
            None,
            seam.causal if self.causal is None else self.causal,
            layer_index=layer_index,
            value_dim=None if widths.value_dim == widths.head_dim else widths.value_dim,
        )

    def groups(self, layer: Any) -> int:
        widths = self._widths(layer)
        return widths.heads // widths.key_heads

    def query_parts(self, layer: Any) -> tuple[QueryPart, ...]:
        return self.projections(layer).query_parts(layer, self._widths(layer))

    def qk_rows(self, layer: Any) -> tuple[Rows, Rows]:
        return self.projections(layer).qk_rows(layer, self._widths(layer))

    def value_rows(self, layer: Any) -> Rows:
        """The value's rows of the projection."""
        return self.projections(layer).rows(layer, "v", self._widths(layer))

    def output(self, layer: Any) -> nn.Module:
        """The output projection."""
        assert self.out is not None
        self._size(layer, self.out)
        return layer.get_submodule(self.out)

    def norm(self, layer: Any) -> str | None:
        return None if self.query_norm is None else "q/k norm"

    def caveat(self, layer: Any) -> str | None:
        turned = "rotary positions: the spectrum of the logits is not W's" if self.seam(layer).turned else None
        return super().caveat(layer) or turned

    def weights_refusal(self, layer: Any) -> str | None:
        return None

    def limits(self, layer: Any) -> Limits:
        found = super(SDPAHost, self).limits(layer)
        query = found.without_query or self.projections(layer).query_refusal(layer) or self.seam(layer).asks_more
        if self.query_norm is not None:
            query = "it normalizes queries, whose weights would train nothing without a query; choose one with a query"
        return replace(found, of=self._uneven(layer), without_query=query, rotates=self.seam(layer).turned)

    def insert(self, layer: Any, mechanism: Any) -> None:
        if not isinstance(layer, SwappedSDPA):
            layer.seam = self.seam(layer)  # read while the query is dropped
        super().insert(layer, mechanism)

    def _drop_query(self, layer: Any) -> None:
        super()._drop_query(layer)
        if self.parts[0][1] == "qkv":
            owner = layer.get_submodule(self.parts[0][0])
            become(owner, JointWithoutQuery)
            part = layer.dropped_query[0]
            owner.dropped = part.size, part.blocks

    def _restore_query(self, layer: Any) -> None:
        owner = layer.get_submodule(self.parts[0][0])
        if layer.dropped_query and isinstance(owner, JointWithoutQuery):
            become(owner, nn.Linear)
            del owner.dropped
        super()._restore_query(layer)


def _no_call(layer: nn.Module) -> str:
    """Why there is no call to check a declaration by."""
    if (reason := other_kernel(layer, calls_of(layer))) is not None:
        return reason
    if known().calls:
        return "it made no call of scaled_dot_product_attention for this example, nor alone"
    return (
        "it does not run alone: pass example=, what the model takes, to swap_attention (in Lightning: "
        "example_input_array)"
    )


def _factor(mine: Tensor, its: Tensor) -> float:
    """The one number that makes the first of two tensors the second; 1 where there is none, or none is needed."""
    factor = 1.0 if mine.is_meta or not mine.any() else float(its.detach().mean() / mine.mean())
    close = torch.finfo(mine.dtype).eps ** 0.5
    return factor if _apart(mine, its) > close and _apart(mine * factor, its) <= close else 1.0


def _apart(mine: Tensor, its: Tensor) -> float:
    """The largest difference, as a share of the largest entry; infinite where the shapes differ."""
    if its.dim() == 4 and its.shape[1] % mine.shape[1] == 0:
        mine = mine.repeat_interleave(its.shape[1] // mine.shape[1], 1)
    if its.dim() == 3 and mine.shape[1] == 1:  # one head, which has no dimension
        mine = mine.squeeze(1)
    if mine.shape != its.shape:
        return float("inf")
    if mine.is_meta or not mine.numel():
        return 0.0
    its = its.detach()
    return float((mine - its).abs().amax() / its.abs().amax().clamp(min=1e-30))
