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
    "torch.nn.functional": (  # last: what no other host understands or refuses
        "attention_modules.hosts.sdpa",
        "any layer that calls F.scaled_dot_product_attention",
    ),
}
_REGISTERED: list[Host] = []


def register_host(host: Host) -> None:
    """Make a host of your own known; it is asked before all others.

    Args:
        host: of a family of attention layers: a subclass of ``Host`` that finds, reads, swaps and restores them. For a
            class that calls ``scaled_dot_product_attention`` there is :func:`attnswap.declare_host`.

    Raises:
        TypeError: if it is no host.

    Example:
        >>> import torch
        >>> from attnswap import swap_attention
        >>> from attnswap.hosts import AttentionSpec, Host, Rows, Swapped, register_host
        >>> class Mixer(torch.nn.Module):  # a stranger's layer, which calls no kernel
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.qkv = torch.nn.Linear(8, 24)
        ...     def forward(self, x):
        ...         q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        ...         return ((q @ k.mT).softmax(-1) @ v).squeeze(1)
        >>> class SwappedMixer(Swapped):
        ...     def forward(self, x):
        ...         return self.mix(*self.qkv(x).unsqueeze(1).chunk(3, -1), x).squeeze(1)
        >>> class MixerHost(Host):
        ...     name, mixin = "Mixer", SwappedMixer
        ...     def understands(self, module):
        ...         return type(module).__name__ == "Mixer"
        ...     def spec(self, layer, layer_index):
        ...         return AttentionSpec(8, num_heads=1, head_dim=8, layer_index=layer_index)
        ...     def query_parts(self, layer):
        ...         return ()
        ...     def qk_rows(self, layer):
        ...         return Rows(layer.qkv, 0, 8), Rows(layer.qkv, 8, 16)
        >>> register_host(MixerHost())
        >>> swap_attention(torch.nn.Sequential(Mixer()), "sink")[0].host
        'Mixer'
    """
    if not isinstance(host, Host):
        raise TypeError(f"expected a host, an object of a subclass of attnswap.hosts.Host, got {host!r}")
    _REGISTERED[:] = [host, *(other for other in _REGISTERED if other != host)]


def _loaded() -> list[ModuleType]:
    return [import_module(module) for library, (module, _) in TABLE.items() if library in sys.modules]


def loaded_hosts() -> list[Host]:
    """Hosts whose library is in memory (no model of another library can exist)."""
    return [*_REGISTERED, *(host for module in _loaded() for host in module.HOSTS)]


def known_refusal(kind: type) -> str | None:
    """Why a library's class is one that no mechanism can be put into, where its host says so."""
    reasons = (getattr(module, "REFUSED", {}).get((kind.__module__, kind.__name__)) for module in _loaded())
    return next((reason for reason in reasons if reason is not None), None)


def known_hosts() -> list[str]:
    """What can be swapped, in words."""
    return [text for _, text in TABLE.values()]
