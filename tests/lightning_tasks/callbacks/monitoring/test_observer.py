"""Monitors leave the model and the process as they found them: plain layers, no hooks, compiled code."""

import copy
import io
import pickle
import signal
import warnings

import pytest
import torch
import torch._dynamo
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from attention_modules import SoftmaxAttention, swap_attention
from attention_modules.mechanism import AttentionMechanism
from lightning_tasks.callbacks import (
    AttentionMapLogger,
    AttentionMonitor,
    Callback,
    EntropyRegularizer,
    LipschitzMonitor,
    LogitMonitor,
    PursuitMonitor,
    QKClip,
    SwapAttention,
)
from lightning_tasks.callbacks.monitoring import observer
from tests.lightning_tasks.callbacks.modules import BuildsInConfigureModel, TinyLM, batches, fit, weights_of
from tests.rows import each_row


def attentions(module):
    return [part for part in module.modules() if isinstance(part, nn.MultiheadAttention)]


def assert_plain(module):
    assert [type(part) for part in attentions(module)] == [nn.MultiheadAttention] * 2
    assert not any(isinstance(part, AttentionMechanism) for part in module.modules())
    assert not any(part._forward_pre_hooks for part in module.modules())
    assert "configure_model" not in vars(module)
    x = torch.randn(1, 3, 8)
    assert attentions(module)[0](x, x, x)[1].shape == (1, 3, 3)
    assert b"attention_modules" not in pickle.dumps(module.net)


def watchers():
    return [AttentionMonitor(every_n_steps=1, stages=["train", "validation", "test"]), AttentionMapLogger()]


class Notes(Callback):
    """What the attention is at the start of each stage and batch, with the exception that it is to raise."""

    def __init__(self, raises=None):
        self.raises, self.seen = raises, set()

    def _note(self, trainer, pl_module, *rest):
        self.seen |= {
            (trainer.state.fn.value, type(getattr(part, "mechanism", None))) for part in attentions(pl_module)
        }

    on_train_start = on_validation_start = on_test_start = on_predict_start = _note

    def on_train_batch_end(self, trainer, *rest):
        if self.raises is not None:
            raise self.raises


@pytest.mark.parametrize("kind", [TinyLM, BuildsInConfigureModel])
def test_plain_layers_are_plain_again_after_every_stage(kind):
    module, notes = kind(), Notes()
    trainer = fit(module, [*watchers(), notes], batches(2), batches(1))
    assert_plain(module)
    for stage in ("validate", "test"):
        getattr(trainer, stage)(module, batches(1), verbose=False)
        assert_plain(module)
    fit(module, [*watchers(), notes], batches(2), batches(1))
    assert_plain(module)
    assert notes.seen == {(stage, SoftmaxAttention) for stage in ("fit", "validate", "test")}


def test_nothing_is_put_in_where_nothing_is_observed():
    module, notes = TinyLM(), Notes()
    module.predict_step = lambda batch, batch_idx: module(batch[0])
    trainer = fit(module, [AttentionMonitor(stages=["validation"]), AttentionMapLogger(), notes], batches(1))
    notes.seen.clear()
    trainer.test(module, batches(1), verbose=False)
    trainer.predict(module, batches(1))
    assert notes.seen == {("test", type(None)), ("predict", type(None))}


