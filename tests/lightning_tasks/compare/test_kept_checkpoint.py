"""The checkpoint that a cell of the table keeps: used again by the command and in Python, and never half of one."""

import pytest
import torch
import yaml

from attention_modules.mechanisms.rpc import RPCAttention
from lightning_tasks.__main__ import main
from lightning_tasks.compare.cluster.run import run_cell
from lightning_tasks.compare.plan import plan_cells
from lightning_tasks.compare.reading import read_comparison
from lightning_tasks.compare.record import record_of
from lightning_tasks.files.load import load_swapped
from lightning_tasks.recipes.variants import read_variants
from lightning_tasks.runs.log import read_metrics
from tests.lightning_tasks.callbacks.modules import BuildsInConfigureModel


class SwappedText(BuildsInConfigureModel):
    """A foreign module that has its data with it."""

    def train_dataloader(self):
        from tests.lightning_tasks.callbacks.modules import batches

        return batches()

    val_dataloader = test_dataloader = train_dataloader


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A comparison of two swaps, and its finished cells."""
    folder = tmp_path_factory.mktemp("kept")
    trainer = {"accelerator": "cpu", "max_epochs": 1, "log_every_n_steps": 1}
    swap = {"class_path": "lightning_tasks.callbacks.SwapAttention", "init_args": {"mechanism": "rpc"}}
    base, comparison = folder / "base.yaml", folder / "kept.yaml"
    base.write_text(yaml.safe_dump({"model": {"class_path": f"{__name__}.SwappedText"}, "trainer": trainer}))
    variants = {"plain": None, "swapped": {"trainer.callbacks+": swap}}
    comparison.write_text(yaml.safe_dump({"base": str(base), "variants": variants, "test": True}))
    cells = plan_cells(read_variants(str(comparison)), [0], folder / "out", keep=True)
    for cell in cells:
        run_cell(cell)
    return comparison, {cell.name: cell for cell in cells}


@pytest.mark.parametrize("by", ["variant", "its own config.yaml"])
def test_the_command_tests_it_to_the_same_numbers(kept, tmp_path, monkeypatch, by):
    """By its own configuration the new run's folder is beside that of its fit, which the report goes on to show."""
    monkeypatch.chdir(tmp_path)
    comparison, cells = kept
    cell = cells["swapped"]
    (fitted,) = cell.folder.rglob("version_0")
    before = {*comparison.parent.rglob("metrics.csv")}
    config = f"{comparison}/swapped" if by == "variant" else str(fitted / "config.yaml")
    main(["test", config, "--ckpt_path", str(cell.checkpoint)])
    (log,) = {*tmp_path.rglob("metrics.csv"), *comparison.parent.rglob("metrics.csv")} - before
    tested = [row["value"] for row in read_metrics(log) if row["metric"] == "val/loss"]
    assert tested == [row["value"] for row in cell.result()["rows"] if row["metric"] == "val/loss"][-1:]
    shown = next(run for run in read_comparison(cell.folder.parents[2]).runs if run.config == "swapped")
    assert shown.folder == fitted


def test_it_loads_with_its_swap(kept):
    _, cells = kept
    loaded = load_swapped(SwappedText, cells["swapped"].checkpoint)
    assert sum(isinstance(each, RPCAttention) for each in loaded.modules()) == 2
    saved = torch.load(cells["swapped"].checkpoint, weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in loaded.state_dict().items())
    plain = SwappedText.load_from_checkpoint(cells["plain"].checkpoint)
    assert not any(isinstance(each, RPCAttention) for each in plain.modules())


def test_one_of_a_cell_that_was_killed_is_not_in_the_record_and_is_made_anew(kept, tmp_path):
    """It was killed while it was tested: its checkpoint is whole, and its result not yet there."""
    comparison, _ = kept
    cell = plan_cells(read_variants(str(comparison)), [1], tmp_path, keep=True)[0]
    cell.folder.mkdir(parents=True)
    cell.checkpoint.write_bytes(b"of the run that was killed")
    assert record_of([cell], [], {}).cells[0].checkpoint == ""
    run_cell(cell)
    assert record_of([cell], [], {}).cells[0].checkpoint == "cells/plain/seed_1/last.ckpt"
    assert torch.load(cell.checkpoint, weights_only=True)["global_step"] == 5
