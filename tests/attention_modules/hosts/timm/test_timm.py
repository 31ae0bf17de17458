"""timm's attention layers and models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from attention_modules.hosts import attention_layers
from attention_modules.layers import SelfAttention
from attention_modules.swap import AttentionSwapError, restore_attention, swap_attention
from tests.attention_modules.hosts.cases import DIM, HEADS, TOKENS, built, features

timm = pytest.importorskip("timm")
attention = pytest.importorskip("timm.layers.attention")
PLAIN_PARAMETERS, SYMMETRIC_PARAMETERS = 5_717_416, 5_272_744  # DeiT-tiny, and with q = k as the RPC paper counts


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_deit_tiny_has_the_papers_parameter_counts() -> None:
    model = timm.create_model("deit_tiny_patch16_224").eval()
    assert count(model) == PLAIN_PARAMETERS
    report = swap_attention(model, "symmetric")
    assert len(report) == 12
    assert count(model) == SYMMETRIC_PARAMETERS
    assert sum(row.before - row.after for row in report) == PLAIN_PARAMETERS - SYMMETRIC_PARAMETERS
    restore_attention(model)
    assert count(model) == PLAIN_PARAMETERS


def test_rpc_in_the_first_layer_only() -> None:
    model = timm.create_model("deit_tiny_patch16_224").eval()
    report = swap_attention(model, "rpc", iterations=4, lam=4.0, layers=[0])
    assert [row.name for row in report] == ["blocks.0.attn"]
    assert [skipped.reason for skipped in report.skipped] == ["not selected"] * 11
    with torch.no_grad():
        assert torch.isfinite(model(torch.randn(1, 3, 224, 224))).all()


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 5),
        ({"no_embed_class": True}, 5),
        ({"reg_tokens": 2}, 7),
        ({"class_token": False, "global_pool": "avg"}, 4),
        ({"dynamic_img_size": True}, 5),
        ({"pos_embed": "none"}, None),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_learned_positions_fix_the_number_of_tokens(options: dict, tokens: int | None) -> None:
    vit = timm.models.vision_transformer.VisionTransformer
    model = vit(img_size=8, patch_size=4, embed_dim=DIM, depth=1, num_heads=HEADS, num_classes=2, **options).eval()
    (layer,) = attention_layers(model)
    assert layer.spec.num_tokens == tokens
    if tokens is not None:
        image = torch.randn(1, 3, 8, 8)
        plain = model(image)
        swap_attention(model, "scaled")  # the matrix form needs the number of tokens
        assert model.blocks[0].attn.mechanism.s.shape == (HEADS, tokens, tokens)
        torch.testing.assert_close(model(image), plain, atol=1e-5, rtol=1e-5)


def test_the_matrix_form_without_a_number_of_tokens_is_refused() -> None:
    model = built("timm-attention")
    with pytest.raises(ValueError, match="num_tokens"):
        swap_attention(model, "scaled")
    assert type(model) is attention.Attention


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_fused_and_manual_attention_are_both_matched(fused: bool, causal: bool) -> None:
    model = built("timm-attention")
    model.fused_attn = fused
    mask = None if causal else torch.randn(2, HEADS, TOKENS, TOKENS)
    plain = model(features(), attn_mask=mask, is_causal=causal)
    swap_attention(model, "softmax")
    torch.testing.assert_close(model(features(), attn_mask=mask, is_causal=causal), plain, atol=1e-5, rtol=1e-5)


def test_dropout_is_handed_to_the_mechanism_in_training_only() -> None:
    model, seen = attention.Attention(DIM, HEADS, attn_drop=0.25), []
    swap_attention(model, "softmax")
    model.mechanism.register_forward_pre_hook(lambda _, __, kw: seen.append(kw["dropout_p"]), with_kwargs=True)
    model.train()(features())
    model.eval()(features())
    assert seen == [0.25, 0.0]


@pytest.mark.parametrize("fused", [True, False])
def test_a_dropout_that_was_set_apart_acts_as_in_the_plain_layer(fused: bool) -> None:
    """As for Monte Carlo dropout: the module drops out by its own mode, a fused kernel by the layer's."""
    for whole, part in ((True, False), (False, True)):
        layer = attention.Attention(DIM, HEADS, attn_drop=0.5).train(whole)
        layer.fused_attn = fused
        layer.attn_drop.train(part)
        plain = copy.deepcopy(layer)
        swap_attention(layer, "softmax")
        found = []
        for each in (plain, layer):
            torch.manual_seed(0)
            found.append(each(features()))
        torch.testing.assert_close(*found)


def test_rope_makes_symmetric_logits_of_rotated_keys() -> None:
    model, seen = built("timm-rope"), {}
    swap_attention(model, "symmetric")
    model.mechanism.register_forward_pre_hook(lambda _, args: seen.update(q=args[0], k=args[1]))
    angles = torch.randn(TOKENS - 1, 2 * DIM // HEADS)
    model(features(), rope=angles)
    assert seen["q"] is seen["k"]
    turned = seen["k"]
    model(features(), rope=None)
    assert not torch.allclose(turned[:, :, 1:], seen["k"][:, :, 1:])
    assert torch.allclose(turned[:, :, 0], seen["k"][:, :, 0])  # the prefix token is not rotated


class Whispering(attention.Attention):
    """A subclass with a forward of its own, which calls no kernel."""

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return 0.5 * self.proj(x)


def test_subclasses_with_their_own_forward_are_refused_by_name() -> None:
    model = nn.ModuleDict({"a": Whispering(DIM, HEADS), "b": attention.Attention(DIM, HEADS)})
    (skipped,) = swap_attention(model, "softmax").skipped
    assert (skipped.name, skipped.kind) == ("a", "Whispering")
    assert "forward of its own" in skipped.reason
    with pytest.raises(AttentionSwapError, match="'a' \\(Whispering\\), an unsupported host: unsupported subclass"):
        swap_attention(model, "softmax", where="a")


def test_other_attention_classes_are_listed_with_the_reason() -> None:
    model = timm.create_model("vit_tiny_patch16_224", global_pool="map", class_token=False, num_classes=2)
    report = swap_attention(model, "softmax")
    assert [(skipped.name, skipped.kind) for skipped in report.skipped] == [("attn_pool", "AttentionPoolLatent")]
    assert "pooling" in report.skipped[0].reason
    with pytest.raises(AttentionSwapError, match=r"'blocks.0.attn': talking heads"):
        swap_attention(timm.create_model("cait_xxs24_224"), "softmax")


def test_our_layer_serves_as_timms_attn_layer() -> None:
    vit = timm.models.vision_transformer.VisionTransformer
    model = vit(
        img_size=8,
        patch_size=4,
        embed_dim=DIM,
        depth=2,
        num_heads=HEADS,
        attn_layer=SelfAttention.configured("softmax"),
    ).eval()
    image = torch.randn(1, 3, 8, 8)
    plain = model(image)
    assert [row.host for row in swap_attention(model, "symmetric")] == ["attnswap SelfAttention"] * 2
    assert not torch.allclose(model(image), plain)
    restore_attention(model)
    assert torch.equal(model(image), plain)
