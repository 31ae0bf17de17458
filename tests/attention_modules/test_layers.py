import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

from attention_modules import AttentionMechanism, RPCAttention, SelfAttention, rpc_attention
from tests.rows import each_row


def test_plain_equals_timm_with_its_weights():
    attention = pytest.importorskip("timm.layers.attention")
    kwargs = {"qkv_bias": True, "qk_norm": True, "scale_norm": True, "norm_layer": nn.LayerNorm, "gated": True}
    theirs = attention.Attention(24, 3, **kwargs)
    ours = SelfAttention(24, 3, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 7, 24)
    mask = torch.rand(2, 1, 7, 7) > 0.3
    assert torch.allclose(ours(x), theirs(x), atol=1e-6)
    assert torch.allclose(ours(x, mask), theirs(x, mask), atol=1e-6)
    assert torch.allclose(ours(x, is_causal=True), theirs(x, is_causal=True), atol=1e-6)


@pytest.mark.parametrize(("mechanism", "rows"), [("softmax", 72), ("scaled", 72), ("symmetric", 48), ("rpc", 48)])
def test_the_projection_has_rows_for_what_is_used(mechanism, rows):
    layer = SelfAttention(24, 3, mechanism, num_tokens=7)
    assert layer.qkv.weight.shape == (rows, 24)
    layer(torch.randn(2, 7, 24)).square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_rows_are_keys_then_values_without_a_query():
    layer = SelfAttention(24, 3, "rpc", {"iterations": 2, "lam": 0.5})
    x = torch.randn(2, 7, 24)
    k, v = (part.view(2, 7, 3, 8).transpose(1, 2) for part in (x @ layer.qkv.weight.T).split(24, -1))
    expected = layer.proj(rpc_attention(k, v, iterations=2, lam=0.5).transpose(1, 2).reshape(2, 7, 24))
    assert torch.allclose(layer(x), expected, atol=1e-6)


def test_a_head_count_that_does_not_divide_the_width_is_an_error():
    with pytest.raises(ValueError, match=r"dim=24.*num_heads=5.*divides"):
        SelfAttention(24, 5)


@pytest.mark.parametrize("mechanism", ["retention", "gla", "delta"])
def test_a_mechanism_does_not_start_with_the_numbers_of_the_queries(mechanism):
    torch.manual_seed(0)
    layer = SelfAttention(24, 3, mechanism, {"output": "gated"})
    assert not torch.isclose(layer.mechanism.gate.weight, layer.qkv.weight[:24]).any()


@pytest.mark.parametrize("mechanism", ["gated", "forgetting"])
def test_what_initializes_the_linear_layers_of_a_model_leaves_a_gate_alone(mechanism):
    timm = pytest.importorskip("timm")
    attention = SelfAttention.configured(mechanism, bias=10.0, std=0.0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, attn_layer=attention)
    gate = model.blocks[0].attn.mechanism.gate
    assert bool((gate.bias == 10.0).all())
    assert not gate.weight.any()


@each_row(("dim", "heads", "text"), [(24, 0, "num_heads"), (24, -4, "num_heads"), (0, 1, "dim")])
def test_sizes_below_one_are_an_error(dim, heads, text):
    with pytest.raises(ValueError, match=f"{text} must be positive, got"):
        SelfAttention(dim, heads)


@each_row("option", ["qk_norm", "scale_norm"])
def test_a_norm_needs_its_layer(option):
    with pytest.raises(ValueError, match="norm_layer"):
        SelfAttention(24, 3, **{option: True})


def test_width_of_heads_and_output_are_free():
    layer = SelfAttention(24, 5, attn_head_dim=4, dim_out=10, dtype=torch.float64)
    assert layer(torch.randn(2, 7, 24, dtype=torch.float64)).shape == (2, 7, 10)


