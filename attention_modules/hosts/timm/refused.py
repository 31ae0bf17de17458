"""Attention-like modules of timm's that no mechanism can be put into, and why: module -> class -> reason."""

from __future__ import annotations

_CHANNELS = "attention among channels, not among tokens"
_HEADS_MIXED = "talking heads: it mixes the maps of its heads, and a mechanism has no map to give"
_LINEAR = "linear attention: no softmax(q kᵀ) v"
_NO_ADAPTER = "no adapter yet"
_FEWER = "fewer queries than keys, so it is no attention among the same tokens"

_BY_MODULE: dict[str, dict[str, str]] = {
    "timm.layers.diff_attention": {"DiffAttention": "the difference of two softmax maps, not one"},
    "timm.layers.halo_attn": {"HaloAttn": f"each block of queries sees a larger one of keys: {_FEWER}"},
    "timm.models._efficientnet_blocks": {
        "MobileAttention": f"multi-query attention: its query heads share one convolved key head, {_NO_ADAPTER}",
    },
    "timm.models.byobnet": {
        "SelfAttnBlock": f"around halo attention, whose blocks of queries see larger ones of keys, {_NO_ADAPTER}, or a "
        f"lambda layer, which is {_LINEAR}"
    },
    "timm.models.coat": {"FactorAttnConvRelPosEnc": f"factorized attention, {_LINEAR}"},
    "timm.models.convit": {"GPSA": "gated: it mixes the softmax map with one of positions"},
    "timm.models.csatv2": {"SpatialAttention": "a gate of one channel, not attention among the block's tokens"},
    "timm.models.davit": {"ChannelAttention": _CHANNELS, "ChannelAttentionV2": _CHANNELS},
    "timm.models.edgenext": {"CrossCovarianceAttn": _CHANNELS},
    "timm.models.efficientformer_v2": {"Attention2d": _HEADS_MIXED, "Attention2dDownsample": f"downsampling: {_FEWER}"},
    "timm.models.efficientvit_msra": {
        "LocalWindowAttention": f"cascaded heads: each reads the output of the one before, {_NO_ADAPTER}",
        "CascadedGroupAttention": f"cascaded heads: each reads the output of the one before, {_NO_ADAPTER}",
    },
    "timm.models.levit": {"AttentionDownsample": f"downsampling: {_FEWER}"},
    "timm.models.mobilevit": {"LinearSelfAttention": _LINEAR},
    "timm.models.mvitv2": {
        "MultiScaleAttention": f"pooling convolutions make queries and keys, and the query the bias, {_NO_ADAPTER}",
        "MultiScaleAttentionPoolFirst": f"queries and keys are pooled before they are projected, {_NO_ADAPTER}",
    },
    "timm.models.nextvit": {"ConvAttention": "a grouped convolution by another name"},
    "timm.models.swiftformer": {"EfficientAdditiveAttention": "additive attention: no softmax(q kᵀ) v"},
    "timm.models.vision_transformer": {
        "ParallelScalingBlock": f"attention and MLP share one projection, so neither is a layer, {_NO_ADAPTER}",
        "DiffParallelScalingBlock": "the difference of two softmax maps, not one",
    },
    "timm.models.volo": {
        "OutlookAttention": "its map is projected from each token alone, not made of q and k",
    },
    "timm.models.xcit": {"XCA": _CHANNELS},
}

REFUSED: dict[tuple[str, str], str] = {
    (module, kind): reason for module, kinds in _BY_MODULE.items() for kind, reason in kinds.items()
}
