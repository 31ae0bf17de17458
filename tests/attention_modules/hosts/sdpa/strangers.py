"""Tiny models of other people's packages, with what they take: for docs/hosts_sdpa.csv."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

Example = tuple[Any, ...] | dict[str, Any]
Build = Callable[[], tuple[nn.Module, Example]]
BUILDERS: dict[str, Build] = {}


def _add(name: str) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        BUILDERS[name] = build
        return build

    return add


def _many(package: str, module: str, example: Example | Callable[[], Example], **kinds: dict[str, Any]) -> None:
    """One entry for each class of a module with its arguments."""
    for kind, options in kinds.items():

        def build(kind: str = kind, options: dict[str, Any] = options) -> tuple[nn.Module, Example]:
            model = getattr(import_module(module), kind)(**options)
            return model, example() if callable(example) else example

        BUILDERS[f"{package}/{kind}"] = build


def _tokens(size: int = 20, length: int = 12) -> Tensor:
    return torch.randint(0, size, (2, length), generator=torch.Generator().manual_seed(0))


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


# litgpt: one class of attention, of many families.
for config, changes in {
    "pythia-14m": {"n_embd": 16, "n_head": 2},
    "Llama-2-7b-hf": {"n_embd": 16, "n_head": 2, "n_query_groups": 2, "intermediate_size": 32},
    "Llama-3-8B": {"n_embd": 16, "n_head": 4, "n_query_groups": 2, "intermediate_size": 32},
    "Mistral-7B-v0.3": {"n_embd": 16, "n_head": 4, "n_query_groups": 1, "intermediate_size": 32},
    "phi-2": {"n_embd": 16, "n_head": 2, "intermediate_size": 32},
    "Qwen3-0.6B": {"n_embd": 16, "n_head": 2, "n_query_groups": 1, "head_size": 8, "intermediate_size": 32},
    "falcon-7b": {"n_embd": 16, "n_head": 2},
    "gemma-3-1b-it": {"n_embd": 16, "n_head": 2, "n_query_groups": 1, "head_size": 8, "intermediate_size": 32},
    "Gemma-2-2b": {"n_embd": 16, "n_head": 2, "n_query_groups": 1, "head_size": 8, "intermediate_size": 32},
}.items():

    def _litgpt(config: str = config, changes: dict[str, Any] = changes) -> tuple[nn.Module, Example]:
        from litgpt.model import GPT, Config

        sizes = {"n_layer": 2, "block_size": 16, "vocab_size": 20, "padded_vocab_size": 20}
        return GPT(Config.from_name(config, **{**sizes, **changes})), (_tokens(),)

    BUILDERS[f"litgpt/{config}"] = _litgpt

_VIT = {"image_size": 16, "patch_size": 8, "num_classes": 3, "dim": 16, "depth": 1, "heads": 2, "mlp_dim": 32}
_IMAGE = (_normal(2, 3, 16, 16),)
for module, kind, options in (
    ("simple_flash_attn_vit", "SimpleViT", {**_VIT, "use_flash": True}),
    ("normalized_vit", "nViT", {**_VIT, "dim_head": 8}),
):
    _many("vit-pytorch", f"vit_pytorch.{module}", _IMAGE, **{kind: options})
_FILM = {"image_size": 16, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2, "num_classes": 3, "dim": 16}
_FILM = {"image_size": 16, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2, "num_classes": 3, "dim": 16}
_FILM |= {"heads": 2, "mlp_dim": 32, "use_flash_attn": True}
_FILMED = (_normal(2, 3, 4, 16, 16),)
_many("vit-pytorch", "vit_pytorch.vivit", _FILMED, ViViT={**_FILM, "spatial_depth": 1, "temporal_depth": 1})
_many("vit-pytorch (3d)", "vit_pytorch.simple_flash_attn_vit_3d", _FILMED, SimpleViT={**_FILM, "depth": 1})
_many(
    "vit-pytorch",
    "vit_pytorch.looped_vit",
    _IMAGE,
    LoopedViT={
        **{name: _VIT[name] for name in ("image_size", "patch_size", "num_classes", "dim", "heads", "mlp_dim")},
        **{"pre_loop_depth": 1, "num_looped_blocks": 1, "post_loop_depth": 1, "loop_depth": 2},
    },
)


@_add("vit-pytorch/NaViT")
def _navit() -> tuple[nn.Module, Example]:
    from vit_pytorch.na_vit import NaViT

    return NaViT(**_VIT), ([[_normal(3, 16, 16), _normal(3, 16, 8)]],)


def _x_transformers(kind: str, **options: Any) -> Build:
    def build() -> tuple[nn.Module, Example]:
        package = import_module("x_transformers")
        layers = getattr(package, kind)(dim=16, depth=1, heads=2, attn_flash=True, **options)
        return package.TransformerWrapper(num_tokens=20, max_seq_len=16, attn_layers=layers), (_tokens(),)

    return build


BUILDERS |= {
    "x-transformers/Decoder": _x_transformers("Decoder"),
    "x-transformers/Encoder": _x_transformers("Encoder"),
    "x-transformers/rotary": _x_transformers("Decoder", rotary_pos_emb=True),
    "x-transformers/one-key-head": _x_transformers("Decoder", attn_one_kv_head=True),
    "x-transformers/qk-norm": _x_transformers("Decoder", attn_qk_norm=True),
}


@_add("x-transformers/ViT")
def _x_vit() -> tuple[nn.Module, Example]:
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(dim=16, depth=1, heads=2, attn_flash=True)
    return ViTransformerWrapper(image_size=16, patch_size=8, num_classes=3, attn_layers=layers), _IMAGE


@_add("open_clip/CLIP")
def _clip() -> tuple[nn.Module, Example]:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=1, width=16, head_width=8, patch_size=8, image_size=16)
    text = CLIPTextCfg(context_length=12, vocab_size=20, width=16, heads=2, layers=1)
    return CLIP(16, vision, text), (_normal(2, 3, 16, 16), _tokens())


@_add("open_clip/own-attention")
def _clip_own() -> tuple[nn.Module, Example]:
    from open_clip.transformer import Attention

    return Attention(16, num_heads=2), (_normal(6, 2, 16),)


@_add("torchvision/vit")
def _torchvision() -> tuple[nn.Module, Example]:
    from torchvision.models import VisionTransformer

    return VisionTransformer(16, 8, 1, 2, 16, 32, num_classes=3), _IMAGE


@_add("torchvision/swin")
def _torchvision_swin() -> tuple[nn.Module, Example]:
    from torchvision.models import SwinTransformer

    return SwinTransformer([2, 2], 16, [2, 2], [2, 2], [4, 4], num_classes=3), (_normal(2, 3, 32, 32),)


@_add("sentence-transformers/MiniLM")
def _sentence() -> tuple[nn.Module, Example]:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    return BertModel(config), (_tokens(),)


@_add("lightly/MaskedCausalBlock")
def _lightly() -> tuple[nn.Module, Example]:
    from lightly.models.modules.masked_causal_vision_transformer import MaskedCausalBlock

    mask = torch.ones(2, 6, dtype=torch.bool)
    return MaskedCausalBlock(dim=16, num_heads=2), (_normal(2, 6, 16), mask)


@_add("lightly/PredictorBlock")
def _lightly_world() -> tuple[nn.Module, Example]:
    from lightly.models.modules.world_model.predictor import PredictorBlock

    block = PredictorBlock(hidden_dim=16, num_heads=2, mlp_ratio=2.0, dropout=0.0, conditional=False)
    return block, (_normal(2, 6, 16),)


@_add("sam2/MemoryAttention")
def _sam() -> tuple[nn.Module, Example]:
    from sam2.modeling.memory_attention import MemoryAttention, MemoryAttentionLayer
    from sam2.modeling.sam.transformer import Attention

    kinds = {"self_attention": Attention(16, 2), "cross_attention": Attention(16, 2)}
    places = {"pos_enc_at_attn": False, "pos_enc_at_cross_attn_keys": True, "pos_enc_at_cross_attn_queries": False}
    layer = MemoryAttentionLayer("relu", d_model=16, dim_feedforward=32, dropout=0.0, **kinds, **places)
    return MemoryAttention(16, False, layer, 1, batch_first=False), (
        _normal(6, 2, 16),
        _normal(6, 2, 16),
        _normal(6, 2, 16),
        _normal(6, 2, 16),
    )


@_add("anomalib/DINOv2 attention")
def _anomalib() -> tuple[nn.Module, Example]:
    from anomalib.models.components.dinov2.layers.attention import Attention

    return Attention(16, 2), (_normal(2, 6, 16),)


@_add("kornia/SigLip2Attention")
def _siglip() -> tuple[nn.Module, Example]:
    from kornia.models.siglip2.attention import SigLip2Attention

    return SigLip2Attention(16, 2), (_normal(2, 6, 16),)


@_add("neuralforecast/PatchTST")
def _patch_tst() -> tuple[nn.Module, Example]:
    from neuralforecast.models.patchtst import PatchTST_backbone

    backbone = PatchTST_backbone(
        c_in=1,
        c_out=1,
        input_size=16,
        h=4,
        patch_len=8,
        stride=4,
        n_layers=1,
        hidden_size=16,
        n_heads=2,
        linear_hidden_size=32,
    )
    return backbone, (_normal(2, 1, 16),)


# monai
_many(
    "monai",
    "monai.networks.blocks",
    (_normal(2, 6, 16),),
    SABlock={"hidden_size": 16, "num_heads": 2, "use_flash_attention": True},
)
_many(
    "monai",
    "monai.networks.blocks.transformerblock",
    (_normal(2, 6, 16),),
    TransformerBlock={"hidden_size": 16, "mlp_dim": 32, "num_heads": 2, "use_flash_attention": True},
)
_many(
    "monai",
    "monai.networks.blocks.crossattention",
    (_normal(2, 6, 16), _normal(2, 5, 16)),
    CrossAttentionBlock={"hidden_size": 16, "num_heads": 2, "use_flash_attention": True},
)
_many(
    "monai",
    "monai.networks.nets",
    (_normal(2, 1, 16, 16),),
    ViT={
        "in_channels": 1,
        "img_size": (16, 16),
        "patch_size": (8, 8),
        "hidden_size": 16,
        "mlp_dim": 32,
        "num_layers": 1,
        "num_heads": 2,
        "spatial_dims": 2,
    },
)


@_add("monai/DiffusionModelUNet")
def _monai_unet() -> tuple[nn.Module, Example]:
    from monai.networks.nets import DiffusionModelUNet

    model = DiffusionModelUNet(
        2,
        1,
        1,
        num_res_blocks=1,
        channels=(8, 16),
        attention_levels=(False, True),
        num_head_channels=8,
        norm_num_groups=4,
        use_flash_attention=True,
    )
    return model, (_normal(2, 1, 8, 8), torch.tensor([1, 2]))


@_add("torchtune/llama2")
def _torchtune() -> tuple[nn.Module, Example]:
    from torchtune.models.llama2 import llama2

    return llama2(vocab_size=20, num_layers=1, num_heads=2, num_kv_heads=2, embed_dim=16, max_seq_len=16), (_tokens(),)


@_add("torchtune/qwen2")
def _torchtune_qwen() -> tuple[nn.Module, Example]:
    from torchtune.models.qwen2 import qwen2

    return qwen2(
        vocab_size=20, num_layers=1, num_heads=4, num_kv_heads=2, embed_dim=16, intermediate_dim=32, max_seq_len=16
    ), (_tokens(),)


@_add("kornia/LightGlue attention")
def _kornia() -> tuple[nn.Module, Example]:
    from kornia.feature.lightglue import SelfBlock

    return SelfBlock(16, 2, flash=False), (_normal(2, 6, 16), _normal(2, 2, 1, 6, 8))


@_add("denoising-diffusion-pytorch/Unet")
def _denoising() -> tuple[nn.Module, Example]:
    from denoising_diffusion_pytorch import Unet

    return Unet(8, dim_mults=(1, 2), flash_attn=True, attn_heads=2, attn_dim_head=8), (
        _normal(2, 3, 8, 8),
        torch.tensor([1, 2]),
    )


@_add("segmentation-models-pytorch/mit")
def _smp() -> tuple[nn.Module, Example]:
    import segmentation_models_pytorch as smp

    return smp.create_model("segformer", "mit_b0", encoder_weights=None, classes=3), (_normal(2, 3, 64, 64),)


# diffusers
_DIT = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 1, "sample_size": 8}


def _latent(channels: int = 4, size: int = 8) -> Tensor:
    return _normal(2, channels, size, size)


_TIME = torch.tensor([1, 2])
_many(
    "diffusers",
    "diffusers",
    lambda: {"hidden_states": _latent(), "timestep": _TIME, "class_labels": torch.tensor([0, 1])},
    DiTTransformer2DModel={**_DIT, "patch_size": 2, "num_embeds_ada_norm": 10, "norm_type": "ada_norm_zero"},
)
_many(
    "diffusers",
    "diffusers",
    lambda: {
        "hidden_states": _latent(),
        "timestep": _TIME,
        "encoder_hidden_states": _normal(2, 5, 16),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    },
    PixArtTransformer2DModel={
        **_DIT,
        "patch_size": 2,
        "cross_attention_dim": 16,
        "caption_channels": 16,
        "use_additional_conditions": False,
    },
)
_many(
    "diffusers",
    "diffusers",
    lambda: {
        "hidden_states": _latent(),
        "timestep": _TIME,
        "encoder_hidden_states": _normal(2, 5, 32),
        "pooled_projections": _normal(2, 64),
    },
    SD3Transformer2DModel={
        "sample_size": 8,
        "patch_size": 1,
        "in_channels": 4,
        "num_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "caption_projection_dim": 32,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 64,
        "out_channels": 4,
    },
)


def _flux_input(heads: int = 2) -> Example:
    return {
        "hidden_states": _normal(2, 6, 4),
        "encoder_hidden_states": _normal(2, 5, 32),
        "pooled_projections": _normal(2, 32),
        "timestep": torch.tensor([0.1, 0.2]),
        "img_ids": _normal(6, 3),
        "txt_ids": _normal(5, 3),
    }


_FLUX = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": [4, 4, 8],
}
_many("diffusers", "diffusers", _flux_input, FluxTransformer2DModel=_FLUX)
_many(
    "diffusers",
    "diffusers",
    lambda: {"hidden_states": _latent(), "timestep": _TIME, "encoder_hidden_states": _normal(2, 5, 32)},
    AuraFlowTransformer2DModel={
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "num_mmdit_layers": 1,
        "num_single_dit_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "joint_attention_dim": 32,
        "caption_projection_dim": 32,
        "out_channels": 4,
        "pos_embed_max_size": 64,
    },
)
_many(
    "diffusers",
    "diffusers",
    lambda: {"sample": _latent(), "timestep": _TIME, "encoder_hidden_states": _normal(2, 5, 16)},
    UNet2DConditionModel={
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "sample_size": 8,
        "norm_num_groups": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 16,
        "attention_head_dim": 4,
    },
)
_many(
    "diffusers",
    "diffusers",
    lambda: {"sample": _latent(3), "timestep": _TIME},
    UNet2DModel={
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "sample_size": 8,
        "norm_num_groups": 4,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 4,
    },
)
_many(
    "diffusers",
    "diffusers",
    lambda: {"hidden_states": _normal(2, 4, 2, 8, 8), "timestep": _TIME, "encoder_hidden_states": _normal(2, 5, 16)},
    WanTransformer3DModel={
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 32,
        "ffn_dim": 32,
        "num_layers": 1,
        "cross_attn_norm": True,
        "rope_max_seq_len": 32,
    },
)
_many(
    "diffusers",
    "diffusers",
    lambda: {"hidden_states": _normal(2, 2, 4, 8, 8), "timestep": _TIME, "encoder_hidden_states": _normal(2, 5, 16)},
    CogVideoXTransformer3DModel={
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 2,
        "text_embed_dim": 16,
        "num_layers": 1,
        "sample_width": 8,
        "sample_height": 8,
        "sample_frames": 5,
        "patch_size": 2,
        "temporal_compression_ratio": 4,
        "max_text_seq_length": 5,
    },
)
_many(
    "diffusers",
    "diffusers",
    lambda: {
        "hidden_states": _normal(2, 12, 2, 8, 8),
        "timestep": _TIME,
        "encoder_hidden_states": _normal(2, 5, 16),
        "encoder_attention_mask": torch.ones(2, 5, dtype=torch.bool),
    },
    MochiTransformer3DModel={
        "patch_size": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "pooled_projection_dim": 16,
        "in_channels": 12,
        "text_embed_dim": 16,
        "time_embed_dim": 4,
        "activation_fn": "swiglu",
        "max_sequence_length": 16,
    },
)
_many(
    "diffusers",
    "diffusers",
    lambda: {
        "hidden_states": _normal(2, 12, 4),
        "timestep": _TIME,
        "encoder_hidden_states": _normal(2, 5, 16),
        "encoder_attention_mask": torch.ones(2, 5, dtype=torch.bool),
        "num_frames": 2,
        "height": 2,
        "width": 3,
    },
    LTXVideoTransformer3DModel={
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "cross_attention_dim": 16,
        "num_layers": 1,
        "qk_norm": "rms_norm_across_heads",
        "caption_channels": 16,
    },
)
_many(
    "diffusers",
    "diffusers",
    lambda: {
        "hidden_states": _normal(2, 4, 2, 8, 8),
        "timestep": _TIME,
        "encoder_hidden_states": _normal(2, 5, 16),
        "encoder_attention_mask": torch.ones(2, 5),
        "pooled_projections": _normal(2, 8),
        "guidance": torch.tensor([6000.0, 6000.0]),
    },
    HunyuanVideoTransformer3DModel={
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 10,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "patch_size": 1,
        "patch_size_t": 1,
        "guidance_embeds": True,
        "text_embed_dim": 16,
        "pooled_projection_dim": 8,
        "rope_axes_dim": (2, 4, 4),
    },
)
_many(
    "diffusers",
    "diffusers",
    lambda: {
        "hidden_states": _normal(2, 4, 8, 8),
        "timestep": _TIME,
        "encoder_hidden_states": _normal(2, 5, 8),
        "encoder_attention_mask": torch.ones(2, 5),
    },
    SanaTransformer2DModel={
        "patch_size": 1,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 1,
        "attention_head_dim": 4,
        "num_attention_heads": 2,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 4,
        "cross_attention_dim": 8,
        "caption_channels": 8,
        "sample_size": 8,
    },
)
_many(
    "diffusers",
    "diffusers",
    lambda: {
        "hidden_states": _normal(2, 6, 16),
        "timestep": _TIME,
        "proj_embedding": _normal(2, 16),
        "encoder_hidden_states": _normal(2, 5, 16),
    },
    PriorTransformer={
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 1,
        "embedding_dim": 16,
        "num_embeddings": 5,
        "additional_embeddings": 4,
    },
)
BUILDERS["diffusers/PriorTransformer"] = lambda: (
    import_module("diffusers").PriorTransformer(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        embedding_dim=16,
        num_embeddings=5,
        additional_embeddings=4,
    ),
    {
        "hidden_states": _normal(2, 16),
        "timestep": 2,
        "proj_embedding": _normal(2, 16),
        "encoder_hidden_states": _normal(2, 5, 16),
    },
)
_many(
    "diffusers",
    "diffusers",
    lambda: {
        "hidden_states": _latent(),
        "timestep": _TIME,
        "encoder_hidden_states": _normal(2, 5, 16),
        "original_size": torch.tensor([[16.0, 16.0]] * 2),
        "target_size": torch.tensor([[16.0, 16.0]] * 2),
        "crop_coords": torch.zeros(2, 2),
    },
    CogView3PlusTransformer2DModel={
        "patch_size": 2,
        "in_channels": 4,
        "num_layers": 1,
        "attention_head_dim": 4,
        "num_attention_heads": 2,
        "out_channels": 4,
        "text_embed_dim": 16,
        "time_embed_dim": 8,
        "condition_dim": 2,
        "pos_embed_max_size": 8,
        "sample_size": 8,
    },
    CogView4Transformer2DModel={
        "patch_size": 2,
        "in_channels": 4,
        "num_layers": 1,
        "attention_head_dim": 4,
        "num_attention_heads": 4,
        "out_channels": 4,
        "text_embed_dim": 16,
        "time_embed_dim": 8,
        "condition_dim": 4,
    },
)
_many(
    "diffusers",
    "diffusers",
    lambda: {
        "hidden_states": _normal(2, 6, 4),
        "encoder_hidden_states": _normal(2, 5, 32),
        "timestep": torch.tensor([0.1, 0.2]),
        "img_ids": _normal(6, 3),
        "txt_ids": _normal(5, 3),
    },
    ChromaTransformer2DModel={
        "patch_size": 1,
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "axes_dims_rope": [4, 4, 8],
        "approximator_num_channels": 8,
        "approximator_hidden_dim": 16,
        "approximator_layers": 1,
    },
)
_many(
    "diffusers",
    "diffusers",
    lambda: {
        "hidden_states": _normal(2, 6, 16),
        "encoder_hidden_states": _normal(2, 5, 16),
        "encoder_hidden_states_mask": torch.ones(2, 5, dtype=torch.long),
        "timestep": torch.tensor([0.1, 0.2]),
        "img_shapes": [[(1, 2, 3)]] * 2,
    },
    QwenImageTransformer2DModel={
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "axes_dims_rope": (4, 6, 6),
    },
)
_many(
    "diffusers",
    "diffusers",
    lambda: {
        "hidden_states": _normal(2, 4, 2, 8, 8),
        "timestep": torch.tensor([1.0, 2.0]),
        "encoder_hidden_states": _normal(2, 5, 16),
    },
    AllegroTransformer3DModel={
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 1,
        "cross_attention_dim": 24,
        "sample_width": 8,
        "sample_height": 8,
        "sample_frames": 2,
        "caption_channels": 16,
    },
    SkyReelsV2Transformer3DModel={
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 32,
        "ffn_dim": 32,
        "num_layers": 1,
        "cross_attn_norm": True,
        "rope_max_seq_len": 32,
    },
)
_many(
    "diffusers",
    "diffusers",
    lambda: {
        "hidden_states": _latent(),
        "timestep": _TIME,
        "encoder_hidden_states": _normal(2, 5, 16),
        "text_embedding_mask": torch.ones(2, 5),
        "encoder_hidden_states_t5": _normal(2, 5, 16),
        "text_embedding_mask_t5": torch.ones(2, 5),
        "image_meta_size": torch.zeros(2, 6),
        "style": torch.zeros(2, dtype=torch.long),
        "image_rotary_emb": [torch.ones(16, 8), torch.zeros(16, 8)],
    },
    HunyuanDiT2DModel={
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "cross_attention_dim": 16,
        "cross_attention_dim_t5": 16,
        "pooled_projection_dim": 16,
        "hidden_size": 16,
        "text_len": 5,
        "text_len_t5": 5,
    },
)
_many(
    "diffusers",
    "diffusers",
    (_normal(2, 3, 16, 16),),
    AutoencoderKL={
        "block_out_channels": (8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "latent_channels": 4,
        "norm_num_groups": 4,
    },
)
_many(
    "diffusers",
    "diffusers",
    lambda: {"sample": _normal(2, 4, 2, 8, 8), "timestep": _TIME, "encoder_hidden_states": _normal(2, 5, 16)},
    UNet3DConditionModel={
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "sample_size": 8,
        "norm_num_groups": 4,
        "down_block_types": ("DownBlock3D", "CrossAttnDownBlock3D"),
        "up_block_types": ("CrossAttnUpBlock3D", "UpBlock3D"),
        "cross_attention_dim": 16,
        "attention_head_dim": 4,
    },
    UNetMotionModel={
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "sample_size": 8,
        "norm_num_groups": 4,
        "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
        "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
        "cross_attention_dim": 16,
        "num_attention_heads": 2,
        "motion_num_attention_heads": 2,
    },
)


@_add("nanoGPT/CausalSelfAttention")
def _nano() -> tuple[nn.Module, Example]:
    from tests.attention_modules.hosts.sdpa.own import NanoAttention

    return nn.Sequential(NanoAttention(), NanoAttention()), (_normal(2, 6, 16),)


@_add("own/Grouped")
def _own_grouped() -> tuple[nn.Module, Example]:
    from tests.attention_modules.hosts.sdpa.own import Grouped

    return Grouped(), (_normal(2, 6, 16),)


@_add("own/Outer")
def _own_outer() -> tuple[nn.Module, Example]:
    from tests.attention_modules.hosts.sdpa.own import Outer

    return Outer(), (_normal(2, 6, 16),)


def quiet() -> None:
    """Without the warnings of other packages."""
    warnings.simplefilter("ignore")
