"""Hugging Face models: every layer that calls transformers' attention interface."""

from attention_modules.hosts.huggingface.host import HOSTS, HuggingFaceHost, SwappedHuggingFace
from attention_modules.hosts.huggingface.interface import INTERFACE, mechanism_attention_forward

__all__ = ["HOSTS", "INTERFACE", "HuggingFaceHost", "SwappedHuggingFace", "mechanism_attention_forward"]
