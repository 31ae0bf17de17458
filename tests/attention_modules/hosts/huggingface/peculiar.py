"""Folders of transformers whose tiny model needs settings or inputs that no general rule gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Peculiar:
    """What the models of a folder are given."""

    settings: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[], dict[str, Any]] | None = None


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _ids(tokens: int = 12) -> Tensor:
    return torch.randint(5, 35, (2, tokens), generator=torch.Generator().manual_seed(0))


def _text() -> dict[str, Any]:
    return {"input_ids": _ids()}


def _speech_codec() -> dict[str, Any]:
    return {"input_values": _randn(2, 1, 3200), "input_features": _randn(2, 10, 160)}


def _axes(*sections: int) -> dict[str, Any]:
    """Rotary positions of three axes, which have so many frequencies each."""
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}


# Detectors that read three stages of a small residual network.
_DETECTOR = Peculiar(
    {
        "backbone_config": {
            "model_type": "rt_detr_resnet",
            "embedding_size": 16,
            "hidden_sizes": [16, 24, 32, 40],
            "depths": [1, 1, 1, 1],
            "layer_type": "basic",
            "out_features": ["stage2", "stage3", "stage4"],
        },
        "encoder_in_channels": [24, 32, 40],
        "encoder_hidden_dim": 64,
        "decoder_in_channels": [64, 64, 64],
        "d_model": 64,
        "feat_strides": [8, 16, 32],
        "num_queries": 10,
        "num_labels": 5,
        "anchor_image_size": None,
        "eval_size": None,
    },
    lambda: {"pixel_values": _randn(2, 3, 64, 64)},
)

OF = {
    "chameleon": Peculiar({"vocabulary_map": {"<image>": 4}}, _text),
    "d_fine": _DETECTOR,
    "dbrx": Peculiar({"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}}),
    "deimv2": _DETECTOR,
    "ernie4_5_vl_moe": Peculiar({"text_config": {"rope_parameters": _axes(3, 3, 2)}}, _text),
    "fun_asr_nano": Peculiar({"adaptor_config": {"intermediate_size": 16}}),
    "glm4v_moe": Peculiar(
        {"text_config": {"rope_parameters": {**_axes(1, 1, 2), "partial_rotary_factor": 0.5}}}, _text
    ),
    "gradium_phonon_tts": Peculiar({"flow_head_config": {"condition_dim": 64}}),
    "granite_speech5": Peculiar(inputs=lambda: {"input_features": _randn(2, 40, 320)}),
    "idefics": Peculiar(
        inputs=lambda: {
            "input_ids": _ids(),
            "pixel_values": _randn(2, 1, 3, 32, 32),
            "image_attention_mask": torch.ones(2, 12, 1, dtype=torch.long),
        }
    ),
    "longcat_flash": Peculiar({"qk_nope_head_dim": 16, "qk_head_dim": 24, "v_head_dim": 16}),
    "moonshine": Peculiar(
        {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
        lambda: {"input_values": _randn(2, 4000), "decoder_input_ids": _ids(7)},
    ),
    "neucodec": Peculiar({"quantization_dim": 128}, _speech_codec),
    "patchtsmixer": Peculiar({"self_attn": True}),
    "pix2struct": Peculiar(  # whose patches begin with their row and their column
        {"vision_config": {"patch_embed_hidden_size": 768}},
        lambda: {"flattened_patches": _randn(2, 12, 770).abs(), "decoder_input_ids": _ids(7)},
    ),
    "pocket_tts": Peculiar({"flow_head_config": {"condition_dim": 64}}),
    "pp_doclayout_v2": _DETECTOR,
    "pp_doclayout_v4": _DETECTOR,
    "rt_detr": _DETECTOR,
    "rt_detr_v2": _DETECTOR,
    "udop": Peculiar(
        inputs=lambda: {
            "input_ids": _ids(),
            "bbox": _randn(2, 12, 4).sigmoid().sort(-1).values,
            "decoder_input_ids": _ids(7),
        }
    ),
    "xcodec2": Peculiar({"quantization_dim": 128}, _speech_codec),
}
