"""The penalty of DAM's gates against the same penalty of the same draw, written into the loss."""

import pytest
import torch

from attention_modules import swap_attention
from lightning_tasks.callbacks import DAMPenalty, SwapAttention
from tests.lightning_tasks.callbacks.modules import TOKENS, TinyLM, fit, weights_of

WEIGHT = 0.01


def _layers(module):
    return [layer.self_attn for layer in module.net["encoder"].layers]


class WithGates(TinyLM):
    """Both layers have gates, the same at every call; ``drawn`` holds those of the forward passes since it was read."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            swap_attention(self, "dam", num_tokens=TOKENS + 2)
        self.drawn = []
        for layer in _layers(self):
            layer.mechanism.drawn.register_forward_hook(lambda _, args, gates: self.drawn.append(gates))

    def norm(self):
        """‖M‖₁ over layers and heads, from the masks themselves."""
        place = torch.arange(TOKENS + 2)
        drawn, self.drawn = self.drawn, []
        assert len(drawn) == len(_layers(self))
        return sum(gates[:, (place[:, None] - place).abs()].abs().sum() for gates in drawn)


class InLoss(WithGates):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + WEIGHT * self.norm()


@pytest.mark.parametrize(
    ("precision", "accumulate", "clip"), [("64-true", 3, None), ("64-true", 1, 0.5), ("bf16-mixed", 1, None)]
)
def test_equals_the_penalty_of_the_same_draw_in_the_loss(precision, accumulate, clip):
    options = {"precision": precision, "accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    trained = []
    for module, callbacks in ((WithGates(), [DAMPenalty(WEIGHT)]), (InLoss(), []), (WithGates(), [])):
        torch.manual_seed(1)
        fit(module, callbacks, **options)
        trained.append(weights_of(module))
    found, expected, plain = trained
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 if precision == "64-true" else 1e-4)
    assert (found - plain).abs().max() > 1e-3


def test_what_is_logged_and_closes_gates():
    module = WithGates()
    trainer = fit(module, [DAMPenalty(WEIGHT)], max_steps=1)
    torch.testing.assert_close(trainer.callback_metrics["dam_penalty/penalty"], WEIGHT * module.norm().detach())
    fit(module, [DAMPenalty(10.0)], max_steps=5)  # each gate that a draw opens is closed for good
    assert torch.stack([layer.mechanism.eval().gates() for layer in _layers(module)]).mean() < 0.2


def test_layers_without_gates():
    with pytest.raises(ValueError, match=r"DAMPenalty: none of the layers has the mechanism 'dam'.*SwapAttention"):
        fit(TinyLM(), [DAMPenalty()])
    one = [SwapAttention("dam", options={"num_tokens": TOKENS}, layers=[1]), DAMPenalty(layers=[0, 1])]
    assert "dam_penalty/penalty" in fit(TinyLM(), one, max_steps=1).callback_metrics
    frozen = WithGates()
    for layer in _layers(frozen):
        layer.mechanism.requires_grad_(False)
    with pytest.raises(ValueError, match=r"no gates of 'net\.encoder\.layers\.0\.self_attn' take a gradient"):
        fit(frozen, [DAMPenalty()])
