"""A clip multiplies the logits of every host's layers by its factors, and touches nothing else."""

import pytest
import torch
from torch import nn

from attention_modules.hosts import attention_layers
from attention_modules.hosts.sdpa.declared import declare_host
from attention_modules.stabilizers.clip import (
    LogitScaler,
    clip_factors,
    clip_refusal,
    scale_logits,
    shared_elsewhere,
)
from attention_modules.stabilizers.followed import follows_scale
from attention_modules.swap import make_observable, swap_attention
from tests.attention_modules.hosts.cases import HEADS, HOSTS, built, hugging_face
from tests.attention_modules.hosts.timm.cases import LAYERS, layer as layer_of_timm

REFUSED = {"sdpa", "timm-attention-norm", "qwen3"}


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


@pytest.mark.parametrize("host", sorted(HOSTS.keys() - REFUSED))
def test_multiplies_the_logits(host):
    for mechanism in {"softmax", "symmetric"} - set(HOSTS[host].refuses):
        check_multiplied(host, mechanism)


def check_multiplied(host, mechanism):
    case = HOSTS[host]
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


@pytest.mark.parametrize("host", sorted(HOSTS.keys() - REFUSED))
def test_queries_and_keys_of_every_host_follow_their_weights(host):
    case, model = HOSTS[host], built(host)
    plain = [layer.name for layer in attention_layers(model) if layer.mechanism is None]
    if plain:
        make_observable(model, plain)
    layer, seen = attention_layers(model)[0], []

    def tried(_, args, kwargs):
        seen.extend(follows_scale(layer, args, kwargs, *how) for how in ((0.5,), (2.0**10, True)))

    kept = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    before, state = logits_of(layer, lambda: case.run(model, None)), torch.get_rng_state()
    hook = layer.module.register_forward_pre_hook(tried, with_kwargs=True)
    after = logits_of(layer, lambda: case.run(model, None))
    hook.remove()
    assert set(seen) == {True}
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, before, after))
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is kept[name][0]
        assert torch.equal(*kept[name])


@pytest.mark.parametrize("name", LAYERS)
def test_multiplies_the_logits_of_every_class_of_timm_or_says_why_not(name):
    for mechanism in {"softmax", "symmetric"} - set(LAYERS[name].refuses):
        check_multiplied_of_timm(name, mechanism)


def check_multiplied_of_timm(name, mechanism):
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


@pytest.mark.parametrize("host", sorted(REFUSED - {"sdpa"}))
def test_a_norm_of_queries_and_keys_is_a_reason(host):
    assert "q/k norm" in clip_refusal(attention_layers(built(host))[0])


@pytest.mark.parametrize("weights", [True, False])
def test_a_norm_without_weights_is_one_too_and_none_is_none(weights):
    """Of Llama 4, whose norm of queries and keys is a module without Parameters."""
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "intermediate_size_mlp": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 20}
    config = transformers.Llama4TextConfig(**sizes, num_local_experts=1, use_qk_norm=weights)
    (layer,) = attention_layers(transformers.Llama4TextModel(config))
    assert bool(weights) is ("q/k norm" in (clip_refusal(layer) or ""))


def test_a_norm_inside_a_low_rank_projection_is_no_norm_of_queries():
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    sizes |= {"qk_nope_head_dim": 8, "v_head_dim": 8, "num_hidden_layers": 1, "vocab_size": 20, "intermediate_size": 32}
    model = transformers.DeepseekV3Model(transformers.DeepseekV3Config(**sizes, first_k_dense_replace=1))
    assert (
        clip_refusal(attention_layers(model)[0]) == "its projections to queries and keys have no names that are known"
    )


def test_a_projection_of_an_own_class_is_a_reason():
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    layer = transformers.models.moshi.modeling_moshi.MoshiAttention(transformers.MoshiConfig(**sizes), 0)
    (found,) = attention_layers(nn.ModuleDict({"attn": layer}))
    assert "'q_proj' is a MoshiLinear" in clip_refusal(found)


def test_a_declared_layer_that_turns_queries_and_keys_is_clipped():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.c_attn(x).chunk(3, -1))
            angles = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
            turn = torch.polar(torch.ones_like(angles), angles)
            q, k = (
                torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (4, 2))) * turn).flatten(-2) for t in (q, k)
            )
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(out.transpose(1, 2).flatten(2))

    declare_host(Turned, qkv="c_attn", heads=2)
    (layer,) = attention_layers(nn.Sequential(Turned()))
    assert clip_refusal(layer) is None


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


def _bert(heads):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32, "num_attention_heads": heads}
    return hugging_face("BertModel", "BertConfig", vocab_size=50, **sizes)()


@pytest.mark.parametrize("alpha", [0.5, 0.2])
def test_queries_and_keys_of_one_weight_take_the_root_each(alpha):
    model = with_biases(built("bert"))
    (layer,) = attention_layers(model)
    make_observable(model, [layer.name])
    (layer,) = attention_layers(model)
    query, key = (rows.owner for rows in layer.host.qk_rows(layer.module))
    key.weight = query.weight  # and two biases
    before, values = logits_of(layer, lambda: HOSTS["bert"].run(model, None))
    factors = torch.tensor([0.3, 1.0, 0.8, 0.5])
    scale_logits(layer, factors, alpha)
    after, same_values = logits_of(layer, lambda: HOSTS["bert"].run(model, None))
    torch.testing.assert_close(after, before * factors.view(-1, 1, 1))
    assert torch.equal(same_values, values)


def test_a_key_that_is_the_query_of_the_next_layer_keeps_both_limits():
    """Each side takes the smallest factor that a user asks for, whole heads at a time."""
    model = with_biases(nn.ModuleList(_bert(heads) for heads in (4, 2)))
    first, second = attention_layers(model)
    second.host.qk_rows(second.module)[0].owner.weight = first.host.qk_rows(first.module)[1].owner.weight
    scaler = LogitScaler([first, second], alpha=0.5)
    before = [layer.host.qk_rows(layer.module)[0].owner.weight.detach().clone() for layer in (first, second)]
    taken = scaler.scale([torch.tensor([1.0, 0.25, 1.0, 1.0]), torch.tensor([1.0, 0.64])])
    shared = second.host.qk_rows(second.module)[0].owner.weight / before[1]
    # Heads 0 and 1 of the first layer are head 0 of the second, and 2 and 3 are its head 1.
    torch.testing.assert_close(shared[:, 0], torch.tensor([0.5, 0.5, 0.8, 0.8]).repeat_interleave(4))
    of_first = first.host.qk_rows(first.module)[0].owner.weight / before[0]
    torch.testing.assert_close(of_first[:, 0], torch.tensor([1.0, 0.5, 1.0, 1.0]).repeat_interleave(4))
    assert taken.tolist() == [True, True, True, True, True, True]


def test_no_host_holds_a_weight_of_its_queries_and_keys_twice(subtests):
    for host in sorted(HOSTS.keys() - REFUSED):
        with subtests.test(host=host):
            model = built(host)
            plain = [layer.name for layer in attention_layers(model) if layer.mechanism is None]
            for observed in (False, True):
                if observed and plain:
                    make_observable(model, plain)
                assert shared_elsewhere(model, attention_layers(model)) == {}
