"""What holds or feeds a model from outside its layers: DistributedDataParallel, and what drops its tokens."""

import pytest
import timm
import torch
import transformers
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

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
    for model, name in ((dropping, "patch_drop drops tokens"), (masked, "embeddings drops and shuffles tokens")):
        if mechanism == "sink":
            swap_attention(model, mechanism)
        else:
            with pytest.raises(AttentionSwapError, match=name):
                swap_attention(model, mechanism, num_tokens=17)
