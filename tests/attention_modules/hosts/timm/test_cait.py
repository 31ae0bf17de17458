"""CaiT: its talking heads are a mechanism's, which changes nothing, and no other mechanism drops them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from attention_modules.hosts import attention_layers
from attention_modules.hosts.base import AttentionSwapError
from attention_modules.swap import restore_attention, swap_attention
from tests.attention_modules.hosts.cases import MECHANISMS
from tests.attention_modules.hosts.timm.cases import noise
from tests.attention_modules.hosts.timm.models import on_meta
from tests.rows import each_row

cait = pytest.importorskip("timm.models.cait")
MODELS = [
    *(f"cait_{size}_{side}" for size in ("xxs24", "xxs36") for side in (224, 384)),
    *("cait_xs24_384", "cait_s24_224", "cait_s24_384", "cait_s36_384", "cait_m36_384", "cait_m48_448"),
]


def small(dtype: torch.dtype = torch.float32, **options: float) -> nn.Module:
    """A CaiT of two blocks and one of class attention, no weight at its start."""
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4, "mlp_ratio": 1}
    model = cait.Cait(**sizes, depth_token_only=1, num_classes=3, **options).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def image(dtype: torch.dtype = torch.float32) -> Tensor:
    return noise(2, 3, 16, 16).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_talking_heads_change_neither_output_nor_gradient(dtype: torch.dtype, tolerance: float) -> None:
    plain, model = small(dtype), small(dtype)
    parameters = dict(model.named_parameters())
    report = swap_attention(model, "talking_heads")
    assert [row.name for row in report] == ["blocks.0.attn", "blocks.1.attn"]
    assert all(row.before == row.after for row in report)
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == list(plain.state_dict())
    expected, out = plain(image(dtype)), model(image(dtype))
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    for one in (expected, out):
        one.square().sum().backward()
    largest = max(float(parameter.grad.abs().max()) for parameter in plain.parameters())
    for (name, parameter), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, wanted.grad, atol=tolerance * max(1, largest), rtol=0, msg=name)


def test_taken_out_copied_and_loaded_it_is_the_same_bit_by_bit() -> None:
    plain, model = small(), small()
    with torch.no_grad():
        expected = plain(image())
        swap_attention(model, "talking_heads")
        out = model(image())
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(image()), out)
        twin = small()
        for parameter in twin.parameters():
            nn.init.zeros_(parameter)
        swap_attention(twin, "talking_heads")
        twin.load_state_dict(plain.state_dict())
        assert torch.equal(twin(image()), out)
        restore_attention(model)
        assert torch.equal(model(image()), expected)
    assert [type(part) for part in model.modules()] == [type(part) for part in plain.modules()]


@each_row("mechanism", [name for name in MECHANISMS if name != "talking_heads"])
def test_what_would_drop_the_talking_heads_is_refused(mechanism: str) -> None:
    model, (name, options) = small(), MECHANISMS[mechanism]
    with pytest.raises(AttentionSwapError, match=r"'blocks\.[01]\.attn': .*(talking heads|which nothing was put)"):
        swap_attention(model, name, **options)
    assert type(model.blocks[0].attn) is cait.TalkingHeadAttn


def test_what_it_could_not_keep_or_would_not_draw_is_refused() -> None:
    with pytest.raises(AttentionSwapError, match=r"after they are mixed \(attn_drop=0.1\)"):
        swap_attention(small(attn_drop_rate=0.1), "talking_heads")
    with pytest.raises(ValueError, match=r"'blocks.0.attn'.*std=0.5 does not draw"):
        swap_attention(small(), "talking_heads", std=0.5)


def test_class_attention_is_left_with_its_reason() -> None:
    report = swap_attention(small(), "talking_heads")
    assert [(skipped.name, skipped.kind) for skipped in report.skipped] == [("blocks_token_only.0.attn", "ClassAttn")]
    assert "cross-attention: swapped only where a pattern" in report.skipped[0].reason


def test_modes_and_compilation() -> None:
    plain, model = small(), small()
    expected = plain(image())
    swap_attention(model, "talking_heads")
    with torch.autocast("cpu", torch.bfloat16):
        assert (model(image()) - expected).abs().mean() < 0.05 * expected.abs().mean()
    model.blocks[0].attn.compile(backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        torch.testing.assert_close(model(image()), expected, atol=1e-5, rtol=1e-5)
    assert "talking heads" in str(attention_layers(model)[0].spectrum_caveat)


def test_adapters_of_the_mixing_projections_count() -> None:
    peft = pytest.importorskip("peft")
    model = small()
    swap_attention(model, "talking_heads")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["proj_l", "proj_w"], init_lora_weights=False))
    with torch.no_grad():
        out = adapted(image())
        restore_attention(model)
        torch.testing.assert_close(out, adapted(image()), atol=1e-5, rtol=1e-5)
        with adapted.disable_adapter():
            assert not torch.allclose(adapted(image()), out, atol=1e-3)


@pytest.mark.parametrize("name", [MODELS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS[1:])])
def test_every_model_takes_them(name: str) -> None:
    model = on_meta(name)
    report = swap_attention(model, "talking_heads")
    assert len(report) == len(model.blocks)
    assert len(report.skipped) == len(model.blocks_token_only)
    assert len(restore_attention(model)) == len(report)
