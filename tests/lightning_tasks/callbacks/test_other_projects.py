"""Every monitor in modules and trainers of the other Lightning package, which know nothing of this project.

Each trains to the same bits as without them, and its model is what it was.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from attention_modules.mechanism import AttentionMechanism
from lightning_tasks.callbacks import (
    AttentionMapLogger,
    AttentionMonitor,
    LipschitzMonitor,
    LocAteR,
    PursuitMonitor,
    RunSummary,
    SpectrumMonitor,
)

pl = pytest.importorskip("pytorch_lightning")
DIM, TOKENS = 8, 20
pytestmark = pytest.mark.filterwarnings("ignore")


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.1, batch_first=True), 2)


class Plain(pl.LightningModule):
    """An encoder and a head."""

    def __init__(self):
        super().__init__()
        self.net, self.head = encoder(), nn.Linear(DIM, 1)

    def forward(self, x):
        return self.head(self.net(x)).mean(1)

    def loss(self, batch):
        return self(batch[0]).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val/loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class TwoNetworks(Plain):
    """Manual optimization of two networks, as of a generator and a discriminator."""

    def __init__(self):
        super().__init__()
        self.other, self.automatic_optimization = encoder(), False

    def training_step(self, batch, batch_idx):
        for optimizer, loss in zip(self.optimizers(), (self.loss, lambda each: self.other(each[0]).std()), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        first = [*self.net.parameters(), *self.head.parameters()]
        return [torch.optim.Adam(first, lr=0.01), torch.optim.SGD(self.other.parameters(), lr=0.01)]


class Compiled(Plain):
    """Compiles a part of itself when it is set up."""

    def setup(self, stage):
        if not hasattr(self.net, "_orig_mod"):
            self.net = torch.compile(self.net, backend="eager")


class ReadsWeights(Plain):
    """Its loss reads the attention weights."""

    def __init__(self):
        super().__init__()
        self.net = nn.MultiheadAttention(DIM, 2, dropout=0.1, batch_first=True)

    def forward(self, x):
        out, weights = self.net(x, x, x)
        return self.head(out).mean(1) + weights.square().mean()


class SkipsSteps(Plain):
    """Every other batch has no loss."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx % 2 else self.loss(batch)


class Averages(pl.callbacks.EMAWeightAveraging):
    """From the first step on."""

    def __init__(self):
        super().__init__(update_every_n_steps=1)


def monitors():
    return [
        AttentionMonitor(every_n_steps=1, stages=["train", "validation", "test"]),
        SpectrumMonitor(every_n_steps=1, heads=True),
        LipschitzMonitor(max_iter=2),
        PursuitMonitor(),
        AttentionMapLogger(),
        LocAteR(0.1, gamma=0.1, observe_only=True),
        RunSummary("val/loss"),
    ]


def data(count=6):
    features = torch.randn(count, TOKENS, DIM, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(features), batch_size=2)


def trainer(callbacks, **options):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(callbacks=callbacks, **{"max_epochs": 2, "accelerator": "cpu", "devices": 1, **quiet, **options})


def trained(kind, callbacks, use=lambda run, module: run.fit(module, data(), data(4)), **options):
    torch.manual_seed(0)
    module = kind()
    run = trainer(callbacks, **options)
    use(run, module)
    return module, run


def assert_as_without(kind, use=None, others=(), **options):
    """The same bits in every weight and in the random state, and a plain model; the watched trainer."""
    given = {} if use is None else {"use": use}
    plain, _ = trained(kind, [each() for each in others], **given, **options)
    drawn = torch.get_rng_state()
    watched, run = trained(kind, [*monitors(), *(each() for each in others)], **given, **options)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert list(watched.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(watched.state_dict()[name], value), name
    assert_untouched(watched)
    return run


def assert_untouched(module):
    assert not any(isinstance(part, AttentionMechanism) for part in module.modules())
    assert not any(part._forward_pre_hooks for part in module.modules())
    assert "configure_model" not in vars(module)


@pytest.mark.parametrize("kind", [Plain, TwoNetworks, Compiled, ReadsWeights, SkipsSteps])
def test_kinds_of_modules(kind):
    run = assert_as_without(kind)
    assert "val/attention/entropy/layer_00" in run.callback_metrics
    assert ("attention/entropy/layer_03" in run.callback_metrics) == (kind is TwoNetworks)


@pytest.mark.parametrize(
    "options",
    [
        {"fast_dev_run": True},
        {"limit_val_batches": 0, "accumulate_grad_batches": 2},
        {"val_check_interval": 1, "num_sanity_val_steps": -1, "inference_mode": False},
        {"precision": "bf16-mixed", "gradient_clip_val": 0.1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_trainers(options):
    assert_as_without(Plain, **options)


def test_weight_averaging():
    assert_as_without(Plain, others=[Averages])


def validate_fit_fit_test_predict(run, module):
    run.validate(module, data(4), verbose=False)
    run.fit(module, data(), [data(4), data(2)])
    run.fit_loop.max_epochs = 3
    run.fit(module, data(), data(4))
    run.test(module, data(4), verbose=False)
    run.predict(module, data(4))


def test_one_trainer_for_every_stage():
    run = assert_as_without(Plain, validate_fit_fit_test_predict)
    assert run.current_epoch == 3


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_stage_alone(stage):
    quiet = {} if stage == "predict" else {"verbose": False}
    run = assert_as_without(Plain, lambda run, module: getattr(run, stage)(module, data(), **quiet))
    prefix = {"validate": "val/", "test": "test/"}.get(stage)
    assert prefix is None or f"{prefix}attention/entropy/mean" in run.callback_metrics


def test_a_teardown_that_fails_before_theirs():
    class Fails(pl.Callback):
        def teardown(self, trainer, pl_module, stage):
            raise RuntimeError("in teardown")

    module = Plain()
    with pytest.raises(RuntimeError, match="in teardown"):
        trainer([Fails(), *monitors()]).fit(module, data(), data(4))
    assert_untouched(module)
