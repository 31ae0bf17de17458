"""Penalties enter Lightning's backward pass, once for each forward pass, and no other that a step takes."""

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.checkpoint import checkpoint

from lightning_tasks.callbacks import EntropyRegularizer, LocAteR, NonFiniteGuard
from tests.lightning_tasks.callbacks.modules import TinyLM, TwoOptimizers, fit
from tests.lightning_tasks.callbacks.stabilizers.probed import Probed, gradients
from tests.lightning_tasks.callbacks.stabilizers.test_map_penalties import KINDS, WEIGHT, InLoss, entropy


class GradientPenalty(Probed):
    """The squared gradient of the loss, by double backward, is part of the loss."""

    def step(self, x, loss_of):
        loss = loss_of(x)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()


class GradientsOfFunctions(Probed):
    """A gradient by ``torch.func``, of each sample by itself, beside the loss."""

    def step(self, x, loss_of):
        by_sample = torch.func.vmap(torch.func.grad(lambda x: self.net["encoder"](x.unsqueeze(0)).square().sum()))
        gradient = by_sample(x.detach()).detach()
        self.forget()
        return loss_of(x) + (x * gradient).sum()


class ForwardMode(Probed):
    """Directional derivatives in forward mode, one where queries and keys take no gradient and one where they do."""

    def step(self, x, loss_of):
        with forward_ad.dual_level():
            along = forward_ad.unpack_dual(loss_of(forward_ad.make_dual(x.detach(), torch.ones_like(x)))).tangent
        self.probe = torch.func.jvp(loss_of, (x.detach(),), (torch.ones_like(x),))[1].detach()
        assert torch.allclose(along, self.probe)
        self.forget()
        return loss_of(x + self.probe)


class FastGradientSign(Probed):
    """A backward pass of the user's own, which fills and clears ``.grad``."""

    def step(self, x, loss_of):
        leaf = x.detach().requires_grad_()
        loss_of(leaf).backward()
        self.zero_grad()
        self.forget()
        return loss_of(x + 0.1 * leaf.grad.sign())


class TwoForwards(Probed):
    def step(self, x, loss_of):
        return loss_of(x) + loss_of(x.flip(0)).square()


@pytest.mark.parametrize("step", [Probed, TwoForwards], ids=lambda step: step.__name__)
def test_penalties_of_several_calls_in_a_step_are_told_of(step):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(step(), [EntropyRegularizer(WEIGHT)], max_steps=2)
    found = [str(each.message) for each in caught if "was called 2 times in a step" in str(each.message)]
    assert len(found) == (step is TwoForwards)


class Evaluates(Probed):
    """A teacher's pass with gradients that never flow."""

    def step(self, x, loss_of):
        target = loss_of(x).detach()
        self.forget()
        return (loss_of(x + 0.1) - target).square()


class Manual(Probed):
    """Manual optimization, where the step says what it adds the penalty to."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        Probed.training_step(self, batch, batch_idx)
        optimizer.step()

    def penalized(self, loss):
        return self.added(loss) if isinstance(self, InLoss) else loss


class TwoBackwards(Manual):
    """Two losses of one forward pass."""

    def step(self, x, loss_of):
        loss = loss_of(x)
        self.manual_backward(self.penalized(loss), retain_graph=True)
        self.manual_backward(loss.square())


class Accumulates(Manual):
    """Half of a loss, as for accumulation by hand: each backward pass has the whole penalty."""

    def step(self, x, loss_of):
        self.manual_backward(self.penalized(loss_of(x) / 2))


class SecondOrder(Manual):
    """The gradient's own gradient, penalty included, is what trains."""

    def step(self, x, loss_of):
        self.manual_backward(self.penalized(loss_of(x)), create_graph=True)
        parameters = list(self.parameters())
        norm = sum(parameter.grad.square().sum() for parameter in parameters)
        for parameter, gradient in zip(parameters, torch.autograd.grad(norm, parameters), strict=True):
            parameter.grad = gradient


class LooksBefore(Probed):
    """A hook that takes a gradient of the loss just before the backward pass."""

    def step(self, x, loss_of):
        return loss_of(x)

    def on_before_backward(self, loss):
        torch.autograd.grad(loss, self.net["embed"].weight, retain_graph=True)


class BackwardTwice(LooksBefore):
    """A backward pass of the module's own, which counts every gradient twice."""

    def backward(self, loss):
        loss.backward(retain_graph=True)
        loss.backward()


class Checkpointed(Probed):
    def step(self, x, loss_of):
        def again(x):
            return checkpoint(loss_of, x, use_reentrant=False)

        (gradient,) = torch.autograd.grad(again(x), x)
        self.forget()
        return again(x + 0.1 * gradient.sign())


