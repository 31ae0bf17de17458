"""Errors of other code, quoted in ours."""

from __future__ import annotations

from pickle import UnpicklingError


def reason(error: BaseException) -> str:
    """Type and text of an error in one line; what torch advises where it refuses code in a file is left out."""
    if isinstance(error, UnpicklingError):
        return "UnpicklingError: it is cut short, is of another kind, or holds more than tensors and plain data"
    return " ".join(f"{type(error).__name__}: {error}".split())
