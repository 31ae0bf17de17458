"""What an attention layer does, measured: pure functions of queries, keys and weights."""

from attention_modules.analysis.max_margin import (
    NotSeparableError,
    locally_optimal,
    margin,
    max_margin_direction,
    max_margin_head,
)
from attention_modules.analysis.spectrum import (
    QKSpectrum,
    frobenius_squared,
    qk_spectrum,
    qk_statistics,
    trace,
    trace_squared,
)
from attention_modules.analysis.statistics import (
    STATISTICS,
    Statistic,
    attention_entropy,
    attention_row_sums,
    attention_statistics,
)

__all__ = [
    "STATISTICS",
    "NotSeparableError",
    "QKSpectrum",
    "Statistic",
    "attention_entropy",
    "attention_row_sums",
    "attention_statistics",
    "frobenius_squared",
    "locally_optimal",
    "margin",
    "max_margin_direction",
    "max_margin_head",
    "qk_spectrum",
    "qk_statistics",
    "trace",
    "trace_squared",
]
