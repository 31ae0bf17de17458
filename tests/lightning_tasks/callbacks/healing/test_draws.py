"""A network that draws random numbers, or keeps something, also in evaluation: looking at it changes nothing."""

import random

import numpy as np
import pytest
import torch

import attnswap
from attnswap.analysis import swap_drift
from lightning_tasks.callbacks import (
    AttentionMonitor,
    DriftMonitor,
    Heal,
    KernelPCAMonitor,
    LipschitzMonitor,
    LogitMonitor,
)
from tests.lightning_tasks.callbacks.healing.healed import Classifier, Task, data, heal


class Counts:
    def __init__(self):
        self.calls, self.generator = 0, torch.Generator().manual_seed(3)


class Draws(Classifier):
    """Draws in one way, or keeps in one place, whether it trains or not."""

    def __init__(self, way):
        super().__init__()
        self.way, self.generator, self.own = way, torch.Generator().manual_seed(3), random.Random(3)
        self.of_numpy, self.older = np.random.default_rng(3), np.random.RandomState(3)
        self.kept, self.counts, self.held = [], Counts(), {"bits": np.random.PCG64(3)}
        self.register_buffer("running", torch.zeros(()))

    def forward(self, x):
        mean = x.detach().mean()
        if self.way == "torch":
            x = x + torch.randn_like(x)
        elif self.way == "python":
            x = x * random.random()
        elif self.way == "numpy":
            x = x * np.random.rand()  # noqa: NPY002 - what older code draws from
        elif self.way == "generator":
            x = x + torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        elif self.way == "own of python":
            x = x * self.own.random()
        elif self.way == "own of numpy":
            x = x * self.of_numpy.random() * self.older.rand()
        elif self.way == "within":
            drawn = float(self.held["bits"].random_raw() % 7)
            x = x + torch.randn(x.shape, generator=self.counts.generator) * drawn
        elif self.way == "buffer":
            self.running.mul_(0.9).add_(mean)
        elif self.way == "list":
            self.kept.append(mean.item())
        elif self.way == "object":
            self.counts.calls += 1
        return super().forward(x)

    def state(self):
        """All that it keeps and draws from, to compare."""
        within = [self.counts.generator.get_state().tolist(), self.held["bits"].state]
        own = [*within, self.own.getstate(), self.of_numpy.bit_generator.state, self.older.get_state(legacy=False)]
        process = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()]  # noqa: NPY002
        tensors = {name: tensor.tolist() for name, tensor in self.state_dict().items()}
        return repr(
            [own, process, tensors, self.generator.get_state().tolist(), self.kept, self.counts.calls, self.training]
        )


DRAWS = ["torch", "python", "numpy", "generator", "own of python", "own of numpy", "within"]
KEEPS = ["buffer", "list", "object"]


def task(way):
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    module = Task()
    module.net = Draws(way)
    return module


@pytest.mark.parametrize("way", DRAWS + KEEPS)
@pytest.mark.parametrize(
    "monitor",
    [
        DriftMonitor,
        lambda: DriftMonitor(maps=True),
        KernelPCAMonitor,
        lambda: LipschitzMonitor(max_iter=2),
        lambda: AttentionMonitor(every_n_steps=1),
        lambda: LogitMonitor(every_n_steps=1),
    ],
    ids=["drift", "drift of maps", "kernel pca", "lipschitz", "attention", "logits"],
)
def test_a_monitor_leaves_its_training_as_it_was(way, monitor):
    found = []
    for callbacks in ([], [monitor()]):
        module, _ = heal(callbacks, "sink", task(way))
        found.append(module.net.state())
    assert found[0] == found[1]


@pytest.mark.parametrize("way", DRAWS)
def test_teacher_and_student_draw_the_same(way):
    """Softmax in place of softmax changes nothing, whatever was drawn before."""
    for match in ("output", "layers"):
        _, trainer = heal(Heal([{"match": match, "train": "attention"}]), "softmax", task(way), max_epochs=2)
        assert trainer.callback_metrics["heal/loss"] < 1e-9
        assert trainer.callback_metrics["val/drift/output_error"] < 1e-6


@pytest.mark.parametrize("way", DRAWS + KEEPS)
@pytest.mark.parametrize(
    "look",
    [
        lambda model, x: swap_drift(model, "uniform", [x, x]),
        attnswap.attention_maps,
        attnswap.explore,
    ],
    ids=["swap_drift", "attention_maps", "explore"],
)
def test_an_analysis_leaves_it_as_it_was(way, look):
    model = task(way).net
    x = next(iter(data()))[0]
    before = model.state()
    look(model, x)
    assert model.state() == before
    model(x)
    assert model.state() != before


@pytest.mark.parametrize("way", DRAWS)
def test_drift_of_softmax_from_softmax_is_none(way):
    found = swap_drift(task(way).net, "softmax", [x for x, _ in data()])
    assert found.output.relative_error < 1e-6
    assert all(max(row.relative_error, row.output.relative_error) < 1e-6 for row in found.layers)


