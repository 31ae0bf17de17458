"""Raw files that are read as records: whole, of numbers, and named with their line where they are not."""

from dataclasses import replace

import numpy as np
import pytest

from docs.pages.errors import PageError
from docs.pages.raw import Raw
from docs.pages.results.smoothness import Draw
from lightning_tasks.runs.divergence import STOPPED
from tests.pages.toy import write_results

ROWS = ["layer,draw,length,mean", *(f"{layer},{draw},8,1.5" for layer in (0, 2) for draw in (0, 1))]


def read(tmp_path, lines):
    (tmp_path / "draws.csv").write_text("\n".join(lines) + "\n")
    return Raw(tmp_path, ".").records("draws.csv", Draw, grid=("layer", "draw", "length"))


def test_rows_are_records(tmp_path):
    assert read(tmp_path, ROWS)[1] == Draw(0, 1, 8, 1.5)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (ROWS[:1], "draws.csv has no rows"),
        (ROWS[:-1], "draws.csv has 0 rows of layer 2, draw 1, length 8, and should have one"),
        ([*ROWS, ROWS[1]], "draws.csv has 2 rows of layer 0, draw 0, length 8, and should have one"),
        ([*ROWS[:-1], "2,1,8,nan"], "draws.csv, line 5: mean is nan, which is no finite number"),
        ([*ROWS[:-1], "2,1,8,abc"], "draws.csv, line 5, is damaged .ValueError: could not convert string to float"),
        ([*ROWS[:-1], "2,1,8"], "draws.csv, line 5, is damaged .TypeError"),
        ([line.rpartition(",")[0] for line in ROWS], "draws.csv, line 2, is damaged .TypeError.*'mean'"),
    ],
    ids=["empty", "hole", "twice", "nan", "text", "short", "column"],
)
def test_damaged_records_are_named(tmp_path, lines, said):
    with pytest.raises(PageError, match=said):
        read(tmp_path, lines)


def test_earlier_seeds_are_kept_apart_and_joined(toy):
    root, page = toy
    folder = root / "docs" / "results" / "toy"
    write_results(folder / "earlier.csv", more=0.01, start=4)
    raw = Raw(root, folder)
    found = raw.comparison("", page.summaries[""])
    earlier, every = raw.with_earlier(found)
    assert (found.seeds, earlier.seeds, every.seeds) == ([*range(4)], [*range(4, 8)], [*range(8)])
    apart = [each.row("test/top1", "rpc", "softmax") for each in (found, earlier, every)]
    assert apart[2].pairs == 8
    assert [every.below("test/top1", *pair) for pair in (("softmax", "rpc"), ("rpc", "softmax"))] == [
        "8 of 8",
        "0 of 8",
    ]
    lacking = replace(every, rows=[row for row in every.rows if (row["config"], row["seed"]) != ("rpc", 2)])
    assert lacking.below("test/top1", "softmax", "rpc") == "7 of 7", "seeds that both have"
    assert apart[2].difference == pytest.approx((apart[0].difference + apart[1].difference) / 2)


def test_an_earlier_run_that_was_stopped_is_one_that_diverged(toy):
    root, page = toy
    folder = root / "docs" / "results" / "toy"
    write_results(folder / "earlier.csv", more=0.01, start=4)
    lines = (folder / "earlier.csv").read_text().splitlines()
    kept = [line for line in lines if not line.startswith("rpc,4,")]
    (folder / "earlier.csv").write_text("\n".join([*kept, f"rpc,4,3,{STOPPED},1.0", ""]))
    raw = Raw(root, folder)
    found = raw.comparison("", page.summaries[""])
    for each in raw.with_earlier(found):
        row = each.row("test/top1", "rpc", "softmax")
        assert (row.verdict, row.diverged) == ("diverged", 1)


def test_a_run_that_diverged_by_its_loss_has_no_other_value(toy):
    root, page = toy
    folder = root / "docs" / "results" / "toy"
    lines = (folder / "results.csv").read_text().splitlines()
    changed = [
        ",".join([*line.split(",")[:-1], "nan"]) if line.startswith("rpc,2,10,val/loss") else line for line in lines
    ]
    assert changed != lines
    (folder / "results.csv").write_text("\n".join([*changed, ""]))
    found = Raw(root, folder).comparison("", page.summaries[""])
    further = replace(found, metrics=["val/loss"])  # then accuracies are none of its metrics
    for each in (found, further):
        row = each.row("test/top1", "rpc", "softmax")
        assert (row.verdict, row.diverged, row.pairs) == ("diverged", 1, 4)
    assert np.isnan(found.values("test/top1", "rpc")).tolist() == [False, False, True, False]
    assert np.isfinite(found.values("val/loss", "rpc", 5)).all()
    doubled = found.with_metric("twice", lambda value: 2 * value, "test/top1")
    assert np.isnan(doubled.mean("twice", "rpc"))
    assert doubled.mean("twice", "softmax") == pytest.approx(2 * found.mean("test/top1", "softmax"))


def test_a_seed_that_ran_twice_is_refused(toy):
    root, page = toy
    folder = root / "docs" / "results" / "toy"
    write_results(folder / "earlier.csv", start=3)
    raw = Raw(root, folder)
    with pytest.raises(PageError, match=r"earlier\.csv has seed 3, which is one of results\.csv too"):
        raw.with_earlier(raw.comparison("", page.summaries[""]))
