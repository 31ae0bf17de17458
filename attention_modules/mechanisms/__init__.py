"""Attention mechanisms, one per file: a pure function under a thin class."""

from attention_modules.mechanisms.keys.forgetting import (
    ForgettingAttention as ForgettingAttention,
    forgetting_attention as forgetting_attention,
)
from attention_modules.mechanisms.keys.kde import KDEAttention as KDEAttention, kde_attention as kde_attention
from attention_modules.mechanisms.keys.l2 import L2Attention as L2Attention, l2_attention as l2_attention
from attention_modules.mechanisms.keys.mom import (
    MedianOfMeansAttention as MedianOfMeansAttention,
    mom_attention as mom_attention,
)
from attention_modules.mechanisms.keys.rkde import (
    RobustKDEAttention as RobustKDEAttention,
    rkde_attention as rkde_attention,
)
from attention_modules.mechanisms.keys.sink import SinkAttention as SinkAttention, sink_attention as sink_attention
from attention_modules.mechanisms.keys.sinkhorn import (
    SinkhornAttention as SinkhornAttention,
    sinkhorn_attention as sinkhorn_attention,
)
from attention_modules.mechanisms.layers.elliptical import (
    EllipticalAttention as EllipticalAttention,
    elliptical_attention as elliptical_attention,
)
from attention_modules.mechanisms.layers.neutreno import (
    NeutrenoAttention as NeutrenoAttention,
    neutreno_attention as neutreno_attention,
)
from attention_modules.mechanisms.layers.value_residual import (
    ValueResidualAttention as ValueResidualAttention,
    value_residual_attention as value_residual_attention,
)
from attention_modules.mechanisms.linear.delta import (
    DeltaAttention as DeltaAttention,
    delta_attention as delta_attention,
)
from attention_modules.mechanisms.linear.gated_delta import (
    GatedDeltaAttention as GatedDeltaAttention,
    gated_delta_attention as gated_delta_attention,
)
from attention_modules.mechanisms.linear.gla import (
    GatedLinearAttention as GatedLinearAttention,
    gla_attention as gla_attention,
)
from attention_modules.mechanisms.linear.hedgehog import (
    HedgehogAttention as HedgehogAttention,
    hedgehog_attention as hedgehog_attention,
)
from attention_modules.mechanisms.linear.kda import (
    KimiDeltaAttention as KimiDeltaAttention,
    kda_attention as kda_attention,
)
from attention_modules.mechanisms.linear.linear import (
    LinearAttention as LinearAttention,
    linear_attention as linear_attention,
)
from attention_modules.mechanisms.linear.performer import (
    PerformerAttention as PerformerAttention,
    performer_attention as performer_attention,
)
from attention_modules.mechanisms.linear.retention import (
    RetentionAttention as RetentionAttention,
    retention_attention as retention_attention,
)
from attention_modules.mechanisms.linear.window import (
    WindowAttention as WindowAttention,
    window_attention as window_attention,
)
from attention_modules.mechanisms.maps.dam import (
    DifferentiableAttentionMask as DifferentiableAttentionMask,
    dam_attention as dam_attention,
)
from attention_modules.mechanisms.maps.entmax import (
    EntmaxAttention as EntmaxAttention,
    entmax_attention as entmax_attention,
)
from attention_modules.mechanisms.maps.hard import HardAttention as HardAttention, hard_attention as hard_attention
from attention_modules.mechanisms.maps.position_bias import (
    PositionBiasAttention as PositionBiasAttention,
    position_bias_attention as position_bias_attention,
)
from attention_modules.mechanisms.maps.sigmoid import (
    SigmoidAttention as SigmoidAttention,
    sigmoid_attention as sigmoid_attention,
)
from attention_modules.mechanisms.maps.talking_heads import (
    TalkingHeadsAttention as TalkingHeadsAttention,
    talking_heads_attention as talking_heads_attention,
)
from attention_modules.mechanisms.outputs.differential import (
    DifferentialAttention as DifferentialAttention,
    differential_attention as differential_attention,
)
from attention_modules.mechanisms.outputs.gated import (
    GatedAttention as GatedAttention,
    gated_attention as gated_attention,
)
from attention_modules.mechanisms.outputs.twicing import (
    TwicingAttention as TwicingAttention,
    twicing_attention as twicing_attention,
)
from attention_modules.mechanisms.queries.qk_norm import (
    QKNormAttention as QKNormAttention,
    qk_norm_attention as qk_norm_attention,
)
from attention_modules.mechanisms.queries.ssa import (
    SelectiveAttention as SelectiveAttention,
    ssa_attention as ssa_attention,
)
from attention_modules.mechanisms.queries.ssmax import (
    SSMaxAttention as SSMaxAttention,
    ssmax_attention as ssmax_attention,
)
from attention_modules.mechanisms.rpc import RPCAttention as RPCAttention, rpc_attention as rpc_attention
from attention_modules.mechanisms.scaled import ScaledAttention as ScaledAttention, scaled_attention as scaled_attention
from attention_modules.mechanisms.softmax import (
    SoftmaxAttention as SoftmaxAttention,
    softmax_attention as softmax_attention,
)
from attention_modules.mechanisms.symmetric import (
    SymmetricAttention as SymmetricAttention,
    symmetric_attention as symmetric_attention,
)
from attention_modules.mechanisms.uniform import (
    UniformAttention as UniformAttention,
    uniform_attention as uniform_attention,
)
