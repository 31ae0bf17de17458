"""Somebody's own module, killed within an epoch and resumed, draws and reads what the uninterrupted fit does."""

import warnings
from importlib import import_module

import pytest
import torch
from attnswap.datamodules import ResumableLoader
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_tasks.callbacks import ExactResume
from lightning_tasks.files.logged import _HOW


class Killed(RuntimeError):
    """What ends the first run."""


def module_of(package, reads_steps, kill_at=None, shuffle=True):
    class Own(getattr(import_module(package), "BaseTask" if package == "lightning_tasks" else "LightningModule")):
        """Draws dropout, and notes the samples that it is given."""

        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
            self.seen = []

        def build_model(self):
            return torch.nn.Identity()  # as a task must

        def train_dataloader(self):
            data = TensorDataset(torch.arange(24.0).reshape(12, 2) / 24)
            return ResumableLoader(data, batch_size=2, shuffle=shuffle)

        def training_step(self, batch, batch_idx):
            if self.global_step == kill_at:
                raise Killed
            self.seen.append(batch[0][:, 0].tolist())
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
            total = self.trainer.estimated_stepping_batches if reads_steps else 18
            schedule = {"scheduler": OneCycleLR(optimizer, 1e-3, total_steps=total), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    torch.manual_seed(3)
    return Own()


def fitted(package, folder, module, every, resumed=None, callbacks=None):
    pl = import_module("lightning.pytorch" if package == "lightning_tasks" else package)
    keep = import_module(f"{pl.__name__}.callbacks").ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=-1)
    own = [ExactResume()] if package != "lightning_tasks" else []
    options = {"max_epochs": 3, "accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    options |= {"enable_model_summary": False, "callbacks": [keep, *(own if callbacks is None else callbacks)]}
    pl.Trainer(**options).fit(module, ckpt_path=resumed)
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("package", "reads_steps", "shuffle", "at"),
    [
        ("lightning.pytorch", True, True, 8),
        ("lightning.pytorch", True, False, 6),  # at the end of an epoch
        ("lightning.pytorch", False, True, 14),
        ("pytorch_lightning", True, False, 3),
        ("lightning_tasks", True, True, 8),  # a task of one's own has what the callback does
    ],
)
def test_a_killed_fit_of_any_module_goes_on_bitwise(tmp_path, package, reads_steps, shuffle, at):
    pytest.importorskip(package)
    whole = module_of(package, reads_steps, shuffle=shuffle)
    expected = fitted(package, tmp_path / "whole", whole, 18)
    killed = module_of(package, reads_steps, at, shuffle)
    with pytest.raises(Killed):
        fitted(package, tmp_path / "killed", killed, at)
    (saved,) = (tmp_path / "killed").glob("*.ckpt")
    torch.manual_seed(99)
    resumed = module_of(package, reads_steps, shuffle=shuffle)
    found = fitted(package, tmp_path / "resumed", resumed, 18, str(saved))
    assert killed.seen + resumed.seen == whole.seen
    assert all(torch.equal(found[name], value) for name, value in expected.items())


