"""`make pages` and `make pages-check`: what differs from the raw files is found and named, and made anew."""

import csv
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from docs.pages import __main__ as command
from docs.pages.errors import PageError
from docs.pages.figures import curves_of
from docs.pages.numbers import at_least, interval, listed, mean_std, number, signed, significant
from docs.pages.overview import overviews
from docs.pages.page import Claim, Page
from docs.pages.results import out_of_distribution, rpc_sparse_part, zoo
from docs.pages.tables import Table, differences, means
from docs.pages.verdicts import by_count, verdict
from lightning_tasks.compare.choice import Choice, Tried
from lightning_tasks.compare.record import FINISHED, CellRecord, Record, VariantRecord, write_record
from lightning_tasks.compare.statistics import paired_p
from lightning_tasks.compare.summary import SummaryRow
from lightning_tasks.runs import robustness
from lightning_tasks.runs.environment import Environment

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "variants: {}\nprimary: test/top1\nmetrics: [test/top1, val/loss]\n"
TEXT = """# Toy

<!-- table scores -->
<!-- end -->

The difference is <!-- number difference --><!-- end --> points.
"""
NAMES = {"softmax": "softmax", "rpc": "RPC"}


@pytest.fixture
def toy(tmp_path):
    """A root with one page, built, and the page."""
    folder = tmp_path / "docs" / "results" / "toy"
    folder.mkdir(parents=True)
    recipe = tmp_path / "compare.yaml"
    recipe.write_text(RECIPE)
    (folder.parent / "toy.md").write_text(TEXT)
    write_results(folder / "results.csv")
    page = Page("toy", summaries={"": str(recipe)})

    @page.table
    def scores(raw):
        return means(raw.comparison("", str(recipe)), NAMES, {"top-1": ("test/top1", 1, 100, True)})

    @page.numbers
    def prose(raw):
        row = raw.comparison("", str(recipe)).row("test/top1", "rpc", "softmax")
        return {"difference": signed(row.difference * 100)}

    @page.figure("curves.png")
    def curves(raw):
        return curves_of(raw.comparison("", str(recipe)))

    command.build(tmp_path, [page])
    return tmp_path, page


