"""What a call of ``scaled_dot_product_attention`` says of its layer: sizes, and of what it makes queries and values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

ORDER = ("ordered", "ordered_keys", "ordered_values")  # of Seam, what a layer of zeros does not show


@dataclass(frozen=True)
class Place:
    """Where an argument of a forward stands: at a position, None where it can only be named, and by its name."""

    position: int | None
    name: str

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a call gives there; None where it gives nothing."""
        if self.position is None or self.name in kwargs:
            return kwargs.get(self.name)
        return args[self.position] if self.position < len(args) else None


@dataclass(frozen=True)
class Source:
    """A sequence that a module was given.

    Args:
        place: of the argument.
        x: ``[B, N, C]``.
        batch_first: whether it was given so, and not as ``[N, B, C]``.
    """

    place: Place
    x: Tensor
    batch_first: bool


@dataclass(frozen=True)
class Seam:
    """What a call says of its layer; None where it cannot be told.

    Args:
        dim: width of the layer's input, C.
        heads: H.
        key_heads: heads of keys and values, which groups of query heads share.
        head_dim: width of a query.
        value_dim: width of a value.
        causal: whether it hides the future.
        cross: whether the queries are of other tokens than the keys.
        own: whether a call of the model shows that they are of the same.
        uneven: whether there is not one query for each key.
        scale: factor on the logits, 1/sqrt(d) where None.
        by_head: whether each head has its query, key and value together in the layer's projection.
        turned: whether positions turn queries and keys after the layer's projections.
        calls: how many calls one forward makes, its children's too.
        batch_first: whether the layer is given ``[B, N, C]``, and not ``[N, B, C]``.
        asking: which of its arguments the queries are made of.
        ordered: whether each query is of the token in its place alone; None if unknown.
        ordered_keys: likewise each key, of the tokens that the queries are made of.
        ordered_values: likewise each value, of the sample in its place.
        given: all of its arguments that are sequences.
        others: arguments that its queries are made of, each with one that keys alone are made of, where that is
            another sequence; None if unknown.
        asks_more: what its queries do beside asking the keys, where that is looked for.
    """

    dim: int | None = None
    heads: int | None = None
    key_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    causal: bool = False
    cross: bool = False
    own: bool = False
    uneven: bool = False
    scale: float | None = None
    by_head: bool = False
    turned: bool = False
    calls: int = 1
    batch_first: bool = True
    asking: Place | None = None
    ordered: bool | None = None
    ordered_keys: bool | None = None
    ordered_values: bool | None = None
    given: tuple[Place, ...] = ()
    others: tuple[tuple[Place, Place], ...] | None = None
    asks_more: str | None = None


