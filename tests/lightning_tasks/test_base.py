import subprocess
import sys

import lightning.pytorch as pl
import pytest
import torch
from attnswap.datamodules import DigitsDataModule
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging
from torch import nn
from torchmetrics import MaxMetric

import lightning_tasks
from lightning_tasks import ImageClassificationTask, LanguageModelingTask
from lightning_tasks.base import BaseTask
from lightning_tasks.training.optimization import build_scheduler, parameter_groups, scheduler_spec
from tests.lightning_tasks.language_data import SMALL, VOCAB, RandomText, trainer
from tests.rows import each_row


class Regression(BaseTask):
    def __init__(self, width: int = 3, optimizer="SGD", **options) -> None:
        super().__init__(width=width, optimizer=optimizer, **options)

    def build_model(self):
        return nn.Sequential(nn.Linear(self.hparams["width"], 4), nn.LayerNorm(4))

    def training_step(self, batch, batch_idx):
        return self.model(batch).square().sum()

    def train_dataloader(self):
        return torch.ones(4, 2, self.hparams["width"])


class Counted(pl.LightningDataModule):
    """Knows the width of the data once it is set up."""

    width = None

    def setup(self, stage):
        self.width = 3

    def train_dataloader(self):
        return torch.ones(4, 2, self.width)


class OfTheData(Regression):
    def build_model(self):
        return nn.Linear(self.trainer.datamodule.width, 4)

    def train_dataloader(self):
        return super(Regression, self).train_dataloader()


class ReadsInSetup(OfTheData):
    def setup(self, stage):
        self.width = self.trainer.datamodule.width

    def build_model(self):
        return nn.Linear(self.width, 4)


def fit_counted(*callbacks, kind=OfTheData):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    task, run = kind(), pl.Trainer(max_epochs=4, accelerator="cpu", callbacks=[*callbacks], **quiet)
    run.fit(task, datamodule=Counted())
    return task


def test_stochastic_weight_averaging_averages_a_task():
    class Seen(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            weights.append(nn.utils.parameters_to_vector(pl_module.parameters()).detach().clone())

    weights = []
    task = fit_counted(StochasticWeightAveraging(0.01, swa_epoch_start=2), Seen())
    torch.testing.assert_close(nn.utils.parameters_to_vector(task.parameters()), torch.stack(weights[:3]).mean(0))


def test_pruning_and_freezing_find_the_network_of_a_task():
    pruned = fit_counted(ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False))
    assert (pruned.model.weight == 0).sum() >= 6

    class Frozen(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.model)

        def finetune_function(self, pl_module, epoch, optimizer):
            self.make_trainable(pl_module.model)

    assert fit_counted(Frozen()).model.weight.requires_grad

    class Later(Frozen):
        def freeze_before_training(self, pl_module):
            pass

        def on_fit_start(self, trainer, pl_module):
            self.freeze(pl_module.model)
            super().on_fit_start(trainer, pl_module)

    assert fit_counted(Later(), kind=ReadsInSetup).model.weight.requires_grad


def optimizer_of(task):
    task.configure_model()
    return task.configure_optimizers()


def test_optimizer_holds_all_parameters_with_its_options():
    configured = optimizer_of(Regression(optimizer={"class_path": "SGD", "init_args": {"lr": 0.25}}))
    (group,) = configured["optimizer"].param_groups
    assert group["lr"] == 0.25
    assert len(group["params"]) == 4
    assert "lr_scheduler" not in configured


def test_parameter_groups_by_name():
    rules = [{"match": "*0.weight", "weight_decay": 0.5}, {"match": "*", "lr": 0.1, "weight_decay": 0.0}]
    first, rest = optimizer_of(Regression(param_groups=rules))["optimizer"].param_groups
    assert (first["weight_decay"], rest["weight_decay"], rest["lr"]) == (0.5, 0.0, 0.1)
    assert [tuple(parameter.shape) for parameter in first["params"]] == [(4, 3)]
    assert len(rest["params"]) == 3


@each_row(
    ("rules", "text"),
    [
        ([{"match": "*attn*"}], r"'\*attn\*' matches no parameter"),
        ([{"match": "*"}, {"match": "*bias"}], r"'\*bias' matches no parameter that an earlier rule left"),
        ([{"lr": 1.0}], "needs the key 'match'"),
    ],
)
def test_bad_parameter_groups(rules, text):
    with pytest.raises(ValueError, match=text):
        parameter_groups(nn.Linear(2, 2).named_parameters(), rules)