def write_results(path, more=0.0, start=0):
    rows = [
        {"config": config, "seed": seed, "step": step, "metric": metric, "value": value + more * (config == "rpc")}
        for config, shift in (("softmax", 0.0), ("rpc", 0.02))
        for seed in range(start, start + 4)
        for metric, step, value in (
            ("test/top1", 10, 0.5 + shift + 0.01 * seed + 0.001 * shift * seed**2),
            ("val/loss", 5, 2.0 - shift * seed),
            ("val/loss", 10, 1.0 - shift * seed),
        )
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def edited(root, old, new):
    path = root / "docs" / "results" / "toy.md"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_built_page_equals_its_raw_files_and_is_not_written_again(toy):
    root, page = toy
    text = (root / page.file).read_text()
    assert "| RPC | 53.5 ± 1.3 |" in text
    assert "is <!-- number difference -->+2.0<!-- end --> points" in text
    folder = root / "docs" / "results" / "toy"
    assert {path.name for path in folder.iterdir()} == {
        *("results.csv", "summary.csv", "summary.md", "curves.png", "figures.json")
    }
    assert command.check(root, [page]) == []
    assert command.build(root, [page]) == []


def test_a_changed_digit_names_page_table_row_and_cure(toy):
    root, page = toy
    edited(root, "| RPC | 53.5", "| RPC | 54.5")
    (found,) = command.check(root, [page])
    for part in ("docs/results/toy.md", "table scores", "row 2 'RPC'", "top-1", "'54.5 ± 1.3'", "'53.5 ± 1.3'"):
        assert part in found
    assert found.endswith("run `make pages`")
    command.build(root, [page])
    assert command.check(root, [page]) == []


def test_a_table_of_another_shape_is_named(toy):
    root, page = toy
    edited(root, "| RPC | 53.5 ± 1.3 |", "| RPC |")
    assert "row 2 'RPC': the page says '| RPC |'" in command.check(root, [page])[0]
    edited(root, "| RPC |", "")
    assert "table scores: the page has" in command.check(root, [page])[0]
    command.build(root, [page])
    edited(root, "| configuration | top-1 |", "| configuration | top-5 |")
    (found,) = command.check(root, [page])
    assert "has the columns '| configuration | top-5 |'" in found


def test_a_changed_number_is_named_and_a_wrapped_one_is_none(toy):
    root, page = toy
    edited(root, "is <!-- number difference -->+2.0<!-- end -->", "is\n<!-- number difference -->+2.0<!-- end -->")
    assert "begins a line" in command.check(root, [page])[0]
    edited(root, "is\n<!-- number difference -->+2.0<!-- end -->", "is <!-- number difference -->\n+2.0<!-- end -->")
    assert command.check(root, [page]) == []
    edited(root, "+2.0", "+2.1")
    assert "number difference: the page says '+2.1', the raw files say '+2.0'" in command.check(root, [page])[0]


def test_a_changed_raw_file_fails_page_summary_and_figure(toy):
    root, page = toy
    write_results(root / "docs" / "results" / "toy" / "results.csv", more=0.01)
    found = "\n".join(command.check(root, [page]))
    for part in ("table scores, row 2 'RPC'", "number difference", "summary.csv", "summary.md", "toy/curves.png"):
        assert part in found
    command.build(root, [page])
    assert command.check(root, [page]) == []


def test_a_summary_that_was_edited_fails_but_not_its_last_digits(toy):
    root, page = toy
    path = root / "docs" / "results" / "toy" / "summary.csv"
    text = path.read_text()
    value = next(row["mean"] for row in csv.DictReader(text.splitlines()) if row["config"] == "rpc")
    path.write_text(text.replace(value, str(float(value) * (1 + 1e-12))))
    assert command.check(root, [page]) == []
    path.write_text(text.replace(value, str(float(value) * 1.01)))
    assert "summary.csv, line 3" in command.check(root, [page])[0]


def test_a_missing_or_damaged_raw_file_or_figure_is_named(toy):
    root, page = toy
    folder = root / "docs" / "results" / "toy"
    (folder / "curves.png").unlink()
    assert "toy/curves.png" in command.check(root, [page])[0]
    text = (folder / "results.csv").read_text()
    (folder / "results.csv").write_text(text.replace("0.52", "much", 1))
    (said,) = command.check(root, [page])
    assert "docs/results/toy.md: table scores: " in said
    assert "results.csv, line 8, is damaged (ValueError: could not convert string to float: 'much')" in said
    (folder / "results.csv").write_text(text + text.splitlines()[1] + "\n")
    assert "results.csv has test/top1 of softmax seed 0 at step 10 2 times" in command.check(root, [page])[0]
    (folder / "results.csv").write_text(text.replace(",value", "", 1))
    assert "results.csv, line 2, is damaged (ValueError: columns are" in command.check(root, [page])[0]
    (folder / "results.csv").unlink()
    assert "results.csv is missing" in command.check(root, [page])[0]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("table scores", "table scoers", "nothing makes the table scoers; there are scores"),
        ("number difference", "number differense", "nothing makes the number differense; there are difference"),
        ("<!-- table scores -->", "", "ends nothing"),
        ("|\n<!-- end -->", "|\n", "has no <!-- end --> before"),
        ("+2.0<!-- end -->", "+2.0", "<!-- number difference --> has no <!-- end -->"),
        ("The difference is <!-- number difference -->+2.0<!-- end -->", "", "number difference stands nowhere"),
    ],
)
def test_markers_that_make_no_sense_are_refused(toy, old, new, said):
    root, page = toy
    edited(root, old, new)
    (found,) = command.check(root, [page])
    assert said in found
    assert "docs/results/toy.md" in found
    text = (root / page.file).read_text()
    with pytest.raises(PageError):
        command.build(root, [page])
    assert (root / page.file).read_text() == text


