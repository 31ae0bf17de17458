"""Class attention: softmax by its name changes nothing, mechanisms of one query for many keys train, others refuse."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_modules.hosts import discovery
from attention_modules.hosts.base import AttentionSwapError
from attention_modules.swap import restore_attention, swap_attention
from tests.attention_modules.hosts.cases import BETWEEN_LAYERS, MECHANISMS, ONE_QUERY_PER_KEY
from tests.attention_modules.hosts.timm.cases import BATCH, DIM, HEADS, TOKENS, noise
from tests.attention_modules.hosts.timm.models import BY_NAME, on_meta, read

LAYERS = {
    "cait": ("timm.models.cait", "ClassAttn"),
    "volo": ("timm.models.volo", "ClassAttention"),
    "crossvit": ("timm.models.crossvit", "CrossAttention"),
}


def model(name: str) -> nn.ModuleDict:
    """A layer of class attention, named "asking"."""
    library, kind = LAYERS[name]
    torch.manual_seed(0)
    layer = getattr(pytest.importorskip(library), kind)(DIM, num_heads=HEADS, qkv_bias=True)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return nn.ModuleDict({"asking": layer}).eval()


def run(module: nn.ModuleDict) -> Tensor:
    return module["asking"](noise(BATCH, TOKENS, DIM))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_softmax_for_softmax_changes_neither_output_nor_gradient(name: str, dtype: torch.dtype) -> None:
    plain, swapped = model(name).to(dtype), model(name).to(dtype)
    (row,) = swap_attention(swapped, "softmax", where="asking")
    assert row.before == row.after
    outs, grads = [], []
    for module in (plain, swapped):
        x = noise(BATCH, TOKENS, DIM).to(dtype).requires_grad_()
        outs.append(module["asking"](x))
        outs[-1].square().sum().backward()
        grads.append([x.grad, *(parameter.grad for parameter in module.parameters())])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(outs[1], outs[0], atol=tolerance, rtol=tolerance)
    for got, wanted in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(got, wanted, atol=10 * tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize("name", LAYERS)
def test_it_trains_or_is_refused(name: str, subtests: pytest.Subtests) -> None:
    for mechanism in MECHANISMS:
        with subtests.test(mechanism=mechanism):
            check_trains_or_is_refused(name, mechanism)


def check_trains_or_is_refused(name: str, mechanism: str) -> None:
    module, (kind, options) = model(name), MECHANISMS[mechanism]
    plain = run(module)
    if mechanism in (*ONE_QUERY_PER_KEY, *BETWEEN_LAYERS):
        with pytest.raises(AttentionSwapError, match=r"'asking'.*cross-attention"):
            swap_attention(module, kind, where="asking", **options)
        assert torch.equal(run(module), plain)
        return
    swap_attention(module, kind, where="asking", **options)
    module.train()
    out = run(module)
    assert out.shape == (BATCH, 1, DIM)
    out.square().sum().backward()
    bad = [key for key, value in module.named_parameters() if value.grad is None or not value.grad.isfinite().all()]
    assert out.isfinite().all()
    assert not bad
    module.eval()
    restore_attention(module)
    assert torch.equal(run(module), plain)


@pytest.mark.parametrize("name", LAYERS)
def test_copies_pickles_and_checkpoints(name: str) -> None:
    module = model(name)
    with torch.no_grad():
        state = {key: value.clone() for key, value in module.state_dict().items()}
        swap_attention(module, "gated", where="asking")
        out = run(module)
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(run(twin), out)
        module.load_state_dict(state)  # of the plain layer: the gate keeps its values
        assert torch.equal(run(module), out)


def test_without_its_name_it_stays_and_the_error_tells_the_name() -> None:
    module = model("cait")
    with pytest.raises(AttentionSwapError, match=r"cross-attention only \('asking'\).*: where='asking'"):
        swap_attention(module, "softmax")
    assert type(module["asking"]).__name__ == "ClassAttn"


@pytest.mark.parametrize("name", ["cait_xxs24_224", "xcit_nano_12_p16_224"])
def test_real_models_take_it_by_name(name: str) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 32, "depth": 1, "embed_dim": 32, "num_heads": 4}
    whole = timm.create_model(name, **sizes).eval()
    for key, parameter in whole.named_parameters():
        if "gamma" in key:
            nn.init.normal_(parameter, std=0.5)  # which starts at almost zero
    image = noise(2, 3, 32, 32)
    names = [layer.name for layer in discovery.survey(whole).layers if layer.cross]
    with torch.no_grad():
        plain = whole(image)
        report = swap_attention(whole, "softmax", where=names)
        assert [row.name for row in report] == names
        torch.testing.assert_close(whole(image), plain, atol=1e-5, rtol=1e-5)
        swap_attention(whole, "sink", where=names, start=3.0)
        assert (whole(image) - plain).abs().max() > 1e-4
        restore_attention(whole)
        assert torch.equal(whole(image), plain)


def test_the_count_names_the_models_that_take_it_alone() -> None:
    families = {row.family for row in read() if BY_NAME in row.swapped}
    assert families == {"cait", "xcit"}
    for row in read():
        if row.family in families:
            assert row.takes("softmax"), row
            assert not row.takes("rpc"), row
    assert len(discovery.survey(on_meta("xcit_nano_12_p16_224")).layers) == 2
