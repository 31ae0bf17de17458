"""Attention mechanisms for PyTorch, and the means to put them into models that exist."""

from attention_modules.mechanism import (
    AttentionMechanism,
    AttentionSpec,
    available_mechanisms,
    build_mechanism,
    mechanism_class,
    register_mechanism,
)
from attention_modules.softmax import SoftmaxAttention

__version__ = "0.1.0"

__all__ = [
    "AttentionMechanism",
    "AttentionSpec",
    "SoftmaxAttention",
    "available_mechanisms",
    "build_mechanism",
    "mechanism_class",
    "register_mechanism",
]