def test_numbers_are_written_in_one_way():
    assert [number(-1234.56), number(0.00234, 3), number(float("nan"))] == ["−1,234.6", "0.002", "nan"]
    assert [signed(float("nan")), significant(float("nan"))] == ["nan", "nan"]  # a page says it
    assert [at_least(0.99898, 4), at_least(1.0, 4), at_least(-0.01)] == ["0.9989", "1.0000", "−0.1"]
    assert [signed(2.0), signed(-2.0, 0)] == ["+2.0", "−2"]
    assert [significant(each, 2) for each in (0.0, 0.000047, 0.0996, 13.4, 45321.0)] == [
        *("0", "0.000047", "0.10", "13", "45,000")
    ]
    assert interval(-0.0214, 0.0003, 1, 100) == "[−2.1, +0.0]"
    assert [mean_std([1.0, 2.0]), mean_std([1.0])] == ["1.5 ± 0.7", "1.0"]


def test_a_table_says_lower_and_higher_by_the_verdict(toy):
    root, page = toy
    found = page.raw(root).comparison("", str(root / "compare.yaml"))
    table = differences(found, "", {"RPC − softmax": ("rpc", "softmax")}, {"top-1": ("test/top1", 1, 100)})
    assert isinstance(table, Table)
    assert found.row("test/top1", "rpc", "softmax").verdict == "higher"
    assert str(table).splitlines()[2] == "| top-1 | **+2.0 [+2.0, +2.0] (0.0)** |"


def test_what_a_claim_is_worth_follows_from_the_verdicts():
    def row(**values):
        given = {"pairs": 8, "difference": -1.0, "low": -2.0, "high": -0.1, "detectable": 0.5, "p": 0.01}
        return SummaryRow("m", "a", 8, 0.0, 1.0, "b", **{**given, "corrected": 0.01, **values})

    lower, weak, open_, too_few = row(), row(corrected=0.2), row(p=0.3, corrected=0.9), row(pairs=3)
    assert verdict("lower", lower) == "holds here (lower)"
    assert verdict("higher", lower) == "does not hold here (lower)"
    assert verdict("lower", row(detectable=3.0)) == "not shown here (lower, but budget too small)"
    assert verdict("higher", row(difference=0.0, low=0.0, high=0.0)) == "does not hold here (equal)"
    assert verdict("lower", weak) == "not shown here (lower, not after correction)"
    counted = "lower, not after correction: 1 of 2; budget too small: 1 of 2"
    assert verdict("higher", weak, open_) == f"not shown here ({counted})"
    assert verdict("lower", lower, open_) == "not shown here (lower: 1 of 2; budget too small: 1 of 2)"
    assert verdict("lower", too_few) == "not shown here (too few pairs)"
    assert verdict("lower", row(p=0.3, corrected=0.9, within_corrected=0.01)) == "does not hold here (equivalent)"
    with pytest.raises(PageError, match="without a verdict"):
        verdict("lower", SummaryRow("m", "a", 1, 0.0, float("nan")))


def test_the_claims_of_a_page_are_a_table(toy):
    root, page = toy
    page.claims(lambda raw: [Claim("better", "+2.0 points", "holds here (higher)")])
    edited(root, "# Toy", "# Toy\n\n<!-- table claims -->\n<!-- end -->")
    command.build(root, [page])
    assert "| better | +2.0 points | holds here (higher) |" in (root / page.file).read_text()
    assert command.check(root, [page]) == []


def test_the_tables_of_claims_are_made_of_those_of_the_pages(toy):
    root, page = toy
    page.title = "Toy"
    page.claims(lambda raw: [Claim("better", "+2.0", "holds here (higher)"), Claim("... twice", "-", "not shown here")])
    edited(root, "# Toy", "# Toy\n\n<!-- table claims -->\n<!-- end -->")
    (root / "README.md").write_text("<!-- table claims -->\n<!-- end -->\n")
    (root / "docs" / "explanations").mkdir()
    (root / "docs" / "explanations" / "reproduced.md").write_text("<!-- table claims -->\n<!-- end -->\n")
    pages = [page, *overviews([page])]
    command.build(root, pages)
    readme, every = ((root / each.file).read_text() for each in reversed(pages[1:]))
    assert "| better | +2.0 | holds here (higher) | [Toy](docs/results/toy.md) |" in readme
    assert "twice" not in readme
    assert "| ... twice | - | not shown here | [Toy](../results/toy.md) |" in every
    edited(root, "| better | +2.0 |", "| better | +2.5 |")
    found = "\n".join(command.check(root, pages))
    for file in ("docs/results/toy.md", "README.md", "docs/explanations/reproduced.md"):
        assert f"{file}: table claims, row 1 'better'" in found


