"""What is removed of a run is a checkpoint of it, whatever a checkpoint that is resumed says."""

import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_tasks.files.checkpoint_io import CheckedCheckpointIO


class Logs(BoringModel):
    def training_step(self, batch, batch_idx):
        self.log("index", float(batch_idx))
        return super().training_step(batch, batch_idx)


def fit(steps, path=None):
    best = ModelCheckpoint(dirpath="run", monitor="index", save_top_k=2, every_n_train_steps=2)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = Trainer(
        max_steps=steps, callbacks=[best], plugins=[CheckedCheckpointIO()], limit_val_batches=0, **options
    )
    trainer.fit(Logs(), ckpt_path=path, weights_only=True)
    return best


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_that_names_other_folders_as_its_best_removes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = torch.load(fit(4).best_model_path, weights_only=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/work").touch()
    victim = f"{tmp_path}/run/../mine"
    (state,) = (state for name, state in content["callbacks"].items() if "ModelCheckpoint" in name)
    state["best_k_models"] = {victim: torch.tensor(98.0), f"{victim}/work": torch.tensor(99.0)}
    state.update(kth_best_model_path=victim, kth_value=torch.tensor(98.0))
    torch.save(content, "evil.ckpt")
    fit(10, "evil.ckpt")
    assert (tmp_path / "mine/work").exists()


@pytest.mark.filterwarnings("ignore")
def test_the_best_of_a_run_are_kept_alone(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    best = fit(10)
    assert {str(path) for path in (tmp_path / "here/run").iterdir()} == set(best.best_k_models)
    assert len(best.best_k_models) == 2


def test_what_is_no_checkpoint_of_the_run_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    files = CheckedCheckpointIO()
    files.save_checkpoint({}, "a/../a/one.ckpt")
    files.remove_checkpoint("a/../a/one.ckpt")  # where the run writes
    files.remove_checkpoint("a/none.ckpt")
    assert not os.listdir("a")
    Path("b").mkdir()
    for path in ("b", "a/../b"):
        with pytest.warns(UserWarning, match="is not removed: it is no checkpoint"):
            files.remove_checkpoint(path)
    Path("b/meta.pt").touch()
    files.remove_checkpoint("b")  # a sharded one
    assert not Path("b").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("victim", ["metrics.csv", "link.ckpt", "folder/notes.txt", "sub", "outside/other.ckpt"])
def test_of_the_runs_own_folder_only_checkpoints_are_removed(tmp_path, monkeypatch, victim):
    monkeypatch.chdir(tmp_path)
    content = torch.load(fit(4).best_model_path, weights_only=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/other.ckpt").touch()
    for folder in ("folder", "sub"):
        (tmp_path / "run" / folder).mkdir()
    for name in ("metrics.csv", "folder/notes.txt", "sub/meta.pt", "sub/work"):
        (tmp_path / "run" / name).touch()
    (tmp_path / "run/link.ckpt").symlink_to("metrics.csv")
    (tmp_path / "run/outside").symlink_to(tmp_path / "elsewhere")
    named = f"{tmp_path}/run/{victim}"
    (state,) = (state for name, state in content["callbacks"].items() if "ModelCheckpoint" in name)
    state["best_k_models"] = {named: torch.tensor(98.0), f"{named}/work": torch.tensor(99.0)}
    state.update(kth_best_model_path=named, kth_value=torch.tensor(98.0))
    torch.save(content, "evil.ckpt")
    before = {path for path in (tmp_path / "run").rglob("*") if path.suffix != ".ckpt"}
    fit(10, "evil.ckpt")
    assert before <= set((tmp_path / "run").rglob("*"))
    assert (tmp_path / "run/link.ckpt").is_symlink()
    assert (tmp_path / "elsewhere/other.ckpt").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_removes_the_former_best_in_folders_that_a_slash_in_a_name_makes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}

    def resume(steps, path=None):
        best = ModelCheckpoint(dirpath="run", filename="{step}/one", save_top_k=1, every_n_train_steps=2)
        plugins = [CheckedCheckpointIO()]
        trainer = Trainer(max_steps=steps, callbacks=[best], plugins=plugins, limit_val_batches=0, **options)
        trainer.fit(Logs(), ckpt_path=path, weights_only=True)
        return best.best_model_path

    first = Path(resume(2))
    first.rename("resumed.ckpt")
    first.touch()
    resume(4, "resumed.ckpt")
    assert [path.parent.name for path in Path("run").rglob("*.ckpt")] == ["step=4"]
