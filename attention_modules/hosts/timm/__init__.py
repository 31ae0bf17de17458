"""timm's attention layers: one file a kind of attention, one small class a layer."""

from __future__ import annotations

from attention_modules.hosts.base import Host
from attention_modules.hosts.timm import biased, plain, rope, talking, windowed
from attention_modules.hosts.timm.refused import REFUSED

__all__ = ["HOSTS", "REFUSED"]

HOSTS: tuple[Host, ...] = (*plain.HOSTS, *rope.HOSTS, *biased.HOSTS, *windowed.HOSTS, *talking.HOSTS)
