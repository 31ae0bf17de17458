"""Student's interval of a mean, which comparisons take over seeds, and analyses over draws."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Student's t-interval of the mean of independent values; two or more are needed."""
    from scipy import special  # a tenth of the time of scipy.stats, whose distributions call it

    found = np.asarray(values, dtype=float)
    half = special.stdtrit(len(found) - 1, (1 + level) / 2) * found.std(ddof=1) / math.sqrt(len(found))
    return float(found.mean() - half), float(found.mean() + half)