class Unfreezes(BaseFinetuning):
    """Trains the first layer, and a norm, from the second epoch on."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0], train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


@pytest.mark.parametrize("at", [6, 8, 11])  # the end of an epoch, within the next, and later
@pytest.mark.parametrize("package", ["lightning.pytorch", "lightning_tasks"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
        Unfreezes,
        lambda: BackboneFinetuning(1, lambda epoch: 1.0, backbone_initial_lr=1e-3),
    ],
    ids=["accumulation", "finetuning", "backbone"],
)
def test_what_lightnings_callbacks_change_from_epoch_to_epoch_is_as_it_was(tmp_path, package, make, at):
    def fit(folder, kill_at=None, resumed=None):
        module = module_of(package, False)
        module.net[0] = torch.nn.Sequential(module.net[0], torch.nn.BatchNorm1d(8))
        module.backbone, module.epochs = module.net[0], []
        module.configure_optimizers = lambda: torch.optim.SGD(module.net[2].parameters(), lr=0.1)
        module.on_train_epoch_start = lambda: module.epochs.append(module.current_epoch)
        own = [ExactResume()] if package == "lightning.pytorch" else []
        found = fitted(package, tmp_path / folder, module, kill_at or 1_000, resumed, [make(), *own])
        return found, module.epochs, [each.requires_grad for each in module.parameters()], module.trainer.global_step

    expected = fit("whole", at)
    resumed = fit("resumed", resumed=str(next((tmp_path / "whole").glob(f"*step={at}.ckpt"))))
    assert all(torch.equal(resumed[0][name], value) for name, value in expected[0].items())
    assert resumed[1] == expected[1][3 - len(resumed[1]) :]
    assert at > 6 or resumed[1] == [1, 2]
    assert resumed[2:] == expected[2:]


class Halves(Callback):
    """Halves the rate at each start of an epoch, and notes them."""

    def __init__(self):
        self.epochs = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.epochs.append(trainer.current_epoch)
        for group in trainer.optimizers[0].param_groups:
            group["lr"] /= 2


@pytest.mark.parametrize("package", ["lightning.pytorch", "lightning_tasks"])
@pytest.mark.parametrize(("at", "accumulated"), [(3, 1), (6, 1), (9, 1), (1, 2), (3, 2), (1, 3)])
def test_each_epoch_starts_once_where_validations_save(tmp_path, package, at, accumulated):
    """After 3 batches of 6; what a window of accumulation has gathered there is lost, and that is said."""

    def fit(resumed=None):
        module, halves = module_of(package, False), Halves()
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
        module.val_dataloader, module.validation_step = module.train_dataloader, lambda *_: None
        keep = ModelCheckpoint(tmp_path / str(resumed is None), save_top_k=-1, filename="{step}")
        own = [ExactResume()] if package == "lightning.pytorch" else []
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        quiet |= {"val_check_interval": 3, "accumulate_grad_batches": accumulated, "callbacks": [keep, halves, *own]}
        trainer = Trainer(max_epochs=3, accelerator="cpu", **quiet)
        trainer.fit(module, ckpt_path=resumed)
        return module, halves.epochs, trainer.fit_loop.epoch_progress.current

    whole, epochs, progress = fit()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        resumed, later, after = fit(str(tmp_path / "True" / f"step={at}.ckpt"))
    is_within = accumulated == 2 and at == 1  # behind 3 batches
    assert any("behind 1 of the batches that a step accumulates" in str(each.message) for each in said) == is_within
    assert all(map(torch.equal, whole.parameters(), resumed.parameters())) != is_within
    assert later == epochs[3 - len(later) :]
    assert after == progress


class Asks(Callback):
    """Makes the loaders after ExactResume has had its turn."""

    def on_fit_start(self, trainer, pl_module):
        assert trainer.estimated_stepping_batches


def test_a_later_hook_may_ask_for_the_number_of_steps(tmp_path):
    callbacks = [ExactResume(), Asks()]
    whole = module_of("lightning.pytorch", False, shuffle=True)
    expected = fitted("lightning.pytorch", tmp_path / "whole", whole, 18, callbacks=callbacks)
    killed = module_of("lightning.pytorch", False, 8, True)
    with pytest.raises(Killed):
        fitted("lightning.pytorch", tmp_path / "killed", killed, 8, callbacks=callbacks)
    (saved,) = (tmp_path / "killed").glob("*.ckpt")
    resumed = module_of("lightning.pytorch", False, shuffle=True)
    found = fitted("lightning.pytorch", tmp_path / "resumed", resumed, 18, str(saved), callbacks)
    assert killed.seen + resumed.seen == whole.seen
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("at", [8, 11])
def test_a_schedule_on_a_plateau_sees_the_epoch_that_was_resumed(tmp_path, at):
    def module(kill_at=None):
        made = module_of("lightning.pytorch", False, kill_at)

        def configure():
            optimizer = torch.optim.SGD(made.parameters(), lr=1e-3)
            made.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made.plateau, "monitor": "batches"}}

        made.configure_optimizers = configure
        made.on_train_batch_end = lambda *_: made.log("batches", 1.0)
        return made

    callbacks = [ExactResume()]
    whole = module()
    expected = fitted("lightning.pytorch", tmp_path / "whole", whole, 18, callbacks=callbacks)
    killed = module(at)
    with pytest.raises(Killed):
        fitted("lightning.pytorch", tmp_path / "killed", killed, at, callbacks=callbacks)
    (saved,) = (tmp_path / "killed").glob("*.ckpt")
    resumed = module()
    found = fitted("lightning.pytorch", tmp_path / "resumed", resumed, 18, str(saved), callbacks)
    assert resumed.plateau.state_dict() == whole.plateau.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_without_it_lightning_begins_the_epoch_anew(tmp_path):
    """Where this fails, Lightning has mended it, and the callback need not."""
    package = "lightning.pytorch"
    with pytest.raises(Killed):
        fitted(package, tmp_path, module_of(package, True, 2), 2, callbacks=[import_module(package).Callback()])
    (saved,) = tmp_path.glob("*.ckpt")
    resumed, whole = module_of(package, True), module_of(package, True)
    fitted(package, tmp_path / "resumed", resumed, 18, str(saved), [import_module(package).Callback()])
    fitted(package, tmp_path / "whole", whole, 18)
    assert resumed.seen[0] == whole.seen[0]  # where it should be that of step 2


LOGGED = {
    "how": {**dict.fromkeys(_HOW), "reduce_fx": "mean"},
    "synced": [False, False],
    "value": torch.ones(()),
    "rows": 1,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("random_states", "of yesterday"),
        ("random_states", [[]]),
        ("random_states", [[1, 2]]),
        ("finetuning", ["trains"]),
        ("finetuning", {"trains": {}}),
        ("finetuning", {"trains": {"weight": "yes"}, "tracks": {}}),
        ("lost_gradients", "two"),
        ("open_batch", 1.0),
        ("metrics", [{"val": 1.0}]),
        ("logged", [{"training_step.loss": {"value": 1.0}}]),
        ("logged", [{"loss": {**LOGGED, "how": {**LOGGED["how"], "reduce_fx": ["mean"]}}}]),
        ("logged", [{"loss": {**LOGGED, "rows": 1.5}}]),
        ("another", True),
    ],
)
def test_a_checkpoint_whose_entry_is_of_another_kind_is_refused(tmp_path, name, value):
    package = "lightning.pytorch"
    with pytest.raises(Killed):
        fitted(package, tmp_path, module_of(package, True, 2), 2)
    (saved,) = tmp_path.glob("*.ckpt")
    content = torch.load(saved, weights_only=True)
    torch.save(content | {"attnswap_resume": content["attnswap_resume"] | {name: value}}, saved)
    with pytest.raises(ValueError, match=f"the checkpoint's {name} are none that attnswap saves, but .*--init_from"):
        fitted(package, tmp_path / "resumed", module_of(package, True), 18, str(saved))


@pytest.mark.parametrize("at", [6, 8])
@pytest.mark.parametrize("reads_steps", [True, False])
@pytest.mark.parametrize("package", ["lightning.pytorch", "lightning_tasks"])
def test_samples_that_are_held_out_stay_so(tmp_path, package, reads_steps, at):
    """They are drawn as the loader is made."""

    def module():
        made = module_of(package, reads_steps)

        def loader():
            data = TensorDataset(torch.arange(48.0).reshape(24, 2) / 48)
            return ResumableLoader(torch.utils.data.random_split(data, [12, 12])[0], batch_size=2, shuffle=True)

        made.train_dataloader = loader
        return made

    whole, resumed = module(), module()
    expected = fitted(package, tmp_path, whole, at)
    torch.manual_seed(3)
    module_of(package, reads_steps)  # as the first run drew
    found = fitted(package, tmp_path / "resumed", resumed, 1_000, str(next(tmp_path.glob(f"*step={at}.ckpt"))))
    assert {tuple(each) for each in resumed.seen} <= {tuple(each) for each in whole.seen}
    assert all(torch.equal(found[name], value) for name, value in expected.items())


class DrawsItsSeed(DataLoader):
    """With a state, as torchdata's StatefulDataLoader; its iterator draws a seed from the global random state."""

    given = skip = 0

    def __iter__(self):
        return self.rest(super().__iter__())

    def rest(self, batches):
        skip, self.skip = self.skip, 0
        for self.given, batch in enumerate(batches, start=1):
            if self.given > skip:
                yield batch

    def state_dict(self):
        return {"given": self.given % len(self)}

    def load_state_dict(self, state):
        self.skip = state["given"]


