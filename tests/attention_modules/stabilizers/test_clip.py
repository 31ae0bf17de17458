"""A clip multiplies the logits of every host's layers by its factors, and touches nothing else."""

import pytest
import torch

from attention_modules.hosts import attention_layers
from attention_modules.stabilizers.clip import clip_factors, clip_refusal, scale_logits
from attention_modules.swap import make_observable, swap_attention
from tests.attention_modules.hosts.cases import HEADS, HOSTS, built
from tests.attention_modules.hosts.timm.cases import LAYERS, layer as layer_of_timm

REFUSED = {"timm-attention-norm", "qwen3"}


@pytest.fixture(autouse=True)
def _in_double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def logits_of(layer, run):
    """q kᵀ of a layer's call, ``[B, H, N, M]``, and its values."""
    seen = []
    hook = layer.mechanism.register_forward_pre_hook(lambda _, args: seen.append([x.detach().clone() for x in args]))
    run()
    hook.remove()
    q, k, v = seen[0]
    return (q if layer.mechanism.uses_query else k) @ k.mT, v


def with_biases(model):
    """Random biases: many hosts start with zeros."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_()
    return model.double()


@pytest.mark.parametrize("mechanism", ["softmax", "symmetric"])
@pytest.mark.parametrize("host", sorted(HOSTS.keys() - REFUSED))
def test_multiplies_the_logits(host, mechanism):
    case = HOSTS[host]
    if mechanism in case.refuses:
        pytest.skip(case.refuses[mechanism])
    model = with_biases(built(host))
    plain = [layer.name for layer in attention_layers(model) if layer.mechanism is None]
    if mechanism != "softmax":
        swap_attention(model, mechanism)
    elif plain:
        make_observable(model, plain)
    layer = attention_layers(model)[0]
    assert clip_refusal(layer) is None
    before, values = logits_of(layer, lambda: case.run(model, None))
    groups = layer.host.groups(layer.module)
    factors = torch.tensor([0.3, 1.0, 0.8, 0.5][: HEADS // groups])
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scale_logits(layer, factors, alpha=0.7)
    after, same_values = logits_of(layer, lambda: case.run(model, None))
    torch.testing.assert_close(after, before * factors.repeat_interleave(groups).view(-1, 1, 1))
    assert torch.equal(same_values, values)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, kept[name])}
    assert all(name.startswith(layer.name) for name in changed)
    scale_logits(layer, torch.ones_like(factors))
    assert torch.equal(logits_of(layer, lambda: case.run(model, None))[0], after)


@pytest.mark.parametrize("mechanism", ["softmax", "symmetric"])
@pytest.mark.parametrize("name", LAYERS)
def test_multiplies_the_logits_of_every_class_of_timm_or_says_why_not(name, mechanism):
    if mechanism in LAYERS[name].refuses:
        pytest.skip("the swap is refused")
    model = with_biases(layer_of_timm(name))
    swap_attention(model, mechanism)
    (layer,) = attention_layers(model)
    reason = clip_refusal(layer)
    assert reason is None or "norm" in reason or "cosine" in reason
    if reason is not None:
        return
    before, _ = logits_of(layer, lambda: model(*LAYERS[name].inputs()))
    factors = torch.linspace(0.2, 0.9, layer.spec.num_heads // layer.host.groups(model))
    scale_logits(layer, factors)
    after, _ = logits_of(layer, lambda: model(*LAYERS[name].inputs()))
    factors = factors.repeat_interleave(layer.host.groups(model)).view(-1, 1, 1)
    torch.testing.assert_close(after, before * factors)


@pytest.mark.parametrize("host", sorted(REFUSED))
def test_a_norm_of_queries_and_keys_is_a_reason(host):
    assert "q/k norm" in clip_refusal(attention_layers(built(host))[0])


def test_what_is_frozen_computed_or_of_other_logits_is_a_reason():
    model = built("timm-attention")
    swap_attention(model, "l2")
    assert "L2Attention are not q kᵀ: they are squared distances" in clip_refusal(attention_layers(model)[0])
    model = built("timm-attention")
    torch.nn.utils.parametrizations.spectral_norm(model.qkv)
    assert "computed at each call" in clip_refusal(attention_layers(model)[0])
    model = built("timm-attention").requires_grad_(False)
    assert "frozen" in clip_refusal(attention_layers(model)[0])


def test_factors():
    largest = torch.tensor([50.0, 400.0, torch.nan, 60.0, torch.inf, 200.0, float("-inf"), 100.0])
    assert clip_factors(largest, 100.0).tolist() == [1.0, 0.25, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0]
    assert clip_factors(largest, 100.0, groups=2).tolist() == [0.25, 1.0, 1.0, 1.0]
