"""What holds or feeds a model from outside its layers: DistributedDataParallel, and what drops its tokens."""

import pytest
import timm
import torch
import transformers
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import VisionTransformer

from attention_modules import AttentionSwapError, restore_attention, swap_attention


@pytest.fixture
def one_process():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("mechanism", ["gated", "symmetric"])
@pytest.mark.parametrize("part", ["", "layers.1"])
def test_what_ddp_holds_keeps_its_parameters(one_process, mechanism, part):
    held = DistributedDataParallel(encoder())
    with pytest.raises(AttentionSwapError, match=r"DistributedDataParallel holds it, .*: swap before wrapping"):
        swap_attention(held.module.get_submodule(part), mechanism)
    swap_attention(held.module, "softmax")
    other = encoder()
    swap_attention(other, mechanism)
    restore_attention(other)
    assert other(torch.randn(1, 3, 16)).shape == (1, 3, 16)


@pytest.mark.parametrize("mechanism", ["position_bias", "scaled", "dam", "sink"])
def test_models_that_drop_tokens_take_no_mechanism_that_counts_columns(mechanism):
    dropping = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, patch_drop_rate=0.5)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    masked = transformers.ViTMAEModel(transformers.ViTMAEConfig(**sizes, image_size=32, patch_size=8))
    eva = timm.create_model("eva02_tiny_patch14_224", img_size=56, depth=1, patch_drop_rate=0.5)
    for model, name in (
        (dropping, "patch_drop drops tokens"),
        (eva, "patch_drop drops tokens"),
        (masked, "embeddings drops and shuffles tokens"),
    ):
        if mechanism == "sink":
            swap_attention(model, mechanism)
        else:
            with pytest.raises(AttentionSwapError, match=name):
                swap_attention(model, mechanism, num_tokens=17)


def of_timm(model: nn.Module, tokens: Tensor) -> Tensor:
    return model.blocks(tokens)


def of_torchvision(model: nn.Module, tokens: Tensor) -> Tensor:
    return model.encoder.layers(tokens)


SIZES = {"img_size": 64, "depth": 1, "embed_dim": 32, "num_heads": 2}
IMAGE_MODELS = {
    "timm": (lambda: timm.create_model("vit_tiny_patch16_224", **SIZES), of_timm),
    "torchvision": (lambda: VisionTransformer(64, 16, 1, 2, 32, 64), of_torchvision),
}


@pytest.mark.parametrize("mechanism", ["position_bias", "scaled", "dam", "sink"])
@pytest.mark.parametrize("library", IMAGE_MODELS)
def test_a_part_of_a_models_tokens_is_no_input_for_what_counts_columns(library, mechanism):
    build, layers = IMAGE_MODELS[library]  # of which lightly and others give the layers the tokens that no mask hides
    model = build().eval()
    swap_attention(model, mechanism)
    tokens = torch.randn(2, 17, 32)
    assert layers(model, tokens).shape == (2, 17, 32)
    if mechanism == "sink":
        layers(model, tokens[:, ::2])
        return
    with pytest.raises(RuntimeError, match=r"counts columns, and the model has positions for 17 tokens, .* 9"):
        layers(model, tokens[:, ::2])
    swap_attention(model, "softmax")
    layers(model, tokens[:, ::2])
    restore_attention(model)
    layers(model, tokens[:, ::2])