@pytest.mark.parametrize("reads_steps", [True, False])
@pytest.mark.parametrize(("kind", "at"), [(DrawsItsSeed, 2), (DrawsItsSeed, 6), (DrawsItsSeed, 8), (DataLoader, 6)])
def test_what_an_iterator_draws_is_drawn_when_the_whole_run_did(tmp_path, reads_steps, kind, at):
    """In front of a checkpoint within an epoch; behind one, even of its last batch, that of the next epoch."""

    def module():
        made = module_of("lightning.pytorch", reads_steps)
        data = TensorDataset(torch.arange(24.0).reshape(12, 2) / 24)
        made.train_dataloader = lambda: kind(data, batch_size=2, shuffle=kind is DataLoader)
        return made

    whole, resumed = module(), module()
    expected = fitted("lightning.pytorch", tmp_path, whole, at)
    found = fitted("lightning.pytorch", tmp_path / "resumed", resumed, 1_000, str(next(tmp_path.glob(f"*={at}.ckpt"))))
    assert resumed.seen == whole.seen[at:]
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("own", [False, True])
def test_loaders_that_are_shuffled_alike_are_told_of(tmp_path, own):
    module = module_of("lightning.pytorch", False)
    data = TensorDataset(torch.arange(24.0).reshape(12, 2) / 24)
    step = module.training_step
    module.training_step = lambda batch, batch_idx: step(batch["a"], batch_idx)
    module.train_dataloader = lambda: {
        name: ResumableLoader(
            data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(seed) if own else None
        )
        for seed, name in enumerate("ab")
    }
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fitted("lightning.pytorch", tmp_path, module, 18)
    assert any("are shuffled alike" in str(each.message) for each in said) is not own


