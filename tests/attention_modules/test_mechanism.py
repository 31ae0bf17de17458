import copy
import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from attention_modules import (
    AttentionMechanism,
    AttentionSpec,
    RPCAttention,
    SoftmaxAttention,
    available_mechanisms,
    build_mechanism,
    mechanism,
    register_mechanism,
)
from attention_modules.mechanism import mechanism_class
from attention_modules.swap import swap_attention
from tests.rows import each_row

SPEC = AttentionSpec(24, 3, 8)


@pytest.fixture
def registry(monkeypatch):
    """A registry of its own, so that a test leaves none of its names behind."""
    monkeypatch.setattr(mechanism, "_REGISTRY", dict(mechanism._REGISTRY))


@each_row(
    ("field", "value"),
    itertools.product(["dim", "num_heads", "head_dim", "num_tokens", "value_dim"], [0, -3, 2.0, True, "8"]),
)
def test_a_spec_refuses_sizes_that_are_none(field, value):
    with pytest.raises(ValueError, match=rf"AttentionSpec\.{field} .*at least 1, got {value!r}"):
        AttentionSpec(**{"dim": 24, "num_heads": 3, "head_dim": 8, field: value})


def test_a_spec_cannot_be_changed():
    with pytest.raises(AttributeError):
        SPEC.dim = 3


def test_our_mechanisms_are_known_by_name():
    assert {"softmax", "symmetric", "rpc", "scaled"} <= set(available_mechanisms())
    assert mechanism_class("rpc") is mechanism_class(RPCAttention) is RPCAttention


def test_an_unknown_name_lists_the_nearest_and_the_known():
    with pytest.raises(ValueError, match=r"'sofmax'.*Did you mean 'softmax'.*Known: .*rpc"):
        mechanism_class("sofmax")


def test_the_name_that_reports_print_leads_to_the_short_one():
    for name in available_mechanisms():
        with pytest.raises(ValueError, match=rf"Did you mean '{name}'\? Known"):
            mechanism_class(mechanism_class(name).__name__)


def test_something_else_is_no_mechanism():
    for other in (torch.nn.Linear, 3, None):
        with pytest.raises(TypeError, match="expected a mechanism"):
            build_mechanism(other, SPEC)


def test_a_name_is_taken_once(registry):
    class Mine(AttentionMechanism):
        pass

    with pytest.raises(ValueError, match=r"'rpc' is taken by attention_modules\.mechanisms\.rpc\.RPCAttention"):
        register_mechanism("rpc")(Mine)
    assert register_mechanism("mine")(Mine) is register_mechanism("mine")(Mine) is mechanism_class("mine")


def test_only_mechanisms_register(registry):
    with pytest.raises(TypeError, match="'matrix'"):
        register_mechanism("matrix")(torch.nn.Linear)
    assert "matrix" not in available_mechanisms()


def test_options_reach_a_name_and_a_class_alike():
    for given in ("rpc", RPCAttention):
        assert build_mechanism(given, SPEC, iterations=2).iterations == 2


def test_an_option_that_does_not_fit_names_class_and_options():
    with pytest.raises(TypeError, match=r"SoftmaxAttention.*iterations"):
        build_mechanism("softmax", SPEC, iterations=2)


def test_a_mistyped_option_names_itself_the_nearest_and_the_known():
    with pytest.raises(TypeError, match=r"RPCAttention has no option 'iteration'; it takes iterations, .*'iterations'"):
        build_mechanism("rpc", SPEC, iteration=4)
    with pytest.raises(TypeError, match="SoftmaxAttention has no option 'iterations'; it takes none"):
        build_mechanism("softmax", SPEC, iterations=4)


def test_a_mechanism_that_takes_anything_is_asked_itself():
    class Open(SoftmaxAttention):
        def __init__(self, spec, **options):
            super().__init__(spec)
            self.options = options

    assert build_mechanism(Open, SPEC, anything=1).options == {"anything": 1}


def test_a_callable_carries_its_own_options_and_returns_a_mechanism():
    assert isinstance(build_mechanism(lambda spec: SoftmaxAttention(spec), SPEC), SoftmaxAttention)
    with pytest.raises(TypeError, match="iterations"):
        build_mechanism(lambda spec: SoftmaxAttention(spec), SPEC, iterations=2)
    with pytest.raises(TypeError, match="Linear"):
        build_mechanism(lambda spec: torch.nn.Linear(1, 1), SPEC)