def test_the_command_says_what_it_found(capsys, monkeypatch, toy):
    root, page = toy
    monkeypatch.setattr(command, "ROOT", root)
    monkeypatch.setattr(command, "PAGES", [page])
    assert command.main(["check"]) == 0
    edited(root, "53.5", "53.4")
    assert command.main(["check"]) == 1
    assert "the raw files say '53.5 ± 1.3'" in capsys.readouterr().err
    assert command.main(["build"]) == 0
    assert capsys.readouterr().out == "docs/results/toy.md\n"


def test_a_comparison_that_is_copied_beside_its_page_fills_it(tmp_path):
    folder = tmp_path / "docs" / "results" / "zoo" / "images"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "results" / "zoo.md", folder.parents[1])
    write_results(folder / "results.csv")
    rates = [Tried([f"--lr={rate}"], score) for rate, score in (("1e-3", 0.4), ("2e-3", 0.5))]
    cells = [
        CellRecord(config, seed, state=FINISHED, initial_weights=f"{config} {seed}" if seed == 3 else "")
        for seed in range(4)
        for config in ("softmax", "rpc")
    ]
    record = Record(
        [VariantRecord("softmax"), VariantRecord("rpc")],
        {},
        ["test/top1", "val/loss"],
        cells=cells,
        choices=[Choice("rpc", "val/top1", "max", [100], rates, 1)],
        primary="test/top1",
    )
    write_record(record, folder)
    command.build(tmp_path, [zoo.PAGE])
    assert command.check(tmp_path, [zoo.PAGE]) == []
    text = (tmp_path / zoo.PAGE.file).read_text()
    assert "| rpc | 4 | 53.5 ± 1.3 | softmax | +2.0 [+2.0, +2.0] | < 0.001 | 0.0 | higher |" in text
    assert "| rpc | 40.0 | **50.0** |" in text
    assert text.count("no numbers yet |") == 5  # the tables of the text, and of further seeds
    more = folder.with_name("images_more")
    more.mkdir()
    write_results(more / "results.csv", start=4)
    write_record(replace(record, cells=[replace(cell, seed=cell.seed + 4) for cell in cells]), more)
    command.build(tmp_path, [zoo.PAGE])
    assert command.check(tmp_path, [zoo.PAGE]) == []
    text = (tmp_path / zoo.PAGE.file).read_text()
    both = "| rpc | 55.5 ± 2.5 | softmax | +2.1 [+2.0, +2.1] | +2.0 [+2.0, +2.1] | < 0.001 | higher |"
    assert both in text
    shutil.rmtree(more)
    command.build(tmp_path, [zoo.PAGE])
    written = (folder / "summary.md").read_text()
    assert "- rpc: lr=2e-3, by val/top1 (max) of seed 100: lr=1e-3 0.4, lr=2e-3 0.5" in written
    assert "- rpc seed 3: initial weights differ from those of softmax" in written
    assert (folder / "differences.png").is_file()
    earlier = json.loads((folder / "comparison.json").read_text())
    del earlier["primary"], earlier["margins"]
    (folder / "comparison.json").write_text(json.dumps(earlier))
    assert command.check(tmp_path, [zoo.PAGE]) == [], "the recipe names the primary endpoint"
    results = (folder / "results.csv").read_text()
    (folder / "results.csv").write_text(results.replace("softmax", "other"))
    (found,) = command.check(tmp_path, [zoo.PAGE])
    assert "has no values of softmax, which all others are compared with" in found
    (folder / "results.csv").write_text(results)
    (folder / "comparison.json").write_text('{"metrics": []}')
    (found,) = command.check(tmp_path, [zoo.PAGE])
    assert "images/comparison.json is damaged (KeyError: 'variants')" in found


