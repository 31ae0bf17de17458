"""Every mechanism as a pure function of queries, keys and values ``[B, H, N, d]``, and of its options."""

from attention_modules import mechanisms
from attention_modules.mechanisms import *  # noqa: F403 the functions among them are listed below
from attention_modules.prompt import prompt_attention as prompt_attention

__all__ = sorted(["prompt_attention", *(name for name in vars(mechanisms) if name.endswith("_attention"))])
