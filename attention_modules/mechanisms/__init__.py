"""Attention mechanisms, one a file: a pure function under a thin class."""

from attention_modules.mechanisms.layers.neutreno import (
    NeutrenoAttention as NeutrenoAttention,
    neutreno_attention as neutreno_attention,
)
from attention_modules.mechanisms.outputs.gated import (
    GatedAttention as GatedAttention,
    gated_attention as gated_attention,
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
