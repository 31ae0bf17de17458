"""What follows a checkpoint within Lightning's loop is done by the run that resumes: validations, plateaus, means."""

import warnings
from signal import SIGTERM

import pytest
import torch
from attnswap.datamodules import ResumableLoader
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from lightning_tasks import BaseTask
from lightning_tasks.callbacks import ExactResume, SaveOnStop
from tests.lightning_tasks.demo import Signal

DATA = TensorDataset(torch.arange(24.0).reshape(12, 2) / 24)  # 6 batches
END_OF_EPOCH, IN_VALIDATION = {}, {"save_on_train_epoch_end": False}


class Own(LightningModule):
    """Logs in each way that an epoch reduces, and validates."""

    shown = False

    def __init__(self, monitor=None, interval="epoch", frequency=1):
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.plateau = {"monitor": monitor, "interval": interval, "frequency": frequency}

    def build_model(self):
        return torch.nn.Identity()  # as a task must

    def train_dataloader(self):
        return ResumableLoader(DATA, batch_size=2, shuffle=True)

    def val_dataloader(self):
        return DataLoader(DATA, batch_size=6)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=self.shown)
        for name in ("sum", "min", "max"):
            self.log(name, loss, on_step=False, on_epoch=True, reduce_fx=name)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).square().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        if self.plateau["monitor"] is None:
            return optimizer
        schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **self.plateau}}


class OwnTask(Own, BaseTask):
    """A task of one's own needs no callback."""


class Notes(Callback):
    def __init__(self):
        self.ends = []

    def on_train_epoch_end(self, trainer, module):
        kept = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.ends.append((trainer.current_epoch, trainer.global_step, kept))


def fit(module, folder, save, callbacks=(), resumed=None, **options):
    notes, keep = Notes(), ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **save)
    own = [] if isinstance(module, BaseTask) else [ExactResume()]
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(max_epochs=4, accelerator="cpu", callbacks=[*callbacks, notes, *own, keep], **quiet, **options)
    trainer.fit(module, ckpt_path=resumed)
    return notes.ends, trainer.global_step, module.state_dict(), trainer.optimizers[0].param_groups[0]["lr"]


def same_when_resumed(make, tmp_path, save, callbacks=tuple, ends=lambda found: found, **options):
    ends_of, *whole = fit(make(), tmp_path / "whole", save, callbacks(), **options)
    files = sorted((tmp_path / "whole").glob("*.ckpt"), key=lambda each: each.stat().st_mtime_ns)
    for file in files[:-1]:
        later, *resumed = fit(make(), tmp_path / file.stem, save, callbacks(), str(file), **options)
        assert resumed[0] == whole[0], file.stem
        assert all(torch.equal(resumed[1][name], value) for name, value in whole[1].items()), file.stem
        assert resumed[2] == whole[2], file.stem
        assert later == ends_of[len(ends_of) - len(later) :], file.stem
    return len(files)


@pytest.mark.parametrize("kind", [Own, OwnTask])
@pytest.mark.parametrize("monitor", ["val", "loss_epoch"])
@pytest.mark.parametrize(
    ("save", "count"), [(END_OF_EPOCH, 4), (IN_VALIDATION, 4), ({"every_n_train_steps": 1}, 24)], ids=str
)
def test_a_plateau_sees_every_epoch(tmp_path, kind, monitor, save, count):
    assert same_when_resumed(lambda: kind(monitor), tmp_path, save) == count


@pytest.mark.parametrize("save", [IN_VALIDATION, {"every_n_train_steps": 3}], ids=str)
def test_a_plateau_within_epochs_sees_every_validation(tmp_path, save):
    assert same_when_resumed(lambda: Own("val", "step", 3), tmp_path, save, val_check_interval=3) == 8


def test_a_plateau_of_steps_sees_every_step(tmp_path):
    assert same_when_resumed(lambda: Own("loss_step", "step", 2), tmp_path, {"every_n_train_steps": 1}) == 24


@pytest.mark.parametrize(("save", "interval"), [(IN_VALIDATION, 6), ({"every_n_train_steps": 3}, 3)], ids=str)
def test_early_stopping_counts_every_validation(tmp_path, save, interval):
    def stops():
        return (EarlyStopping("val", patience=2, min_delta=10.0),)

    assert same_when_resumed(Own, tmp_path, save, stops, val_check_interval=interval) >= 3


@pytest.mark.parametrize("kind", [Own, OwnTask])
@pytest.mark.parametrize("at", [3, 6, 12])
@pytest.mark.parametrize("stops", [None, "val", "loss_epoch"])
def test_a_validation_that_sigterm_cut_short_is_begun_anew(tmp_path, kind, at, stops):
    """Twice in a row, with what it draws: of its loader, and in a module of one's own."""

    class Draws(kind):
        def validation_step(self, batch, batch_idx):
            super().validation_step([batch[0] + torch.rand(())], batch_idx)

    def callbacks(signal=None):
        signals = [] if signal is None else [Signal(SIGTERM, signal, validating=True)]
        at_end = stops == "loss_epoch"
        stop = EarlyStopping(
            stops or "val", patience=2 if at_end else 4, min_delta=10.0, check_on_train_epoch_end=at_end
        )
        return [*signals, SaveOnStop(), *([stop] if stops else [])]

    def run(name, signal=None, resumed=None):
        module = Draws(None if stops else "val")
        folder = tmp_path / name
        return fit(module, folder, {"every_n_train_steps": 2}, callbacks(signal), resumed, val_check_interval=3)

    whole, resumed = run("whole"), None
    for name in ("told", "again"):
        with pytest.raises(SIGTERMException):
            run(name, at, resumed)
        (resumed,) = map(str, (tmp_path / name).glob("stopped-*.ckpt"))
    found = run("resumed", None, resumed)
    assert found[0] == whole[0][len(whole[0]) - len(found[0]) :]
    assert (found[1], found[3]) == (whole[1], whole[3])
    assert all(torch.equal(found[2][name], value) for name, value in whole[2].items())


