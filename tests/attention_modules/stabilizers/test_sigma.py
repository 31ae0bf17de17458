"""σReparam: the equation, neutral start, both layouts of checkpoints, and swaps over and under it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from attention_modules.analysis import frobenius_squared
from attention_modules.hosts import attention_layers
from attention_modules.stabilizers.sigma import (
    SigmaReparametrization,
    linear_weights,
    plain_state,
    power_step,
    projections,
    remove_sigma_reparam,
    reparametrizations,
    sigma_reparametrize,
)
from attention_modules.swap import AttentionSwapError, make_observable, make_plain, restore_attention, swap_attention
from tests.attention_modules.hosts.cases import HOSTS, built

SOME = ["mha", "timm-vit", "gpt2", "llama-grouped", "own"]


def reparametrized(model, gamma=None):
    for layer in attention_layers(model):
        for owner, tensor in projections(layer):
            sigma_reparametrize(owner, tensor, gamma)
    return model


def test_equals_the_equation_with_its_gradients():
    torch.manual_seed(0)
    weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    part = SigmaReparametrization(weight, gamma=1.5)
    upstream = torch.randn(6, 4, dtype=torch.float64)
    found = torch.autograd.grad(part(weight), (weight, part.gamma), upstream)
    gamma = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    expected = gamma / torch.linalg.matrix_norm(weight, 2) * weight
    torch.testing.assert_close(part(weight), expected)
    for one, other in zip(found, torch.autograd.grad(expected, (weight, gamma), upstream), strict=True):
        torch.testing.assert_close(one, other)


def test_the_power_iteration_finds_the_norm_of_another_weight():
    torch.manual_seed(0)
    part, other = SigmaReparametrization(torch.randn(6, 4)), torch.randn(6, 4)
    before = part(other).detach()
    assert torch.equal(part(other), before)  # reading is no step
    for _ in range(200):
        part.step(other)
    torch.testing.assert_close(part.sigma(other), torch.linalg.matrix_norm(other, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype):
    layer = nn.Linear(8, 8).to(dtype)
    sigma_reparametrize(layer, "weight")
    assert layer.weight.dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.parametrizations.weight[0].sigma(layer.parametrizations.weight.original).dtype == torch.float32
        assert layer(torch.randn(2, 8)).isfinite().all()


@pytest.mark.parametrize("host", SOME)
def test_starts_as_the_plain_layer_and_loads_both_layouts(host):
    case, plain = HOSTS[host], built(host)
    expected = case.run(plain, None)
    model = reparametrized(built(host, seed=1))
    model.load_state_dict(plain.state_dict())  # strictly
    torch.testing.assert_close(case.run(model, None), expected, atol=1e-5, rtol=1e-5)
    for _, _, part in reparametrizations(model):
        torch.nn.init.constant_(part.gamma, 0.7)
    trained = case.run(model, None)
    other = reparametrized(built(host, seed=2))
    other.load_state_dict(model.state_dict())
    assert torch.equal(case.run(other, None), trained)
    copied = copy.deepcopy(model)
    assert torch.equal(case.run(copied, None), trained)
    back = built(host, seed=3)
    back.load_state_dict(plain_state(model.state_dict()))
    torch.testing.assert_close(case.run(back, None), trained)
    remove_sigma_reparam(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(case.run(model, None), trained)


@pytest.mark.parametrize("host", SOME)
def test_hosts_read_the_weight_that_acts(host):
    model = reparametrized(built(host), gamma=2.0)
    layer = attention_layers(model)[0]
    rows, _ = layer.host.qk_rows(layer.module)
    whole = getattr(rows.owner, rows.tensor)
    torch.testing.assert_close(torch.linalg.matrix_norm(whole, 2), torch.tensor(2.0))
    w_q, w_k = layer.qk_weights()
    grads = torch.autograd.grad(frobenius_squared(w_q, w_k).sum(), layer.qk_parameters())
    assert len(grads) in (2, 4)
    assert all(grad.abs().sum() > 0 for grad in grads)


@pytest.mark.parametrize("order", ["swap first", "sigma first"])
@pytest.mark.parametrize("host", SOME)
def test_swaps_with_a_query_and_back(host, order):
    case, model = HOSTS[host], built(host)
    if order == "swap first":
        swap_attention(model, "softmax")
    reparametrized(model, gamma=0.9)
    keys = model.state_dict().keys()
    expected = case.run(model, None)
    if order == "sigma first":
        swap_attention(model, "softmax")
    torch.testing.assert_close(case.run(copy.deepcopy(model), None), expected)
    assert len(list(reparametrizations(model))) == sum("0.gamma" in key for key in keys)
    restore_attention(model)
    assert not any(layer.mechanism for layer in attention_layers(model)) or host == "own"
    torch.testing.assert_close(case.run(model, None), expected)
    remove_sigma_reparam(model)
    torch.testing.assert_close(case.run(model, None), expected)
    assert not any(map(parametrize.is_parametrized, model.modules()))


def test_observed_layers_become_plain_again_under_it():
    model = built("mha")
    make_observable(model, [""])
    reparametrized(model)
    make_plain(model, [""])
    assert attention_layers(model)[0].mechanism is None
    assert HOSTS["mha"].run(model, None).isfinite().all()


@pytest.mark.parametrize("host", ["mha", "timm-vit", "gpt2"])
def test_without_a_query(host):
    case, model = HOSTS[host], built(host)
    swap_attention(model, "symmetric")
    expected = case.run(model, None)
    reparametrized(model)
    torch.testing.assert_close(case.run(model, None), expected, atol=1e-5, rtol=1e-5)
    model.load_state_dict(built(host, seed=1).state_dict())  # of the plain model, with its query rows
    assert case.run(model, None).isfinite().all()
    with pytest.raises(AttentionSwapError, match=r"computed at each call .*remove_sigma_reparam"):
        restore_attention(model)
    remove_sigma_reparam(model)
    restore_attention(model)
    torch.testing.assert_close(case.run(model, None), case.run(built(host, seed=1), None), atol=1e-5, rtol=1e-5)
    with pytest.raises(AttentionSwapError, match=r"parametrized|list SwapAttention before SigmaReparam"):
        swap_attention(reparametrized(built(host)), "symmetric")


def test_a_frozen_weight_stays_frozen_and_a_zero_one_is_refused():
    layer = nn.Linear(4, 4).requires_grad_(False)
    sigma_reparametrize(layer, "weight")
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    with pytest.raises(ValueError, match="zero or not finite"):
        SigmaReparametrization(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="meta device"):
        SigmaReparametrization(torch.zeros(3, 3, device="meta"))
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match="quantized"):
        sigma_reparametrize(layer, "weight")


def test_every_linear_weight_once():
    model = nn.TransformerEncoderLayer(8, 2, 16)
    names = {id(module): name for name, module in model.named_modules()}
    found = sorted(f"{names[id(module)]}.{tensor}" for module, tensor in linear_weights(model))
    assert found == ["linear1.weight", "linear2.weight", "self_attn.in_proj_weight", "self_attn.out_proj.weight"]
    before = {name: part.detach().clone() for name, part in model.named_parameters()}
    for module, tensor in linear_weights(model):
        sigma_reparametrize(module, tensor)
    power_step(model)
    assert all(torch.equal(part, before[name]) for name, part in model.named_parameters() if name in before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cast", ["to", "before"])
def test_a_cast_leaves_sigma_in_single_precision(dtype, cast):
    torch.manual_seed(0)
    layer = nn.Linear(16, 16)
    if cast == "before":
        layer.to(dtype)
    sigma_reparametrize(layer, "weight", gamma=1.3)
    layer.to(dtype)
    part, original = layer.parametrizations.weight[0], layer.parametrizations.weight.original
    assert {part.u.dtype, part.v.dtype, part.gamma.dtype} == {torch.float32}
    assert layer.weight.dtype == original.dtype == layer.bias.dtype == dtype
    norms = []
    for _ in range(300):
        part.step(original)
        norms.append(torch.linalg.matrix_norm(layer.weight.float(), 2).item())
    assert norms[-1] == pytest.approx(1.3, rel=2e-3)  # not a multiple of what 8 bits can say
    expected = 1.3 / torch.linalg.matrix_norm(original.double(), 2) * original.double()
    assert torch.equal(layer.weight, expected.to(dtype))
    layer(torch.randn(2, 16, dtype=dtype)).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    assert state["parametrizations.weight.0.u"].dtype == torch.float32
    other = nn.Linear(16, 16).to(dtype)
    sigma_reparametrize(other, "weight")
    other.load_state_dict(state)
    assert torch.equal(other.weight, layer.weight)
    assert torch.equal(plain_state(state)["weight"], layer.weight)
    layer.double()
    assert {part.u.dtype, part.gamma.dtype, layer.weight.dtype} == {torch.float64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_weight_rests_and_one_that_changes_all_the_same_is_followed(dtype):
    torch.manual_seed(0)
    layer = nn.Linear(40, 30).to(dtype).requires_grad_(False)
    sigma_reparametrize(layer, "weight", gamma=1.3)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for _ in range(50):
        power_step(layer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    layer.parametrizations.weight.original.data = torch.randn(30, 40).to(dtype)  # as momentum encoders do
    for _ in range(500):
        power_step(layer)
    assert torch.linalg.matrix_norm(layer.weight.float(), 2).item() == pytest.approx(1.3, rel=1e-2)


def test_a_loss_of_several_batches_is_differentiated_after_their_steps():
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 3), torch.randn(2, 4)
    sigma_reparametrize(layer, "weight")
    with torch.no_grad():
        layer.parametrizations.weight.original.mul_(torch.tensor([[3.0], [1.0], [1.0]]))  # where a step moves u and v
    out = layer(x).square().sum()
    wanted = torch.autograd.grad(out, list(layer.parameters()), retain_graph=True)
    before = layer.weight.detach().clone()
    power_step(layer)
    assert not torch.equal(layer.weight, before)
    assert all(map(torch.equal, torch.autograd.grad(out, list(layer.parameters())), wanted))


def test_a_tiny_weight_of_half_precision_stays_finite():
    layer = nn.Linear(8, 8).half()
    with torch.no_grad():
        layer.weight.mul_(1e-6)
    sigma_reparametrize(layer, "weight", gamma=1.0)
    assert layer.weight.isfinite().all()


def test_parts_of_other_dtypes_are_taken():
    """As after a cast of one tensor by hand, or a checkpoint of another precision."""
    layer = nn.Linear(8, 8)
    sigma_reparametrize(layer, "weight")
    before, part = layer.weight.detach().clone(), layer.parametrizations.weight[0]
    part.u.data, part.gamma.data = part.u.bfloat16(), part.gamma.bfloat16()
    torch.testing.assert_close(layer.weight, before, atol=1e-2, rtol=1e-2)
    power_step(layer)
    layer.to("meta")
    assert part.u.is_meta


@pytest.mark.parametrize("dead", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["u", "v"])
def test_vectors_without_a_direction_are_made_anew(name, dead):
    trained, layer, plain = (nn.Linear(5, 4) for _ in range(3))
    sigma_reparametrize(trained, "weight", gamma=2.0)
    sigma_reparametrize(layer, "weight")
    state = trained.state_dict()
    state[f"parametrizations.weight.0.{name}"] = torch.full_like(state[f"parametrizations.weight.0.{name}"], dead)
    layer.load_state_dict(state)
    plain.load_state_dict(plain_state(state))
    for weight in (layer.weight, plain.weight):
        torch.testing.assert_close(weight, trained.weight)
    power_step(layer)
    assert layer.weight.isfinite().all()


@pytest.mark.parametrize(
    ("part", "text"), [("0.gamma", "γ is nan: load an earlier"), ("original", "zero or not finite")]
)
def test_what_cannot_be_made_anew_is_refused_by_name(part, text):
    model = nn.Sequential(nn.Linear(5, 4))
    sigma_reparametrize(model[0], "weight")
    state = copy.deepcopy(model.state_dict())
    state["0.parametrizations.weight.0.u"] *= 0
    state[f"0.parametrizations.weight.{part}"] *= float("nan")
    with pytest.raises(RuntimeError, match=rf"'0\.weight': .*{text}"):
        model.load_state_dict(state)
    with pytest.raises(ValueError, match=rf"0\.weight: .*{text}"):
        plain_state(state)
