"""Attention mechanisms for PyTorch, and the means to put them into models that exist."""

from attention_modules.layers import SelfAttention
from attention_modules.mechanism import (
    AttentionMechanism,
    AttentionSpec,
    available_mechanisms,
    build_mechanism,
    mechanism_class,
    register_mechanism,
)
from attention_modules.rpc import RPCAttention, rpc_attention
from attention_modules.scaled import ScaledAttention, scaled_attention
from attention_modules.softmax import SoftmaxAttention
from attention_modules.symmetric import SymmetricAttention, symmetric_attention

__version__ = "0.1.0"

__all__ = [
    "AttentionMechanism",
    "AttentionSpec",
    "RPCAttention",
    "ScaledAttention",
    "SelfAttention",
    "SoftmaxAttention",
    "SymmetricAttention",
    "available_mechanisms",
    "build_mechanism",
    "mechanism_class",
    "register_mechanism",
    "rpc_attention",
    "scaled_attention",
    "symmetric_attention",
]
