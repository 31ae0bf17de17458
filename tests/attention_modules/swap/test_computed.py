"""Weights that a pre-hook computes at each call: a swap is restored rightly, or refused and nothing has changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune, spectral_norm, weight_norm

from attention_modules.swap import AttentionSwapError, restore_attention, swap_attention

COMPUTED: dict[str, Callable[[nn.Module, str], object]] = {
    "prune": lambda owner, name: prune.l1_unstructured(owner, name, 0.5),
    "structured": lambda owner, name: prune.ln_structured(owner, name, 0.5, 2, 0),
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
}


def encoder() -> tuple[nn.Module, nn.Module, str, torch.Tensor]:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    return model, model.self_attn, "in_proj_weight", torch.randn(1, 5, 16)


def vit() -> tuple[nn.Module, nn.Module, str, torch.Tensor]:
    model = pytest.importorskip("timm").create_model("vit_tiny_patch16_224", img_size=32, depth=1).eval()
    return model, model.blocks[0].attn.qkv, "weight", torch.randn(1, 3, 32, 32)


@pytest.mark.filterwarnings("ignore:.*(weight_norm|spectral_norm).* is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", COMPUTED)
@pytest.mark.parametrize("build", [encoder, vit])
@pytest.mark.parametrize("mechanism", ["symmetric", "rpc"])
def test_a_projection_without_its_query_that_is_computed_stays(
    kind: str, build: Callable[[], tuple[nn.Module, nn.Module, str, torch.Tensor]], mechanism: str
) -> None:
    model, _, _, x = build()
    swap_attention(model, mechanism)
    owner, name = (model.self_attn, "in_proj_weight") if build is encoder else (model.blocks[0].attn.qkv, "weight")
    COMPUTED[kind](owner, name)
    model.eval()
    before = model(x)
    for change in (restore_attention, lambda model: swap_attention(model, "softmax")):
        with pytest.raises(AttentionSwapError, match=rf"{name}' is no Parameter any more.*make it permanent first"):
            change(model)
        assert torch.equal(model(x), before)
    if kind in ("prune", "structured"):
        prune.remove(owner, name)
        restore_attention(model)
        model(x)


@pytest.mark.filterwarnings("ignore:.*(weight_norm|spectral_norm).* is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", COMPUTED)
@pytest.mark.parametrize("build", [encoder, vit])
def test_with_a_query_a_computed_projection_is_swapped_and_restored(
    kind: str, build: Callable[[], tuple[nn.Module, nn.Module, str, torch.Tensor]]
) -> None:
    for early in (True, False):
        model, owner, name, x = build()
        if early:
            COMPUTED[kind](owner, name)
            model.eval()
            plain = model(x)
        swap_attention(model, "softmax")
        if not early:
            COMPUTED[kind](owner, name)
            model.eval()
        swapped = model(x)
        restore_attention(model)
        torch.testing.assert_close(model(x), swapped, atol=1e-5, rtol=1e-4)
        if early:
            torch.testing.assert_close(plain, swapped, atol=1e-5, rtol=1e-4)


def test_another_projection_in_place_of_the_shrunk_one_is_told() -> None:
    model, *_ = encoder()
    swap_attention(model, "symmetric")
    model.self_attn.in_proj_weight = nn.Parameter(torch.randn(48, 16))
    with pytest.raises(AttentionSwapError, match="in_proj_weight' has 48 features, and without the query's it had 32"):
        restore_attention(model)


def test_after_a_swap_that_fails_handles_of_hooks_remove_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed(dict[str, int]):
        """As configurations of diffusers are."""

        def update(self, *args: object, **kwargs: object) -> None:
            raise TypeError

    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    model.sizes = Fixed(a=1)
    seen: list[object] = []
    handle = model.layers[0].register_forward_hook(lambda *args: seen.append(args))

    def fails(self: object, model: nn.Module) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("attention_modules.hosts.torch.MultiheadAttentionHost.settle", fails)
    with pytest.raises(torch.OutOfMemoryError):
        swap_attention(model, "rpc")
    handle.remove()
    model(torch.randn(1, 5, 16))
    assert not seen
    assert model.sizes == {"a": 1}


def test_an_error_of_a_warning_leaves_the_model_as_it_was() -> None:
    model, *_ = vit()
    model.blocks[0].attn.fused_attn = False
    model.blocks[0].attn.attn_drop.register_forward_hook(lambda *args: None)
    kinds = [type(module) for module in model.modules()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="hooks on"):
            swap_attention(model, "rpc")
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("mechanism", ["symmetric", "rpc"])
def test_a_bias_that_is_computed_is_not_split(mechanism: str) -> None:
    for compute in (
        lambda layer: prune.l1_unstructured(layer, "in_proj_bias", 0.5),
        lambda layer: parametrize.register_parametrization(layer, "in_proj_bias", nn.Identity()),
    ):
        layer = nn.MultiheadAttention(16, 2, batch_first=True).eval()
        compute(layer)
        x = torch.randn(1, 5, 16)
        before = layer(x, x, x)[0]
        with pytest.raises(AttentionSwapError, match="its in_proj_bias is computed at each call"):
            swap_attention(layer, mechanism)
        assert torch.equal(layer(x, x, x)[0], before)
        swap_attention(layer, "sink", start=-30.0)
        torch.testing.assert_close(layer(x, x, x)[0], before)
