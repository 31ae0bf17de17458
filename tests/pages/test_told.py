"""Sentences of pages that have no number of their own are refused where the raw files say otherwise."""

import csv
import math
import shutil
from dataclasses import replace

import pytest

from docs.pages.errors import PageError, check_told
from docs.pages.results import slopes, token_selection, zoo
from docs.pages.results.rpc import classification
from docs.pages.results.zoo_seeds import Seeds, seeds_of, together
from docs.pages.results.zoo_told import check_longest
from lightning_tasks.analyses.lipschitz_report import Row
from tests.pages.toy import ROOT


@pytest.fixture
def copied(tmp_path):
    """A root with a copy of a page's folder."""

    def copy(name):
        shutil.copytree(ROOT / "docs" / "results" / name, tmp_path / "docs" / "results" / name)
        return tmp_path

    return copy


def test_the_error_names_the_sentence_and_what_is_found():
    check_told("it is even", True, 3)
    with pytest.raises(PageError, match="the page says that it is even, and the raw files say 3: write it anew"):
        check_told("it is even", False, 3)


def test_other_seeds_under_an_attack_turn_a_sentence(copied):
    root = copied("rpc_classification")
    assert classification.harmed(classification.PAGE.raw(root))
    path = classification.PAGE.raw(root).folder / "results.csv"
    rows = list(csv.DictReader(path.open(newline="")))
    for row in rows:
        if (row["config"], row["metric"]) == ("rpc", "robustness/pgd/1_255/accuracy"):
            row["value"] = str(float(row["value"]) + 0.008)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    said = r"says that RPC is below symmetric attention under all four.* the raw files say .*\+0\.3 \["
    with pytest.raises(PageError, match=said):
        classification.harmed(classification.PAGE.raw(root))


@pytest.mark.parametrize(
    ("quantity", "told"),
    [
        ("sparsity/layer_00/pass_2", "S is fuller in the last pass than in the others"),
        ("entropy/layer_00/pass_3", "three passes are nearly uniform attention"),
        ("residual/layer_00/pass_2", "the residual is as large as the keys in all passes"),
    ],
)
def test_a_nan_makes_no_sentence_true(copied, quantity, told):
    root = copied("rpc_classification")
    path = classification.PAGE.raw(root).folder / "results.csv"
    lines = path.read_text().splitlines(keepends=True)
    at = max(n for n, line in enumerate(lines) if line.startswith("rpc,8,") and f",val/pursuit/{quantity}," in line)
    lines[at] = f"{lines[at].rpartition(',')[0]},nan\n"
    path.write_text("".join(lines))
    with pytest.raises(PageError, match=rf"{told}, and the raw files say \[.*nan"):
        classification.prose(classification.PAGE.raw(root))


@pytest.mark.parametrize("more", [-3.0, math.nan])
def test_a_mechanism_that_gains_more_than_longer_training_turns_a_sentence(more):
    metric, raw = "test/perplexity", zoo.PAGE.raw(ROOT)

    def seeds(more):
        found = []
        for each in seeds_of(raw, "text")[:2]:
            rows = [row for row in each.rows if row["metric"] == metric]
            rows = [row | {"value": row["value"] + (more if row["config"] == "dam" else 0.0)} for row in rows]
            found.append(replace(each, rows=rows, metrics=[metric]))
        return Seeds(*found, together(*found))

    check_longest("text", seeds(0.0))
    said = r"forgetting alone gains more .*, and the raw files say \['dam', 'forgetting'\]"
    with pytest.raises(PageError, match=said):
        check_longest("text", seeds(more))


def test_a_problem_that_was_not_solved_is_not_left_out(copied):
    root = copied("token_selection")
    raw = token_selection.PAGE.raw(root)
    assert token_selection.summary(raw) == raw.text("summary.md")
    path = raw.folder / "summary.md"
    path.write_text(path.read_text() + "| single | 2 | all | failed: no solution |  |  |  |  |\n")
    with pytest.raises(PageError, match=r"has a problem that was not solved, .*\| single \| 2 \| all"):
        token_selection.summary(token_selection.PAGE.raw(root))


def test_a_length_or_a_slope_that_was_not_measured_is_named():
    found = [Row("encoder.0", "text", length, 0, 1.0 + length, 0.0, True, 9, 1.0) for length in (2, 4, 8)]
    assert slopes.mean_at(found, 4) == 5
    with pytest.raises(PageError, match=r"lipschitz\.csv has no length 128, and has 2, 4, 8"):
        slopes.mean_at(found, 128)
    with pytest.raises(PageError, match=r"the slope of value of encoder\.0 has no interval: give two sequences"):
        slopes.fit(found)
