"""One tiny layer for each attention class of timm's that can be swapped, alone, with its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.attention_modules.hosts.cases import (
    BETWEEN_LAYERS,
    FEATURES_APART,
    SEES_THE_FUTURE,
    WITHOUT_QUERY,
    WITHOUT_ROWS,
)

BATCH, DIM, HEADS, SIDE = 2, 16, 4, 4
TOKENS = SIDE * SIDE
ROPE = dict.fromkeys(FEATURES_APART, "rotary positions")
QUERY_NORM = {**ROPE, **dict.fromkeys(WITHOUT_QUERY, "q_norm")}
BIASED = dict.fromkeys(WITHOUT_ROWS, "differs from row to row")
QUERY_BIAS = {**BIASED, **dict.fromkeys(WITHOUT_QUERY, "product with the query")}
WIDE_VALUES = {**BIASED, **dict.fromkeys(("rpc", "elliptical"), r"different widths \(4 and 8\)")}
SHIFTED = {**BIASED, **dict.fromkeys(BETWEEN_LAYERS, "windows are shifted")}


def noise(*shape: int, seed: int = 0) -> Tensor:
    """A fixed normal tensor."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _shifted() -> Tensor:
    """A mask of two windows as Swin makes it: the second one's halves do not see each other."""
    half = torch.arange(TOKENS) < TOKENS // 2
    mask = torch.zeros(2, TOKENS, TOKENS)
    mask[1] = (half[:, None] != half[None, :]) * -100.0
    return mask


def tokens(*rest: object) -> tuple[Any, ...]:
    """``[B, N, C]`` and what else the forward takes."""
    return (noise(BATCH, TOKENS, DIM), *rest)


def windows() -> tuple[Any, ...]:
    """``[B * windows, N, C]`` and the mask of shifted windows."""
    return noise(2 * BATCH, TOKENS, DIM), _shifted()


def image(*rest: object) -> tuple[Any, ...]:
    """``[B, C, h, w]`` and what else the forward takes."""
    return (noise(BATCH, DIM, SIDE, SIDE), *rest)


def grid(height: int = SIDE, width: int = SIDE) -> tuple[Any, ...]:
    """``[B, h, w, C]``."""
    return (noise(BATCH, height, width, DIM),)


@dataclass(frozen=True)
class LayerCase:
    """A layer of timm's, what it is called with, and which swaps it refuses.

    Args:
        library: module of timm's.
        kind: class in it.
        args: positional arguments of the class.
        options: its other arguments.
        inputs: makes what the forward is called with.
        refuses: mechanism -> a piece of the error's text.
        linear: whether the logits are x W_qᵀ W_k xᵀ · scale, plus a bias.
    """

    library: str
    kind: str
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[], tuple[Any, ...]] = tokens
    refuses: dict[str, str] = field(default_factory=dict)
    linear: bool = True


def _models(name: str) -> str:
    return f"timm.models.{name}"


