"""timm's attention layers: one file per kind of attention, one small class per layer."""

from __future__ import annotations

from attention_modules.hosts.base import Host
from attention_modules.hosts.timm import biased, class_token, convolved, plain, rope, talking, windowed
from attention_modules.hosts.timm.refused import REFUSED

__all__ = ["HOSTS", "REFUSED"]

_KINDS = (plain, rope, biased, windowed, talking, class_token, convolved)
HOSTS: tuple[Host, ...] = tuple(host for kind in _KINDS for host in kind.HOSTS)
