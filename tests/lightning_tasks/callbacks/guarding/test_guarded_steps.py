"""What NonFiniteGuard does around the steps of optimizers: of any kind, signature and number in a batch."""

import math
import threading
from contextlib import suppress

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_tasks.callbacks import NonFiniteGuard, QKWeightDecay
from tests.lightning_tasks.callbacks.guarding.test_non_finite_guard import Poisoned, stopped
from tests.lightning_tasks.callbacks.modules import (
    TinyLM,
    TwoOptimizers,
    batches,
    fit,
    weights_of,
)


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("action", ["stop", "skip"])
def test_steps_of_optimizers_that_lightning_does_not_wrap_are_judged(action, closure):
    class Raw(TwoOptimizers):
        at = 2

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers(use_pl_optimizer=False):
                optimizer.zero_grad()

                def backward():
                    loss = TinyLM.training_step(self, batch, batch_idx)
                    self.manual_backward(loss * (math.nan if batch_idx == self.at else 1.0))

                optimizer.step(backward if closure else backward())

    if action == "stop":
        assert stopped(Raw()).startswith("step 2 (epoch 0, batch 2): the loss is nan")
        return
    module, never_saw, guard = Raw(), Raw(), NonFiniteGuard("skip")
    never_saw.at = None
    with pytest.warns(UserWarning, match="skipped step 2"):
        fit(module, [guard], loader=batches(4))
    fit(never_saw, loader=DataLoader([each for at, each in enumerate(batches(4)) if at != 2], batch_size=None))
    assert guard.skipped == 2
    assert torch.equal(weights_of(module), weights_of(never_saw))


@pytest.mark.parametrize("optimizer", ["AdamW", "Lamb", "Adan"])  # the last two count their steps in their groups
@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_run_that_skips_a_step_is_one_without_its_batch(optimizer, step):
    class Tensors(Poisoned):
        def configure_optimizers(self):
            made, flat = super().configure_optimizers(), torch.zeros(4)
            self.held = {
                "views": [flat[:2], flat[2:]],
                "flat": flat,
                "rate": torch.tensor(0.5),
                "lock": threading.Lock(),
            }
            made.param_groups[0].update(self.held)
            return made

    skips, never_saw = Tensors(at=(step,), optimizer=optimizer), Poisoned(at=(), optimizer=optimizer)
    with pytest.warns(UserWarning, match=f"skipped step {step} .*the loss is nan"):
        run = fit(skips, [NonFiniteGuard("skip")])
    fit(never_saw, loader=DataLoader([batch for at, batch in enumerate(batches()) if at != step], batch_size=None))
    assert torch.equal(weights_of(skips), weights_of(never_saw))
    (group,) = run.optimizers[0].param_groups
    assert all(group[name] is value for name, value in skips.held.items())
    assert not run.optimizers[0]._optimizer_step_post_hooks


@pytest.mark.parametrize("place", ["module", "clipping", "callback", "hook"])
def test_a_rate_that_is_set_right_before_a_skipped_step_stays(place):
    def halve(optimizer, *_):
        optimizer.param_groups[0]["lr"] /= 2

    class Halves(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            if place == "callback":
                halve(optimizer)

        def on_train_start(self, trainer, module):
            if place == "hook":
                trainer.optimizers[0].register_step_post_hook(halve)

    module = Poisoned(optimizer="SGD")
    if place == "module":
        module.on_before_optimizer_step = halve
    if place == "clipping":
        module.configure_gradient_clipping = lambda optimizer, **_: halve(optimizer)
    first = module.configure_optimizers().param_groups[0]["lr"]
    with pytest.warns(UserWarning, match="skipped step 2"):
        run = fit(module, [NonFiniteGuard("skip"), Halves()])
    (optimizer,) = run.optimizers
    assert optimizer.param_groups[0]["lr"] == first / 2**run.global_step
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_rate_that_good_steps_of_the_same_batch_set_stays(wrapped):
    class Thrice(Poisoned):
        def __init__(self):
            super().__init__(at=(), optimizer="SGD")
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers(use_pl_optimizer=wrapped)
            for turn in range(3):
                optimizer.zero_grad()
                loss = super().training_step(batch, batch_idx)
                self.manual_backward(loss * math.nan if (batch_idx, turn) == (1, 0) else loss)
                optimizer.step()
                optimizer.param_groups[0]["lr"] *= 0.5

    module = Thrice()
    first = module.configure_optimizers().param_groups[0]["lr"]
    with pytest.warns(UserWarning, match="skipped step"):
        run = fit(module, [NonFiniteGuard("skip")], loader=batches(3))
    assert run.optimizers[0].param_groups[0]["lr"] == first / 2**9


class KeywordOnly(torch.optim.SGD):
    def step(self, *, closure=None):
        return super().step(closure)


class SecondPlace(torch.optim.SGD):
    def step(self, scale=None, closure=None):
        assert scale is None
        return super().step(closure)


@pytest.mark.parametrize("kind", [KeywordOnly, SecondPlace])
def test_steps_of_any_signature_are_called_as_before(kind):
    class Own(Poisoned):
        def configure_optimizers(self):
            return kind(self.parameters(), 0.1)

    watched, alone = Own(at=()), Own(at=())
    fit(watched, [NonFiniteGuard("skip"), QKWeightDecay(0.0)])
    fit(alone)
    assert torch.equal(weights_of(watched), weights_of(alone))


@pytest.mark.parametrize("given", [{"closure": print}, torch.ones(())])
def test_a_step_that_takes_no_closure_takes_what_it_is_given(given):
    class Takes(torch.optim.SGD):
        def step(self, options=None):
            assert options is given
            return super().step()

    class ByHand(TwoOptimizers):
        def configure_optimizers(self):
            return Takes(self.parameters(), 0.1)

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers(use_pl_optimizer=False)
            self.manual_backward(TinyLM.training_step(self, batch, batch_idx))
            optimizer.step(given)

    fit(ByHand(), [NonFiniteGuard("skip"), QKWeightDecay(0.1)])


def test_a_step_that_gives_its_closure_a_word_and_one_that_is_tried_again():
    class Fails(torch.optim.SGD):
        calls = 0

        def step(self, closure):
            closure(backward=True)
            self.calls += 1
            if self.calls == 1:
                raise MemoryError
            super().step()

    class ByHand(TwoOptimizers):
        def configure_optimizers(self):
            return Fails(self.parameters(), 0.1)

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers(use_pl_optimizer=False)
            for turn in range(4):

                def closure(backward, bad=batch_idx == 0 and turn == 2):
                    optimizer.zero_grad()
                    loss = TinyLM.training_step(self, batch, batch_idx)
                    self.manual_backward(loss * math.nan if bad else loss)

                with suppress(MemoryError):
                    optimizer.step(closure)

    module, guard = ByHand(), NonFiniteGuard("skip", max_consecutive_skips=1)
    with pytest.warns(UserWarning, match="skipped step 0"):
        fit(module, [guard], loader=batches(2))
    assert guard.skipped == 1
    assert weights_of(module).isfinite().all()