def test_what_a_recipe_asks_for_is_corrected_for_before_it_has_run(toy):
    root, page = toy
    raw = page.raw(root)
    assert raw.comparison("", "compare.yaml").row("test/top1", "rpc", "softmax").family == 1
    (root / "compare.yaml").write_text(
        RECIPE.replace("{}", "{softmax: {}, rpc: {}, third: {}, fourth: {}}") + "references: {third: [rpc]}\n"
    )
    row = page.raw(root).comparison("", "compare.yaml").row("test/top1", "rpc", "softmax")
    assert (row.family, row.corrected) == (4, pytest.approx(4 * row.p))
    record = Record(
        [VariantRecord("softmax"), VariantRecord("rpc")],
        {},
        ["test/top1"],
        primary="test/top1",
        environments=[Environment("0" * 40), Environment("1" * 40)],
        comparisons=7,
    )
    write_record(record, raw.folder)
    found = page.raw(root).comparison("", "compare.yaml")
    assert found.row("test/top1", "rpc", "softmax").family == 7
    (said,) = found.remarks["Code"]
    assert said.endswith("different commits: 0000000000, 1111111111")


def test_further_seeds_are_corrected_for_all_among_which_the_first_seeds_chose(tmp_path):
    raw = zoo.PAGE.raw(tmp_path)
    shifts = {"softmax": 0.0, "rpc": 0.02, "sink": 0.0, "kde": 0.0}
    for place, configs, seeds in (("images", [*shifts], range(4)), ("images_more", ["softmax", "rpc"], range(4, 8))):
        (raw.folder / place).mkdir(parents=True)
        lines = [
            f"{config},{seed},10,test/top1,{0.5 + shifts[config] + 0.01 * (-1) ** seed * (config != 'softmax')}"
            for config in configs
            for seed in seeds
        ]
        text = "\n".join(["config,seed,step,metric,value", *lines])
        (raw.folder / place / "results.csv").write_text(f"{text}\n")
        write_record(Record([*map(VariantRecord, configs)], {}, ["test/top1"], primary="test/top1"), raw.folder / place)
    (row,) = zoo.more_seeds("images", raw).rows
    p = paired_p([0.03, 0.01] * 4)
    assert row[0] == "rpc"
    assert row[-2] == number(3 * p, 3)
    assert number(3 * p, 3) != number(p, 3)


def test_tests_of_cells_that_are_copied_beside_their_page_fill_it(tmp_path):
    page, folder = out_of_distribution.PAGE, tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / page.file, folder)
    assert "no numbers yet" in str(out_of_distribution.primary(page.raw(tmp_path)))
    for variant, more in (("softmax", 0.0), ("rpc_lam_1", 0.1)):
        for seed in range(4):
            rows = [
                robustness.Row("out of distribution", place, score, metric, 0.5 + more + seed / 100)
                for place in out_of_distribution.OUTSIDE
                for score in out_of_distribution.SCORES
                for metric in out_of_distribution.FIGURES
            ]
            (folder / "out_of_distribution" / variant).mkdir(parents=True, exist_ok=True)
            table = folder / "out_of_distribution" / variant / f"seed_{seed}.csv"
            robustness.write_csv([robustness.Row("clean", "", "", "accuracy", 0.5), *rows], table)
    raw = page.raw(tmp_path)
    assert out_of_distribution.prose(raw)["verdicts"] == "no spread 1 of 1"
    assert (raw.folder / "softmax" / "seed_0.csv").is_file()
    assert "| softmax | digits | 51.5 ± 1.3 |" in str(out_of_distribution.figures("auroc", raw))
    primary = str(out_of_distribution.primary(raw))
    assert "| rpc lam 1 | 4 | 61.5 ± 1.3 | softmax | +10.0 [+10.0, +10.0]" in primary
    shutil.rmtree(folder / "out_of_distribution" / "softmax")
    with pytest.raises(PageError, match=r"has no values of softmax, which all others are compared with"):
        out_of_distribution.primary(page.raw(tmp_path))


ATTACKED = 50  # images


def attacked(share, note):
    """The table that a test with AutoAttack writes."""
    right = robustness.right_as_text(np.arange(ATTACKED) + 0.5 < share * ATTACKED)
    clean = robustness.Row("clean", "", "", "accuracy", 0.5, ATTACKED)
    after = [f" after {name}" for name in ("apgd-ce", "apgd-t", "fab-t", "square")]
    return [
        clean,
        *(
            robustness.Row("attack", f"autoattack{name}", eps, "accuracy", share, ATTACKED, note=said, right=right)
            for eps in ("1/255", "4/255")
            for name, said in [("", note), *((name, "") for name in after)]
        ),
    ]


