"""Logs that were cut, are damaged or very large: shown as far as they are true, or refused by name."""

import re
from dataclasses import replace

import pytest

import lightning_tasks.report.page as report_module
from lightning_tasks.compare.summary import SummaryRow
from lightning_tasks.report.page import drawable_rows
from lightning_tasks.runs.log import read_metrics
from tests.lightning_tasks.report.report_folders import report, run_folder

HEAD = "epoch,step,val/loss,train/x\n"


def write(folder, text):
    run_folder(folder)
    (folder / "metrics.csv").write_bytes(text.encode())
    return folder


@pytest.mark.parametrize("cut", ["0,1,0.", "0,1,0.25,3", "0,1", "0,", "0"])
def test_a_line_that_was_cut_is_no_value(tmp_path, cut):
    """Of 0.25 there may be 0 alone: a run that was killed would end with a loss of 0."""
    _, found = report(tmp_path, write(tmp_path / "run", f"{HEAD}0,0,1.5,2\n{cut}"))
    assert "val/loss 1.5" in found.rows
    assert "train/x 2" in found.rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HEAD}0,0,1,2,5\n", "line 2 has more values than there are columns"),
        (f"{HEAD}0,{10**30},1,2\n", f"line 2 has the step {10**30}"),
        ("epoch,st\n0,1\n", "it has no column step, but epoch, st"),
    ],
)
def test_a_damaged_log_is_named(tmp_path, capsys, text, message):
    with pytest.raises(SystemExit) as stop:
        report(tmp_path, write(tmp_path / "run", text))
    assert stop.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(f"run/metrics.csv cannot be read: .*{message}", said)


@pytest.mark.parametrize("text", ["", "epoch,step", HEAD, f"{HEAD},,,\n"])
def test_a_log_of_nothing_has_no_values(tmp_path, text):
    assert read_metrics(write(tmp_path / "run", text) / "metrics.csv") == []


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    path = write(tmp_path / "run", "\ufeffstep,val/loss\r\n3,1\r\n") / "metrics.csv"
    assert read_metrics(path) == [{"step": 3, "metric": "val/loss", "value": 1.0}]


def test_what_is_not_finite_or_too_large_to_draw_is_said(tmp_path):
    lines = "0,0,1,1e308\n0,1,2,-1e308\n0,2,nan,1e400\n"
    _, found = report(tmp_path, write(tmp_path / "run", HEAD + lines))
    assert "val/loss not finite" in found.rows
    assert "train/x not finite" in found.rows


def test_layers_with_values_that_are_too_large_to_draw_end_no_report(tmp_path):
    """The color bar's limits, and their distance, must be finite."""
    head = "step,a/layer_0,a/layer_1,b/layer_0\n"
    text, _ = report(tmp_path, write(tmp_path / "run", f"{head}0,1.7e308,1,-1.7e308\n1,-1.7e308,2,1e200\n"))
    assert text.count("<image") == 4  # two heat maps, and their color bars


def test_a_difference_that_is_too_large_to_draw_is_in_the_table_alone():
    small = SummaryRow("m", "b", 2, 1.0, 0.1, "a", 2, 0.0, -1.0, 1.0)
    huge = replace(small, config="c", difference=1.7e308, low=-1.7e308, high=1.7e308)
    assert drawable_rows([small, huge]) == {"m": [small]}


def test_of_very_many_metrics_the_first_are_drawn_and_all_are_in_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(report_module, "MOST_CURVES", 1)
    names = [f"m{index}" for index in range(2000)]
    lines = [",".join(["step", *names]), *(",".join([str(step), *["1"] * 2000]) for step in (0, 1))]
    text, found = report(tmp_path, write(tmp_path / "run", "\n".join(lines) + "\n"))
    assert {f"{name} 1" for name in names} <= set(found.rows)
    assert "drawn are the first 1 curves of 2000" in text