def rates(spec, steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = build_scheduler(scheduler_spec(spec), optimizer)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_warm_up_of_torch():
    warm_up = {"class_path": "LinearLR", "init_args": {"start_factor": 0.25, "total_iters": 3}}
    assert rates(warm_up, 5) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_warm_up_then_decay_as_nested_data():
    schedulers = [
        {"class_path": "LinearLR", "init_args": {"start_factor": 0.5, "total_iters": 2}},
        {"class_path": "ExponentialLR", "init_args": {"gamma": 0.5}},
    ]
    spec = {"class_path": "SequentialLR", "init_args": {"schedulers": schedulers, "milestones": [2]}}
    assert rates(spec, 5) == pytest.approx([0.5, 0.75, 1.0, 0.5, 0.25])
    assert scheduler_spec(spec)["init_args"]["schedulers"] == schedulers


@pytest.mark.parametrize(("interval", "expected"), [("step", 0.5**4), ("epoch", 0.5**2)])
def test_schedule_steps_as_often_as_asked(interval, expected, tmp_path):
    task = Regression(
        scheduler={"class_path": "ExponentialLR", "init_args": {"gamma": 0.5}}, scheduler_interval=interval
    )
    run = trainer(tmp_path, max_epochs=2, limit_train_batches=2)
    run.fit(task)
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3 * expected)


def test_stored_as_plain_data_that_resumes_with_weights_only(tmp_path):
    task = Regression(optimizer=torch.optim.Adam, scheduler=torch.optim.lr_scheduler.ConstantLR)
    run = trainer(tmp_path)
    run.fit(task)
    run.save_checkpoint(tmp_path / "a.ckpt")
    stored = torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"]
    assert stored["optimizer"] == {"class_path": "torch.optim.Adam", "init_args": {}}
    loaded = Regression.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert torch.equal(loaded.model[0].weight, task.model[0].weight)
    again = trainer(tmp_path, max_epochs=2)
    with pytest.raises(ValueError, match=r"scheduler is torch.optim.lr_scheduler.ConstantLR\(\) .* and None now"):
        again.fit(Regression(optimizer=torch.optim.Adam), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    same = Regression(optimizer="Adam", scheduler="ConstantLR")
    again = trainer(tmp_path, max_epochs=2)
    again.fit(same, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert again.global_step == 8


def test_hyper_parameters_that_are_no_plain_data_are_an_error():
    with pytest.raises(TypeError, match=r"width cannot be stored in a checkpoint"):
        Regression(width=torch.ones(1))


def test_a_task_without_a_model_says_so():
    with pytest.raises(NotImplementedError, match=r"BaseTask must implement build_model\(\)"):
        BaseTask().configure_model()


def test_package_is_imported_without_lightning():
    code = "import sys, lightning_tasks; sys.exit('lightning' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_lazy_names():
    assert issubclass(lightning_tasks.LanguageModelingTask, pl.LightningModule)
    assert callable(lightning_tasks.load_swapped)
    assert set(lightning_tasks.__all__) <= set(dir(lightning_tasks))
    with pytest.raises(AttributeError, match="has no attribute 'LanguageModelling'"):
        _ = lightning_tasks.LanguageModelling


class Best(Regression):
    """It keeps a metric over epochs, as templates do."""

    def __init__(self):
        super().__init__()
        self.val_best = MaxMetric()

    def validation_step(self, batch, batch_idx):
        self.val_best.update(1.0 - self.current_epoch)

    def val_dataloader(self):
        return self.train_dataloader()


def test_metrics_of_a_subclass_are_its_own_affair(tmp_path):
    module = Best()
    trainer(tmp_path, max_epochs=2).fit(module)
    assert module.val_best.compute() == 1.0


class BreaksOff(pl.Callback):
    def on_validation_batch_end(self, run, module, outputs, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 1:
            raise MemoryError


@pytest.mark.parametrize("kind", ["text", "images"])
def test_a_validation_that_was_broken_off_counts_nothing_in_the_next(tmp_path, kind):
    options = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2}
    text = (LanguageModelingTask(SMALL, vocab_size=VOCAB), RandomText(batch_size=2))
    module, data = text if kind == "text" else (ImageClassificationTask(model_options=options), DigitsDataModule())
    found = [trainer(tmp_path).validate(module, data, verbose=False)]
    with pytest.raises(MemoryError):
        trainer(tmp_path, callbacks=[BreaksOff()]).validate(module, data, verbose=False)
    found.append(trainer(tmp_path).validate(module, data, verbose=False))
    assert found[0] == found[1]


def test_an_option_that_an_optimizer_does_not_have_is_told():
    with pytest.warns(UserWarning, match="AdamW has no option 'weight_deacy' of its own.*Did you mean 'weight_decay'"):
        optimizer_of(Regression(optimizer="AdamW", param_groups=[{"match": "*1*", "weight_deacy": 0.0}]))
