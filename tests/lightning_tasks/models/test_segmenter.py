"""Segmenter: backbones of several families, both decoders, position embeddings, swapping, and what is refused."""

import pytest
import timm
import torch
from torch.nn import functional

from attention_modules import RPCAttention, SymmetricAttention, restore_attention, swap_attention
from attention_modules.mechanism import AttentionMechanism
from lightning_tasks.models import Segmenter
from lightning_tasks.models.segmenter import MaskTransformer
from tests.rows import each_row

TINY = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


def segmenter(backbone="deit_tiny_patch16_224", img_size=32, options=TINY, **given):
    torch.manual_seed(0)
    return Segmenter(backbone, 5, img_size, backbone_options=options, decoder_heads=2, **given).eval()


def images(height=32, width=32, count=2):
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "backbone",
    [
        "deit_tiny_patch16_224",  # a class token
        "deit_tiny_distilled_patch16_224",  # two
        "vit_base_patch16_siglip_224",  # none, and attention pooling
        "vit_medium_patch16_reg4_gap_256",  # registers, and a norm after the average
        "eva02_tiny_patch14_224",  # another class, rope
        "beit_base_patch16_224",  # relative positions
    ],
)
def test_every_parameter_of_any_backbone_learns(backbone):
    model = segmenter(backbone, decoder="linear" if backbone.startswith("deit") else "mask_transformer")
    logits = model(images())
    assert logits.shape == (2, 5, 32, 32)
    functional.cross_entropy(logits, torch.randint(5, (2, 32, 32))).backward()
    # no key has a bias of its own that could matter: softmax does not see it
    idle = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not idle


def test_hooks_on_the_network_run_in_the_training_step_too():
    model, calls = segmenter(), []
    model.register_forward_pre_hook(lambda module, arguments: calls.append("before"))
    model.register_forward_hook(lambda module, arguments, output: calls.append(output))
    found = model.losses(images(), torch.randint(5, (2, 32, 32)), 255)
    assert calls == ["before", found]
    next(model.bands(images()))
    assert calls[2] == "before"
    assert calls[3].shape == (1, 5, 32, 32)  # a window


def test_tokens_are_those_of_the_patches_without_class_and_register_tokens():
    model = segmenter("vit_medium_patch16_reg4_gap_256")
    found = model.tokens(images())
    features = model.backbone.forward_features(images())
    assert (features.shape[1], model.backbone.num_prefix_tokens) == (20, 4)
    torch.testing.assert_close(found.flatten(1, 2), model.backbone.fc_norm(features)[:, 4:])


def test_logits_lie_where_their_patch_is():
    """A decoder that passes the mean of a patch on gives the image back, blurred."""
    model = segmenter(decoder="linear")
    rows = torch.linspace(0, 1, 32).view(1, 1, 32, 1).expand(1, 3, 32, 32)
    model.tokens = lambda given: functional.avg_pool2d(rows, 8).permute(0, 2, 3, 1)
    model.decoder = torch.nn.Identity()
    found = model(rows)
    torch.testing.assert_close(found[..., 4:28, :], rows[..., 4:28, :], rtol=0, atol=1e-5)


def test_the_mask_transformer_is_the_paper_s():
    """Cosines of projected patch and class tokens, normalized over the classes."""
    torch.manual_seed(0)
    decoder = MaskTransformer(6, 3, 8, 2, 2).eval()
    tokens = torch.randn(2, 4, 5, 6)
    x = torch.cat([decoder.embed(tokens.view(2, 20, 6)), decoder.class_tokens.repeat(2, 1, 1)], 1)
    for block in decoder.blocks:
        x = block(x)
    x = decoder.norm(x)
    patches, classes = x[:, :20] @ decoder.patch_proj.weight.T, x[:, 20:] @ decoder.class_proj.weight.T
    cosine = functional.cosine_similarity(patches[:, :, None], classes[:, None], dim=-1)
    torch.testing.assert_close(decoder(tokens), decoder.mask_norm(cosine).view(2, 4, 5, 3))


def test_images_are_normalized_inside():
    one, other = segmenter(), segmenter(mean=[0.0] * 3, std=[1.0] * 3)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    torch.testing.assert_close(one(images()), other((images() - mean) / std))
    assert not [name for name in one.state_dict() if "image_" in name]