@pytest.fixture
def with_attacks(tmp_path):
    """The page of the comparison, with what AutoAttack leaves of two variants."""
    raw = rpc_sparse_part.PAGE.raw(tmp_path)
    shutil.copytree(ROOT / "docs" / "results" / "rpc_sparse_part", raw.folder)
    shutil.rmtree(raw.folder / "autoattack", ignore_errors=True)
    assert "no numbers yet" in str(rpc_sparse_part.autoattack(raw))
    assert rpc_sparse_part.prose(raw)["flags"] == "no numbers yet"
    for variant, more in (("softmax", 0.2), ("rpc_lam_1", 0.1)):
        folder = raw.folder / "autoattack" / variant
        folder.mkdir(parents=True)
        for seed in range(4):
            flags = "the output is random; some gradients are zero" if more == 0.1 and seed == 1 else "none"
            note = f"worst case of square (5,000 queries); L-inf; flags: {flags}"
            robustness.write_csv(attacked(more + seed * 0.02, note), folder / f"seed_{seed}.csv")
        claimed = [each.claim for each in rpc_sparse_part.claims(rpc_sparse_part.PAGE.raw(tmp_path))]
        assert ("... and under AutoAttack" in claimed) == (variant == "rpc_lam_1"), "a claim needs pairs"
    return rpc_sparse_part.PAGE.raw(tmp_path)


def test_what_autoattack_leaves_is_read_with_its_flags(with_attacks):
    raw = with_attacks
    rows = [row[:4] for row in rpc_sparse_part.autoattack(raw).rows]
    clean = "50.0 ± 0.0"
    assert rows == [[name, "4", eps, clean] for name in ("softmax", "rpc lam 1") for eps in ("1/255", "4/255")]
    assert "| softmax | 4 | 1/255 | 50.0 ± 0.0 | 23.0 ± 2.6 |" in str(rpc_sparse_part.autoattack(raw))
    primary = rpc_sparse_part.autoattack_primary(raw).rows
    assert [row[3] for row in primary] == ["", "softmax"]  # references without tables are left out
    assert primary[1][4].startswith("−10.0")
    text = rpc_sparse_part.prose(raw)
    one = "(1 of 4 seeds)"
    assert text["flags"].split("; ") == [
        f"rpc lam 1 at {eps}: {flag} {one}"
        for eps in ("1/255", "4/255")
        for flag in ("the output is random", "some gradients are zero")
    ]
    assert text["autoattack-settings"] == "50 images; worst case of square (5,000 queries); L-inf"
    assert re.fullmatch(r"\[−\d+\.\d, −\d+\.\d\]", text["autoattack-images"])


def cut(table):
    table.write_text("\n".join(table.read_text().splitlines()[:-1]) + "\n")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda table: table.rename(table.with_name("seed_00.csv")), r"seed_00\.csv is none of VARIANT/seed_N\.csv"),
        (lambda table: table.parent.rename(table.parents[1] / "rpc lam 1"), r"is none of VARIANT/seed_N\.csv"),
        (cut, "have other rows: autoattack after square/4/255/accuracy is in one alone"),
        (lambda table: table.write_text(table.read_text() + table.read_text().splitlines()[-1] + "\n"), "a row twice"),
        (
            lambda table: table.write_text(table.read_text().replace("5,000", "100")),
            "other settings of autoattack/1/255",
        ),
        (lambda table: table.write_text(table.read_text().replace(",50,", ",500,")), "other settings of autoattack"),
        (lambda table: table.write_text(table.read_text().replace("attack,", "shift,")), "no row of the test 'attack'"),
        (lambda table: robustness.write_csv(attacked(float("nan"), "none"), table), "was not measured"),
    ],
    ids=["seed_00", "folder", "cut", "twice", "queries", "images", "other test", "nan"],
)
def test_a_table_of_another_test_is_named(with_attacks, damage, said):
    damage(with_attacks.folder / "autoattack" / "rpc_lam_1" / "seed_2.csv")
    with pytest.raises(PageError, match=said):
        rpc_sparse_part.autoattack(rpc_sparse_part.PAGE.raw(with_attacks.root))


