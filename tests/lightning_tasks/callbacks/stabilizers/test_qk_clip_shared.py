"""QKClip scales a weight that several layers, or queries and keys, share once, by the smallest factor of its users."""

import pytest
import torch
from torch.nn.functional import linear

from attention_modules.analysis import largest_logit
from lightning_tasks.callbacks import QKClip
from tests.lightning_tasks.callbacks.modules import DIM, HEADS, TinyLM, batches, fit
from tests.lightning_tasks.callbacks.stabilizers.test_qk_clip import attentions

TAU = 1.0


def largest_logits(module):
    """The largest causal logit of each head in the first batch, ``[layers, H]``."""
    seen = []

    def look(layer, args):
        q, k, _ = linear(args[0], layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
        q, k = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k))
        seen.append(largest_logit(q, k, is_causal=True).amax(0))

    hooks = [layer.register_forward_pre_hook(look) for layer in attentions(module)]
    with torch.no_grad():
        module(next(iter(batches()))[0])
    for hook in hooks:
        hook.remove()
    return torch.stack(seen)


def tied(**options):
    """Both layers have one fused projection, whose logits differ as their inputs do."""
    module = TinyLM(lr=0.0, **options)
    first, second = attentions(module)
    with torch.no_grad():
        first.in_proj_weight[: 2 * DIM] *= 2
    second.in_proj_weight, second.in_proj_bias = first.in_proj_weight, first.in_proj_bias
    return module


def wanted(largest):
    """γ of each head; logits may be negative."""
    return torch.where(largest > TAU, TAU / largest, 1.0)


@pytest.mark.parametrize("alpha", [0.5, 0.3])
def test_two_layers_take_the_smallest_factor_once(alpha):
    module = tied()
    before, weight = largest_logits(module), attentions(module)[0].in_proj_weight.detach().clone()
    factors = wanted(before)
    assert (factors[0] != factors[1]).all()
    assert (factors < 1).any()
    trainer = fit(module, [QKClip(TAU, alpha)], max_steps=1)
    by_feature = factors.amin(0).repeat_interleave(DIM // HEADS).unsqueeze(-1)
    expected = torch.cat([weight[:DIM] * by_feature**alpha, weight[DIM : 2 * DIM] * by_feature ** (1 - alpha)])
    torch.testing.assert_close(attentions(module)[1].in_proj_weight[: 2 * DIM], expected)
    assert torch.equal(attentions(module)[1].in_proj_weight[2 * DIM :], weight[2 * DIM :])
    assert attentions(module)[0].in_proj_weight is attentions(module)[1].in_proj_weight
    assert trainer.callback_metrics["qk_clip/clipped_heads"] == 2 * (factors.amin(0) < 1).sum()


def test_a_layer_that_stands_twice_in_a_model_is_clipped_once():
    module = TinyLM(lr=0.0)
    layers = module.net["encoder"].layers
    layers[1] = layers[0]
    with torch.no_grad():
        layers[0].self_attn.in_proj_weight[: 2 * DIM] *= 2
    before, weight = largest_logits(module), layers[0].self_attn.in_proj_weight.detach().clone()
    fit(module, [QKClip(TAU)], max_steps=1)
    factors = wanted(before.amax(0)).repeat_interleave(DIM // HEADS).unsqueeze(-1)
    torch.testing.assert_close(layers[0].self_attn.in_proj_weight[:DIM], weight[:DIM] * factors**0.5)


def test_a_weight_of_other_users_too_is_refused_by_name():
    module = tied()
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn' \(.*in_proj_weight.*layers\.1\.self_attn\.in_proj_"):
        fit(module, [QKClip(TAU, layers=[0])], max_steps=1)
    module = TinyLM()
    module.head = torch.nn.Module()
    module.head.register_parameter("again", attentions(module)[1].in_proj_weight)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn' .*head\.again"):
        fit(module, [QKClip(TAU)], max_steps=1)
    fit(module, [QKClip(TAU, exclude=["*.1.*"])], max_steps=1)