def test_position_embeddings_follow_the_size():
    assert segmenter(img_size=48).backbone.pos_embed.shape == (1, 1 + 36, 16)
    any_size = segmenter(options={**TINY, "dynamic_img_size": True})
    assert any_size(images(40, 56)).shape == (2, 5, 40, 56)


def kinds(model):
    return [type(part).__name__ for part in model.modules() if isinstance(part, AttentionMechanism)]


def test_backbone_and_decoder_are_swapped_and_restored():
    model = segmenter(decoder_depth=2)
    before = model(images())
    report = swap_attention(model, "symmetric")
    names = ["backbone.blocks.0.attn", "backbone.blocks.1.attn", "decoder.blocks.0.attn", "decoder.blocks.1.attn"]
    assert [row.name for row in report] == names
    swap_attention(model, "rpc", layers=[0, 2], iterations=2)
    assert kinds(model) == [kind.__name__ for kind in (RPCAttention, SymmetricAttention) * 2]
    model(images()).sum().backward()
    restore_attention(model)
    assert torch.equal(model(images()), before)
    swap_attention(model, "softmax")
    torch.testing.assert_close(model(images()), before)


def test_embeddings_of_classes_and_positions_have_no_weight_decay():
    assert segmenter().no_weight_decay() >= {"decoder.class_tokens", "backbone.pos_embed", "backbone.cls_token"}


def test_drop_path_grows_over_the_decoder_s_layers():
    blocks = segmenter(decoder_depth=3, decoder_drop_path=0.4).decoder.blocks
    rates = [[getattr(path, "drop_prob", 0.0) for path in (block.drop_path1, block.drop_path2)] for block in blocks]
    assert torch.tensor(rates).allclose(torch.tensor([[0.0], [0.2], [0.4]]))


def test_parameters_of_the_papers_model():
    """DeiT-tiny at 512 pixels, and a mask transformer of two layers, 150 classes."""
    with torch.device("meta"):
        model = Segmenter("deit_tiny_patch16_224", 150)
    backbone = sum(parameter.numel() for parameter in model.backbone.parameters())
    plain = timm.create_model("deit_tiny_patch16_224", num_classes=0)
    positions = (1024 - 196) * 192
    assert backbone == sum(parameter.numel() for parameter in plain.parameters()) + positions
    assert len(model.decoder.blocks) == 2
    assert model.decoder.blocks[0].attn.num_heads == 3


@each_row(
    ("given", "text"),
    [
        ({"backbone": "diet_tiny_patch16_224"}, "the nearest names are deit_tiny_patch16_224"),
        ({"backbone": "swin_tiny_patch4_window7_224", "options": {}}, "is no backbone for Segmenter"),
        ({"backbone": "resnet18", "options": {}}, "resnet18 is no backbone for Segmenter: it is built for no img_size"),
        ({"decoder": "mask"}, "decoder is 'mask': give one of 'mask_transformer', 'linear'"),
        ({"decoder_depth": 0}, "decoder_depth is 0: give at least 1, or decoder='linear'"),
        ({"decoder_dim": 9}, "decoder_dim=9 is not a multiple of decoder_heads=2"),
    ],
)
def test_what_cannot_be_built(given, text):
    with pytest.raises(ValueError, match=text):
        segmenter(**given)


def test_images_that_do_not_fit():
    with pytest.raises(ValueError, match=r"images must be \[B, 3, H, W\], got \[3, 32, 32\]"):
        segmenter()(images()[0])
    with pytest.raises(ValueError, match="built for 32 x 32 pixels"):
        segmenter()(images(40, 32))
    small = {"embed_dim": 16, "depth": 1, "num_heads": 2}
    for size, nearest in ((40, 32), (136, 128)):  # as many tokens as whole patches of 20 and 17 pixels would give
        uneven = Segmenter("deit_tiny_patch16_224", 5, size, backbone_options=small, decoder="linear")
        with pytest.raises(ValueError, match=f"no grid of whole patches of 16 pixels: .* img_size={nearest}"):
            uneven(torch.rand(1, 3, size, size))
    # Too shallow for its class token, which comes in at the tenth layer: one patch less than there are.
    odd = Segmenter("convit_tiny", 5, 64, backbone_options={"depth": 3}, decoder="linear")
    with pytest.raises(ValueError, match="this backbone's tokens are not those of its patches"):
        odd(torch.rand(1, 3, 64, 64))
