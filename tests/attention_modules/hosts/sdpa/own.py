"""Attention layers that nobody prepared, as people write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention_modules import declare_host


class Joint(nn.Module):
    """One linear layer for q, k and v."""

    causal = False

    def __init__(self, width: int = 16, heads: int = 4, bias: bool = True) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = nn.Linear(width, 3 * width, bias), nn.Linear(width, width), heads

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(2, (self.n_head, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, 2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=self.causal and attn_mask is None)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class DeclaredJoint(Joint):
    """The same, declared below."""


class Causal(Joint):
    """It hides the future."""

    causal = True


class ByHead(nn.Module):
    """Each head has its query, key and value together, as Megatron and GPT-NeoX have them."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.query_key_value, self.heads = nn.Linear(width, 3 * width), heads

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(*heads.chunk(3, -1)).transpose(1, 2).flatten(2)


class Grouped(nn.Module):
    """Rotary positions and grouped keys."""

    def __init__(self, width: int = 16, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.q_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.kv_proj = nn.Linear(width, 2 * kv_heads * self.head_dim)

    def _turned(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[2], device=x.device, dtype=x.dtype).unsqueeze(1) / torch.tensor([1.0, 10.0])
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv_proj(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2).chunk(2, 1)
        y = F.scaled_dot_product_attention(self._turned(q), self._turned(k), v, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class NanoAttention(nn.Module):
    """As nanoGPT has it: the fused call where there is one, the softmax by hand else."""

    def __init__(self, width: int = 16, heads: int = 4, flash: bool = True) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.n_embd, self.flash, self.dropout = heads, width, flash, 0.0
        self.register_buffer("bias", torch.ones(32, 32).tril().view(1, 1, 32, 32))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
        q = q.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
        v = v.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
        if self.flash:
            y = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
            )
        else:
            scores = (q @ k.transpose(-2, -1)) * k.size(-1) ** -0.5
            scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
            y = F.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class SequenceFirst(nn.Module):
    """It is given ``[N, B, C]``."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).unflatten(2, (3, self.n_head, -1)).permute(2, 1, 3, 0, 4)
        return self.c_proj(F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2))


class WithMemory(nn.Module):
    """Keys of another sequence."""

    def __init__(self, width: int = 16, heads: int = 4, memory: int = 16) -> None:
        super().__init__()
        self.to_q, self.to_kv, self.heads = nn.Linear(width, width), nn.Linear(memory, 2 * width), heads

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = self.to_q(x), *self.to_kv(memory).chunk(2, -1)
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class MemoryFirst(WithMemory):
    """The same, called with the memory first."""

    def forward(self, memory: Tensor, x: Tensor) -> Tensor:
        return super().forward(x, memory)


class Context(WithMemory):
    """It attends to itself unless it is given something else."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return super().forward(x, x if context is None else context)


class Three(nn.Module):
    """Queries, keys and values of an input each, sequence-first."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(12, 16), nn.Linear(10, 16)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        made = (self.q(query), self.k(key), self.v(value))
        q, k, v = (x.unflatten(2, (4, -1)).permute(1, 2, 0, 3) for x in made)
        return F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)


class Attend(nn.Module):
    """The kernel as a module of its own."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Outer(nn.Module):
    """Projections around such a module, in a function that tells nothing of its shapes."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.to_qkv, self.attend, self.heads = nn.Linear(width, 3 * width, bias=False), Attend(), heads

    def forward(self, x: Tensor) -> Tensor:
        heads = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, 2))
        return self.attend(*heads).transpose(1, 2).flatten(2)


declare_host(DeclaredJoint, qkv="c_attn", heads="n_head", out="c_proj")
