"""`make pages` and `make pages-check`: what differs from the raw files is found and named, and made anew."""

import csv
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from docs.pages import __main__ as command
from docs.pages.errors import PageError
from docs.pages.list_of_pages import RESULTS
from docs.pages.overview import overviews
from docs.pages.page import Claim, Page
from docs.pages.results import gpu
from lightning_tasks.compare.record import FINISHED, CellRecord, Record, VariantRecord, write_record
from lightning_tasks.compare.summary import Endpoints
from tests.pages.toy import ROOT, edited, write_results


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
    for text in (
        "metric,foo\na,b\n",
        *("\n".join([lines[0], lines[1].replace("0.125", new)]) for new in ("-1", "nan")),
    ):
        path.write_text(text)
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
    for margin in (0, -0.1, math.inf, math.nan):
        endpoints = Endpoints("test/top1", {"test/top1": margin})
        record = Record(variants, {}, ["test/top1"], cells=cells, primary=endpoints.primary, margins=endpoints.margins)
        write_record(record, folder)
        assert f"the margin of test/top1 is {margin}, and must be above 0 and finite" in said_by(toy)


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


def test_every_page_of_results_is_in_the_table_of_contents():
    lines = (ROOT / "docs" / "explanations" / "reproduced.md").read_text(encoding="utf-8").splitlines()
    pages = {page.file for page in [*RESULTS, gpu.PAGE]}
    assert {f"docs/{line.removeprefix('../')}.md" for line in lines if line.startswith("../results/")} == pages