@dataclass
class Call:
    """One call, and the modules whose forward ran around it, outermost first, each with what it was given."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    scale: float | None
    around: list[tuple[nn.Module, dict[Place, Tensor]]]
    asked: Tensor
    """A view of q, through which nothing but this call is reached."""
    mask: Tensor | None = None
    outs: dict[nn.Module, Any] = field(default_factory=dict)
    """What the modules around gave."""
    seams: dict[nn.Module, Seam] = field(default_factory=dict)
    """What it said of modules so far."""

    def given(self, module: nn.Module) -> dict[Place, Tensor]:
        """What one of the modules around was given."""
        return next(given for outer, given in self.around if outer is module)

    def sources(self, module: nn.Module, made: Tensor) -> list[Source]:
        """The sequences that the module was given of which these queries, keys or values may be made."""
        places = [*self.given(module).items()]
        of = _sources(made, [x for _, x in places])
        laid = ((place, x, _lies(x, made)) for at, (place, x) in enumerate(places) if not of or at in of)
        return [
            Source(place, x if first else x.transpose(0, 1), first) for place, x, first in laid if first is not None
        ]

    def tells(self, module: nn.Module) -> bool:
        """Whether the sequences that it was made of have values by which projections can be told apart."""
        made = [source.x for each in (self.q, self.k, self.v) for source in self.sources(module, each)]
        return all(x.is_meta or bool(x.any() and x.isfinite().all()) for x in made)

    def seam(self, module: nn.Module) -> Seam:
        """What it says of one of the modules around it."""
        if module not in self.seams:
            self.seams[module] = self._seam(module)
        return self.seams[module]

    def asks_more(self, module: nn.Module, projection: nn.Module, rows: Sequence[int]) -> str | None:
        """What the module's queries do beside asking the keys; None if nothing, or where no gradient can tell.

        Args:
            module: one of those around it.
            projection: the linear layer of the queries.
            rows: of its weight, those that make queries.
        """
        named = {name: each for name, each in module.named_parameters() if each.requires_grad}
        given = [each for each in (*tree_leaves(self.outs.get(module)), self.mask) if _has_gradient(each)]
        handle = self.asked.register_hook(torch.zeros_like) if _has_gradient(self.asked) else None
        if handle is None or not named:
            return None
        beside = _gradients(given, named)
        handle.remove()
        asking, others = (_gradients(of, named) for of in ([self.q], [self.k, self.v]))
        weight = next((beside[name] for name, each in named.items() if each is projection.weight), None)
        if weight is not None and bool(weight[list(rows)].any()):
            return "its forward uses its queries elsewhere, too (in a residual, bias, output); choose one with a query"
        own = {id(each) for each in projection.parameters()}
        for name, each in named.items():
            found = [gradient is not None and bool(gradient.any()) for gradient in (asking[name], beside[name])]
            if id(each) not in own and found == [True, False] and others[name] is None:
                return f"{name!r} acts on its queries alone, and would train nothing; choose one with a query"
        return None

    def _seam(self, module: nn.Module) -> Seam:
        (heads, key_heads), source = self._heads(), self._asking(module)
        q_in_order, k_in_order = (
            None if source is None else _in_order(made, self.given(module)[source.place], source.batch_first)
            for made in (self.q, self.k)
        )
        return Seam(
            None if source is None else source.x.shape[-1],
            heads,
            key_heads,
            self.q.shape[-1],
            self.v.shape[-1],
            self.causal,
            self.is_cross,
            uneven=self.k.shape[-2] != self.q.shape[-2],
            scale=self.scale,
            batch_first=source is None or source.batch_first,
            asking=None if source is None else source.place,
            ordered=q_in_order,
            ordered_keys=k_in_order,
            ordered_values=self._keeps_values(module),
            given=tuple(place for place, x in self.given(module).items() if x.dim() == 3),
        )

    def _heads(self) -> tuple[int, int]:
        """How many heads there are, and how many keys have; of three dimensions they have one."""
        made = self.q, self.k, self.v
        if max(each.dim() for each in made) < 4:
            return 1, 1
        heads = [each.shape[-3] if each.dim() > 2 else 1 for each in made]
        return max(heads), heads[1]

    def _asking(self, module: nn.Module) -> Source | None:
        """What its queries are made of; of several, as of tokens and positions, what its values are made of too."""
        found, valued = self.sources(module, self.q), {source.place for source in self.sources(module, self.v)}
        likely = [source for source in found if source.place in valued] or found
        return next((source for source in likely if "pos" not in source.place.name), next(iter(likely), None))

    def _keeps_values(self, module: nn.Module) -> bool | None:
        """Whether its values are of the module's tokens in their order; None if unknown."""
        given = self.given(module)
        sources = {source.place: source.batch_first for source in self.sources(module, self.v)}
        found = [_in_order(self.v, given[place], sources.get(place)) for place in sources or given]
        return True if True in found else False if False in found else None

    def others(self, module: nn.Module) -> tuple[Place, ...]:
        """Of what a module was given, what its keys are made of, and not its queries."""
        found = _others(*self._made_of(module))
        return tuple(place for at, place in enumerate(self.given(module)) if at in found)

    @cached_property
    def is_own(self) -> bool:
        """Whether queries and keys are made of the same, and of the same places of it."""
        module = next(self._projecting(), None)
        if module is None or self.is_cross:
            return False
        of_query, of_key, _ = self._made_of(module)
        given = [*self.given(module).values()]
        return bool(of_query) and of_query == of_key and not any(self._apart(given[at]) for at in of_query)

    @cached_property
    def reads_another(self) -> bool:
        """Whether keys are made of a sequence that queries are not made of."""
        made = [self._made_of(module) for module in self._projecting()]
        apart = any(of_query and of_key and of_query.isdisjoint(of_key) for of_query, of_key, _ in made)
        return apart or any(_others(*each) for each in made[:1])

    @cached_property
    def is_cross(self) -> bool:
        """Whether its keys are of other tokens than its queries."""
        return self.reads_another or self.k.shape[-2] > self.q.shape[-2]  # one token that asks; fewer are reduced

    def _projecting(self) -> Iterator[nn.Module]:
        """The modules whose weights make queries or keys, innermost first; a bias that is trained makes none."""
        around = (module for module, _ in reversed(self.around))
        return itertools.dropwhile(lambda module: not self._projects(module), around)

    def _projects(self, module: nn.Module) -> bool:
        weights = [each for each in module.parameters() if each.dim() > 1]
        trained = [each for each in weights if each.requires_grad]
        return bool(len(trained) < len(weights) or _sources(self.q, trained) or _sources(self.k, trained))

    def _made_of(self, module: nn.Module) -> tuple[set[int], set[int], set[int]]:
        """Of what it was given, by their numbers, what queries, keys and values are made of."""
        given = [*self.given(module).values()]
        return _sources(self.q, given), _sources(self.k, given), _sources(self.v, given)

    def _apart(self, x: Tensor) -> bool:
        """Whether queries and keys of a sample are of other tokens of a tensor: of another sample, or another part."""
        if x.is_meta:
            return False
        with torch.inference_mode(False), torch.enable_grad():
            slopes = [
                torch.autograd.grad(made[0].float().sum(), x, allow_unused=True, retain_graph=True)[0]
                for made in (self.q, self.k)
            ]
        of_query, of_key = (torch.zeros(1) if slope is None else slope.ne(0).any(-1) for slope in slopes)
        return bool(of_query.any() and of_key.any() and not (of_query & of_key).any())