def test_a_built_mechanism_is_no_factory():
    with pytest.raises(TypeError, match=r"a built SoftmaxAttention.*give the class SoftmaxAttention itself"):
        build_mechanism(SoftmaxAttention(SPEC), SPEC)


@each_row(
    ("name", "dropout"),
    itertools.product(["softmax", "symmetric", "rpc", "scaled", "uniform"], [-0.5, 1.5, float("nan")]),
)
def test_dropout_is_a_probability(name, dropout):
    mechanism = build_mechanism(name, dataclasses.replace(SPEC, num_tokens=3))
    x = torch.ones(1, SPEC.num_heads, 3, SPEC.head_dim)
    with pytest.raises(ValueError, match="dropout_p must be a probability from 0 to 1"):
        mechanism(x, x, x, dropout_p=dropout)


def test_forward_is_left_to_subclasses():
    with pytest.raises(NotImplementedError, match="AttentionMechanism must implement forward"):
        AttentionMechanism(SPEC)(*torch.zeros(3, 1, 3, 4, 8))


@pytest.mark.parametrize("name", ["sink", "scaled", "dam", "gated", "qk_norm"])
def test_empty_tensors_are_reset_to_those_of_a_new_mechanism(name):
    mechanism = build_mechanism(name, AttentionSpec(dim=24, num_heads=3, head_dim=8, num_tokens=5))
    mechanism.to_empty(device="cpu")
    for parameter in mechanism.parameters():
        parameter.data.fill_(torch.nan)
    mechanism.reset_parameters()
    assert all(tensor.isfinite().all() for tensor in mechanism.state_dict().values())


@pytest.mark.parametrize("depth", [None, 1, 40])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_lambda_of_a_depth_is_that_of_the_paper_in_each_dtype(depth, dtype):
    spec = AttentionSpec(dim=16, num_heads=2, head_dim=8, layer_index=depth)
    with torch.device("meta"):
        mechanism = build_mechanism("differential", spec).to(dtype)
    assert "pairs='features'" in repr(mechanism)
    mechanism.to_empty(device="cpu").reset_parameters()
    expected = 0.8 - 0.6 * math.exp(-0.3 * (depth or 0))
    limit = 1e-15 if dtype == torch.float64 else 1e-7
    assert mechanism.lambda_init.item() == pytest.approx(expected, abs=limit)
    for name, vector in mechanism.named_parameters():
        nn.init.constant_(vector, 0.5 if "1" in name else 0.0)
    found = mechanism.lam()
    assert found.dtype == dtype
    exact = torch.tensor(math.exp(1.0) - 1.0 + expected, dtype=torch.float64)
    torch.testing.assert_close(found.double(), exact, atol=0.0, rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("decay", [0.9, 0.9995, 0.9999])
def test_an_average_of_equal_models_has_their_lambda(decay):
    layers = nn.ModuleList(
        build_mechanism("differential", AttentionSpec(dim=16, num_heads=2, head_dim=8, layer_index=index))
        for index in range(24)
    )
    averaged = AveragedModel(layers, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    for _ in range(20):
        averaged.update_parameters(layers)
    for own, other in zip(layers, averaged.module, strict=True):
        assert torch.equal(own.lambda_init, other.lambda_init)
        assert torch.equal(own.lambda_init, copy.deepcopy(own).bfloat16().lambda_init)


@pytest.mark.parametrize("name", ["sigmoid", "value_residual", "uniform"])
def test_keywords_that_a_mechanism_does_not_need_are_refused(name):
    mechanism = build_mechanism(name, AttentionSpec(dim=16, num_heads=2, head_dim=8))
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        mechanism(q, q, q, mask=torch.ones(3, 3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("sink", {"start": -5}),
        ("gated", {"bias": 5, "std": 0}),
        ("forgetting", {"bias": 5, "std": 0}),
        ("ssa", {"start": 1.5}),
        ("dam", {"start": 5, "num_tokens": 6}),
    ],
)
def test_saturated_neutral_starts_do_not_train_and_nearer_ones_do(name, near):
    found = []
    options = mechanism_class(name).neutral
    for given in ({**options, **({"num_tokens": 6} if name == "dam" else {})}, near):
        torch.manual_seed(0)
        model = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        swap_attention(model, name, **given)
        mechanism = model.self_attn.mechanism
        model(torch.randn(4, 6, 16)).square()[:, :, :8].mean().backward()
        found.append(max(float(each.grad.abs().max()) for each in mechanism.parameters()))
    assert found[1] > 1e-6 > 10 * found[0]
