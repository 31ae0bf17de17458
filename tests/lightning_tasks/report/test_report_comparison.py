"""A report of a comparison: its cells count, and tables that were written before them do not."""

import json
import re

from lightning_tasks.compare.formats import write_summary
from lightning_tasks.compare.reading import read_comparison
from lightning_tasks.compare.summary import SummaryRow, summarize
from lightning_tasks.compare.tables import write_results
from lightning_tasks.report.svg import curves_svg, forest_svg
from tests.lightning_tasks.report.report_folders import report

VALUES = {("plain", 0): 1.0, ("rpc", 0): 2.0, ("plain", 1): 3.0, ("rpc", 1): 4.5}


def rows_of(values):
    return [
        {"config": config, "seed": seed, "step": 5, "metric": "val/loss", "value": value}
        for (config, seed), value in values.items()
    ]


def comparison(folder, cells, table):
    """Finished cells, and tables as the command wrote them when only those of `table` were finished."""
    folder.mkdir()
    for (config, seed), value in cells.items():
        place = folder / "cells" / config / f"seed_{seed}"
        place.mkdir(parents=True)
        rows = [{"step": 5, "metric": "val/loss", "value": value}]
        (place / "result.json").write_text(json.dumps({"config": config, "seed": seed, "rows": rows}))
    write_results(rows_of(table), folder / "results.csv")
    write_summary(summarize(rows_of(table), ["plain", "rpc"], ["val/loss"]), {}, folder)
    return folder


def test_a_comparison_that_was_extended_shows_its_cells(tmp_path):
    folder = comparison(tmp_path / "out", VALUES, {key: value for key, value in VALUES.items() if key[1] == 0})
    (folder / "cells" / "rpc" / "seed_2").mkdir()
    text, found = report(tmp_path, folder)
    assert "val/loss 2 ± 1.4 (2) 3.25 ± 1.8 (2)" in found.rows
    (row,) = [row for row in found.rows if row.startswith("val/loss rpc plain too few")]  # the old summary has no pairs
    assert row.startswith("val/loss rpc plain too few pairs 1.25 [")
    assert "results.csv (2 cells) and summary.csv are of other cells than the 4 that are finished now" in text
    assert "not finished: rpc/seed_2" in text


def test_a_cell_that_was_run_anew_is_shown_and_not_the_table(tmp_path):
    """The cells have the same names, so that nothing but their values tells."""
    folder = comparison(tmp_path / "out", VALUES, {key: value + 7 for key, value in VALUES.items()})
    _, found = report(tmp_path, folder)
    assert "val/loss 2 ± 1.4 (2) 3.25 ± 1.8 (2)" in found.rows


def test_of_a_cell_that_was_killed_the_run_is_shown_in_which_it_ended(tmp_path):
    folder = comparison(tmp_path / "out", VALUES, VALUES)
    cell = folder / "cells" / "rpc" / "seed_0"
    logs = [cell / "runs" / "recipe" / f"version_{number}" for number in (2, 10, 11)]
    for step, log in enumerate(logs):  # the last one is of a later test
        log.mkdir(parents=True)
        (log / "metrics.csv").write_text("step,val/loss\n5,2.0\n")
        (log / "attention_heads.csv").write_text(f"step,name,layer,head_00\n{step},attention/entropy,0,{step}.5\n")
    result = json.loads((cell / "result.json").read_text())
    for named, place, steps in (({"log": "runs/recipe/version_10"}, logs[1], [0, 1]), ({}, logs[0], [0])):
        (cell / "result.json").write_text(json.dumps({**result, **named}))
        run = next(each for each in read_comparison(folder).runs if (each.config, each.seed) == ("rpc", 0))
        assert run.folder == place
        assert [row["step"] for row in run.rows if "head" in row["metric"]] == steps


def test_configurations_stand_in_the_order_of_the_table_and_seeds_by_number(tmp_path):
    cells = {("b", 10): 1.0, ("a", 10): 2.0, ("b", 2): 3.0, ("a", 2): 4.0}
    _, found = report(tmp_path, comparison(tmp_path / "out", cells, {**cells, ("c", 2): 5.0}))
    assert "metric b a" in found.rows
    runs = [row.split()[:2] for row in found.rows if str(tmp_path) in row]
    assert runs == [["b", "2"], ["b", "10"], ["a", "2"], ["a", "10"]]


def test_where_no_cell_is_finished_the_older_table_is_shown_and_named_so(tmp_path):
    folder = comparison(tmp_path / "out", {}, VALUES)
    (folder / "cells" / "rpc" / "seed_0").mkdir(parents=True)
    text, found = report(tmp_path, folder)
    assert "val/loss 2 ± 1.4 (2) 3.25 ± 1.8 (2)" in found.rows
    assert "shown is results.csv, which is older than the cells: none of them is finished" in text


def test_curves_and_differences_say_their_values_where_the_pointer_is():
    rows = [
        {"config": "a<b", "seed": 0, "step": step, "metric": "val/'loss", "value": 0.5 + step} for step in (0, 1000)
    ]
    svg = curves_svg(rows, ["a<b"], "val/'loss")
    assert re.findall("<title>(.*?)</title>", svg) == ["a&lt;b, step 0: 0.5", "a&lt;b, step 1,000: 1000"]
    summary = [
        SummaryRow("m", name, 2, 1.0, 0.1, "plain", 2, 0.25, low, 0.5) for name, low in (("x", 0.0), ("y", -1.0))
    ]
    svg = forest_svg(summary, "m")
    assert re.findall("<title>(.*?)</title>", svg) == ["x - plain: 0.25 [0, 0.5]", "y - plain: 0.25 [-1, 0.5]"]
    assert all(f">{name} - plain<" in svg for name in "xy")


def test_names_of_folders_that_are_no_unicode_are_drawn():
    svg = forest_svg([SummaryRow("m", "\udcff: x", 2, 1.0, 0.1, "plain", 2, 0.25, 0.0, 0.5)], "m")
    assert r">\udcff: x - plain<" in svg
