"""σReparam of a Parameter that several weights share: one σ and one γ, or a refusal."""

import copy

import pytest
import torch
from torch import nn

from attention_modules.stabilizers.sigma import (
    linear_weights,
    plain_state,
    power_step,
    remove_sigma_reparam,
    reparametrizations,
    reparametrize_like,
    sigma_reparametrize,
    sigma_reparametrize_all,
)


def tied(seed=0):
    """Two layers of one weight, and one of its own."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    model[1].weight = model[0].weight
    return model


def trained(model, steps=20):
    """After some steps of gradient descent, far from the start."""
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(steps):
        power_step(model)
        optimizer.zero_grad()
        (model(inputs) - 1).square().mean().backward()
        optimizer.step()
    return inputs


def reparametrized(seed=0):
    model = tied(seed)
    sigma_reparametrize_all(model, linear_weights(model))
    return model


def test_one_sigma_and_one_gain():
    model = reparametrized()
    assert [name for name, _ in model.named_parameters() if "gamma" in name] == [
        "0.parametrizations.weight.0.gamma",
        "2.parametrizations.weight.0.gamma",
    ]
    trained(model)
    assert torch.equal(model[0].weight, model[1].weight)
    shared = model[0].parametrizations.weight
    alone = nn.Linear(4, 4)
    alone.weight = nn.Parameter(shared.original.detach().clone())
    sigma_reparametrize(alone, "weight")
    for name in ("u", "v"):
        getattr(alone.parametrizations.weight[0], name).copy_(getattr(shared[0], name))
    power_step(alone)
    power_step(model)  # one step, not one for each user
    assert torch.equal(shared[0].u, alone.parametrizations.weight[0].u)


@pytest.mark.parametrize("way", ["plain_state", "remove", "like", "copy"])
def test_every_way_out_keeps_the_function_and_the_tie(way):
    model = reparametrized()
    inputs = trained(model)
    expected = model(inputs)
    assert (model[0].weight - model[0].parametrizations.weight.original).abs().max() > 1e-2
    state = copy.deepcopy(model.state_dict())
    other = tied(1)
    if way == "plain_state":
        other.load_state_dict(plain_state(state))
    elif way == "like":
        reparametrize_like(other, state)
        other.load_state_dict(state)
        assert len({id(part) for _, _, part in reparametrizations(other)}) == 2
    else:
        other = copy.deepcopy(model)
        if way == "remove":
            remove_sigma_reparam(other)
    torch.testing.assert_close(other(inputs), expected)
    assert torch.equal(other[0].weight, other[1].weight)
    if way in ("plain_state", "remove"):
        assert other[0].weight is other[1].weight
        assert other.state_dict().keys() == tied().state_dict().keys()


def test_a_later_user_of_the_weight_joins():
    model = tied()
    sigma_reparametrize_all(model, [(model[0], "weight"), (model[1], "weight")])
    model.append(nn.Linear(4, 4))
    model[3].weight = model[0].parametrizations.weight.original
    sigma_reparametrize_all(model, [(model[3], "weight")])
    assert model[3].parametrizations.weight[0] is model[0].parametrizations.weight[0]


def test_both_names_of_one_module():
    layer = nn.MultiheadAttention(8, 2, kdim=8, vdim=4)
    layer.k_proj_weight = layer.q_proj_weight
    sigma_reparametrize_all(layer, linear_weights(layer))
    assert layer.parametrizations.q_proj_weight[0] is layer.parametrizations.k_proj_weight[0]
    x = torch.randn(3, 2, 8)
    assert layer(x, x, x[..., :4])[0].isfinite().all()


def test_a_weight_that_others_read_too_is_refused_by_name():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    with pytest.raises(ValueError, match=r"'head\.weight' is 'embed\.weight' too.* the same Parameter.*exclude"):
        sigma_reparametrize_all(model, linear_weights(model))
    assert [*model.state_dict()] == ["embed.weight", "head.weight"]  # unchanged


@pytest.mark.parametrize("layout", ["reparametrized", "plain", "another gain alone"])
def test_a_state_dict_of_two_weights_is_refused_by_their_names(layout):
    model, untied = reparametrized(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    if layout == "reparametrized":
        sigma_reparametrize_all(untied, linear_weights(untied))
    state = untied.state_dict()
    if layout == "another gain alone":
        state = copy.deepcopy(model.state_dict())
        state["1.parametrizations.weight.0.gamma"] = 2 * state["0.parametrizations.weight.0.gamma"]
    refused = r"'0\.weight' and '1\.weight' are one Parameter of the model.* does not tie"
    with pytest.raises(RuntimeError, match=refused):
        model.load_state_dict(state, strict=False)
    model.load_state_dict(reparametrized(1).state_dict())  # the next one is not blamed for the last
    model.load_state_dict(tied(2).state_dict())


def test_two_names_of_one_module_are_compared_too():
    layer, untied = (nn.MultiheadAttention(8, 2, kdim=8, vdim=4) for _ in range(2))
    layer.k_proj_weight = layer.q_proj_weight
    sigma_reparametrize_all(layer, linear_weights(layer))
    with pytest.raises(RuntimeError, match="'q_proj_weight' and 'k_proj_weight' are one Parameter"):
        layer.load_state_dict(untied.state_dict())
