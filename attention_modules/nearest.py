"""Names that were meant: the known ones that are most like one that is not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher


def nearest(
    name: str, known: Iterable[str], count: int = 3, cutoff: float = 0.6, *, beginnings: bool = False
) -> list[str]:
    """The known names that are like a name, the most like first; with `beginnings` also those that begin like it."""

    def likeness(each: str) -> tuple[float, float]:
        whole, start = (SequenceMatcher(None, text.lower(), name.lower()).ratio() for text in (each, each[: len(name)]))
        return (max(whole, start), whole) if beginnings else (whole, whole)

    ranked = sorted(((likeness(each), each) for each in known), key=lambda pair: pair[0], reverse=True)
    return [each for (score, _), each in ranked if score >= cutoff][:count]


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A question that offers the nearest known names, with a space before it; empty where none is near."""
    near = nearest(name, known, cutoff=cutoff)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
