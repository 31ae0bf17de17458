"""Every mechanism as a pure function of queries, keys and values ``[B, H, N, d]``, and of its options."""

from attention_modules.mechanisms.rpc import rpc_attention as rpc_attention
from attention_modules.mechanisms.scaled import scaled_attention as scaled_attention
from attention_modules.mechanisms.softmax import softmax_attention as softmax_attention
from attention_modules.mechanisms.symmetric import symmetric_attention as symmetric_attention
from attention_modules.mechanisms.uniform import uniform_attention as uniform_attention
from attention_modules.prompt import prompt_attention as prompt_attention
