"""The map by which a mechanism mixes values, held as what it is made of: some rows or columns of it at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention_modules.kernels import without_autocast
from attention_modules.masks import hide
from attention_modules.mechanisms.shared.chunks import Weights, row_weights
from attention_modules.precision import scaled_logits

ELEMENTS = 2**20  # of a map that are held at once: 4 MiB of float32
Block = tuple[slice, slice, Tensor]


class NoMapError(ValueError):
    """A mechanism has no map: its output is not linear in the values, and it does not say what its map is.

    Example:
        >>> import torch
        >>> import attnswap
        >>> def squared(q, k, v):
        ...     return torch.nn.functional.scaled_dot_product_attention(q, k, v).square()
        >>> layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        >>> report = attnswap.swap_attention(layer, squared)
        >>> try:
        ...     attnswap.attention_maps(layer, (torch.randn(1, 5, 16),) * 3)
        ... except attnswap.NoMapError as error:
        ...     print(str(error).partition(":")[0])
        squared has no attention map
    """


class ActingMap(ABC):
    """Weights ``[B, H, N, M]`` of values, of which no more is held at once than asked for."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, N and M."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it is."""

    @abstractmethod
    def blocks(self, rows: Tensor | None = None) -> Iterator[Block]:
        """Parts of the map, at least float32: places among the rows, places among the columns, and the weights there.

        Args:
            rows: numbers of the rows wanted, ``[R]``; all where None.
        """

    def some_rows(self, counting: Tensor | None = None) -> Tensor | None:
        """Rows that stand for all that count, boolean ``[B, N]``, where all would cost much; None for all."""
        return None

    def of_heads(self, heads: Sequence[int]) -> ActingMap:
        """The same of some heads."""
        return _Part(self, list(heads), self.shape[3])

    def of_first_keys(self, number: int) -> ActingMap:
        """The same of some keys; those that follow have no value."""
        return _Part(self, list(range(self.shape[1])), number)

    def dense(self, rows: Tensor | None = None) -> Tensor:
        """The map, or some rows of it, ``[B, H, R, M]``."""
        batch, heads, number, columns = self.shape
        number = number if rows is None else len(rows)
        found: Tensor | None = None
        for place, column, part in self.blocks(rows):
            if found is None:
                if part.shape == (batch, heads, number, columns):
                    return part
                found = part.new_zeros(batch, heads, number, columns)
            found[:, :, place, column] = part
        return torch.zeros(batch, heads, number, columns, device=self.device) if found is None else found


@dataclass(frozen=True)
class FactorMap(ActingMap):
    """gain_i · softmax(q kᵀ · scale + mask)_ij · weight_j, of which the first keys may be no values.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, E + M, d]``.
        attn_mask: boolean or additive, broadcastable to ``[B, H, N, E + M]``.
        is_causal: row i sees the E first keys and keys 0 to i.
        scale: factor on the logits, 1/sqrt(d) where None.
        extra: E, keys before the others that have no value (a sink).
        gain: of each row, ``[B, H, N, 1]``.
        weight: of each key, ``[B, H, M]``.
    """

    q: Tensor
    k: Tensor
    attn_mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    extra: int = 0
    gain: Tensor | None = None
    weight: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (*self.q.shape[:3], self.k.shape[2] - self.extra)

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def is_plain(self) -> bool:
        """Whether it is softmax, and rows sum to 1."""
        return not self.extra and self.gain is None and self.weight is None

    def of_heads(self, heads: Sequence[int]) -> FactorMap:
        of = list(heads)
        mask = self.attn_mask
        if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
            mask = mask[..., of, :, :]
        gain, weight = (None if x is None else x[:, of] for x in (self.gain, self.weight))
        return replace(self, q=self.q[:, of], k=self.k[:, of], attn_mask=mask, gain=gain, weight=weight)

    def of_first_keys(self, number: int) -> ActingMap:
        if self.is_causal or not self.is_plain:
            return super().of_first_keys(number)
        mask = self.attn_mask
        if mask is not None and mask.dim() and mask.shape[-1] > 1:
            mask = mask.roll(self.k.shape[2] - number, -1)
        k = self.k.roll(self.k.shape[2] - number, 2)
        return replace(self, k=k, attn_mask=mask, extra=self.k.shape[2] - number)

    def normalized(self) -> FactorMap:
        """Absolute weights, each row over its sum: softmax of other queries and keys."""
        if self.is_plain:
            return self
        q, k, mask, scale = self.q, self.k[:, :, self.extra :], self.attn_mask, self.scale
        if mask is not None and mask.shape[-1] > 1:
            mask = mask[..., self.extra :]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if self.weight is not None:
            wide = torch.promote_types(q.dtype, torch.float32)
            log = self.weight.abs().to(wide).log().clamp(min=-1e9).unsqueeze(-1)  # 0 · -inf would be NaN
            q = torch.cat([q.to(wide) * scale, torch.ones_like(q[..., :1], dtype=wide)], -1)
            k, scale = torch.cat([k.to(wide), log], -1), 1.0
        return FactorMap(q, k, mask, self.is_causal, scale)

    def blocks(self, rows: Tensor | None = None) -> Iterator[Block]:
        places = torch.arange(self.q.shape[2], device=self.q.device) if rows is None else rows
        step = max(1, ELEMENTS // max(1, self.q.shape[0] * self.q.shape[1] * self.k.shape[2]))
        for first in range(0, len(places), step):
            part = softmax_rows(self, places[first : first + step])
            yield slice(first, first + part.shape[2]), slice(0, part.shape[3]), part


def softmax_rows(factors: FactorMap, rows: Tensor) -> Tensor:
    """These rows ``[R]`` of the map, ``[B, H, R, M]``; zeros in rows that see nothing, NaN where q or k are."""
    attn_mask = hide(factors.attn_mask)
    extra = factors.extra
    with without_autocast(factors.q.device):
        logits = scaled_logits(factors.q[:, :, rows], factors.k, factors.scale)
        if factors.is_causal:
            column = torch.arange(factors.k.shape[2], device=logits.device)
            logits = logits.masked_fill(column > rows[:, None] + extra, float("-inf"))
        if attn_mask is not None:
            part = attn_mask[..., rows, :] if attn_mask.dim() > 1 and attn_mask.shape[-2] > 1 else attn_mask
            logits = logits.masked_fill(~part, float("-inf")) if part.dtype == torch.bool else logits + part
        empty = (logits == float("-inf")).all(-1, keepdim=True)  # of which softmax is 0/0
        found = logits.softmax(-1).masked_fill(empty, 0.0)[..., extra:]
        if factors.gain is not None:
            found = found * factors.gain[:, :, rows]
        return found if factors.weight is None else found * factors.weight.unsqueeze(-2)


@dataclass(frozen=True)
class ChunkedMap(ActingMap):
    """What :func:`.attend_by` mixes values with; the arguments are its own."""

    weights: Weights
    q: Tensor
    k: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    scale: float | None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (*self.q.shape[:3], self.k.shape[2])

    @property
    def device(self) -> torch.device:
        return self.q.device

    def blocks(self, rows: Tensor | None = None) -> Iterator[Block]:
        batch, heads, number, columns = self.shape
        step = max(1, ELEMENTS // max(1, batch * heads * columns))
        done = 0
        for first, last in _runs(number, step) if rows is None else _runs_of(rows.tolist(), step):
            here, mask = slice(first, last), self.attn_mask
            if mask is not None and mask.shape[-2] > 1:
                mask = mask[..., here, :]
            given = self.q[:, :, here], self.k, mask, first, self.is_causal, self.scale
            yield slice(done, done + last - first), slice(0, columns), row_weights(self.weights, *given)
            done += last - first


def _runs(number: int, step: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + step, number)) for first in range(0, number, step))


def _runs_of(rows: Sequence[int], step: int) -> Iterator[tuple[int, int]]:
    """Rows that follow each other, so many at most."""
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or rows[end] != rows[end - 1] + 1 or end - start == step:
            yield rows[start], rows[end - 1] + 1
            start = end


@dataclass(frozen=True)
class SumMap(ActingMap):
    """Σ factor · map, of maps of one shape; factors are numbers."""

    parts: Sequence[tuple[float | Tensor, FactorMap]]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.parts[0][1].shape

    @property
    def device(self) -> torch.device:
        return self.parts[0][1].device

    def some_rows(self, counting: Tensor | None = None) -> Tensor | None:
        return _as_many_as_wide(self.parts[0][1].q, counting)

    def blocks(self, rows: Tensor | None = None) -> Iterator[Block]:
        for several in zip(*(part.blocks(rows) for _, part in self.parts), strict=True):
            place, column, _ = several[0]
            total = sum(factor * block[2] for (factor, _), block in zip(self.parts, several, strict=True))
            yield place, column, total  # type: ignore[misc]


@dataclass(frozen=True)
class LinearMap(ActingMap):
    """The matrix of a function that is linear in the values: by columns of the identity as values, or by its gradient.

    Args:
        mix: the function of values ``[B, H, M, d]``, without a gradient; a constant may be added to what is linear.
        slope: of a gradient of the output, the output for ``values`` and their gradient; None where they have none.
        values: those for which it shall act, ``[B, H, M, d]``.
        like: what has the output's shape and dtype, ``[B, H, N, d']``.
        name: of the mechanism, for the error.
    """

    mix: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], tuple[Tensor, Tensor] | None]
    values: Tensor
    like: Tensor
    name: str

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, columns, _ = self.values.shape
        return batch, heads, self.like.shape[2], columns

    @property
    def device(self) -> torch.device:
        return self.values.device

    def some_rows(self, counting: Tensor | None = None) -> Tensor | None:
        return _as_many_as_wide(self.like, counting)

    def blocks(self, rows: Tensor | None = None) -> Iterator[Block]:
        """As in the base; all is given only after map · v was compared with the output.

        Raises:
            NoMapError: if they differ.
        """
        columns = self.values.shape[2]
        if rows is not None and 4 * len(rows) <= columns and (found := self._by_slope(rows)) is not None:
            yield slice(0, len(rows)), slice(0, columns), found
            return
        wide = torch.promote_types(self.values.dtype, torch.float32)
        tried, constant = _beside(self.values), self._constant()
        want = self.mix(tried) - constant
        want, tried = (want if rows is None else want[:, :, rows]).to(wide), tried.to(wide)
        total = torch.zeros_like(want)
        for first in range(0, columns, self.values.shape[3]):
            last = min(first + self.values.shape[3], columns)
            one = torch.zeros_like(self.values)
            one[..., first:last, : last - first] = torch.eye(last - first, dtype=one.dtype, device=one.device)
            part = (self.mix(one) - constant)[..., : last - first]
            part = (part if rows is None else part[:, :, rows]).to(wide)
            total += _product(part, tried[..., first:last, :])
            if last == columns:
                self._check(total, want)
            yield slice(0, want.shape[2]), slice(first, last), part

    def _constant(self) -> Tensor:
        return self.mix(torch.zeros_like(self.values))

    def _by_slope(self, rows: Tensor) -> Tensor | None:
        """These rows, as many from one gradient as outputs are wide; None where there is no gradient."""
        found = []
        for part in rows.split(self.like.shape[-1]):
            above = torch.zeros_like(self.like)
            above[:, :, part, torch.arange(len(part), device=part.device)] = 1.0
            if (given := self.slope(above)) is None:
                return None
            out, gradient = given
            found.append(gradient[..., : len(part)].mT)
        wide = torch.promote_types(self.values.dtype, torch.float32)
        weights = torch.cat(found, 2).to(wide)
        total, want = _product(weights, self.values.to(wide)), out[:, :, rows].to(wide)
        if not self._fits(total, want):
            self._check(total, want - self._constant()[:, :, rows].to(wide))
        return weights

    def _fits(self, total: Tensor, want: Tensor) -> bool:
        error = (total - want).norm()
        return not bool(error > TOLERANCE[self.like.dtype] * want.norm() + 1e-30)  # NaN is no error of the mechanism

    def _check(self, total: Tensor, want: Tensor) -> None:
        if not self._fits(total, want):
            error, size = (total - want).norm(), want.norm()
            raise NoMapError(
                f"{self.name} has no attention map: with other values its output differs from map · values by "
                f"{float(error / size):.1g} of its norm, so it is not linear in them; where it has a map all the same, "
                "define own_map in a subclass of AttentionMechanism"
            )


def _as_many_as_wide(given: Tensor, counting: Tensor | None) -> Tensor | None:
    """As many rows as it is wide, where at least 8 times as many count in a sample."""
    number, width = given.shape[2:]
    if number < 8 * width or (counting is not None and int(counting.sum(-1).amax()) < 8 * width):
        return None
    return middles(number, width, given.device, None if counting is None else counting.any(0))


def middles(number: int, most: int, device: torch.device, counting: Tensor | None = None) -> Tensor:
    """The middles of so many parts of equal size of a number of rows: none stands for more of them than others do.

    Of the rows that count, boolean ``[..., N]``, where these are known: some several times where they are fewer.
    """
    places = 2 * torch.arange(most, device=device) + 1
    if counting is None or most == number:
        return places * number // (2 * most)
    seen = counting.cumsum(-1)
    return torch.searchsorted(seen, places * seen[..., -1:] // (2 * most), right=True).clamp(max=number - 1)


def once(rows: Tensor) -> Tensor:
    """Which of :func:`middles` are not the row before them again."""
    return rows.diff(dim=-1, prepend=rows[..., :1] - 1) != 0


def _product(x: Tensor, y: Tensor) -> Tensor:
    with without_autocast(x.device):
        return x @ y


TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}


def _beside(values: Tensor) -> Tensor:
    """Other values of the same size, drawn without the global random state."""
    return (values + quasi_random(values) * values.detach().square().mean().sqrt().clamp(min=1e-3)).to(values.dtype)


def quasi_random(like: Tensor, turn: int = 1) -> Tensor:
    """Numbers between -1 and 1 that look random, the same for each ``turn``, of a tensor's shape, dtype and device."""
    wide = torch.promote_types(like.dtype, torch.float32)
    golden = (0x9E3779B97F4A7C15 * turn + 2**63) % 2**64 - 2**63  # of all integers, among which multiples wrap around
    count = torch.arange(1, like.numel() + 1, device=like.device).mul_(golden)
    return count.to(wide).mul_(2.0**-63).view(like.shape).to(like.dtype)


@dataclass(frozen=True)
class DenseMap(ActingMap):
    """A map ``[B, H, N, M]`` that is there."""

    found: Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return tuple(self.found.shape)  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        return self.found.device

    def blocks(self, rows: Tensor | None = None) -> Iterator[Block]:
        found = self.found if rows is None else self.found[:, :, rows]
        found = found.to(torch.promote_types(found.dtype, torch.float32))
        yield slice(0, found.shape[2]), slice(0, found.shape[3]), found


@dataclass(frozen=True)
class _Part(ActingMap):
    """Of some heads and the first keys."""

    whole: ActingMap
    heads: list[int]
    keys: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.whole.shape[0], len(self.heads), self.whole.shape[2], self.keys

    @property
    def device(self) -> torch.device:
        return self.whole.device

    def some_rows(self, counting: Tensor | None = None) -> Tensor | None:
        return self.whole.some_rows(counting)

    def blocks(self, rows: Tensor | None = None) -> Iterator[Block]:
        for place, column, part in self.whole.blocks(rows):
            last = min(column.stop, self.keys)
            yield place, slice(column.start, last), part[:, self.heads, :, : max(0, last - column.start)]
