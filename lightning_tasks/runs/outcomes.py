"""Which samples of a test were right: a bit a sample, as text that a table holds."""

from __future__ import annotations

from typing import Any

import numpy as np


def to_text(right: Any) -> str:
    """Booleans ``[N]`` (a tensor or an array) as hexadecimal digits, four samples each."""
    return np.packbits(np.asarray(right, dtype=bool)).tobytes().hex()


def from_text(text: str, samples: int) -> np.ndarray:
    """What :func:`to_text` was given, ``[samples]``.

    Raises:
        ValueError: if the text is no such digits, or of another number of samples.
    """
    packed = np.frombuffer(bytes.fromhex(text), dtype=np.uint8)
    if samples < 0 or len(packed) != (samples + 7) // 8:
        raise ValueError(f"{len(packed)} bytes are not the bits of {samples} samples")
    return np.unpackbits(packed, count=samples).astype(bool)
