"""What is removed of a run is a checkpoint of it, whatever a checkpoint that is resumed says."""

import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_tasks.checkpoint_files import CheckedCheckpointIO


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
