"""In a bare loop and in transformers' Trainer, callbacks see and do what they do in Lightning's, bit by bit."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import attnswap
from attention_modules import swap_attention
from lightning_tasks.callbacks import (
    AttentionDiversification,
    AttentionMonitor,
    DAMPenalty,
    EntropyRegularizer,
    LocAteR,
    LogitMonitor,
    QKClip,
    SigmaReparam,
    SpectrumMonitor,
)
from tests.lightning_tasks.callbacks.modules import TOKENS, TinyLM, batches, fit, weights_of

CALLBACKS = {
    "AttentionMonitor": lambda: [AttentionMonitor(every_n_steps=2, stages=["train"])],
    "LogitMonitor": lambda: [LogitMonitor(every_n_steps=1, heads=True)],
    "SpectrumMonitor": lambda: [SpectrumMonitor(every_n_steps=3)],
    "LocAteR": lambda: [LocAteR(0.1, gamma=0.1)],
    "QKClip": lambda: [QKClip(tau=0.5)],
    "AttentionDiversification": lambda: [AttentionDiversification(0.5)],
    "EntropyRegularizer": lambda: [EntropyRegularizer(0.5, target=0.3)],
    "all": lambda: [AttentionMonitor(every_n_steps=1, stages=["train"]), LocAteR(0.1), QKClip(tau=0.5)],
}


@pytest.fixture(autouse=True)
def _files_of_lightning_s_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Kept(DummyLogger):
    """What Lightning logs, by step."""

    def __init__(self):
        super().__init__()
        self.rows = {}

    def log_metrics(self, metrics, step):
        values = {name: value for name, value in metrics.items() if name != "epoch"}
        if values:
            self.rows.setdefault(step, {}).update(values)


def swapped(module, mechanism):
    """With a mechanism by name, or by name and number of tokens; or plain."""
    if isinstance(mechanism, tuple):
        swap_attention(module, mechanism[0], num_tokens=mechanism[1])
    elif mechanism:
        swap_attention(module, mechanism)


def in_lightning(callbacks, mechanism, accumulate=1):
    module, kept = TinyLM(), Kept()
    swapped(module, mechanism)
    fit(module, callbacks, logger=kept, log_every_n_steps=1, accumulate_grad_batches=accumulate, max_epochs=2)
    return kept.rows, weights_of(module)


def in_a_loop(callbacks, mechanism, accumulate=1, further=lambda module: None):
    module, rows = TinyLM(), {}
    swapped(module, mechanism)

    def log(values, step):
        rows.setdefault(step, {}).update(values)

    optimizer = module.configure_optimizers()
    with attnswap.watch(module, log=log, callbacks=callbacks, optimizer=optimizer, accumulate=accumulate):
        for _ in range(2):
            data = list(batches())
            for place, (inputs, targets) in enumerate(data):
                loss = cross_entropy(module(inputs).flatten(0, 1), targets.flatten()) / accumulate
                further(module)
                loss.backward()
                if (place + 1) % accumulate == 0 or place + 1 == len(data):
                    optimizer.step()
                    optimizer.zero_grad()
    return rows, weights_of(module)


@pytest.mark.parametrize("mechanism", [None, "symmetric"])
@pytest.mark.parametrize("name", CALLBACKS)
def test_a_loop_gives_the_values_and_weights_of_lightning(name, mechanism):
    expected, weights = in_lightning(CALLBACKS[name](), mechanism)
    found, trained = in_a_loop(CALLBACKS[name](), mechanism)
    assert found == expected
    assert torch.equal(trained, weights)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_penalty_of_drawn_gates_is_that_of_lightning(accumulate):
    runs = []
    for run in (in_lightning, in_a_loop):
        torch.manual_seed(0)
        runs.append(run([DAMPenalty(0.01)], ("dam", TOKENS), accumulate))
    (expected, weights), (found, trained) = runs
    assert torch.equal(trained, weights)
    assert accumulate == 2 or found == expected


@pytest.mark.parametrize("name", ["AttentionMonitor", "LocAteR", "EntropyRegularizer"])
def test_accumulated_batches_are_those_of_lightning(name):
    expected, weights = in_lightning(CALLBACKS[name](), None, accumulate=2)
    found, trained = in_a_loop(CALLBACKS[name](), None, accumulate=2)
    if name == "LocAteR":  # its share enters with each batch here, and at the step there
        torch.testing.assert_close(trained, weights, rtol=1e-5, atol=1e-7)
    else:
        assert torch.equal(trained, weights)
    for step, row in found.items():
        assert row == pytest.approx({key: expected[step][key] for key in row}, rel=1e-6 if name == "LocAteR" else 0)


@pytest.mark.parametrize("name", ["LogitMonitor", "AttentionMonitor", "EntropyRegularizer"])
def test_further_forward_passes_and_evaluations_are_no_batches(name):
    def further(module):
        module.eval()
        module(next(iter(batches()))[0].flip(0, 1))
        module.train()
        with torch.no_grad():
            module(next(iter(batches()))[0].flip(0, 1))

    plain, with_further = (in_a_loop(CALLBACKS[name](), None, further=each) for each in (lambda _: 0, further))
    assert plain[0] == with_further[0]
    assert list(plain[0]) == list(range(0, 10, 2 if name == "AttentionMonitor" else 1))
    assert torch.equal(plain[1], with_further[1])


@pytest.mark.parametrize("name", ["EntropyRegularizer", "QKClip"])
@pytest.mark.parametrize(
    ("look", "reentrant"),
    [("no_grad", False), ("no_grad", True), *((f"attack{place}", False) for place in ("", " behind", " before"))],
)
def test_a_look_beside_a_backward_pass_that_runs_layers_again_changes_nothing(name, reentrant, look):
    class Blocks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(16, 16)
            self.layer = torch.nn.TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True)

        def forward(self, x):
            x = self.first(x)
            return checkpoint(self.layer, x, use_reentrant=reentrant) if torch.is_grad_enabled() else self.layer(x)

    def peek(model, x):
        model.eval()
        with torch.set_grad_enabled(look != "no_grad"):
            out = model(x.requires_grad_(look != "no_grad")).sum()
        model.train()
        return out, x

    def trained(looks):
        torch.manual_seed(0)
        model = Blocks()
        with torch.no_grad():
            model.layer.self_attn.in_proj_weight.mul_(8)
        optimizer, x = torch.optim.SGD(model.parameters(), lr=1e-2), torch.randn(3, 7, 16)
        callbacks = [QKClip(tau=1.0)] if name == "QKClip" else CALLBACKS[name]()
        with attnswap.watch(model, callbacks=callbacks, optimizer=optimizer, log=lambda values, step: None):
            for _ in range(2):
                seen = [peek(model, 2 * x)] if looks and look == "attack before" else []
                out = model(x)
                if looks and look in ("no_grad", "attack"):
                    seen.append(peek(model, 2 * x))
                out.square().mean().backward()
                if looks and look == "attack behind":
                    seen.append(peek(model, 2 * x))
                for each in seen if look != "no_grad" else []:
                    torch.autograd.grad(*each)
                optimizer.step()
                optimizer.zero_grad()
        return weights_of(model)

    assert torch.equal(trained(looks=True), trained(looks=False))


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_transforms_of_torch_func_are_no_passes(transform):
    module = torch.nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True)
    optimizer, x = torch.optim.SGD(module.parameters(), lr=0.1), torch.randn(1, 3, 8)
    with (
        attnswap.watch(module, callbacks=[QKClip(tau=1.0)], optimizer=optimizer, log=lambda values, step: None) as loop,
        sdpa_kernel(SDPBackend.MATH),
    ):
        for _ in range(2):  # outside a batch, and within one
            transform(lambda given: module(given).sum())(x)
            module(x).sum()
        assert loop.passes == 1


def test_a_backward_pass_behind_the_block_pauses_nothing():
    module, monitor = TinyLM(), AttentionMonitor(1)
    x = next(iter(batches()))[0]
    with attnswap.watch(module, callbacks=[monitor], log=lambda values, step: None):
        module(x).sum().backward()
        module.eval()
        out = module(x)
        module.train()
    out.sum().backward()
    assert not monitor.paused


def test_after_an_error_and_at_the_end_the_model_is_as_it_was():
    module = TinyLM()
    before = {name: type(part) for name, part in module.named_modules()}
    for error in (None, RuntimeError("out of memory")):
        try:
            with attnswap.watch(module, every=1, log=lambda values, step: None):
                module(next(iter(batches()))[0]).sum().backward()
                if error:
                    raise error
        except RuntimeError:
            pass
        assert {name: type(part) for name, part in module.named_modules()} == before
        assert not module._forward_pre_hooks
        assert not module._forward_hooks


def test_gradients_are_added_before_they_are_clipped():
    """As Lightning does: what a clip sees holds the penalty's."""
    norms = []
    for weight in (0.0, 1e3):
        module = TinyLM()
        optimizer = module.configure_optimizers()
        with attnswap.watch(module, log=lambda values, step: None, callbacks=[LocAteR(weight)], optimizer=optimizer):
            module(next(iter(batches()))[0]).square().mean().backward()
            norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0))
            optimizer.step()
    assert norms[1] > 10 * norms[0]


