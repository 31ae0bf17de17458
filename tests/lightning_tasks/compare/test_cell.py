"""One cell: its result, its pair, and what makes it another cell."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import BatchEncoding

from lightning_tasks.compare.cell import RESULT, last_error
from lightning_tasks.compare.cluster.run import run_cell
from lightning_tasks.compare.pairing import RecordPairing
from lightning_tasks.compare.plan import plan_cells
from lightning_tasks.compare.tables import unpaired_seeds
from lightning_tasks.recipes.schema import override_arguments
from lightning_tasks.recipes.variants import Variant, read_variants
from tests.lightning_tasks.demo import DemoModule


def test_a_finished_cell_has_one_whole_result(cells):
    slow = cells[0]
    assert not slow.is_finished()
    run_cell(slow)
    assert slow.is_finished()
    assert {row["metric"] for row in slow.result()["rows"]} >= {"val/loss", "val/perplexity"}
    assert not list(slow.folder.rglob("*.ckpt"))
    assert (slow.folder / "log.txt").is_file()


def test_a_cell_can_test_what_it_fitted(cells):
    fitted, tested = cells[0], replace(cells[0], test=True)
    run_cell(fitted)
    assert not tested.is_finished()
    run_cell(tested)
    assert "test/loss" in {row["metric"] for row in tested.result()["rows"]}


def test_a_kept_checkpoint_has_the_weights_that_were_tested_and_changes_no_number(demo, tmp_path):
    keep_tested = {"class_path": "tests.lightning_tasks.demo.KeepTested", "init_args": {"folder": str(tmp_path)}}
    variant = Variant("plain", str(demo), override_arguments({"trainer.callbacks+": keep_tested}), test=True)
    (plain,) = plan_cells([variant], [0], tmp_path / "out")
    run_cell(plain)
    rows = plain.result()["rows"]
    assert not plain.checkpoint.exists()
    kept = replace(plain, keep=True)
    assert kept.is_finished()  # whether it is kept is no setting
    run_cell(kept)
    assert kept.result()["rows"] == rows
    found, tested = (torch.load(path, weights_only=True) for path in (kept.checkpoint, tmp_path / "tested.pt"))
    assert found["global_step"] == 2
    assert all(torch.equal(value, tested[name]) for name, value in found["state_dict"].items())
    module = DemoModule.load_from_checkpoint(kept.checkpoint)
    assert torch.equal(module.layer.weight, tested["layer.weight"])


def test_one_seed_means_one_start_and_one_order_of_the_data(cells):
    for cell in cells:
        run_cell(cell)
    slow, fast, watched = (cell.result() for cell in cells)
    assert slow["initial_weights"] == fast["initial_weights"] == watched["initial_weights"]
    assert slow["training_data"] == fast["training_data"] == watched["training_data"]
    assert slow["rows"] != fast["rows"]
    assert unpaired_seeds(cells) == []


@dataclass
class Held:
    ids: torch.Tensor


@pytest.mark.parametrize(
    "batch_of",
    [
        lambda ids: (ids, ids),
        lambda ids: {"text": {"ids": ids}},
        lambda ids: [[ids], "labels"],
        lambda ids: BatchEncoding({"input_ids": ids}),
        Held,
        lambda ids: ids[None].to_sparse(),
        lambda ids: ids[None].to_sparse_csr(),
        lambda ids: torch.complex(ids.float(), ids.float()).conj(),
        lambda ids: torch.nested.nested_tensor([ids, ids[1:]], layout=torch.jagged),
    ],
)
def test_other_data_are_seen_in_batches_of_every_form(batch_of):
    digests = set()
    for first in (0, 1):
        pairing = RecordPairing()
        pairing.on_train_batch_start(None, None, batch_of(torch.arange(first, 4)), 0)
        digests.add(pairing.training_data)
    assert len(digests) == 2


def test_cells_that_are_no_pair_are_named(demo, tmp_path):
    wide = Variant("wide", str(demo), ("--model.init_bias=true",))
    cells = plan_cells([Variant("plain", str(demo)), wide], [0], tmp_path / "out")
    for cell in cells:
        run_cell(cell)
    assert unpaired_seeds(cells) == ["wide seed 0: initial weights differ from those of plain"]


def test_cells_that_are_no_pair_are_named_where_the_first_configuration_is_missing(demo, tmp_path):
    """References pair what is there: the second with the third, say."""
    wide = Variant("wide", str(demo), ("--model.init_bias=true",))
    cells = plan_cells([Variant("plain", str(demo)), Variant("other", str(demo)), wide], [0, 1], tmp_path / "out")
    for cell in cells[:2] + cells[4:]:
        run_cell(cell)
    assert unpaired_seeds(cells) == ["wide seed 1: initial weights differ from those of other"]


def test_another_setting_makes_another_cell(cells, comparison, tmp_path):
    run_cell(cells[0])
    changed = plan_cells(read_variants(str(comparison)), [0], tmp_path / "out", ["--trainer.max_steps=1"])
    assert not changed[0].is_finished()


def test_a_comment_or_another_place_makes_no_other_cell(cells, tmp_path):
    moved = tmp_path / "moved.yaml"
    moved.write_text("# said otherwise\n" + Path(cells[0].config).read_text())
    assert replace(cells[0], config=str(moved)).fingerprint == cells[0].fingerprint
    moved.write_text(moved.read_text() + "\nckpt_path: other\n")
    assert replace(cells[0], config=str(moved)).fingerprint != cells[0].fingerprint


def test_a_half_written_cell_is_run_again(cells):
    cell = cells[0]
    (cell.folder / "runs").mkdir(parents=True)
    (cell.folder / f"{RESULT}.partial").write_text('{"rows": [')
    assert not cell.is_finished()
    run_cell(cell)
    assert cell.is_finished()
    assert not (cell.folder / f"{RESULT}.partial").exists()


PEER = "another process of this run ended, and says why itself; RuntimeError: gloo"


@pytest.mark.parametrize(
    ("printed", "error"),
    [
        ("usage: x\nerror: Parser key:\n  Key 'a' is not expected\n\n", "error: Parser key: Key 'a' is not expected"),
        ("step 1\nattnswap: error: no such file\n", "attnswap: error: no such file"),
        ("Traceback:\n  line\nKeyError: 'x'\nValueError: bad\n", "ValueError: bad"),
        ("Killed\n", "Killed"),
        (f"error: RuntimeError: its own\nattnswap: error: {PEER}\n\nerror: {PEER}\n", "error: RuntimeError: its own"),
        (f"step 1\nattnswap: error: {PEER}\n", f"attnswap: error: {PEER}"),
        ("", ""),
    ],
)
def test_the_error_that_a_log_ends_with(printed, error):
    assert last_error(printed) == error
