"""Attention mechanisms for PyTorch, and the means to put them into models that exist."""

import sys
from importlib import import_module

from attention_modules.diagnostics import rpc_diagnostics
from attention_modules.layers import SelfAttention
from attention_modules.mechanism import (
    AttentionMechanism,
    AttentionSpec,
    available_mechanisms,
    build_mechanism,
    mechanism_class,
    register_mechanism,
)
from attention_modules.mechanisms.rpc import RPCAttention, rpc_attention
from attention_modules.mechanisms.scaled import ScaledAttention, scaled_attention
from attention_modules.mechanisms.softmax import SoftmaxAttention
from attention_modules.mechanisms.symmetric import SymmetricAttention, symmetric_attention
from attention_modules.mechanisms.uniform import UniformAttention
from attention_modules.pretrained import load_pretrained
from attention_modules.prompt import PromptAttention, prompt_attention
from attention_modules.swap import AttentionSwapError, SwapReport, restore_attention, swap_attention, swapped

# Where the mechanisms were until 0.1: pickled models and stored class paths name these modules.
for _name in ("pursuit", "rpc", "scaled", "softmax", "symmetric", "uniform"):
    sys.modules[f"{__name__}.{_name}"] = import_module(f"{__name__}.mechanisms.{_name}")

__version__ = "0.1.0"

__all__ = [
    "AttentionMechanism",
    "AttentionSpec",
    "AttentionSwapError",
    "PromptAttention",
    "RPCAttention",
    "ScaledAttention",
    "SelfAttention",
    "SoftmaxAttention",
    "SwapReport",
    "SymmetricAttention",
    "UniformAttention",
    "available_mechanisms",
    "build_mechanism",
    "load_pretrained",
    "mechanism_class",
    "prompt_attention",
    "register_mechanism",
    "restore_attention",
    "rpc_attention",
    "rpc_diagnostics",
    "scaled_attention",
    "swap_attention",
    "swapped",
    "symmetric_attention",
]