def test_what_cannot_run_here_is_refused_by_name():
    module = TinyLM()
    with pytest.raises(ValueError, match="callbacks has SigmaReparam, and here run only AttentionMonitor, "):
        attnswap.watch(module, callbacks=[SigmaReparam()])
    with pytest.raises(ValueError, match="LocAteR changes gradients or weights: give the optimizer"):
        attnswap.watch(module, callbacks=[LocAteR(0.1)])
    watching = attnswap.watch(module, callbacks=[AttentionMonitor(where="nothing")])
    with pytest.raises(ValueError, match="nothing"), watching:
        pass


def _probed(module, loss):
    torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)


def _probed_by_one(module, loss):
    torch.autograd.grad(loss, [next(module.parameters())], retain_graph=True)


@pytest.mark.parametrize("probe", [_probed, _probed_by_one])
def test_gradients_that_the_loop_takes_itself_are_without_the_penalty(probe):
    found = []
    for before in (lambda module, loss: None, probe):
        module = TinyLM()
        optimizer = module.configure_optimizers()
        with attnswap.watch(
            module, log=dict, callbacks=[EntropyRegularizer(5.0, target=0.3), LocAteR(0.1)], optimizer=optimizer
        ):
            for inputs, targets in batches():
                loss = cross_entropy(module(inputs).flatten(0, 1), targets.flatten())
                before(module, loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(weights_of(module))
    assert torch.equal(*found)


class Parts(TinyLM):
    """A model that a loop may call in several ways."""

    def forward(self, tokens, kind="tensor"):
        out = super().forward(tokens)
        return Out(out) if kind == "dataclass" else out


@dataclass(slots=True)
class Out:
    """What a model gives."""

    logits: torch.Tensor


CALLS = {
    "tensor": lambda module, inputs: module(inputs),
    "dataclass": lambda module, inputs: module(inputs, "dataclass").logits,
    "functional": lambda module, inputs: functional_call(module, dict(module.named_parameters()), (inputs,)),
    "of its parts": lambda module, inputs: module.net["head"](module.net["encoder"](module.net["embed"](inputs))),
    "evaluates": lambda module, inputs: module.eval()(inputs),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["EntropyRegularizer", "LogitMonitor"])
def test_a_batch_is_seen_however_the_model_is_called_or_the_step_says_so(call, name):
    seen, module = [], Parts()
    optimizer, callbacks = module.configure_optimizers(), CALLBACKS[name]()

    def train():
        with attnswap.watch(module, log=lambda _, step: seen.append(step), callbacks=callbacks, optimizer=optimizer):
            for inputs, targets in batches(2):
                cross_entropy(CALLS[call](module, inputs).flatten(0, 1), targets.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()

    if call in ("tensor", "dataclass", "functional"):
        train()
        assert seen == [0, 1]
    elif name == "LogitMonitor":
        train()
        assert not seen
    else:
        before = weights_of(module)
        with pytest.raises(ValueError, match=r"EntropyRegularizer saw nothing of this step: no backward\(\) came"):
            train()
        assert torch.equal(weights_of(module), before)


def others(module, inputs):
    functional_call(module, {name: 3 * each for name, each in module.named_parameters()}, (inputs,))


def by_sample(module, inputs):
    weights = {name: each.detach() for name, each in module.named_parameters()}
    loss = lambda weights, one: functional_call(module, weights, (one[None],)).square().mean()  # noqa: E731
    torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, inputs)


def reloaded(module, inputs):
    module.load_state_dict({name: each.clone() for name, each in module.state_dict().items()}, assign=True)


@pytest.mark.parametrize("before", [others, by_sample, reloaded])
@pytest.mark.parametrize("name", ["SpectrumMonitor", "AttentionMonitor", "LogitMonitor"])
def test_what_monitors_log_is_of_passes_with_the_models_own_weights(before, name):
    logged = []
    for other in (False, True):
        torch.manual_seed(0)
        module, seen = Parts().requires_grad_(), {}
        watched = {"callbacks": CALLBACKS[name](), "log": lambda values, step, seen=seen: seen.update({step: values})}
        with attnswap.watch(module, **watched):
            for inputs, _ in batches(3):
                if other:
                    with torch.random.fork_rng():
                        before(module, inputs)
                module(inputs).square().mean().backward()
                torch.optim.SGD(module.parameters(), 0.1).step()
                module.zero_grad()
        logged.append(seen)
    assert logged[0] == logged[1]
    assert logged[0]


class Behind(torch.nn.Module):
    """A network whose Parameters a reentrant checkpoint hides from the graph of the loss, or that is frozen."""

    def __init__(self, how):
        super().__init__()
        self.how, self.layer = how, torch.nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        self.requires_grad_(how != "frozen")

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=True) if self.how == "reentrant" else self.layer(x)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        *itertools.product(["plain", "reentrant"], ["LogitMonitor", "LocAteR"]),
        ("frozen", "LogitMonitor"),  # in which LocAteR refuses to act
    ],
)
def test_batches_are_seen_where_the_graph_reaches_no_parameter_of_the_model(how, name):
    torch.manual_seed(0)
    model, seen = Behind(how), []
    prompt = torch.nn.Parameter(torch.randn(2, 3, 8))
    optimizer = torch.optim.SGD([prompt, *model.parameters()], lr=0.1)
    with attnswap.watch(model, log=lambda _, step: seen.append(step), callbacks=CALLBACKS[name](), optimizer=optimizer):
        for _ in range(3):
            model(prompt).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [0, 1, 2]


