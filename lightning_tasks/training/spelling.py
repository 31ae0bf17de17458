"""The two spellings of a task's mechanism, its options and its layers."""

from __future__ import annotations

from typing import Any

Choice = tuple[Any, dict[str, Any] | None, list[int] | None]


def one_spelling(former: Choice, present: Choice) -> Choice:
    """A task's mechanism, options and layers, from the names that only tasks have and those of all other places.

    Args:
        former: ``attention``, ``attention_options`` and ``attention_layers``.
        present: ``mechanism``, ``options`` and ``layers``, each of which stands in place of the former where given;
            the former options are of another mechanism where there is a ``mechanism``.
    """
    attention, attention_options, attention_layers = former
    mechanism, options, layers = present
    if mechanism is not None:
        attention, attention_options = mechanism, None
    return (
        attention,
        attention_options if options is None else options,
        attention_layers if layers is None else layers,
    )
