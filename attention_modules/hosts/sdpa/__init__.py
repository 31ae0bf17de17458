"""Any layer that calls ``scaled_dot_product_attention``, found by its code or by one recorded forward pass."""

from attention_modules.hosts.base import Host
from attention_modules.hosts.sdpa.declared import declare_host
from attention_modules.hosts.sdpa.layer import SDPAHost

__all__ = ["HOSTS", "declare_host"]

HOSTS: tuple[Host, ...] = (SDPAHost(),)
