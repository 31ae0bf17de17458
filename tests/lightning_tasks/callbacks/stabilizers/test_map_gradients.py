"""What penalties of maps add to each Parameter, by finite differences of the penalty."""

import pytest
import torch

import attnswap
from attention_modules.stabilizers.entropy import row_entropy
from attention_modules.stabilizers.naive import naive_row_entropy
from lightning_tasks.callbacks import AttentionDiversification, AttentionMonitor, EntropyRegularizer

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")


def gpt2():
    config = transformers.GPT2Config(
        n_embd=16, n_head=2, n_layer=2, vocab_size=20, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(
        config
    ), lambda model: model(torch.arange(18).view(2, 9), use_cache=False).logits


def vit(name="vit_tiny_patch16_224"):
    model = timm.create_model(name, img_size=24, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=3)
    image = torch.randn(2, 3, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return model, lambda model: model(image)


def beit():
    return vit("beit_base_patch16_224")


CASES = {  # the model, the mechanism, and a Parameter that the map depends on by a way of its own
    "gates of kept tokens": (gpt2, "forgetting", "transformer.h.1.attn.mechanism.gate.bias"),
    "values in queries": (vit, "rpc", "blocks.1.attn.qkv.weight"),
    "a learned bias on the logits": (beit, "sink", "blocks.1.attn.relative_position_bias_table"),
    "the same, of a plain layer": (beit, None, "blocks.0.attn.relative_position_bias_table"),
}
PENALTIES = {
    "entropy": lambda weight: EntropyRegularizer(weight, target=0.5, max_rows=None),
    "diversification": lambda weight: AttentionDiversification(weight, threshold=0.1),
}


def step(penalty, model, call):
    """The penalty in double precision, without the weight, and the gradients."""
    seen, of_layer, optimizer = [], penalty._penalty, torch.optim.SGD(model.parameters(), lr=0.0)
    penalty._penalty = lambda *given: seen.append(value := of_layer(*given)) or value
    optimizer.zero_grad()
    with attnswap.watch(model, log=dict, callbacks=[penalty], optimizer=optimizer):
        call(model).square().mean().backward()
        optimizer.step()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return sum(map(float, seen)), gradients


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("case", CASES)
def test_a_penalty_adds_its_gradient_to_all_that_the_map_is_made_of(case, name):
    build, mechanism, parameter = CASES[case]
    torch.manual_seed(0)
    model, call = build()
    model.double().train()
    if mechanism:
        attnswap.swap_attention(model, mechanism)
    torch.manual_seed(2)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.1 * torch.randn_like(each))
    weight = dict(model.named_parameters())[parameter]
    added = step(PENALTIES[name](1.0), model, call)[1][parameter].clone()
    added -= step(PENALTIES[name](0.0), model, call)[1][parameter]
    direction = torch.randn_like(weight)
    if mechanism == "rpc":
        direction[:-16] = 0  # of values alone
    at, before = [], weight.detach().clone()
    for side in (1e-4, -1e-4):
        weight.data = before + side * direction
        at.append(step(PENALTIES[name](1.0), model, call)[0])
    expected = (at[0] - at[1]) / 2e-4
    assert abs(expected) > 1e-6
    assert (added * direction).sum().item() == pytest.approx(expected, rel=1e-3)


def test_a_bias_that_is_zero_now_takes_the_gradient():
    q, k = torch.randn(2, 1, 2, 80, 8, dtype=torch.float64)
    gradients = []
    for entropy in (row_entropy, naive_row_entropy):
        bias = torch.zeros(1, 2, 80, 80, dtype=torch.float64, requires_grad=True)
        gradients += torch.autograd.grad(entropy(q, k, attn_mask=bias).square().sum(), bias)
    torch.testing.assert_close(*gradients)


def test_a_penalty_leaves_what_a_monitor_behind_it_sees_of_learned_sinks():
    """Their keys have no value, which the host notes at the tensor of values."""
    config = transformers.GptOssConfig(
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=2,
        intermediate_size=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        vocab_size=20,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model, found = transformers.GptOssForCausalLM(config).train(), []
    for first in ([], [EntropyRegularizer(0.0, target=0.5)], [AttentionDiversification(0.0)]):
        rows, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.0)
        callbacks = [*first, AttentionMonitor(1)]
        log = lambda values, step, rows=rows: rows.append(values)  # noqa: E731
        with attnswap.watch(model, log=log, callbacks=callbacks, optimizer=optimizer):
            model(torch.arange(3, 19).view(2, 8), use_cache=False).logits.square().mean().backward()
            optimizer.step()
        found.append({name: value for name, value in rows[0].items() if name.startswith("attention/")})
    assert found[0] == found[1] == found[2]
