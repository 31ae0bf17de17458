"""What a layer takes: one record, and why it refuses what it does not take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from attention_modules.base import described
from attention_modules.mechanism import AttentionMechanism

SHIFTED = "its windows are shifted from block to block, so that its tokens are not those of the other layers"


@dataclass(frozen=True)
class Limits:
    """Why a layer takes no mechanism of a kind; None where it does.

    Args:
        every: none at all.
        of: a given mechanism.
        without_rows: one whose ``row_masks`` is False.
        with_input: one that needs the layer's input.
        with_query: one that uses the query.
        without_query: one that leaves the query out.
        sharing: one that reads the values of other layers, or gives its own.
        rotates: whether rotary positions have turned queries and keys before.
    """

    every: str | None = None
    of: Callable[[AttentionMechanism], str | None] = lambda mechanism: None
    without_rows: str | None = None
    with_input: str | None = None
    with_query: str | None = None
    without_query: str | None = None
    sharing: str | None = None
    rotates: bool = False

    def reasons(self, built: AttentionMechanism, cross: bool, sees_the_future: bool) -> Iterator[str | None]:
        """Why a mechanism is not taken, in turn; in cross-attention its queries are of other tokens than its keys."""
        name = type(built).__name__
        yield self.every
        yield self.of(built)
        yield None if built.row_masks else self.without_rows
        if built.before_rotation and self.rotates:
            yield (
                f"rotary positions have turned its queries and keys, and {described(built)} treats their features "
                "apart; choose its option for whole heads, or a mechanism without"
            )
        yield self.with_input if "x" in built.needs else None
        if cross and not (built.uses_query and not built.one_query_per_key):
            lacks = "has no query for each key" if built.uses_query else "needs a query"
            what = f"which {name} needs" if built.uses_query else f"which {name} does not use"
            yield f"cross-attention {lacks}, {what}; leave it out of `where`, or choose another mechanism"
        yield self.with_query if built.uses_query else None
        if sees_the_future and built.causality == "always":  # the last: whatever else refuses it refuses its cures too
            yield (
                f"it sees the future, and {name} writes one token after the other into a state: choose linear, "
                "retention, performer, or hedgehog without a window, which have a form for that, or, where it hides "
                "the future all the same, set its is_causal = True"
            )
