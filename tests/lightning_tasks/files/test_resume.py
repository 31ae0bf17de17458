"""A run that is killed in the middle of an epoch and resumed ends bit-identical to one that was not."""

from signal import SIGTERM

import lightning.pytorch as pl
import pytest
import torch
from attnswap.datamodules import PythonSourceDataModule
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_tasks import LanguageModelingTask
from lightning_tasks.callbacks import ExactResume, LocAteR, SaveOnStop
from tests.lightning_tasks.demo import DemoModule, Signal

MODEL = {"num_layers": 1, "dim": 16, "num_heads": 2, "mlp_dim": 16, "num_tokens": 8, "dropout": 0.2}
STEPS = 23


class Killed(RuntimeError):
    pass


class KillAt(pl.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.step:
            raise Killed


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    for index in range(20):
        body = "\n".join(f"value_{index} = {row} + other_{row % 5}" for row in range(12))
        (folder / f"module_{index:02d}.py").write_text(body + "\n", encoding="utf-8")
    return folder


def fit(folder, text, *callbacks, ckpt_path=None, workers=0, max_steps=STEPS, **trainer_options):
    pl.seed_everything(3, verbose=False)
    data = PythonSourceDataModule(folder=text, num_tokens=8, batch_size=16, num_workers=workers)
    task = LanguageModelingTask(model={"class_path": "TransformerLM", "init_args": MODEL}, optimizer="AdamW")
    keep = ModelCheckpoint(dirpath=folder, every_n_train_steps=5, save_last=True)
    trainer = pl.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"limit_val_batches": 0, **trainer_options},
        callbacks=[LocAteR(weight=0.1, gamma=1.0), keep, *callbacks],
    )
    trainer.fit(task, data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return {name: value.clone() for name, value in task.state_dict().items()}, trainer


@pytest.mark.parametrize("workers", [0, 1])
def test_resumed_within_an_epoch(tmp_path, text, workers):
    whole, trainer = fit(tmp_path / "whole", text, workers=workers)
    batches = trainer.num_training_batches
    with pytest.raises(Killed):
        fit(tmp_path / "killed", text, KillAt(18), workers=workers)
    last = tmp_path / "killed" / "last.ckpt"
    step = torch.load(last, weights_only=True)["global_step"]
    assert step == 15
    assert step % batches, "the checkpoint must lie within an epoch"
    resumed, _ = fit(tmp_path / "resumed", text, ckpt_path=last, workers=workers)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_resumed_at_the_end_of_a_shortened_epoch(tmp_path, text):
    """With epochs of five steps the checkpoint of step 15 lies between two of them: the next one is given whole."""
    whole, _ = fit(tmp_path / "whole", text, limit_train_batches=5)
    with pytest.raises(Killed):
        fit(tmp_path / "killed", text, KillAt(18), limit_train_batches=5)
    last = tmp_path / "killed" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 15
    resumed, _ = fit(tmp_path / "resumed", text, ckpt_path=last, limit_train_batches=5)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.parametrize("stop", [4, 14])
def test_a_finished_run_goes_on_with_more_steps(tmp_path, text, stop):
    """Lightning's default checkpoint, of a run that max_steps ended within its first or a later epoch."""
    whole, trainer = fit(tmp_path / "whole", text)
    assert stop % trainer.num_training_batches
    fit(tmp_path / "first", text, ModelCheckpoint(dirpath=tmp_path / "default"), max_steps=stop)
    (kept,) = (tmp_path / "default").glob("*.ckpt")
    assert torch.load(kept, weights_only=True)["global_step"] == stop
    more, _ = fit(tmp_path / "more", text, ckpt_path=kept)
    assert all(torch.equal(more[name], whole[name]) for name in whole)


@pytest.mark.parametrize("stop", [4, 14])
def test_so_does_one_that_was_saved_when_its_fit_was_over(tmp_path, text, stop):
    whole, _ = fit(tmp_path / "whole", text, ExactResume())
    _, trainer = fit(tmp_path / "first", text, ExactResume(), max_steps=stop)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    more, _ = fit(tmp_path / "more", text, ExactResume(), ckpt_path=tmp_path / "saved.ckpt")
    assert all(torch.equal(more[name], whole[name]) for name in whole)


class Validations(pl.Callback):
    """The steps at which validations end."""

    def __init__(self):
        self.steps = []

    def on_validation_end(self, trainer, module):
        self.steps += [] if trainer.sanity_checking else [trainer.global_step]


@pytest.mark.parametrize(
    ("step", "validating", "each", "average"),
    [(12, False, 1, False), (14, False, 1, False), (15, True, 1, False), (12, False, 3, False), (15, True, 1, True)],
)
def test_a_run_that_sigterm_ends_goes_on_where_it_was(tmp_path, text, step, validating, each, average):
    """In the middle of an epoch of five steps, of several batches too, in its last one, and as it is validated."""
    options = {"limit_train_batches": 5 * each, "limit_val_batches": 2, "num_sanity_val_steps": 0}
    options |= {"accumulate_grad_batches": each}

    def also(*others):
        return [*([EMAWeightAveraging(decay=0.9)] if average else []), *others]

    whole, _ = fit(tmp_path / "whole", text, *also(), **options)
    with pytest.raises(SIGTERMException):
        fit(tmp_path / "told", text, *also(SaveOnStop(), Signal(SIGTERM, step, validating)), **options)
    (saved,) = (tmp_path / "told").glob("stopped-*.ckpt")
    validations = Validations()
    resumed, trainer = fit(tmp_path / "resumed", text, *also(validations), ckpt_path=saved, **options)
    assert validations.steps[0] == 15  # also where the signal cut that validation short
    assert trainer.global_step == STEPS
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_a_validation_within_a_step_ends_at_once_and_its_checkpoint_says_what_it_lacks(tmp_path, text):
    options = {"limit_train_batches": 6, "accumulate_grad_batches": 4, "val_check_interval": 3, "limit_val_batches": 2}
    options["num_sanity_val_steps"] = 0
    with pytest.warns(UserWarning, match="lacks their gradients"), pytest.raises(SIGTERMException):
        fit(tmp_path, text, SaveOnStop(), Signal(SIGTERM, 0, validating=True), **options)
    assert [*tmp_path.glob("stopped-*-step=0.ckpt")]


def test_a_fit_that_ends_within_a_step_sees_the_signal(tmp_path, text):
    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.should_stop = batch_idx == 1

    options = {"limit_train_batches": 6, "accumulate_grad_batches": 4}
    with pytest.raises(SIGTERMException):
        fit(tmp_path, text, Stops(), SaveOnStop(), Signal(SIGTERM, 0), **options)


VALIDATIONS = {
    "interval": ({"val_check_interval": 2}, {2, 4, 6}),
    "epoch": ({}, {4}),
    "second epoch": ({"check_val_every_n_epoch": 2}, set()),
    "any epoch": ({"val_check_interval": 3, "check_val_every_n_epoch": None}, {3, 6}),
    "none": ({"limit_val_batches": 0}, set()),
}


@pytest.mark.parametrize(("options", "due"), VALIDATIONS.values(), ids=VALIDATIONS)
def test_a_validation_that_follows_a_checkpoint_is_that_of_the_resumed_run(tmp_path, options, due):
    """Checkpoints of each step, which are saved before Lightning validates."""

    def fit(path=None, folder=tmp_path / "resumed"):
        validations = Validations()
        saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
        own = {"limit_train_batches": 4, "max_steps": 7, "logger": False, "default_root_dir": tmp_path, **options}
        shown = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
        trainer = pl.Trainer(accelerator="cpu", callbacks=[validations, ExactResume(), saves], **shown, **own)
        trainer.fit(DemoModule(), ckpt_path=path, weights_only=True if path else None)
        return validations.steps

    whole = fit(folder=tmp_path)
    assert due <= set(whole)
    for step in (1, 2, 3, 4, 6):
        assert fit(tmp_path / f"step={step}.ckpt") == [each for each in whole if each >= step]