def _has_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _gradients(made: Sequence[Tensor], of: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """The gradients of a weighed sum of tensors."""
    made, drawn = [each for each in made if each.requires_grad], torch.Generator().manual_seed(0)
    if not made:
        return dict.fromkeys(of)
    with torch.inference_mode(False), torch.enable_grad():
        sums = [(each.float() * torch.randn(each.shape, generator=drawn).to(each.device)).sum() for each in made]
        found = torch.autograd.grad(sums, [*of.values()], allow_unused=True, retain_graph=True)
    return dict(zip(of, found, strict=True))


def _sources(made: Tensor, given: Sequence[Tensor]) -> set[int]:
    """Which of the tensors another one depends on."""
    if not given or not made.requires_grad:
        return set()
    with torch.inference_mode(False), torch.enable_grad():
        found = torch.autograd.grad(made.float().sum(), list(given), allow_unused=True, retain_graph=True)
    return {index for index, gradient in enumerate(found) if gradient is not None}


def _others(of_query: set[int], of_key: set[int], of_value: set[int]) -> set[int]:
    """What keys are made of, and not queries; of what they share a memory may be, and positions make no values."""
    if of_query.isdisjoint(of_key):
        return of_key
    return (of_key - of_query) & of_value if of_query - of_key else set()


def _lies(x: Tensor, made: Tensor) -> bool | None:
    """Whether ``x`` lies as ``[B, N, C]``, of whose tokens these queries, keys or values are; False for ``[N, B, C]``.

    None where it has another length, or another batch.
    """
    if x.dim() != 3:
        return None
    tokens, folded = made.shape[-2], made.dim() == 3  # folded: heads may lie in the batch
    if x.shape[1] == tokens and (x.shape[0] != tokens or made.dim() != 4 or _apart_in(0, made, x)):
        return True
    if x.shape[0] != tokens or made.shape[0] % max(x.shape[1], 1) or (made.shape[0] != x.shape[1] and not folded):
        return None
    return False if x.shape[1] != tokens or _apart_in(1, made, x) else None


def _apart_in(dim: int, made: Tensor, x: Tensor) -> bool:
    """Whether the first sample of ``made`` is of the first slice of ``x`` in this dimension alone."""
    if x.shape[dim] == 1 or not made.requires_grad or x.is_meta:
        return dim == 0
    with torch.inference_mode(False), torch.enable_grad():
        (slope,) = torch.autograd.grad(made[0].float().sum(), x, allow_unused=True, retain_graph=True)
    return slope is None or not bool(slope.narrow(dim, 1, x.shape[dim] - 1).any())


def _in_order(made: Tensor, x: Tensor, batch_first: bool | None) -> bool | None:
    """Whether each row of queries, keys or values is of the row of ``x`` in its place alone; None if unknown.

    Then weights of the rows weigh the gradient of ``x`` in the same places. Features are weighed too: the sum of
    normalized ones has no gradient.

    Args:
        made: queries, keys or values.
        x: what they were made of.
        batch_first: whether it is ``[B, N, C]``, or ``[N, B, C]``; where None, samples and rows may each be several
            dimensions that follow each other.
    """
    if not made.requires_grad or x.is_meta:
        return None
    folded, sizes = made.dim() == 3, (made.shape[:-3].numel(), made.shape[-2])  # folded: heads may lie in the batch
    drawn = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad():
        samples, rows = ((torch.rand(size, generator=drawn) + 0.5).to(made.device) for size in sizes)
        features = torch.randn(made.shape[-1], generator=drawn).to(made.device)
        weights = rows[:, None] if folded else samples.view(*made.shape[:-3], 1, 1, 1) * rows[:, None]
        plain, weighed = (
            torch.autograd.grad((made.float() * by * features).sum(), x, allow_unused=True, retain_graph=True)[0]
            for by in (torch.ones_like(rows[:, None]), weights)
        )
    if plain is None or weighed is None or not weighed.isfinite().all() or not plain.any():
        return None
    plain, weighed = plain.float(), weighed.float()
    return any(
        _weighed_alike(plain, weighed, row, sample)
        for row in _along(x, rows, None if batch_first is None else int(batch_first))
        for sample in (
            [plain.new_ones([1] * x.dim())]
            if folded
            else _along(x, samples, None if batch_first is None else int(not batch_first))
        )
    )


def _weighed_alike(plain: Tensor, weighed: Tensor, row: Tensor, sample: Tensor) -> bool:
    """Whether one gradient is the other with each token's weight, but for what half precision rounds of a token."""
    features = [at for at, sizes in enumerate(zip(row.shape, sample.shape, strict=True)) if max(sizes) == 1]
    limit = 0.05 * torch.maximum(plain.abs(), weighed.abs()).amax(features, keepdim=True)
    return bool(((weighed - plain * row * sample).abs() <= limit).all())


def _along(x: Tensor, weights: Tensor, dim: int | None) -> Iterator[Tensor]:
    """The weights along a dimension of ``x``, where None along any, or several that follow each other, that fit."""
    for first, last in itertools.combinations(range(x.dim() + 1), 2) if dim is None else [(dim, dim + 1)]:
        sizes = [size if first <= at < last else 1 for at, size in enumerate(x.shape)]
        if math.prod(sizes) == weights.numel():
            yield weights.view(sizes)
