"""Names of anybody's in figures: drawn as they are written, and each in the legend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def plain_names() -> Iterator[None]:
    """Texts that are made meanwhile are no formulas, also when their figure is saved later: `$x` is two letters."""
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):
        yield


def draw_legend(place: Any, entries: Sequence[tuple[str, Any]], **options: Any) -> Any:
    """A legend of axes or a figure: lines and patches after their names, also one that begins with `_`."""
    numbers = [str(number) for number in range(len(entries))]  # Matplotlib leaves names with `_` out
    legend = place.legend(handles=[handle for _, handle in entries], labels=numbers, **options)
    for text, (name, _) in zip(legend.get_texts(), entries, strict=True):
        text.set_text(name)
    return legend