@each_row("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_plain_layers_are_plain_again_after_an_error(error):
    module = TinyLM()
    with pytest.raises((RuntimeError, SystemExit)):
        fit(module, [*watchers(), Notes(error)], batches(2), batches(1))
    assert_plain(module)
    trainer = fit(module, watchers(), batches(1), batches(1))
    assert_plain(module)
    assert "val/attention/entropy/mean" in trainer.callback_metrics


@pytest.fixture
def _signals():
    """A trainer whose callbacks fail so leaves its handlers in place, which other tests would meet."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals")
def test_an_error_before_the_last_one_was_told_is_made_good_by_the_next_trainer():
    """Lightning tells callbacks of an error one by one, and no more of them once one fails itself."""

    class Fails(Callback):
        def on_exception(self, *args):
            raise ValueError("in on_exception")

    module = TinyLM()
    with pytest.raises(ValueError, match="in on_exception"):
        fit(module, [Fails(), AttentionMonitor(every_n_steps=1), Notes(RuntimeError("broken"))])
    assert len([part for part in module.modules() if isinstance(part, SoftmaxAttention)]) == 2
    fit(module, watchers(), batches(1), batches(1))
    assert_plain(module)


class TearsDown(Callback):
    """Notes whether the layers are plain when it is its turn."""

    def teardown(self, trainer, pl_module, stage):
        self.plain = not any(isinstance(part, AttentionMechanism) for part in pl_module.modules())


def test_the_last_of_two_monitors_takes_softmax_out():
    first, last = TearsDown(), TearsDown()
    monitors = watchers()
    fit(TinyLM(), [monitors[0], first, monitors[1], last])
    assert (first.plain, last.plain) == (False, True)


class Holds(Callback):
    """Tells a callback that the trainer does not know of everything, or of the first batch alone."""

    def __init__(self, held, first_batch=False):
        self.held, self.first_batch = held, first_batch

    def __getattribute__(self, name):
        held = name.startswith("on_train_batch") or name.startswith("on_validation") or name in ("setup", "teardown")
        return getattr(self.held, name) if held else super().__getattribute__(name)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if self.first_batch:
            self.held.teardown(trainer, pl_module, "fit")


def test_a_monitor_that_another_callback_holds_keeps_its_softmax():
    """Others, held or not, leave before it; the trainer's list has none of those that are held."""
    held, last, module = AttentionMonitor(every_n_steps=1, stages=["validation"]), TearsDown(), TinyLM()
    callbacks = [Holds(held), Holds(AttentionMapLogger(), first_batch=True), last]
    trainer = fit(module, callbacks, batches(2), batches(1))
    assert "val/attention/entropy/mean" in trainer.callback_metrics
    assert last.plain
    assert_plain(module)


class Inner(Callback):
    """Validates the network with another trainer and monitor, within a fit."""

    def on_train_epoch_end(self, trainer, pl_module):
        other = TinyLM()
        other.net = pl_module.net
        fit(other, [AttentionMonitor(every_n_steps=1)], batches(1), batches(1), max_steps=0)
        pl_module.net.train()


def test_a_trainer_within_a_trainer_leaves_its_softmax():
    module = TinyLM()
    trainer = fit(module, [Inner(), AttentionMonitor(every_n_steps=1)], batches(2), max_epochs=2)
    assert "attention/entropy/mean" in trainer.callback_metrics
    assert_plain(module)


def test_calls_within_a_transform_are_passed_by():
    class PerSample(TinyLM):
        def training_step(self, batch, batch_idx):
            weights = {name: weight.detach() for name, weight in self.named_parameters()}

            def loss(tokens):
                return torch.func.functional_call(self, weights, (tokens[None],)).square().mean()

            self.losses = torch.func.vmap(loss, randomness="different")(batch[0])
            return super().training_step(batch, batch_idx)

    kept = []
    for callbacks in ([], [AttentionMonitor(every_n_steps=1)]):
        module = PerSample()
        fit(module, callbacks, batches(2))
        kept.append(module.losses)
    torch.testing.assert_close(*kept)


@pytest.mark.parametrize(
    "callback",
    [
        lambda: AttentionMonitor(every_n_steps=1, stages=["train"]),
        lambda: LogitMonitor(every_n_steps=1),
        lambda: QKClip(tau=0.5),
        lambda: EntropyRegularizer(0.5, target=0.3),
    ],
)
def test_a_copy_that_is_made_in_a_batch_is_not_watched(callback):
    """Nor does watching keep a step from copying and saving the module."""

    class Student(TinyLM):
        teacher = None

        def __init__(self, lazily):
            super().__init__()
            self.lazily, self.rows = lazily, []

        def copied(self):
            teacher = copy.deepcopy(self).requires_grad_(False)
            for part in attentions(teacher):
                part.in_proj_weight.mul_(4)
            self.__dict__["teacher"] = teacher

        def on_fit_start(self):
            if not self.lazily:
                self.copied()

        def training_step(self, batch, batch_idx):
            if self.teacher is None:
                self.copied()
                torch.save(self.net, io.BytesIO())
            return super().training_step(batch, batch_idx) + 0 * self.teacher(batch[0]).sum()

        def on_train_batch_end(self, *_):
            self.rows.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    found = []
    for lazily in (False, True):
        module = Student(lazily)
        fit(module, [callback()], batches(3))
        found.append((module.rows, weights_of(module).tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("mechanism", ["softmax", "rpc"])
@pytest.mark.parametrize("before", [True, False])
def test_what_was_swapped_stays_swapped(mechanism, before):
    """By hand or by the callback, which may be listed after the monitors and then replaces what they put in."""
    module = TinyLM()
    if before:
        swap_attention(module, mechanism, layers=[1])
        fit(module, watchers(), batches(1), batches(1))
    else:
        fit(module, [*watchers(), SwapAttention(mechanism, layers=[1])], batches(1), batches(1))
    kinds = [type(getattr(part, "mechanism", None)).__name__ for part in attentions(module)]
    assert kinds == ["NoneType", {"softmax": "SoftmaxAttention", "rpc": "RPCAttention"}[mechanism]]


def test_a_checkpoint_of_an_observed_run_loads_into_the_plain_model(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="observed")
    fit(TinyLM(), [*watchers(), saver], batches(2), batches(1), enable_checkpointing=True)
    state = torch.load(tmp_path / "observed.ckpt", weights_only=True)["state_dict"]
    plain = TinyLM()
    assert list(state) == list(plain.state_dict())
    plain.load_state_dict(state)


class Compiled(TinyLM):
    """Compiles its network in ``setup``, and counts the calls that ran compiled."""

    def __init__(self, in_place=False):
        super().__init__()
        self.in_place, self.runs = in_place, 0

    def setup(self, stage):
        if self.in_place:
            self.net["encoder"].compile(backend=self._backend)
        elif not hasattr(self.net["encoder"], "_orig_mod"):
            self.net["encoder"] = torch.compile(self.net["encoder"], backend=self._backend)

    def _backend(self, graph, inputs):
        def run(*args):
            self.runs += 1
            return graph(*args)

        return run


class Runs(Callback):
    """How many compiled calls each training step made."""

    def __init__(self):
        self.steps = []

    def on_train_batch_start(self, trainer, pl_module, *rest):
        self._before = pl_module.runs

    def on_train_batch_end(self, trainer, pl_module, *rest):
        self.steps.append(pl_module.runs > self._before)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_monitor_says_once_where_compiled_code_draws_otherwise(rate, monkeypatch):
    monkeypatch.setattr(observer, "draws_otherwise", lambda: True)
    module = TinyLM()
    module.net["dropout"] = torch.nn.Dropout(rate)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, [AttentionMonitor(every_n_steps=1)])
    found = [str(each.message) for each in caught if "draws other random numbers" in str(each.message)]
    assert len(found) == bool(rate)


@pytest.mark.parametrize("in_place", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_models_are_observed_and_run_compiled_between_firings(in_place):
    """Observers of several layers at a time, which open and close in the order of the callbacks."""
    torch._dynamo.reset()
    module, runs = Compiled(in_place), Runs()
    monitors = [AttentionMonitor(every_n_steps=3), LipschitzMonitor(max_iter=2), AttentionMapLogger(), PursuitMonitor()]
    swap_attention(module, "rpc", iterations=1, layers=[1])
    trainer = fit(module, [*monitors, runs], batches(8), batches(2), max_epochs=2, val_check_interval=4)
    assert "val/pursuit/sparsity/layer_01/pass_1" in trainer.callback_metrics
    assert runs.steps == [step % 3 != 0 for step in range(16)]
    assert torch._dynamo.eval_frame._stance.stance == "default"
    with pytest.raises(RuntimeError, match="broken"):
        fit(module, [*monitors, Notes(RuntimeError("broken"))], batches(2), batches(1))
    assert torch._dynamo.eval_frame._stance.stance == "default"
    before = module.runs
    module(next(iter(batches()))[0])
    assert module.runs > before
