"""Attention mechanisms for PyTorch, and the means to put them into models that exist."""

from attention_modules.diagnostics import rpc_diagnostics as rpc_diagnostics
from attention_modules.hosts.model.connected import connect_layers as connect_layers
from attention_modules.hosts.sdpa.declared import declare_host as declare_host
from attention_modules.hosts.table import register_host as register_host
from attention_modules.layers import SelfAttention as SelfAttention
from attention_modules.mechanism import (
    AttentionMechanism as AttentionMechanism,
    AttentionSpec as AttentionSpec,
    available_mechanisms as available_mechanisms,
    build_mechanism as build_mechanism,
    mechanism_class as mechanism_class,
    register_mechanism as register_mechanism,
)
from attention_modules.mechanisms import *  # noqa: F403 a line for each is there
from attention_modules.mechanisms.shared.acting import NoMapError as NoMapError
from attention_modules.pretrained import load_pretrained as load_pretrained
from attention_modules.prompt import PromptAttention as PromptAttention, prompt_attention as prompt_attention
from attention_modules.swap import (
    AttentionSwapError as AttentionSwapError,
    SwapReport as SwapReport,
    restore_attention as restore_attention,
    swap_attention as swap_attention,
    swapped as swapped,
)

__version__ = "0.2.0"