def _rope() -> Tensor:
    return noise(TOKENS - 1, 2 * DIM // HEADS, seed=1)


def _relative(kind: str, **options: Any) -> Any:
    """A class of relative positions, built when it is called."""

    def build(**sizes: Any) -> nn.Module:
        return getattr(import_module("timm.layers"), kind)(window_size=(SIDE, SIDE), **options, **sizes)

    return build


_HEADS: dict[str, Any] = {"num_heads": HEADS, "qkv_bias": True}
_MAXX: dict[str, Any] = {"dim_head": DIM // HEADS}
_LEVIT = {"key_dim": 4, "num_heads": HEADS, "attn_ratio": 2, "resolution": (SIDE, SIDE)}
_EVA = {**_HEADS, "norm_layer": nn.LayerNorm}
_NORMED = {**dict.fromkeys(WITHOUT_QUERY, "batch norm"), **WIDE_VALUES}

_CASES: dict[str, LayerCase] = {
    "eva": LayerCase(_models("eva"), "EvaAttention", (DIM,), _EVA, lambda: tokens(_rope()), linear=False, refuses=ROPE),
    "eva-separate-bias": LayerCase(
        _models("eva"), "EvaAttention", (DIM,), {**_EVA, "qkv_bias_separate": True, "gated": True}, refuses=ROPE
    ),
    "eva-unfused": LayerCase(
        _models("eva"),
        "EvaAttention",
        (DIM,),
        {**_EVA, "qkv_fused": False},
        lambda: tokens(_rope()),
        linear=False,
        refuses=ROPE,
    ),
    "eva-norm": LayerCase(
        _models("eva"),
        "EvaAttention",
        (DIM,),
        {**_EVA, "qk_norm": True, "rotate_half": True},
        lambda: tokens(_rope()),
        QUERY_NORM,
        linear=False,
    ),
    "gemma": LayerCase(
        _models("gemma4_vit"),
        "Gemma4Attention",
        (DIM,),
        {"num_heads": HEADS, "head_dim": 4, "num_kv_heads": 2},
        lambda: tokens(noise(BATCH, TOKENS, 4, seed=1), noise(BATCH, TOKENS, 4, seed=2)),
        QUERY_NORM,
        linear=False,
    ),
    "beit": LayerCase(
        _models("beit"),
        "Attention",
        (DIM,),
        {**_HEADS, "window_size": (SIDE, SIDE - 1)},
        lambda: (noise(BATCH, SIDE * (SIDE - 1) + 1, DIM), noise(1, HEADS, 13, 13, seed=1)),
        refuses=BIASED,
    ),
    "beit-no-window": LayerCase(_models("beit"), "Attention", (DIM,), {"num_heads": HEADS}, refuses=BIASED),
    "relpos": LayerCase(
        _models("vision_transformer_relpos"),
        "RelPosAttention",
        (DIM,),
        {**_HEADS, "rel_pos_cls": _relative("RelPosBias")},
        refuses=BIASED,
    ),
    "relpos-shared": LayerCase(
        _models("vision_transformer_relpos"),
        "RelPosAttention",
        (DIM,),
        _HEADS,
        lambda: tokens(noise(1, HEADS, TOKENS, TOKENS, seed=1)),
        refuses=BIASED,
    ),
    "sam": LayerCase(
        _models("vision_transformer_sam"),
        "Attention",
        (DIM,),
        {**_HEADS, "use_rel_pos": True, "input_size": (SIDE, SIDE)},
        grid,
        QUERY_BIAS,
    ),
    "botnet": LayerCase(
        "timm.layers.bottleneck_attn",
        "BottleneckAttn",
        (DIM,),
        {**_HEADS, "feat_size": (SIDE, SIDE)},
        image,
        QUERY_BIAS,
    ),
    "botnet-pooled": LayerCase(
        "timm.layers.bottleneck_attn",
        "BottleneckAttn",
        (DIM,),
        {**_HEADS, "feat_size": (SIDE, SIDE), "stride": 2, "scale_pos_embed": True, "dim_head": 8},
        image,
        {**QUERY_BIAS, **dict.fromkeys(("rpc", "elliptical"), r"different widths \(8 and 4\)")},
    ),
    "sam-no-bias": LayerCase(_models("vision_transformer_sam"), "Attention", (DIM,), _HEADS, partial(grid, 2, 3)),
    "maxxvit-2d": LayerCase(
        _models("maxxvit"),
        "Attention2d",
        (DIM,),
        {**_MAXX, "rel_pos_cls": _relative("RelPosBias")},
        image,
        refuses=BIASED,
    ),
    "maxxvit-2d-heads-last": LayerCase(
        _models("maxxvit"),
        "Attention2d",
        (DIM, 24),
        {**_MAXX, "head_first": False, "expand_first": False},
        image,
        refuses=BIASED,
    ),
    "maxxvit-cl": LayerCase(
        _models("maxxvit"),
        "AttentionCl",
        (DIM,),
        {**_MAXX, "rel_pos_cls": _relative("RelPosBiasTf")},
        grid,
        refuses=BIASED,
    ),
    "maxxvit-cl-heads-last": LayerCase(
        _models("maxxvit"),
        "AttentionCl",
        (DIM,),
        {**_MAXX, "head_first": False, "rel_pos_cls": _relative("RelPosMlp")},
        grid,
        refuses=BIASED,
    ),
    "levit": LayerCase(_models("levit"), "Attention", (DIM,), _LEVIT, tokens, _NORMED, linear=False),
    "levit-conv": LayerCase(
        _models("levit"), "Attention", (DIM,), {**_LEVIT, "use_conv": True}, image, _NORMED, linear=False
    ),
    "tiny-vit": LayerCase(
        _models("tiny_vit"), "Attention", (DIM,), {**_LEVIT, "attn_ratio": 1}, refuses=BIASED, linear=False
    ),
    "efficientformer": LayerCase(
        _models("efficientformer"), "Attention", (DIM,), {**_LEVIT, "resolution": SIDE}, refuses=WIDE_VALUES
    ),
    "swin": LayerCase(
        _models("swin_transformer"),
        "WindowAttention",
        (DIM, HEADS),
        {"window_size": SIDE, "head_dim": 4},
        windows,
        refuses=SHIFTED,
    ),
    "swin-v2": LayerCase(
        _models("swin_transformer_v2"),
        "WindowAttention",
        (DIM, (SIDE, SIDE), HEADS),
        {},
        windows,
        linear=False,
        refuses=SHIFTED,
    ),
    "swin-v2-separate-bias": LayerCase(
        _models("swin_transformer_v2"),
        "WindowAttention",
        (DIM, (SIDE, SIDE), HEADS),
        {"qkv_bias_separate": True},
        tokens,
        linear=False,
        refuses=SHIFTED,
    ),
    "swin-v2-cr": LayerCase(
        _models("swin_transformer_v2_cr"),
        "WindowMultiHeadAttention",
        (DIM, HEADS, (SIDE, SIDE)),
        {},
        windows,
        linear=False,
        refuses=SHIFTED,
    ),
    "gcvit": LayerCase(
        _models("gcvit"),
        "WindowAttentionGlobal",
        (DIM, HEADS, (SIDE, SIDE)),
        {"use_global": False},
        lambda: tokens(noise(BATCH, SIDE, SIDE, DIM, seed=1)),
        refuses=BIASED,
    ),
    "metaformer": LayerCase(_models("metaformer"), "Attention", (DIM,), {"head_dim": 4, "qkv_bias": True}),
    "convit": LayerCase(_models("convit"), "MHSA", (DIM,), _HEADS),
    "davit": LayerCase(_models("davit"), "WindowAttention", (DIM, (SIDE, SIDE), HEADS)),
    "tnt": LayerCase(_models("tnt"), "Attention", (DIM, DIM), _HEADS),
    "pvt": LayerCase(_models("pvt_v2"), "Attention", (DIM,), _HEADS, lambda: tokens((SIDE, SIDE))),
    "twins-global": LayerCase(
        _models("twins"), "GlobalSubSampleAttn", (DIM,), {"num_heads": HEADS}, lambda: tokens((SIDE, SIDE))
    ),
    "twins-local": LayerCase(
        _models("twins"),
        "LocallyGroupedAttn",
        (DIM,),
        {"num_heads": HEADS, "ws": 3},
        lambda: (noise(BATCH, 20, DIM), (4, 5)),
    ),
    "nextvit": LayerCase(_models("nextvit"), "EfficientAttention", (DIM,), {"head_dim": 4}),
    "nest": LayerCase(_models("nest"), "Attention", (DIM,), _HEADS, partial(grid, 3, 5)),
    "volo": LayerCase(_models("volo"), "Attention", (DIM,), _HEADS, partial(grid, 3, 5)),
    "sam2": LayerCase(_models("hieradet_sam2"), "MultiScaleAttention", (DIM, DIM, HEADS), {}, partial(grid, 3, 5)),
    "hiera": LayerCase(_models("hiera"), "MaskUnitAttention", (DIM, DIM, HEADS)),
    "hiera-units": LayerCase(
        _models("hiera"), "MaskUnitAttention", (DIM, DIM, HEADS), {"window_size": 8, "use_mask_unit_attn": True}
    ),
    "visformer": LayerCase(_models("visformer"), "Attention", (DIM,), {"num_heads": HEADS}, image),
    "lowformer": LayerCase(
        _models("lowformer"),
        "ConvAttention",
        (DIM,),
        {"att_stride": 2, "att_kernel": 3, "head_dim_mul": 8},
        image,
        linear=False,
    ),
    "cpubone": LayerCase(
        _models("cpubone"),
        "ConvAttention",
        (DIM,),
        {"att_stride": 2, "small_kernels": True, "fuse_out_proj": True, "head_dim_mul": 8},
        lambda: (noise(BATCH, DIM, 7, 9),),
        linear=False,
    ),
    "fastvit": LayerCase(_models("fastvit"), "Attention", (DIM,), {"head_dim": 4, "qkv_bias": True}, image),
}
# None of them hides the future, which is said last.
LAYERS = {name: replace(case, refuses={**SEES_THE_FUTURE, **case.refuses}) for name, case in _CASES.items()}

_NORMS = {**_HEADS, "qk_norm": True, "norm_layer": nn.LayerNorm}
# The classes that have tests of their own.
OTHERS: dict[str, LayerCase] = {
    "vit": LayerCase("timm.layers.attention", "Attention", (DIM,), _NORMS),
    "vit-rope": LayerCase("timm.layers.attention", "AttentionRope", (DIM,), _NORMS, lambda: tokens(_rope())),
    "sam-norm": LayerCase(_models("vision_transformer_sam"), "Attention", (DIM,), _NORMS, partial(grid, 2, 3)),
    "cait": LayerCase(_models("cait"), "TalkingHeadAttn", (DIM,), _HEADS),
    "cait-class": LayerCase(_models("cait"), "ClassAttn", (DIM,), _HEADS),
    "volo-class": LayerCase(_models("volo"), "ClassAttention", (DIM,), _HEADS),
    "crossvit-class": LayerCase(_models("crossvit"), "CrossAttention", (DIM,), _HEADS),
}


def layer(name: str, seed: int = 0) -> nn.Module:
    """The plain layer in eval mode, the same at every call, no weight or running statistic left at its start."""
    case = (LAYERS | OTHERS)[name]
    torch.manual_seed(seed)
    module = getattr(pytest.importorskip(case.library), case.kind)(*case.args, **case.options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    for part in module.modules():
        if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.normal_(part.running_mean, std=0.3)
            nn.init.uniform_(part.running_var, 0.5, 1.5)
    module.eval()  # which returns None in LeViT and its kin
    return module