def test_names_are_listed_however_many_there_are():
    given = [], ["a"], ["a", "b"], ["a", "b", "a", "c"]
    assert [listed(each) for each in given] == ["none", "a", "a and b", "a, b and c"]


def test_a_verdict_without_seeds_follows_what_was_counted():
    assert by_count(3, 3, "intervals that hold 1/2") == "holds here (intervals that hold 1/2: 3 of 3)"
    assert by_count(1, 3, "layers") == "not shown here (layers: 1 of 3)"
    assert by_count(0, 3, "layers") == "does not hold here (layers: 0 of 3)"


def test_the_check_imports_no_torch():
    """It is the first thing that `make test` does."""
    program = "import sys, docs.pages.list_of_pages; print([x for x in ('torch', 'lightning') if x in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_intervals_over_images_stand_in_the_summary_that_is_made(toy):
    root, page = toy
    lines = ["metric,config,reference,images,seeds,low,high", "test/top1,rpc,softmax,50,4,-0.25,0.125"]
    path = root / "docs/results/toy/images.csv"
    path.write_text("\n".join([*lines, ""]))
    command.build(root, [page])
    text = (root / "docs/results/toy/summary.md").read_text()
    assert "| [-0.25, +0.125] |" in text
    assert "over the 50 test images" in text
    assert command.check(root, [page]) == []
    for old, new in ((",4,", ",8,"), ("rpc,softmax", "rpc,other")):
        path.write_text("\n".join([lines[0], lines[1].replace(old, new), ""]))
        assert "images.csv has an interval of test/top1 of rpc to" in command.check(root, [page])[0]
    path.write_text("metric,foo\na,b\n")
    assert "images.csv, line 2, is damaged" in command.check(root, [page])[0]


def test_a_record_of_other_cells_than_the_values_is_named(toy):
    root, page = toy
    folder = root / "docs" / "results" / "toy"
    variants = [VariantRecord("softmax"), VariantRecord("rpc")]
    cells = [CellRecord(each.name, seed, state=FINISHED) for each in variants for seed in range(4)]
    write_record(Record(variants, {}, ["test/top1"], cells=cells), folder)
    command.build(root, [page])
    write_record(Record(variants, {}, ["test/top1"], cells=cells[:-1]), folder)
    assert "results.csv has values of rpc seed 3, which comparison.json calls not finished" in said_by(toy)
    write_record(Record(variants, {}, ["test/top1"], cells=[*cells, replace(cells[0], seed=4)]), folder)
    assert "results.csv has no values of softmax seed 4, which comparison.json calls finished" in said_by(toy)
    for text in ("[]", "{", "{}"):
        (folder / "comparison.json").write_text(text)
        assert "comparison.json is damaged" in said_by(toy)


def said_by(toy):
    root, page = toy
    with pytest.raises(PageError) as caught:
        command.build(root, [page])
    (found,) = command.check(root, [page])
    assert found.startswith("docs/results/toy.md: table scores: ")
    assert found.partition("scores: ")[2] in str(caught.value)
    return found


def test_nothing_is_written_where_one_page_cannot_be_made(toy):
    root, page = toy
    folder = root / "docs" / "results" / "toy"
    before = {path: path.read_bytes() for path in [*folder.iterdir(), root / page.file] if path.suffix != ".csv"}
    write_results(folder / "results.csv", more=0.01)
    other = Page("other")
    (folder.parent / "other.md").write_text("<!-- table gone -->\n<!-- end -->\n")
    with pytest.raises(PageError, match="nothing makes the table gone"):
        command.build(root, [page, other])
    assert {path: path.read_bytes() for path in before} == before


def test_a_figure_that_was_changed_is_named_and_drawn_anew(toy):
    root, page = toy
    path = root / "docs" / "results" / "toy" / "curves.png"
    path.write_bytes(b"x")
    assert "toy/curves.png: drawn of other data or by other code, or changed since" in command.check(root, [page])[0]
    assert command.build(root, [page]) == [path]
    assert path.read_bytes()[1:4] == b"PNG"