@pytest.mark.parametrize(
    ("exact", "options", "why"),
    [
        (False, {}, "no ExactResume"),
        (True, {"val_check_interval": "00:00:00:00"}, "is a time"),
        (True, {"max_steps": 6}, "the last of max_steps"),
        (True, {"max_steps": 7}, None),
    ],
)
def test_a_validation_that_cannot_be_begun_anew_is_told_of(tmp_path, exact, options, why):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    told = [SaveOnStop(), Signal(SIGTERM, 6, validating=True), ModelCheckpoint(tmp_path)]
    trainer = Trainer(max_epochs=3, accelerator="cpu", callbacks=told + [ExactResume()] * exact, **quiet, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(SIGTERMException):
            trainer.fit(Own())
    found = [str(each.message) for each in said if "cut the validation at step 6 short" in str(each.message)]
    assert [why in each for each in found] == [True] * (why is not None)
    assert "run" not in vars(trainer.fit_loop.epoch_loop.val_loop)


def test_what_replaces_a_validation_is_called_and_comes_back(tmp_path):
    calls = []

    class Wraps(Callback):
        def on_fit_start(self, trainer, module):
            loop = trainer.fit_loop.epoch_loop.val_loop
            run = loop.run
            loop.run = self.mine = lambda: (calls.append(trainer.global_step), run())[1]

    wraps = Wraps()
    fit(Own(), tmp_path, END_OF_EPOCH, [wraps, SaveOnStop(), SaveOnStop()])
    assert calls == [0, 6, 12, 18, 24]  # the sanity check runs the same loop


def test_what_is_logged_otherwise_from_now_on_is_no_error(tmp_path):
    ends, *_ = fit(Own(), tmp_path, {"every_n_train_steps": 2})
    module = Own()
    module.shown = True
    found, *_ = fit(module, tmp_path / "resumed", {"every_n_train_steps": 2}, resumed=str(tmp_path / "step=8.ckpt"))
    assert found == ends[1:]


def test_numbers_of_ones_own_among_the_metrics_are_saved(tmp_path):
    class Puts(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.callback_metrics.update(own=0.5, words="none")

    def steps():
        return fit(Own(), tmp_path, {"every_n_train_steps": 2}, [Puts()])

    with pytest.raises(ValueError, match="could not convert"):  # of Notes, at the end of an epoch
        steps()
    assert torch.load(tmp_path / "step=4.ckpt", weights_only=True)["attnswap_resume"]["metrics"][0]["own"] == 0.5


@pytest.mark.parametrize("kind", [Own, OwnTask])
def test_entries_of_ones_own_in_a_checkpoint_are_nobody_elses(tmp_path, kind):
    class Saves(kind):
        def on_save_checkpoint(self, checkpoint):
            super().on_save_checkpoint(checkpoint)
            checkpoint |= {"metrics": {"best": 0.5}, "logged": 3, "finetuning": "none"}

    assert same_when_resumed(lambda: Saves("val"), tmp_path, IN_VALIDATION) == 4


@pytest.mark.parametrize("at", [4, 6, 12])
def test_a_trainer_that_has_fitted_before_goes_on_as_a_new_one(tmp_path, at):
    ends, *whole = fit(Own(), tmp_path, {"every_n_train_steps": 2})
    module, notes = Own(), Notes()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(max_epochs=4, accelerator="cpu", callbacks=[notes, ExactResume()], **quiet)
    trainer.fit(Own())
    notes.ends.clear()
    trainer.fit(module, ckpt_path=str(tmp_path / f"step={at}.ckpt"))
    assert notes.ends == ends[len(ends) - len(notes.ends) :]
    assert all(torch.equal(module.state_dict()[name], value) for name, value in whole[1].items())
    assert (
        not {"advance", "on_advance_start", "run"} & (vars(trainer.fit_loop) | vars(trainer.fit_loop.epoch_loop)).keys()
    )


def test_epochs_that_the_module_ends_itself_end_once(tmp_path):
    class Ends(Own):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 4 else None

    assert same_when_resumed(Ends, tmp_path, END_OF_EPOCH) == 4


@pytest.mark.parametrize("at", [6, 12])
def test_behind_a_checkpoint_of_lightning_alone_the_next_epoch_starts(tmp_path, at):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    keep = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=6)
    Trainer(max_epochs=2, accelerator="cpu", callbacks=[keep], **quiet).fit(Own())

    class Starts(Callback):
        epochs = ()

        def on_train_epoch_start(self, trainer, module):
            self.epochs += (trainer.current_epoch,)

    starts = Starts()
    run = Trainer(
        max_epochs=4, accelerator="cpu", callbacks=[starts, ExactResume()], enable_checkpointing=False, **quiet
    )
    run.fit(Own(), ckpt_path=str(tmp_path / f"step={at}.ckpt"))
    assert starts.epochs == tuple(range(at // 6, 4))
