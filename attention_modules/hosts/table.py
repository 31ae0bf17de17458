"""The table of hosts: which library, which file."""

from __future__ import annotations

import sys
from importlib import import_module

from attention_modules.hosts.base import Host

# library whose presence in memory makes a host possible -> (our module, what it covers)
TABLE: dict[str, tuple[str, str]] = {
    "attention_modules.layers": ("attention_modules.hosts.attnswap", "attnswap SelfAttention"),
    "torch": ("attention_modules.hosts.torch", "torch MultiheadAttention"),
    "timm.layers.attention": ("attention_modules.hosts.timm", "timm Attention and AttentionRope"),
    "transformers.modeling_utils": (
        "attention_modules.hosts.huggingface",
        "Hugging Face models of the attention interface",
    ),
}


def loaded_hosts() -> list[Host]:
    """Hosts whose library is in memory (no model of another library can exist)."""
    modules = [module for library, (module, _) in TABLE.items() if library in sys.modules]
    return [host for module in modules for host in import_module(module).HOSTS]


def known_hosts() -> list[str]:
    """What can be swapped, in words."""
    return [text for _, text in TABLE.values()]
