"""The table of hosts: which library, which file."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

from attention_modules.hosts.base import Host

# library whose presence in memory makes a host possible -> (our module, what it covers)
TABLE: dict[str, tuple[str, str]] = {
    "attention_modules.layers": ("attention_modules.hosts.attnswap", "attnswap SelfAttention"),
    "mmcv.cnn.bricks.transformer": (  # before torch, whose layers it wraps
        "attention_modules.hosts.mmseg",
        "mmsegmentation models (their nn.MultiheadAttention, with reduced keys too)",
    ),
    "torch": ("attention_modules.hosts.torch", "torch MultiheadAttention"),
    "timm.layers.attention": ("attention_modules.hosts.timm", "timm attention layers (docs/hosts.md lists the models)"),
    "transformers.modeling_utils": (
        "attention_modules.hosts.huggingface",
        "Hugging Face models of the attention interface",
    ),
}


def _loaded() -> list[ModuleType]:
    return [import_module(module) for library, (module, _) in TABLE.items() if library in sys.modules]


def loaded_hosts() -> list[Host]:
    """Hosts whose library is in memory (no model of another library can exist)."""
    return [host for module in _loaded() for host in module.HOSTS]


def known_refusal(kind: type) -> str | None:
    """Why a library's class is one that no mechanism can be put into, where its host says so."""
    reasons = (getattr(module, "REFUSED", {}).get((kind.__module__, kind.__name__)) for module in _loaded())
    return next((reason for reason in reasons if reason is not None), None)


def known_hosts() -> list[str]:
    """What can be swapped, in words."""
    return [text for _, text in TABLE.values()]
