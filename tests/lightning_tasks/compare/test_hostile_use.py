"""What says of a comparison something else than what was run: files edited meanwhile, old tables, seeds left out."""

import pytest
import yaml
from lightning.pytorch import Callback

from lightning_tasks.compare.cluster.run import run_cell
from lightning_tasks.compare.plan import plan_cells
from lightning_tasks.compare.tables import write_tables
from lightning_tasks.errors import UsageError
from lightning_tasks.recipes.schema import override_arguments
from lightning_tasks.recipes.variants import Variant, read_variants
from tests.lightning_tasks.compare.test_record import finish


def test_a_configuration_that_is_edited_while_a_cell_runs_is_another_cell(demo, tmp_path):
    """The result is of what was read at the start, and not of what stood there at the end."""
    edit = {"class_path": "tests.lightning_tasks.demo.EditFile", "init_args": {"path": str(demo)}}
    (cell,) = plan_cells([Variant("v", str(demo), override_arguments({"trainer.callbacks+": edit}))], [0], tmp_path)
    before = cell.fingerprint
    run_cell(cell)
    assert cell.fingerprint != before  # the file is another one now
    assert cell.result()["fingerprint"] == before
    assert not cell.is_finished()


def test_a_file_that_an_override_names_is_part_of_what_a_cell_is_asked(demo, tmp_path):
    named, missing = tmp_path / "trainer.yaml", tmp_path / "missing.yaml"
    named.write_text("max_steps: 2\n")
    overrides = (f"--trainer={named}", f"--model.note={missing}")
    (cell,) = plan_cells([Variant("v", str(demo), overrides)], [0], tmp_path / "out")
    before = cell.fingerprint
    named.write_text("# two of them\nmax_steps: 2\n")
    assert cell.fingerprint == before
    named.write_text("max_steps: 3\n")
    assert cell.fingerprint != before


def test_tables_of_cells_that_are_no_longer_there_are_taken_away(demo, tmp_path):
    cells = plan_cells([Variant("a", str(demo))], [0], tmp_path)
    finish(cells[0], 1.0)
    write_tables(cells, ["val/loss"], {}, tmp_path)
    files = [tmp_path / name for name in ("summary.md", "summary.csv", "tables.tex", "curves.png")]
    assert all(file.is_file() for file in files)
    changed = plan_cells([Variant("a", str(demo), ("--model.rate=3",))], [0], tmp_path)
    assert write_tables(changed, ["val/loss"], {}, tmp_path) is None
    assert not any(file.exists() for file in files)


def test_finished_seeds_that_a_table_leaves_out_are_said(demo, tmp_path):
    """Else the best of eight seeds could be shown, and nobody would know."""
    variants = [Variant("a", str(demo)), Variant("b", str(demo), ("--model.rate=3",))]
    cells = plan_cells(variants, [0, 1, 2], tmp_path)
    for cell in cells[:-1]:
        finish(cell, 1.0)
    write_tables([cell for cell in cells if cell.seed == 1], ["val/loss"], {}, tmp_path)
    said = (tmp_path / "summary.md").read_text()
    assert "Finished, with other seeds than these tables:\n\n- a: seeds 0, 2\n- b: seed 0\n" in said
    write_tables(cells, ["val/loss"], {}, tmp_path)
    assert "other seeds" not in (tmp_path / "summary.md").read_text()


def test_two_variants_of_one_name_are_refused(demo, tmp_path):
    path = tmp_path / "same.yaml"
    path.write_text(f"base: {demo}\nvariants: {{1: null, '1': {{model.rate: 0.5}}}}\n")
    with pytest.raises(UsageError, match="'1' twice, once as a number"):
        read_variants(str(path))
    path.write_text(f"base: {demo}\nvariants: {{a: null, a: {{model.rate: 0.5}}}}\n")
    with pytest.raises(UsageError, match="'a' is there twice"):
        read_variants(str(path))


@pytest.mark.parametrize("alone", [True, False])
def test_a_recipe_that_keeps_checkpoints_can_be_compared(demo, tmp_path, alone):
    """Lightning refuses a ModelCheckpoint where none are kept; what a cell keeps is its last.ckpt alone."""
    content = yaml.safe_load(demo.read_text())
    keep = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"save_last": True}}
    made = {"class_path": "tests.lightning_tasks.demo.make_monitor"}
    content["trainer"]["callbacks"] = keep if alone else [keep, made]
    demo.write_text(yaml.safe_dump(content))
    (cell,) = plan_cells([Variant("v", str(demo))], [0], tmp_path / "out", keep=True)
    run_cell(cell)
    assert [*cell.folder.rglob("*.ckpt")] == [cell.checkpoint]


def test_a_recipe_with_a_progress_bar_can_be_compared_and_looks_for_the_best_checkpoint(demo, tmp_path):
    content = yaml.safe_load(demo.read_text())
    bar = {"class_path": "lightning.pytorch.callbacks.TQDMProgressBar"}
    content["trainer"]["callbacks"] = [bar, {"class_path": f"{__name__}.LooksForTheBest"}]
    demo.write_text(yaml.safe_dump(content))
    (cell,) = plan_cells([Variant("v", str(demo))], [0], tmp_path / "out")
    run_cell(cell)


class LooksForTheBest(Callback):
    def on_fit_end(self, trainer, pl_module):
        best = trainer.checkpoint_callback
        assert best is None or (best.best_model_path, best.last_model_path) == ("", "")


@pytest.mark.parametrize("devices", ["auto", -1, None])
def test_a_cell_of_one_process_takes_one_device_wherever_it_runs(demo, tmp_path, monkeypatch, devices):
    """Of a machine with several, on which `attnswap cell` runs it by its plan."""
    monkeypatch.setattr("lightning.pytorch.accelerators.CPUAccelerator.auto_device_count", lambda: 2)
    content = yaml.safe_load(demo.read_text())
    content["trainer"] |= {"accelerator": "auto"} | ({} if devices is None else {"devices": devices})
    demo.write_text(yaml.safe_dump(content))
    (cell,) = plan_cells([Variant("v", str(demo))], [0], tmp_path / "out")
    run_cell(cell)
    (config,) = cell.folder.rglob("config.yaml")
    assert yaml.safe_load(config.read_text())["trainer"]["devices"] == 1
