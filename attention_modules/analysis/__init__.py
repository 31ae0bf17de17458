"""What an attention layer does, measured: pure functions of queries, keys and weights."""

from attention_modules.analysis.agreement import Agreement
from attention_modules.analysis.drift import Drift, LayerDrift, swap_drift
from attention_modules.analysis.kernel_pca import (
    KernelPCA,
    ProjectionLoss,
    compare_values,
    eigen_residual,
    gamma_constancy,
    kernel_pca,
    projection_loss,
)
from attention_modules.analysis.lipschitz import LipschitzEstimate, NotFiniteError, local_lipschitz
from attention_modules.analysis.lipschitz_ascent import ascend_lipschitz
from attention_modules.analysis.lipschitz_bound import layer_lipschitz_bound, lipschitz_bound
from attention_modules.analysis.logits import largest_logit, logit_bound
from attention_modules.analysis.maps import attention_map, attention_rollout
from attention_modules.analysis.max_margin import (
    NotSeparableError,
    locally_optimal,
    margin,
    max_margin_direction,
    max_margin_head,
)
from attention_modules.analysis.model_maps import attention_maps
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
    attention_sink,
    attention_statistics,
    sink_features,
    token_similarity,
)

__all__ = [
    "STATISTICS",
    "Agreement",
    "Drift",
    "KernelPCA",
    "LayerDrift",
    "LipschitzEstimate",
    "NotFiniteError",
    "NotSeparableError",
    "ProjectionLoss",
    "QKSpectrum",
    "Statistic",
    "ascend_lipschitz",
    "attention_entropy",
    "attention_map",
    "attention_maps",
    "attention_rollout",
    "attention_row_sums",
    "attention_sink",
    "attention_statistics",
    "compare_values",
    "eigen_residual",
    "frobenius_squared",
    "gamma_constancy",
    "kernel_pca",
    "largest_logit",
    "layer_lipschitz_bound",
    "lipschitz_bound",
    "local_lipschitz",
    "locally_optimal",
    "logit_bound",
    "margin",
    "max_margin_direction",
    "max_margin_head",
    "projection_loss",
    "qk_spectrum",
    "qk_statistics",
    "sink_features",
    "swap_drift",
    "token_similarity",
    "trace",
    "trace_squared",
]