class PowerOfTwoScale(MixedPrecision):
    """A gradient scaler, whose scale is exact, in float64."""

    def forward_context(self):
        return nullcontext()


STEPS = [
    Probed,
    GradientPenalty,
    GradientsOfFunctions,
    ForwardMode,
    FastGradientSign,
    TwoForwards,
    Evaluates,
    TwoBackwards,
    Accumulates,
    SecondOrder,
    LooksBefore,
    BackwardTwice,
    Checkpointed,
]


def assert_equal(kind, step, **options):
    callback, in_loss = KINDS[kind]
    written = type("Written", (InLoss, step), {"penalty": staticmethod(in_loss.penalty)})
    if issubclass(step, Manual):
        written.training_step = step.training_step
    module = step()
    found = gradients(module, callback(), **options)
    expected = gradients(written(), **options)
    plain_module = step()
    plain = gradients(plain_module, **options)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-12, rtol=1e-10)
    assert max((found[name] - plain[name]).abs().max() for name in plain) > 1e-3
    if hasattr(module, "probe"):
        assert torch.equal(module.probe, plain_module.probe)


# Two kinds a step, in turn; a second derivative of naive diversification is NaN where a row is all below its limit.
TURNS = [(kind, step) for i, step in enumerate(STEPS) for kind in ([*KINDS] * 2)[i % 3 :][:2]]


@pytest.mark.parametrize(("kind", "step"), [turn for turn in TURNS if turn != ("diversification", SecondOrder)])
def test_equals_the_loss_form(kind, step):
    assert_equal(kind, step)


@pytest.mark.parametrize("step", [Probed, GradientPenalty, TwoForwards], ids=lambda step: step.__name__)
def test_with_accumulation_and_a_gradient_scaler(step):
    assert_equal("entropy", step, accumulate_grad_batches=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert_equal("entropy", step, plugins=[PowerOfTwoScale("16-mixed", "cpu", scaler)])


def test_logs_what_entered():
    """The first forward pass of the step does not."""
    probed = fit(Probed(), [entropy()], max_steps=1).callback_metrics["entropy_regularizer/penalty"]

    class Sees(InLoss, Probed):
        penalty = staticmethod(KINDS["entropy"][1].penalty)

        def added(self, loss):
            self.value = WEIGHT * sum(self.penalty(*seen) for seen in self.seen).detach()
            return super().added(loss)

    module = Sees()
    fit(module, max_steps=1)
    torch.testing.assert_close(probed, module.value)


def test_a_backward_pass_around_lightning_is_warned_of():
    class Raw(TwoOptimizers):
        def manual_backward(self, loss, *args, **kwargs):
            loss.backward()

    with pytest.warns(UserWarning, match=r"EntropyRegularizer.*manual_backward"):
        fit(Raw(), [entropy()], max_steps=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*manual_backward")
        fit(TwoOptimizers(), [entropy()], max_steps=1)
        fit(TinyLM(), [entropy()], max_steps=1)


def test_layers_that_no_optimizer_holds_are_warned_of():
    class Head(TinyLM):
        def configure_optimizers(self):
            return torch.optim.SGD(self.net["embed"].parameters(), lr=0.1)

    with pytest.warns(UserWarning, match=r"no optimizer holds a weight of .*layers\.0\.self_attn.*exclude="):
        fit(Head(), [entropy()], max_steps=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no optimizer holds")
        fit(TinyLM(), [entropy()], max_steps=1)


def test_a_layer_that_another_optimizer_trains_is_no_error():
    """The first layer takes no gradient in the turn of the second, which comes first."""

    class Alternates(TwoOptimizers):
        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            for optimizer in (second, first):
                self.toggle_optimizer(optimizer)
                self.net["embed"].weight.requires_grad_(False)
                optimizer.zero_grad()
                self.manual_backward(TinyLM.training_step(self, batch, batch_idx))
                optimizer.step()
                self.untoggle_optimizer(optimizer)

    with pytest.warns(UserWarning, match=r"layers\.0\.self_attn' take a gradient.*exclude="):
        trainer = fit(Alternates(), [entropy()], max_steps=2)
    assert trainer.callback_metrics["entropy_regularizer/penalty"] > 0


class Searches(TinyLM):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), line_search_fn="strong_wolfe")


@pytest.mark.parametrize("callback", [EntropyRegularizer(0.1), LocAteR(0.1), NonFiniteGuard("skip")])
def test_optimizers_that_compare_losses_or_move_before_them_are_refused(callback):
    with pytest.raises(ValueError, match=r"LBFGS with line_search_fn='strong_wolfe'|cannot skip a step of LBFGS"):
        fit(Searches(), [callback])
