"""What a hostile user or machine does to a comparison: a full disk, damaged files, strange names, a hidden endpoint."""

import errno
import json
import os

import pytest
import yaml

from lightning_tasks.__main__ import main
from lightning_tasks.compare import tables
from lightning_tasks.compare.cell import RESULT
from lightning_tasks.compare.cluster.run import run_cell
from lightning_tasks.compare.formats import markdown
from lightning_tasks.compare.plan import plan_cells
from lightning_tasks.compare.record import read_record
from lightning_tasks.compare.summary import summarize
from lightning_tasks.compare.tables import write_tables
from lightning_tasks.recipes.variants import Variant, read_variants
from tests.lightning_tasks.compare.test_record import finish


@pytest.fixture
def done(demo, tmp_path):
    """A comparison file of two variants, and its command, whose cells are finished."""
    path, out = tmp_path / "done.yaml", tmp_path / "out"
    content = {"base": str(demo), "variants": {"a": None, "b": {"model.rate": 0.5}}}
    content |= {"metrics": ["val/loss", "val/top1"], "primary": "val/top1"}
    path.write_text(yaml.safe_dump(content))
    cells = plan_cells(read_variants(str(path)), [0, 1], out)
    for cell in cells:
        finish(cell, 1.0 + cell.seed)
    return cells, ["compare", str(path), "--seeds", "0:2", "--output", str(out)]


def refusal(command, capsys):
    with pytest.raises(SystemExit):
        main(command)
    return capsys.readouterr().err


@pytest.mark.parametrize("option", [["--seeds", "2:4"], ["--output", "out"], ["--metrics", "a"], ["--jobs", "2"]])
def test_an_option_given_twice_is_refused(done, capsys, option):
    said = refusal([*done[1], *option, *option], capsys)
    assert f"{option[0]} is given twice" in said


def test_the_primary_endpoint_cannot_be_left_out(done, tmp_path, capsys):
    said = refusal([*done[1], "--metrics", "val/loss"], capsys)
    assert "--metrics leaves out val/top1, the primary endpoint" in said
    assert not (tmp_path / "out" / "summary.md").exists()


def test_a_metric_given_twice_counts_once(done, tmp_path):
    main([*done[1], "--metrics", "val/top1,val/loss,val/loss"])
    assert read_record(tmp_path / "out").metrics == ["val/top1", "val/loss"]


def test_cells_that_never_logged_a_metric_of_the_table_are_named(done, tmp_path):
    cells = done[0]
    for cell in cells[2:]:
        finish(cell, 1.0, rows=[{"step": 5, "metric": "val/loss", "value": 1.0}])
    finish(cells[1], 1.0, rows=[{"step": 5, "metric": "val/top1", "value": 1.0}])
    write_tables(cells, ["val/loss", "val/top1"], {}, tmp_path / "out")
    text = (tmp_path / "out" / "summary.md").read_text()
    assert "Not logged:\n\n- val/loss: b seed 0\n- val/top1: a seed 1; b seed 1\n" in text


@pytest.mark.parametrize("name", ["a|b", "two\nlines", "`code`", "größe 重 🙂", "<b>", "a/../../b", "."])
def test_any_name_is_one_cell_of_a_table_and_one_folder(demo, tmp_path, name):
    cells = plan_cells([Variant(name, str(demo)), Variant("plain", str(demo))], [0], tmp_path / "out")
    assert cells[0].folder.resolve().parent.parent == (tmp_path / "out" / "cells").resolve()
    for cell in cells:
        finish(cell, 1.0)
    write_tables(cells, ["val/loss"], {}, tmp_path / "out")
    rows = [{"config": cell.name, "seed": 0, "step": 0, "metric": "m", "value": 1.0} for cell in cells]
    lines = markdown(summarize(rows, [cell.name for cell in cells], ["m"])).splitlines()
    columns = {line.replace("\\|", "").count("|") for line in lines if line.startswith("|")}
    assert (len(lines), columns) == (6, {9})


@pytest.mark.parametrize("content", ["", "{", "[]", '{"variants": 1}'])
def test_a_damaged_comparison_json_or_table_is_written_anew(done, tmp_path, content):
    command, out = done[1], tmp_path / "out"
    main(command)
    whole = {name: (out / name).read_bytes() for name in ("comparison.json", "results.csv", "summary.csv")}
    for name in whole:
        (out / name).write_text(content)
    main(command)
    assert whole == {name: (out / name).read_bytes() for name in whole}


def test_a_cut_result_is_named_before_anything_is_lost(done, tmp_path, capsys):
    cells, command = done
    main(command)
    table = (tmp_path / "out" / "results.csv").read_bytes()
    path = cells[0].folder / RESULT
    path.write_bytes(path.read_bytes()[:-20])
    assert f"{path} is damaged" in refusal(command, capsys)
    assert (tmp_path / "out" / "results.csv").read_bytes() == table


def test_a_figure_that_cannot_be_drawn_costs_no_table(done, tmp_path, monkeypatch):
    def fails(*given):
        raise RuntimeError("no figure")

    monkeypatch.setattr(tables, "draw_comparison", fails)
    cells, _ = done
    with pytest.raises(RuntimeError, match="no figure"):
        write_tables(cells, ["val/loss"], {}, tmp_path / "out")
    assert (tmp_path / "out" / "summary.md").is_file()


@pytest.mark.parametrize("name", ["comparison.json", "results.csv", "summary.csv", "summary.md", "curves.png"])
def test_a_full_disk_leaves_the_former_tables_whole_and_is_one_line(done, tmp_path, monkeypatch, capsys, name):
    main(done[1])
    out = tmp_path / "out"
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    replace_file = os.replace

    def full(source, target):
        if os.path.basename(target) == name:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", full)
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(done[1])
    assert end.value.code not in (0, None)
    said = f"{end.value}{capsys.readouterr().err}"
    assert "No space left on device" in said
    assert "Traceback" not in said
    assert before == {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


@pytest.mark.parametrize("name", ["last.ckpt", RESULT])
def test_a_disk_that_fills_up_in_a_cell_leaves_no_result(demo, tmp_path, monkeypatch, name):
    """Nor half a checkpoint."""
    (cell,) = plan_cells([Variant("v", str(demo))], [0], tmp_path / "out", keep=True)
    rename, replace_file = os.rename, os.replace

    def full(source, target, move):
        if os.path.basename(target) == name:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        move(source, target)

    monkeypatch.setattr(os, "rename", lambda source, target: full(source, target, rename))
    monkeypatch.setattr(os, "replace", lambda source, target: full(source, target, replace_file))
    with pytest.raises(OSError, match="No space left"):
        run_cell(cell)
    assert not cell.is_finished()
    assert not (cell.folder / name).exists()
    monkeypatch.undo()
    run_cell(cell)
    assert cell.is_finished()
    assert {path.name for path in cell.folder.iterdir()} == {"last.ckpt", "log.txt", RESULT, "runs"}
    assert json.loads((cell.folder / RESULT).read_text())["seconds"] > 0