def test_attention_dropout_acts_in_training_only():
    layer = SelfAttention(24, 3, "rpc", attn_drop=0.5)
    x = torch.randn(2, 7, 24)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_the_mechanism_is_called_through_hooks_with_keywords():
    layer, seen = SelfAttention(24, 3, "rpc"), []
    layer.mechanism.register_forward_pre_hook(lambda m, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    layer(torch.randn(2, 7, 24), is_causal=True)
    ((args, kwargs),) = seen
    assert [x.shape for x in args] == [(2, 3, 7, 8)] * 3
    assert kwargs == {"attn_mask": None, "is_causal": True, "dropout_p": 0.0, "scale": None}


def test_a_callable_builds_the_mechanism():
    layer = SelfAttention(24, 3, lambda spec: RPCAttention(spec, iterations=3), num_tokens=7)
    assert isinstance(layer.mechanism, AttentionMechanism)
    assert (layer.mechanism.iterations, layer.mechanism.spec.num_tokens) == (3, 7)


def test_configured_serves_as_timm_s_attention_layer():
    timm = pytest.importorskip("timm")
    layer = SelfAttention.configured("rpc", iterations=2, lam=3.0)
    kwargs = {"img_size": 32, "patch_size": 16, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    model = timm.models.VisionTransformer(**kwargs, attn_layer=layer)
    found = [m for m in model.modules() if isinstance(m, SelfAttention)]
    assert [(m.mechanism.iterations, m.mechanism.lam) for m in found] == [(2, 3.0)] * 2
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    plain = timm.models.VisionTransformer(**kwargs)
    fewer = sum(p.numel() for p in plain.parameters()) - sum(p.numel() for p in model.parameters())
    assert fewer == 2 * (24 * 24 + 24)


def test_configured_layers_copy_and_pickle():
    cls = SelfAttention.configured("scaled", num_tokens=7, variant="matrix")
    assert cls is SelfAttention.configured("scaled", num_tokens=7, variant="matrix")
    layer, x = cls(24, 3), torch.randn(2, 7, 24)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is cls
        assert torch.equal(other(x), layer(x))
        assert other.qkv.weight is not layer.qkv.weight


def test_a_timm_model_that_keeps_the_configured_class_pickles():
    timm = pytest.importorskip("timm")
    layer = SelfAttention.configured("rpc", iterations=2)
    assert pickle.loads(pickle.dumps(layer)) is layer
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=5, attn_layer=layer).eval()
    x = torch.randn(1, 3, 32, 32)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))


@each_row("name", ["attn_head_dim", "dim_out"])
def test_a_width_of_zero_is_no_default(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, or None .* got 0"):
        SelfAttention(8, 2, **{name: 0})


def test_the_parameter_counts_of_the_paper():
    """DeiT-tiny: 5,717,416 parameters, 5,272,744 with symmetric attention (Teo and Nguyen, 2024)."""
    timm = pytest.importorskip("timm")
    kwargs = {"embed_dim": 192, "depth": 12, "num_heads": 3}
    for mechanism, count in (("softmax", 5_717_416), ("symmetric", 5_272_744), ("rpc", 5_272_744)):
        with torch.device("meta"):
            model = timm.models.VisionTransformer(**kwargs, attn_layer=SelfAttention.configured(mechanism))
        assert sum(p.numel() for p in model.parameters()) == count


def test_a_causal_layer_hides_the_future_and_tells_its_mechanism():
    layer = SelfAttention(8, num_heads=2, is_causal=True, layer_index=3)
    assert (layer.mechanism.spec.is_causal, layer.mechanism.spec.layer_index) == (True, 3)
    x = torch.randn(1, 5, 8)
    changed = x.clone()
    changed[:, -1] += 1
    torch.testing.assert_close(layer(x)[:, :-1], layer(changed)[:, :-1])
    torch.testing.assert_close(layer(x), layer(x, is_causal=True))


@each_row("shape", [(5, 8), (2, 1, 5, 8), (2, 0, 8), (2, 5, 7)])
def test_an_input_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=rf"\[batch, tokens, 8\].*got \({', '.join(map(str, shape))}\).*x\[None\]"):
        SelfAttention(8, 2)(torch.zeros(shape))


@each_row(
    ("mechanism", "masked"), itertools.product(["softmax", "symmetric", "rpc", "scaled", "uniform"], [False, True])
)
def test_an_empty_batch_is_attended(mechanism, masked):
    layer = SelfAttention(8, 2, mechanism, num_tokens=5)
    out = layer(torch.zeros(0, 5, 8), torch.ones(5, 5).tril() > 0 if masked else None)
    assert out.shape == (0, 5, 8)
    out.sum().backward()
    assert not layer.qkv.weight.grad.any()


def test_options_that_no_mechanism_takes_are_refused():
    with pytest.raises(TypeError, match=r"RPCAttention has no option 'iteration'.*Did you mean 'iterations'"):
        SelfAttention(8, 2, "rpc", {"iteration": 4})
    with pytest.raises(TypeError, match=r"options of RPCAttention must be a dict .* got \[4\]"):
        SelfAttention(8, 2, "rpc", [4])


def test_a_mechanism_that_draws_leaves_the_other_weights_as_they_are():
    def layers(mechanism, **options):
        torch.manual_seed(0)
        return [SelfAttention(16, 2, mechanism=mechanism, mechanism_options=options) for _ in range(2)]

    plain, drawn = layers("softmax"), layers("differential")
    for one, other in zip(plain, drawn, strict=True):
        assert torch.equal(one.qkv.weight, other.qkv.weight)
        assert torch.equal(one.proj.weight, other.proj.weight)
    first, second = (each.mechanism.lambda_q1 for each in drawn)
    assert not torch.equal(first, second)
