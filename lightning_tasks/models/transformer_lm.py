"""A small causal language model whose attention is exchangeable layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from attention_modules.hosts.model.connected import connect_layers, shares_values
from attention_modules.layers import SelfAttention
from attention_modules.mechanism import Mechanism


def sinusoidal_positions(num_tokens: int, dim: int) -> Tensor:
    """Fixed position vectors ``[num_tokens, dim]``: sines, then cosines (Vaswani et al., 2017; fairseq's order).

    Raises:
        ValueError: if ``dim`` is odd or below 4.
    """
    if dim % 2 or dim < 4:
        raise ValueError(f"sinusoidal positions need an even dim of at least 4, got {dim}; use positions='learned'")
    half = dim // 2
    frequencies = torch.exp(torch.arange(half) * (-math.log(10_000) / (half - 1)))
    angles = torch.arange(num_tokens).unsqueeze(1) * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class TransformerLayer(nn.Module):
    """Causal self-attention and a ReLU feed-forward network, each with dropout, a residual and a LayerNorm.

    Args:
        attention: the causal self-attention module, ``[B, N, dim]`` to the same.
        dim: width of the residual stream.
        mlp_dim: width of the hidden feed-forward layer.
        dropout: probability after attention and after the feed-forward network.
        pre_norm: LayerNorm before each part (True) or after each residual sum (False).
    """

    def __init__(self, attention: SelfAttention, dim: int, mlp_dim: int, dropout: float, pre_norm: bool) -> None:
        super().__init__()
        self.pre_norm = pre_norm
        self.attn = attention
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_dim), nn.ReLU(inplace=True), nn.Linear(mlp_dim, dim))
        self.attn_norm = nn.LayerNorm(dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the projections of attention; the rest keeps PyTorch's initial values, the mechanism its own."""
        for projection in self.attn.qkv.weight.split(self.attn.num_heads * self.attn.head_dim):  # each of q, k, v
            nn.init.xavier_uniform_(projection, gain=2**-0.5)
        nn.init.xavier_uniform_(self.attn.proj.weight)
        nn.init.zeros_(self.attn.proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, N, dim]`` to ``[B, N, dim]``; token i depends on tokens 0 to i only."""
        if self.pre_norm:
            x = x + self.dropout(self.attn(self.attn_norm(x)))
            return x + self.dropout(self.mlp(self.mlp_norm(x)))
        x = self.attn_norm(x + self.dropout(self.attn(x)))
        return self.mlp_norm(x + self.dropout(self.mlp(x)))


class TransformerLM(nn.Module):
    """A decoder-only language model; scaling, initial values and defaults are those of fairseq's `transformer_lm`.

    Embeddings are N(0, 1/dim) and multiplied by sqrt(dim); query, key and value weights are Xavier-uniform with gain
    1/sqrt(2), the output projection with gain 1 and zero bias; the head has no bias.

    Args:
        vocab_size: number of token ids, V.
        num_layers: number of layers.
        dim: width of embeddings and residual stream.
        num_heads: attention heads; divides ``dim``, unless ``attn_head_dim`` is given.
        mlp_dim: hidden width of the feed-forward network.
        num_tokens: longest input, T.
        dropout: on the embeddings and on each part of a layer.
        attn_dropout: on the attention map.
        norm: "pre" (and a final LayerNorm) or "post".
        positions: "learned" or "sinusoidal".
        tied: whether the head's weight is the embedding's.
        scale_embedding: whether embeddings are multiplied by sqrt(dim).
        attention: short name, class or callable of the mechanism.
        attention_options: its options by name.
        attention_layers: indices of the layers that get it (-1: the last), all where None; the others have plain
            softmax attention.
        attn_head_dim: width of one head, ``dim / num_heads`` where None.

    Raises:
        ValueError: for a size below 1, heads that do not divide the width, an unknown choice or layer index.
    """

    tensor_parallel: ClassVar = {"layers.*.attn": "heads", "layers.*.mlp.0": "columns", "layers.*.mlp.2": "rows"}
    """Which of its modules several processes share, and by what (``training/tensor_parallel.py``)."""

    def __init__(
        self,
        vocab_size: int,
        num_layers: int = 2,
        dim: int = 128,
        num_heads: int = 4,
        mlp_dim: int = 512,
        num_tokens: int = 256,
        dropout: float = 0.1,
        attn_dropout: float = 0.0,
        norm: Literal["pre", "post"] = "pre",
        positions: Literal["learned", "sinusoidal"] = "learned",
        tied: bool = False,
        scale_embedding: bool = True,
        attention: Mechanism = "softmax",
        attention_options: dict[str, Any] | None = None,
        attention_layers: Sequence[int] | None = None,
        attn_head_dim: int | None = None,
    ) -> None:
        super().__init__()
        sizes = {"vocab_size": vocab_size, "num_layers": num_layers, "dim": dim, "num_heads": num_heads}
        sizes |= {
            "mlp_dim": mlp_dim,
            "num_tokens": num_tokens,
            "attn_head_dim": 1 if attn_head_dim is None else attn_head_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if attn_head_dim is None and dim % num_heads:
            raise ValueError(
                f"dim={dim} is not a multiple of num_heads={num_heads}; choose a head count that divides it, or give "
                "attn_head_dim"
            )
        if norm not in ("pre", "post"):
            raise ValueError(f"norm must be 'pre' or 'post', got {norm!r}")
        if positions not in ("learned", "sinusoidal"):
            raise ValueError(f"positions must be 'learned' or 'sinusoidal', got {positions!r}")
        chosen = set(range(num_layers) if attention_layers is None else attention_layers)
        if not chosen <= set(range(-num_layers, num_layers)):
            limits = f"{-num_layers} to {num_layers - 1}"
            raise ValueError(f"attention_layers (a task's layers) must lie in {limits}, got {sorted(chosen)}")
        chosen = {index % num_layers for index in chosen}
        self.num_tokens = num_tokens
        self.embedding_scale = math.sqrt(dim) if scale_embedding else 1.0
        self.embedding = nn.Embedding(vocab_size, dim)
        if positions == "learned":
            self.positions = nn.Parameter(torch.empty(num_tokens, dim))
        else:
            self.register_buffer("positions", sinusoidal_positions(num_tokens, dim), persistent=False)
        self.dropout = nn.Dropout(dropout)
        layers = [
            TransformerLayer(
                SelfAttention(
                    dim,
                    num_heads=num_heads,
                    mechanism=attention if index in chosen else "softmax",
                    mechanism_options=attention_options if index in chosen else None,
                    qkv_bias=True,
                    attn_drop=attn_dropout,
                    attn_head_dim=attn_head_dim,
                    num_tokens=num_tokens,
                    is_causal=True,
                    layer_index=index,
                ),
                dim,
                mlp_dim,
                dropout,
                norm == "pre",
            )
            for index in range(num_layers)
        ]
        self.layers = nn.Sequential(*layers)  # called, so that layers can read each other's values in one pass
        self.norm = nn.LayerNorm(dim) if norm == "pre" else nn.Identity()
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self._reset_parameters(layers)
        if tied:
            self.head.weight = self.embedding.weight
        if any(map(shares_values, (layer.attn for layer in layers))):
            connect_layers(self)

    @torch.no_grad()
    def _reset_parameters(self, layers: list[TransformerLayer]) -> None:
        """Draw initial values as the class docstring says; those of the mechanisms stay their own."""
        std = self.embedding.embedding_dim**-0.5
        nn.init.normal_(self.embedding.weight, std=std)
        nn.init.normal_(self.head.weight, std=std)
        if isinstance(self.positions, nn.Parameter):
            nn.init.normal_(self.positions, std=std)
        for layer in layers:
            layer.reset_parameters()

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the head sees: ``[B, N]`` token ids to ``[B, N, dim]``.

        Raises:
            ValueError: if ``tokens`` is not ``[B, N]`` or longer than the model takes.
        """
        if tokens.ndim != 2 or tokens.shape[1] > self.num_tokens:
            raise ValueError(
                f"tokens must be [B, N] with N of at most {self.num_tokens}, got {list(tokens.shape)}; "
                "shorten the window or build the model with a larger num_tokens"
            )
        x = self.embedding_scale * self.embedding(tokens) + self.positions[: tokens.shape[1]]
        return self.norm(self.layers(self.dropout(x)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, N, V]`` of the next token, from ``[B, N]`` token ids."""
        return self.head(self.hidden(tokens))