class Masks(Task):
    """Hides patches that it draws, also in evaluation, as masked autoencoders do."""

    def __init__(self):
        transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
        super().__init__()
        small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        torch.manual_seed(0)
        self.net = transformers.ViTMAEForPreTraining(
            transformers.ViTMAEConfig(
                **small, image_size=16, patch_size=4, **{f"decoder_{name}": value for name, value in small.items()}
            )
        )

    def training_step(self, batch, batch_idx):
        return self.net(batch).loss


def test_masked_autoencoders():
    """At a learning rate of 0, softmax in place of softmax is no drift."""
    images = torch.utils.data.DataLoader(torch.randn(4, 3, 16, 16), batch_size=2)
    for callback in (DriftMonitor(logits=False), Heal([{"match": "output", "train": "all"}])):
        module = Masks()
        module.hparams.lr = 0.0
        _, trainer = heal(callback, "softmax", module, loader=images)
        assert trainer.callback_metrics["val/drift/output_error"] < 1e-6
    assert trainer.callback_metrics["heal/loss"] < 1e-9


class Remembers(Draws):
    """Its output depends on what it has seen, which the task forgets before each step."""

    def forward(self, x):
        self.kept.append(x.detach().mean())
        return super().forward(x + torch.stack(self.kept).mean())


class Forgets(Task):
    def training_step(self, batch, batch_idx):
        self.net.kept.clear()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("callback", [DriftMonitor, lambda: Heal([{"match": "output", "train": "attention"}])])
def test_a_teacher_keeps_nothing(callback):
    module, watching = Forgets(), callback()
    module.net = Remembers("torch")
    heal(watching, "softmax", module)
    assert watching.teacher.network.kept == []


class Shares(Classifier):
    """Two parts share an object and a buffer, and one makes a Parameter in its first call."""

    def __init__(self):
        super().__init__()
        self.counts, self.head.counts = [Counts()] * 2
        self.register_buffer("table", torch.zeros(3))
        self.head.register_buffer("table", self.table)
        self.made, self.cur = None, None

    def forward(self, x):
        if self.made is None:
            self.made = torch.nn.Parameter(torch.ones(()))
        self.cur = torch.nn.Identity()  # another one in each call
        self.counts.calls += 1
        self.table += 1
        return super().forward(self.cur(x) * self.made)


def test_what_parts_share_stays_shared_where_a_call_makes_something():
    model, x = Shares(), torch.randn(2, 6, 8)
    for _ in range(2):
        attnswap.attention_maps(model, x)
        assert model.counts is model.head.counts
        assert model.table is model.head.table
        assert model.counts.calls == 0
        assert model.table.sum() == 0


class Lazy(Classifier):
    """Makes its Parameters in its first call, in three ways."""

    def __init__(self):
        super().__init__()
        self.lazy, self.norm = torch.nn.LazyLinear(8), torch.nn.LazyBatchNorm1d()
        self.plain = torch.nn.LazyBatchNorm1d(affine=False)
        self.own, self.is_made, self.more = None, False, torch.nn.ModuleList()
        self.system = random.SystemRandom()  # which has no state

    def forward(self, x):
        if self.own is None:
            self.own = torch.nn.Linear(8, 8)
        if not self.is_made:
            self.more.append(torch.nn.Linear(8, 8))
            self.scale, self.is_made = torch.nn.Parameter(torch.ones(8)), True
        x = self.plain(x.mT).mT
        return super().forward(self.norm(self.own(self.lazy(x)).mT).mT * self.scale)


@pytest.mark.parametrize("look", [attnswap.attention_maps, attnswap.explore])
def test_what_a_model_makes_in_its_first_call_stays(look):
    model, x = Lazy(), torch.randn(2, 6, 8)
    look(model, x)
    made, given = dict(model.named_parameters()), model(x)
    assert {"own.weight", "scale", "lazy.weight", "norm.weight"} <= made.keys()
    assert len(model.more) == 1
    assert torch.equal(model(x), given)
    assert all(made[name] is now for name, now in model.named_parameters())
    assert (model.lazy.in_features, model.norm.num_features, model.plain.num_features) == (8, 8, 8)


class Grows(Classifier):
    """Makes a Parameter anew for sequences of another length."""

    def __init__(self):
        super().__init__()
        self.length, self.positions = 4, torch.nn.Parameter(torch.zeros(4, 8))

    def forward(self, x):
        if x.shape[1] != self.length:
            self.length, self.positions = x.shape[1], torch.nn.Parameter(torch.ones(x.shape[1], 8))
        return super().forward(x + self.positions)


@pytest.mark.parametrize("look", [attnswap.attention_maps, attnswap.explore])
def test_a_parameter_of_another_size_stays_with_what_says_so(look):
    model, x = Grows(), torch.randn(2, 6, 8)
    look(model, x)
    assert model.length == len(model.positions) == 6