def test_a_gradient_of_the_input_is_without_the_penalty():
    found = []
    for probes in (False, True):
        torch.manual_seed(0)
        model, prompt = Behind("plain"), torch.randn(2, 3, 8, requires_grad=True)
        optimizer, gradients = torch.optim.SGD(model.parameters(), lr=0.1), []
        with attnswap.watch(model, log=dict, callbacks=[EntropyRegularizer(5.0, target=0.3)], optimizer=optimizer):
            for _ in range(3):
                loss = model(prompt).square().mean()
                if probes:
                    gradients += torch.autograd.grad(loss, prompt, retain_graph=True)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    assert torch.equal(*found)
    assert len(gradients) == 3


@pytest.mark.parametrize("name", ["LogitMonitor", "LocAteR"])
def test_a_step_in_which_the_model_takes_no_part_is_none_of_its(name):
    module, head, seen = TinyLM(), torch.nn.Linear(3, 3), []
    optimizer = torch.optim.SGD([*module.parameters(), *head.parameters()], lr=0.1)
    with attnswap.watch(
        module, log=lambda _, step: seen.append(step), callbacks=CALLBACKS[name](), optimizer=optimizer
    ):
        for place, (inputs, targets) in enumerate(batches(4)):
            if place % 2:
                head(torch.ones(1, 3)).square().sum().backward()
            else:
                cross_entropy(module(inputs).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=place == 0)
    assert len(seen) == 2
