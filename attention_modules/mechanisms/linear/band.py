"""What a causal window sees: for blocks of rows, the keys before and among them, and the first keys of all."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_modules.base import State
from attention_modules.masks import require, tokens_of
from attention_modules.mechanisms.linear.stateful import check_state
from attention_modules.mechanisms.shared.chunks import refuse_free_length


class Band:
    """The last ``window`` visible keys of each row and the first ``sinks`` of its sequence, a block of rows at a time.

    Hidden tokens do not count: a window reaches over them. What stands for all tokens of earlier calls is in ``state``:
    the last keys and values, ``keys`` and ``values`` ``[B, H, window, d]``, the last of all at the end; the first ones
    of their sequence, ``first_keys`` and ``first_values`` ``[B, H, sinks, d]``, zeros where there are fewer; and
    ``count`` ``[B]``, how many visible tokens their sequence has had. In what follows the order of a visible token is
    its number among those of this call, from 0; earlier ones have -1, -2 and so on.

    Args:
        name: of the mechanism, for messages.
        k: keys of the new tokens ``[B, H, N, d]``.
        v: their values.
        window: how many keys a row sees, itself among them.
        sinks: how many it sees beside.
        tokens: which tokens are seen, boolean ``[B, N]``; all where None.
        starts: at which tokens a sequence begins, boolean ``[B, N]``; nowhere where None.
        state: of the earlier tokens; empty or None before the first.

    Raises:
        ValueError: if it is the state of something else.
    """

    def __init__(
        self,
        name: str,
        k: Tensor,
        v: Tensor,
        window: int,
        sinks: int = 0,
        tokens: Tensor | None = None,
        starts: Tensor | None = None,
        state: State | None = None,
    ) -> None:
        self.batch, _, self.tokens = k.shape[:3]
        refuse_free_length(self.tokens)
        tokens, starts = (tokens, starts) if self.tokens else (None, None)
        self.window, self.sinks = window, sinks
        if state:
            kinds = {"": window, "first_": sinks} if sinks else {"": window}
            shapes = {
                f"{kind}{of}": (*x.shape[:2], size, x.shape[-1])
                for kind, size in kinds.items()
                for of, x in (("keys", k), ("values", v))
            }
            check_state(name, state, {"count": (self.batch,), **shapes})
        if tokens is not None:  # 0 times what is no number is none
            k, v = (x.masked_fill(~tokens[:, None, :, None], 0.0) for x in (k, v))
        # Where nothing was before, a window wider than the sequence is as wide as that.
        kept = window if state else 0
        self.reach = min(window, kept + self.tokens)
        self.before = max(kept, self.reach - 1)  # how many keys lie between the first ones and the new ones
        count = state["count"] if state else torch.zeros(self.batch, dtype=torch.long, device=k.device)
        self.k, self.v = (
            torch.cat(
                [
                    *([state[f"first_{name}"].to(new.dtype) if state else _blank(new, sinks)] if sinks else []),
                    _blank(new, self.before - kept),
                    *([state[name].to(new.dtype)] if state else []),
                    new,
                ],
                2,
            )
            for name, new in (("keys", k), ("values", v))
        )
        rows = torch.arange(self.tokens, device=k.device)[None]
        # Of each row the order of the last visible token, [1 or B, N], and that of its sequence's first, [B, 1 or N].
        self.last = rows if tokens is None else tokens.cumsum(1) - 1
        self.first = -count[:, None]
        if starts is not None:
            begun = self.last if tokens is None else self.last + (~tokens).long()
            self.first = torch.where(starts, begun, self.first).cummax(1).values
        self.seen = tokens
        self.place = None if tokens is None else (~tokens).long().argsort(dim=1, stable=True)
        self.plain = tokens is None and starts is None

    def index(self, order: Tensor) -> Tensor:
        """Where tokens of some order, ``[1 or B, n]``, stand in ``k`` and ``v``; those that are not kept anywhere."""
        new = order.clamp(0, self.tokens - 1)
        if self.place is not None:
            new = self.place.gather(1, new.expand(self.batch, -1))
        return (torch.where(order < 0, order, new) + self.sinks + self.before).clamp(min=0)

    def first_index(self, first: Tensor) -> Tensor:
        """Where the first tokens of sequences stand, ``[B, n] -> [B, n * sinks]``: earlier ones among the first."""
        slots = torch.arange(self.sinks, device=first.device)
        order = first[..., None] + slots
        return torch.where(order < 0, slots, self.index(order.flatten(1)).view(order.shape)).flatten(1)

    def blocks(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values of blocks of rows, and what each row sees.

        Args:
            q: ``[B, H, N, d]``.

        Returns:
            ``[B * n, H, L, d]``, twice ``[B * n, H, sinks + L + window - 1, d]``, and boolean
            ``[B * n, 1, L, sinks + L + window - 1]``.
        """
        length = min(self.reach, self.tokens)
        number = -(-self.tokens // length)
        wide, more = length + self.reach - 1, number * length - self.tokens
        last, first = (
            _longer(x.expand(-1, self.tokens), more).unflatten(1, (number, length)) for x in (self.last, self.first)
        )
        start = last[:, :, 0] - self.reach + 1  # the order of a block's first key, [1 or B, n]
        order = start[..., None] + torch.arange(wide, device=q.device)  # [1 or B, n, wide]
        row, at, begin = order[:, :, None], last[..., None], first[..., None]
        seen = (row <= at) & (row >= begin) & ((row > at - self.reach) | (row < begin + self.sinks))
        keys, values = (self._spans(x, order, more) for x in (self.k, self.v))
        if self.sinks:
            slots = first[:, :, :1] + torch.arange(self.sinks, device=q.device)  # [B, n, sinks]
            beside = (slots < start[..., None])[:, :, None] & (first == first[:, :, :1])[..., None]
            seen = torch.cat([beside, seen.expand(*beside.shape[:-1], -1)], -1)
            index = self.first_index(first[:, : 1 if self.plain else None, 0])
            firsts = (_take(x, index).unflatten(2, (-1, self.sinks)) for x in (self.k, self.v))
            keys, values = (
                torch.cat([each.expand(-1, -1, number, -1, -1), span], 3)
                for each, span in zip(firsts, (keys, values), strict=True)
            )
        blocks = F.pad(q, (0, 0, 0, more)).unflatten(2, (number, length))
        seen = seen.expand(self.batch, -1, -1, -1)[:, None].expand(-1, 1, -1, -1, -1)
        return tuple(x.transpose(1, 2).flatten(0, 1) for x in (blocks, keys, values, seen))  # type: ignore[return-value]

    def _spans(self, x: Tensor, order: Tensor, more: int) -> Tensor:
        """Of keys or values those that a block may see: ``[B, H, n, wide, d]``."""
        number, wide = order.shape[1:]
        if self.place is None:
            begin = self.sinks + self.before - self.reach + 1
            return F.pad(x[:, :, begin:], (0, 0, 0, more)).unfold(2, wide, wide - self.reach + 1).transpose(-1, -2)
        return _take(x, self.index(order.flatten(1))).unflatten(2, (number, wide))

    def whole(self, out: Tensor) -> Tensor:
        """The rows of blocks ``[B * n, H, L, d]`` as ``[B, H, N, d]``."""
        number = -(-self.tokens // min(self.reach, self.tokens))
        return out.unflatten(0, (self.batch, number)).transpose(1, 2).flatten(2, 3)[:, :, : self.tokens]

    def leaving(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row the key and the value that its window has just left, and whether there is one.

        Returns:
            Twice ``[B, H, N, d]``, and boolean ``[B, N]``.
        """
        order = self.last - self.window
        gone = (order >= self.first).expand(self.batch, -1)
        if self.place is None:
            there = max(0, self.before + self.tokens - self.window)  # the first rows' windows have left nothing
            ends = (x[:, :, self.sinks : self.sinks + there] for x in (self.k, self.v))
            keys, values = (F.pad(x, (0, 0, self.tokens - there, 0)) for x in ends)
        else:
            index = self.index(order)
            keys, values = (_take(x, index) for x in (self.k, self.v))
        return keys, values, gone if self.seen is None else gone & self.seen

    def write(self, state: State) -> None:
        """Fill a state with what stands for all tokens so far."""
        if self.tokens == 0 and state:
            return
        last = self.last[:, -1:] if self.tokens else self.first - 1
        first = self.first[:, -1:]
        order = last + torch.arange(1 - self.window, 1, device=last.device)
        there = order >= first
        state["count"] = (last + 1 - first).squeeze(1)
        if self.place is None:
            ends = (x[:, :, self.sinks :][:, :, -self.window :] for x in (self.k, self.v))
            found = [F.pad(x, (0, 0, self.window - x.shape[2], 0)) for x in ends]
        else:
            found = [_take(x, self.index(order)) for x in (self.k, self.v)]
        state["keys"], state["values"] = (torch.where(there[:, None, :, None], x, 0.0) for x in found)
        if self.sinks:
            there = first + torch.arange(self.sinks, device=last.device) <= last
            index = self.first_index(first)
            state["first_keys"], state["first_values"] = (
                torch.where(there[:, None, :, None], _take(x, index), 0.0) for x in (self.k, self.v)
            )


def past_tokens(name: str, attn_mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    """Which tokens are there, boolean ``[B, N]``, in a call that must hide the future; None where all are.

    Raises:
        TypeError, ValueError: as :func:`.tokens_of`; if the future is not hidden, or heads see different tokens.
    """
    tokens, is_causal = tokens_of(name, attn_mask, is_causal, q, k)
    if not is_causal and q.shape[-2] > 1:
        raise ValueError(
            f"{name} attention sees the last tokens before each, so it must hide the future: pass is_causal=True, or "
            "choose another mechanism for a layer that sees the future (ViT, BERT)"
        )
    if tokens is None:
        return None
    require((tokens == tokens[:, :1]).all(), f"{name} attention takes one mask of padding for all heads of a sample")
    return tokens[:, 0].expand(q.shape[0], -1)


def _blank(x: Tensor, tokens: int) -> Tensor:
    return x.new_zeros(*x.shape[:2], tokens, x.shape[-1])


def _longer(x: Tensor, more: int) -> Tensor:
    """Rows ``[B, N]`` with the last one repeated."""
    return torch.cat([x, x[:, -1:].expand(-1, more)], 1)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Of ``[B, H, M, d]`` the tokens ``[1 or B, n]``: ``[B, H, n, d]``."""
    index = index.expand(x.shape[0], -1)
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))
