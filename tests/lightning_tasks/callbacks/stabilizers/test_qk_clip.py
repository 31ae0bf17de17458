"""QKClip limits logits after each step, and nothing else."""

import lightning.pytorch as pl
import pytest
import torch
from torch.nn.functional import linear

from attention_modules.swap import swap_attention
from lightning_tasks.callbacks import QKClip
from lightning_tasks.callbacks.stabilizers import qk_clip
from tests.lightning_tasks.callbacks.modules import DIM, HEADS, TinyLM, TwoOptimizers, batches, fit, weights_of
from tests.lightning_tasks.callbacks.stabilizers.ranks import TAU


def attentions(module):
    return [layer.self_attn for layer in module.net["encoder"].layers]


class ClipsItself(TinyLM):
    """QK-clip of the weights and biases written into the module, for ``accumulate`` batches a step."""

    def __init__(self, tau, accumulate=1, alpha=0.5):
        super().__init__()
        self.tau, self.alpha, self.accumulate = tau, alpha, accumulate
        self.largest = torch.full((2, HEADS), -torch.inf)
        for index, layer in enumerate(attentions(self)):
            layer.register_forward_pre_hook(lambda layer, args, index=index: self.look(index, layer, args[0]))

    @torch.no_grad()
    def look(self, index, layer, x):
        q, k, _ = linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
        q, k = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k))
        logits = (q @ k.mT / (DIM // HEADS) ** 0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
        self.largest[index] = torch.maximum(self.largest[index], logits.amax((0, 2, 3)))

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if (batch_idx + 1) % self.accumulate and batch_idx != 4:
            return
        for layer, largest in zip(attentions(self), self.largest, strict=True):
            factor = (self.tau / largest).clamp(max=1.0).repeat_interleave(DIM // HEADS)
            for held in (layer.in_proj_weight, layer.in_proj_bias):
                column = factor.view(-1, *[1] * (held.ndim - 1))
                held[:DIM] *= column**self.alpha
                held[DIM : 2 * DIM] *= column ** (1 - self.alpha)
        self.largest.fill_(-torch.inf)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_equals_a_clip_written_into_the_module(accumulate):
    found, expected = TinyLM(), ClipsItself(TAU, accumulate, alpha=0.3)
    fit(found, [QKClip(TAU, alpha=0.3)], accumulate_grad_batches=accumulate, gradient_clip_val=0.5)
    fit(expected, accumulate_grad_batches=accumulate, gradient_clip_val=0.5)
    torch.testing.assert_close(weights_of(found), weights_of(expected), atol=1e-6, rtol=1e-5)
    plain = TinyLM()
    fit(plain, accumulate_grad_batches=accumulate, gradient_clip_val=0.5)
    assert (weights_of(found) - weights_of(plain)).abs().max() > 1e-3


@pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "looked at"])
def test_changes_no_bit_where_no_head_passes(bounded, monkeypatch):
    if not bounded:  # as on devices that must not be waited for
        monkeypatch.setattr(qk_clip, "logit_bound", lambda q, k, scale: torch.full(q.shape[:2], torch.inf))
    found, plain = TinyLM(), TinyLM()
    trainer = fit(found, [QKClip(tau=1e4)], max_epochs=2)
    fit(plain, max_epochs=2)
    assert torch.equal(weights_of(found), weights_of(plain))
    assert trainer.callback_metrics["qk_clip/clipped_heads"] == 0


def test_the_bound_changes_no_clip(monkeypatch):
    found, looked_at = TinyLM(), TinyLM()
    fit(found, [QKClip(TAU)])
    monkeypatch.setattr(qk_clip, "logit_bound", lambda q, k, scale: torch.full(q.shape[:2], torch.inf))
    fit(looked_at, [QKClip(TAU)])
    assert torch.equal(weights_of(found), weights_of(looked_at))


def test_every_n_steps_and_chosen_layers():
    found, plain = TinyLM(lr=0.0), TinyLM(lr=0.0)
    fit(found, [QKClip(TAU, every_n_steps=100, layers=[0])])
    once = weights_of(found)
    pairs = zip(attentions(found), attentions(plain), strict=True)
    assert [torch.equal(a.in_proj_weight, b.in_proj_weight) for a, b in pairs] == [False, True]
    found = TinyLM(lr=0.0)
    fit(found, [QKClip(TAU, layers=[0])], max_steps=1)
    assert torch.equal(weights_of(found), once)  # one look, at step 0


def test_a_mechanism_without_query_is_clipped_by_its_keys():
    module = TinyLM(lr=0.0)
    swap_attention(module, "symmetric")
    before = [layer.in_proj_weight.detach().clone() for layer in attentions(module)]
    trainer = fit(module, [QKClip(TAU, alpha=1.0)], max_steps=1)
    assert trainer.callback_metrics["qk_clip/clipped_heads"] == 2 * HEADS
    for layer, kept in zip(attentions(module), before, strict=True):
        ratio = (layer.in_proj_weight / kept)[:DIM].view(HEADS, -1)
        assert (ratio < 0.999).any(1).all()  # alpha = 1 would leave W_k as it is
        assert torch.equal(layer.in_proj_weight[DIM:], kept[DIM:])  # values


def test_a_swap_while_it_trains_is_followed():
    """The fused projection then has keys where its queries were."""

    class Swaps(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 1:
                swap_attention(pl_module, "symmetric")
                trainer.optimizers = [pl_module.configure_optimizers()]

    module = TinyLM(lr=0.0)
    values = [layer.in_proj_weight[2 * DIM :].detach().clone() for layer in attentions(module)]
    trainer = fit(module, [Swaps(), QKClip(TAU)], max_steps=2)
    assert trainer.callback_metrics["qk_clip/clipped_heads"] == 2 * HEADS
    for layer, kept in zip(attentions(module), values, strict=True):
        assert torch.equal(layer.in_proj_weight[DIM:], kept)


def test_with_manual_optimization():
    found, plain = TwoOptimizers(), TwoOptimizers()
    fit(found, [QKClip(TAU)])
    fit(plain)
    assert (weights_of(found) - weights_of(plain)).abs().max() > 1e-3


def test_a_resumed_run_is_the_same_run(tmp_path):
    straight, resumed = TinyLM(), TinyLM()
    fit(straight, [QKClip(TAU)], max_epochs=4)
    fit(TinyLM(), [QKClip(TAU)], max_epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=4, accelerator="cpu", logger=False, callbacks=[QKClip(TAU)], **quiet)
    trainer.fit(resumed, batches(), ckpt_path=tmp_path / "half.ckpt")
    assert torch.equal(weights_of(resumed), weights_of(straight))


def test_layers_that_cannot_be_clipped_are_refused_by_name():
    module = TinyLM()
    swap_attention(module, "qk_norm", layers=[1])
    with pytest.raises(ValueError, match=r"'net.encoder.layers.1.self_attn' \(the logits of QKNormAttention.*exclude="):
        fit(module, [QKClip()])
    fit(module, [QKClip(exclude=["*.1.*"])], max_steps=1)
    module = TinyLM()
    attentions(module)[0].in_proj_weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"layers.0.self_attn' \(its weights are frozen"):
        fit(module, [QKClip()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": 0}, "tau must be above 0, got 0"),
        ({"tau": -1.0}, "tau .* at least 0, got -1.0"),
        ({"alpha": 1.5}, "alpha .* at most 1, got 1.5"),
        ({"every_n_steps": 0}, "every_n_steps .* got 0"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        QKClip(**options)
