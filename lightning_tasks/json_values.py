"""Values of a JSON file, which anyone may have written, checked by kind."""

from __future__ import annotations

from typing import Any


def of_kind(value: Any, *kinds: type) -> Any:
    """The value, if its type is one of `kinds`; a truth is no number.

    Raises:
        TypeError: it is another.
    """
    if type(value) not in kinds:
        needed = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{repr(value)[:80]} is {type(value).__name__}, and {needed} is needed")
    return value


def text_of(value: Any) -> str:
    """A text that can be written.

    Raises:
        TypeError: it is no text.
        ValueError: it holds half of a surrogate pair.
    """
    text: str = of_kind(value, str)
    text.encode()
    return text


def texts_of(values: Any) -> dict[str, str]:
    """Texts by name.

    Raises:
        TypeError, ValueError: they are something else, or cannot be written.
    """
    return {text_of(name): text_of(value) for name, value in of_kind(values, dict).items()}


def number_of(value: Any) -> float:
    """A number.

    Raises:
        TypeError: it is none.
        ValueError: it is a whole number that no float holds.
    """
    try:
        return float(of_kind(value, float, int))
    except OverflowError as error:
        raise ValueError(f"{str(value)[:80]} is too large for a float") from error


def seed_of(value: Any) -> int:
    """A seed.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is negative, or 2**32 or more.
    """
    if not 0 <= of_kind(value, int) < 1 << 32:
        raise ValueError(f"the seed {str(value)[:80]} is not at least 0 and below 2**32")
    return int(value)


def list_of(values: Any, kind: type) -> list[Any]:
    """A list of values of one kind.

    Raises:
        TypeError: it is no list, or holds another kind.
        ValueError: a text in it cannot be written.
    """
    return [text_of(value) if kind is str else of_kind(value, kind) for value in of_kind(values, list)]
