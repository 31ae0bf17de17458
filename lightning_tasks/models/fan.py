"""FAN-tiny, a fully attentional network (Zhou et al., ICML 2022), as RPC-Attention's experiments have it.

Written from the published sizes and steps. Attention among tokens is :class:`attention_modules.SelfAttention`, so that
any mechanism goes into it; the attention of the class token can do without a query as well.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from timm.layers import trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.xcit import PositionalEncodingFourier
from torch import Tensor, nn
from torch.nn import functional as F

from attention_modules import SelfAttention

EPS = 1e-6


class PatchEmbedding(nn.Module):
    """Four 3 x 3 convolutions of stride 2 with batch norm, GELU between them: ``[B, C, H, W]`` to 1/16 of each side."""

    def __init__(self, in_chans: int, dim: int) -> None:
        super().__init__()
        widths = [in_chans, dim // 8, dim // 4, dim // 2, dim]
        self.convolutions = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after))
            for before, after in itertools.pairwise(widths)
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.convolutions[0](images)
        for convolution in self.convolutions[1:]:
            x = convolution(F.gelu(x))
        return x


class ConvolutionalMlp(nn.Module):
    """Two linear layers, and between them a depthwise branch over the image: 3 x 3, GELU, batch norm, 3 x 3."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.gamma = nn.Parameter(torch.ones(hidden))
        self.conv1 = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.norm = nn.BatchNorm2d(hidden)
        self.conv2 = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        x = self.fc1(x)
        image = x.transpose(1, 2).unflatten(2, size)
        image = self.conv2(self.norm(F.gelu(self.conv1(image))))
        return self.fc2(x + self.gamma * image.flatten(2).transpose(1, 2))


class ChannelProcessing(nn.Module):
    """Attention among channels: a weight for each channel of a head, times what an MLP makes of the tokens."""

    def __init__(self, dim: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim)
        self.temperature = nn.Parameter(torch.ones(num_heads, 1, 1))
        self.mlp = ConvolutionalMlp(dim, hidden)
        self.norm = nn.LayerNorm(dim, EPS)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q, k = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2).softmax(-2) for part in (self.q(x), x))
        weights = (q.transpose(-2, -1) @ k.mean(-1, keepdim=True)).sigmoid() * self.temperature  # [B, H, d, 1]
        return self.norm(self.mlp(x, size)) * weights.flatten(1).unsqueeze(1)


class Block(nn.Module):
    """Attention among tokens, then among channels, each scaled and added."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, EPS), nn.LayerNorm(dim, EPS)
        self.attn = SelfAttention(dim, num_heads, qkv_bias=True)
        self.channels = ChannelProcessing(dim, num_heads, int(dim * mlp_ratio))
        self.gamma1, self.gamma2 = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        x = x + self.gamma1 * self.attn(self.norm1(x))
        return x + self.gamma2 * self.channels(self.norm2(x), size)


class ClassAttention(nn.Module):
    """The class token attends to all tokens and itself; without a query, by its key."""

    def __init__(self, dim: int, num_heads: int, uses_query: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim) if uses_query else None
        self.k, self.v, self.proj = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, 1, C]`` of the tokens ``[B, N, C]``, whose first is the class token."""
        k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (self.k(x), self.v(x)))
        q = k[:, :, :1]
        if self.q is not None:
            q = self.q(x[:, :1]).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ClassBlock(nn.Module):
    """A block of CaiT's kind, with all tokens normalized: only the class token changes by attention and MLP."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, uses_query: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, EPS), nn.LayerNorm(dim, EPS)
        self.attn = ClassAttention(dim, num_heads, uses_query)
        hidden = int(dim * mlp_ratio)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.gamma1, self.gamma2 = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.gamma1 * torch.cat([self.attn(normed), normed[:, 1:]], 1)
        x = self.norm2(x)
        return x + torch.cat([self.gamma2 * self.mlp(x[:, :1]), x[:, 1:]], 1)


class FAN(nn.Module):
    """A fully attentional network.

    Args:
        img_size: side of the images, of which only the number of tokens depends; other sizes run as well.
        in_chans: channels of the images.
        num_classes: size of the head; 0 for none.
        embed_dim: width of the tokens.
        depth: blocks before the class token joins.
        num_heads: of each block.
        mlp_ratio: hidden features over ``embed_dim``.
        class_depth: blocks of the class token.
        class_query: whether the class token asks by a query; RPC-Attention's FAN asks by its key.

    Shape:
        ``[B, in_chans, H, W]`` with sides that are multiples of 16, to ``[B, num_classes]``.
    """

    def __init__(
        self,
        img_size: int = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 4,
        mlp_ratio: float = 4.0,
        class_depth: int = 2,
        class_query: bool = True,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.patch_embed = PatchEmbedding(in_chans, embed_dim)
        self.pos_embed = PositionalEncodingFourier(hidden_dim=32, dim=embed_dim)
        self.blocks = nn.ModuleList(Block(embed_dim, num_heads, mlp_ratio) for _ in range(depth))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.class_blocks = nn.ModuleList(
            ClassBlock(embed_dim, num_heads, mlp_ratio, class_query) for _ in range(class_depth)
        )
        self.norm = nn.LayerNorm(embed_dim, EPS)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        trunc_normal_(self.cls_token, std=0.02)
        self.apply(_initialize)

    def no_weight_decay(self) -> set[str]:
        """Names of Parameters without weight decay, for timm's groups."""
        return {"cls_token"}

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def reset_classifier(self, num_classes: int) -> None:
        """Put in a head for other classes."""
        self.num_classes = num_classes
        self.head = nn.Linear(self.embed_dim, num_classes) if num_classes else nn.Identity()

    def forward_features(self, images: Tensor) -> Tensor:
        """The class token and the others, ``[B, 1 + N, C]``."""
        x = self.patch_embed(images)
        batch, _, *size = x.shape
        x = x.flatten(2).transpose(1, 2) + self.pos_embed(batch, *size).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, (size[0], size[1]))
        x = torch.cat([self.cls_token.expand(batch, -1, -1), x], 1)
        for class_block in self.class_blocks:
            x = class_block(x)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits of the class token."""
        return x[:, 0] if pre_logits else self.head(x[:, 0])

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, ConvolutionalMlp):
        for convolution in (module.conv1, module.conv2):
            nn.init.normal_(convolution.weight, std=math.sqrt(2 / 9))
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]


default_cfgs = generate_default_cfgs(
    {
        "fan_tiny_12_p16_224.untrained": {
            "input_size": (3, 224, 224),
            "crop_pct": 1.0,
            "interpolation": "bicubic",
            "first_conv": "patch_embed.convolutions.0.0",
            "classifier": "head",
            "num_classes": 1000,
            "mean": (0.485, 0.456, 0.406),
            "std": (0.229, 0.224, 0.225),
        }
    }
)


@register_model
def fan_tiny_12_p16_224(pretrained: bool = False, **options: Any) -> FAN:
    """FAN-tiny: 12 blocks of width 192 with 4 heads, 7,319,920 parameters with 1,000 classes."""
    return build_model_with_cfg(FAN, "fan_tiny_12_p16_224", pretrained, **options)