@pytest.mark.parametrize("reads_steps", [True, False])
def test_a_loader_is_told_its_place_once(tmp_path, reads_steps):
    calls = []

    class Notes(ResumableLoader):
        def load_state_dict(self, state):
            calls.append("load_state_dict")
            super().load_state_dict(dict(state))
            state.clear()  # it is theirs

        def __iter__(self):
            calls.append("iter")
            return super().__iter__()

    def module():
        made = module_of("lightning.pytorch", reads_steps)
        data = TensorDataset(torch.arange(24.0).reshape(12, 2) / 24)
        made.train_dataloader = lambda: Notes(data, batch_size=2, shuffle=True)
        return made

    whole, resumed = module(), module()
    fitted("lightning.pytorch", tmp_path, whole, 8)
    calls.clear()
    fitted("lightning.pytorch", tmp_path / "resumed", resumed, 1_000, str(next(tmp_path.glob("*step=8.ckpt"))))
    assert resumed.seen == whole.seen[8:]
    begun = calls.index("load_state_dict")
    assert calls[begun:] == ["load_state_dict", "iter", "iter"]  # of the second epoch and the third


@pytest.mark.parametrize("where", ["on_fit_start", "__len__"])
def test_a_resumed_fit_that_failed_before_it_ran_leaves_nothing_to_the_next(tmp_path, where):
    fitted("lightning.pytorch", tmp_path, module_of("lightning.pytorch", True), 8)

    class Fails(Callback):
        fails = True

        def on_fit_start(self, trainer, module):
            self.fail("on_fit_start")

        def fail(self, place):
            if self.fails and place == where:
                raise Killed

        def on_train_start(self, trainer, module):
            self.drawn = torch.get_rng_state()

    fails, own = Fails(), module_of("lightning.pytorch", False)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer, plain = (
        Trainer(max_epochs=3, accelerator="cpu", callbacks=kept, **quiet) for kept in ([ExactResume(), fails], [fails])
    )
    own.configure_optimizers = lambda: torch.optim.SGD(own.parameters(), lr=1e-3)

    class Counted(ResumableLoader):
        def __len__(self):  # an error in train_dataloader() leaves DataLoader as Lightning changes it for that call
            fails.fail("__len__")
            return super().__len__()

    data = TensorDataset(torch.arange(24.0).reshape(12, 2) / 24)
    own.train_dataloader = lambda: Counted(data, batch_size=2, shuffle=True)
    with pytest.raises(Killed):
        trainer.fit(own, ckpt_path=str(next(tmp_path.glob("*step=8.ckpt"))))
    fails.fails, drawn = False, []
    for each in (trainer, plain):
        torch.manual_seed(5)
        each.fit(own)
        drawn.append(fails.drawn)
    assert torch.equal(*drawn)


def test_a_fit_that_resumes_nothing_is_left_alone(tmp_path):
    module = module_of("lightning.pytorch", True)
    watched = fitted("lightning.pytorch", tmp_path / "a", module, 18)
    alone, other = module_of("lightning.pytorch", True), import_module("lightning.pytorch").Callback()
    plain = fitted("lightning.pytorch", tmp_path / "b", alone, 18, callbacks=[other])
    assert module.seen == alone.seen
    assert all(torch.equal(watched[name], value) for name, value in plain.items())


class SaveAtStart(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def test_a_checkpoint_from_the_start_of_an_epoch_has_that_epoch_before_it(tmp_path):
    """Lightning alone leaves out all but one of its batches."""
    package, path = "lightning.pytorch", tmp_path / "start.ckpt"
    whole = module_of(package, True)
    expected = fitted(package, tmp_path, whole, 18, callbacks=[ExactResume(), SaveAtStart(path)])
    resumed = module_of(package, True)
    found = fitted(package, tmp_path / "resumed", resumed, 18, str(path))
    assert resumed.seen == whole.seen[6:]
    assert all(torch.equal(found[name], value) for name, value in expected.items())
