"""Errors of other code, quoted in ours."""

from __future__ import annotations


def reason(error: BaseException) -> str:
    """Type and text of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
