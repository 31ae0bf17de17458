"""`make pages` and `make pages-check`: what differs from the raw tables is found and named, and made anew."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from docs.pages import tables
from docs.pages.__main__ import build, check, main, pages_of
from docs.pages.errors import PageError
from docs.pages.language import Folder
from lightning_tasks.compare.record import FINISHED, CellRecord, Record, VariantRecord, write_record
from tests.rows import each_row

ROOT = Path(__file__).resolve().parents[2]
TEXT = """# Toy

<!-- let top = "test/top1" -->
| claim | what we found | verdict |
|---|---|---|
| better | <!-- number diff(top, "rpc", scale=100) --><!-- end --> | <!-- number claim("higher", [top, "rpc"]) --><!-- end --> |

<!-- table compared(top, scale=100) -->
<!-- end -->

The loss is <!-- number mean("val/loss", "rpc", 2) --><!-- end -->.

<!-- figure curves() -->
![Curves](toy/curves.png)
<!-- end -->
"""  # noqa: E501


def write_toy(folder, more=0.0):
    rows = [
        {"config": config, "seed": seed, "step": step, "metric": metric, "value": value + more * (config == "rpc")}
        for config, shift in (("softmax", 0.0), ("rpc", 0.02))
        for seed in range(4)
        for metric, step, value in (
            ("test/top1", 10, 0.5 + shift + 0.01 * seed + 0.001 * shift * seed**2),
            ("val/loss", 5, 2.0 - shift * seed),
            ("val/loss", 10, 1.0 - shift * seed),
        )
    ]
    write_csv(folder / "results.csv", rows)
    cells = [CellRecord(name, seed, state=FINISHED) for name in ("softmax", "rpc") for seed in range(4)]
    variants = [VariantRecord("softmax"), VariantRecord("rpc")]
    write_record(Record(variants, {}, ["test/top1", "val/loss"], cells=cells, primary="test/top1"), folder)


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    tables.pack(path)


@pytest.fixture
def toy(tmp_path):
    """A root with one page, built."""
    folder = tmp_path / "docs" / "results" / "toy"
    folder.mkdir(parents=True)
    (folder.parent / "toy.md").write_text(TEXT)
    write_toy(folder)
    assert [path.name for path in build(tmp_path)] == ["toy.md", "appendix.md", "curves.png"]
    return tmp_path


def test_a_built_page_has_the_values_of_its_raw_tables(toy):
    text = (toy / "docs/results/toy.md").read_text()
    assert "-->+2.0 [+2.0, +2.0]<!-- end -->" in text
    assert "-->holds here<!-- end -->" in text
    assert "| rpc | 53.5 ± 1.3 | softmax | +2.0 [+2.0, +2.0] | < 0.001 | higher |" in text
    assert 'The loss is <!-- number mean("val/loss", "rpc", 2) -->0.97<!-- end -->.' in text
    text = (toy / "docs/results/toy/appendix.md").read_text()
    assert "### test/top1 (primary endpoint)" in text
    assert "| `results.parquet` | 24 | config, seed, step, metric, value |" in text
    assert [*check(toy), *build(toy)] == []


@each_row(
    ("old", "new", "said"),
    [
        ("53.5 ± 1.3", "54.5 ± 1.3", "the page says '| rpc | 54.5 ± 1.3"),
        ("-->0.97<", "-->0.98<", "the page says '0.98', the raw tables say '0.97'"),
        ("| rpc | 53.5", "| rpc |\n| rpc | 53.5", "has 5 lines, the raw tables give 4"),
        ('mean("val/loss"', 'mean("val/los"', "has no val/los of rpc"),
        ('"rpc", 2)', "rpc, 2)", "'rpc' is undefined"),
        ("compared(top, ", "compared(", "gives nothing (TypeError"),
        ("compared(top, scale=100)", "top.__class__.__mro__", "is unsafe"),
        ("<!-- table compared(top, scale=100) -->", "", "ends nothing"),
        ("0.97<!-- end -->", "0.97", "has no <!-- end -->"),
        ("The loss is <!--", "The loss is\n<!--", "a number begins a line"),
        ("![Curves](toy/curves.png)", "", "has no link to an image"),
    ],
)
def test_what_differs_or_makes_no_sense_is_named(toy, old, new, said):
    text = (page := toy / "docs/results/toy.md").read_text()
    assert old in text
    page.write_text(text.replace(old, new))
    (found,) = check(toy)
    page.write_text(text)
    assert [part in found for part in (said, "docs/results/toy.md")] == [True, True], found


def test_changed_raw_tables_fail_page_appendix_and_figure(toy):
    write_toy(toy / "docs/results/toy", more=0.01)
    found = "\n".join(check(toy))
    for part in ("'+2.0 [+2.0, +2.0]'", "| rpc | 53.5", "appendix.md is not what", "curves.png was drawn of other"):
        assert part in found
    assert [main([command, "--root", str(toy)]) for command in ("build", "check")] == [0, 0]


def test_raw_tables_that_are_damaged_or_missing_are_named(toy):
    folder = toy / "docs/results/toy"
    whole = (path := folder / "results.parquet").read_bytes()
    rows = [*csv.DictReader(tables.csv_of(path).splitlines())]
    for changed, said in (
        ([*rows, rows[0]], "has 1 values twice"),
        (rows[:-3], "rpc seed 3 is in results.parquet or in comparison.json alone"),
        ([{**row, "more": 1} for row in rows], "has the columns config, seed, step, metric, value, more"),
    ):
        write_csv(folder / "results.csv", changed)
        assert said in next(check(toy))
    path.write_bytes(whole[:-100])
    assert "results.parquet is damaged" in next(check(toy))
    path.unlink()
    assert "results.parquet is missing" in next(check(toy))
    (folder / "comparison.json").write_text("{}")
    assert "comparison.json is damaged" in next(check(toy))
    (folder / "comparison.json").unlink()
    assert "has no comparison.json" in next(check(toy))


def test_csv_comes_back_from_parquet_as_it_was(tmp_path, capsys):
    text = 'name,count,share,note,right\na,1,0.1,,True\n"b,c",,1e-07,007,False\nd,-3,nan,x,True\n'
    (tmp_path / "raw.csv").write_text(text)
    assert main(["pack", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["csv", str(tmp_path / "raw.parquet")]) == 0
    assert capsys.readouterr().out == text
    assert tables.read(tmp_path / "raw.parquet")["count"].to_pylist() == [1, None, -3]
    (tmp_path / "odd.csv").write_text("a,a\n1,2\n")
    with pytest.raises(PageError, match="has a column twice"):
        tables.pack(tmp_path / "odd.csv")


def test_tests_of_checkpoints_are_compared_and_are_of_the_same_checkpoints(toy):
    folder = toy / "docs/results/toy"
    rows = [
        {"variant": config, "seed": seed, "test": test, "name": name, "setting": "", "metric": "accuracy"}
        | {"value": value, "samples": 2000, "note": "", "right": ""}
        for config, shift in (("softmax", 0.0), ("rpc", 0.02))
        for seed in range(4)
        for test, name, value in (
            ("clean", "", 0.5 + shift + 0.01 * seed + 0.001 * shift * seed**2),
            ("attack", "fgsm", 0.3 - shift + 0.01 * seed + 0.001 * shift * seed**2),
        )
    ]
    write_csv(folder / "tests.csv", rows)
    attacked = Folder(folder).tests("tests", "attack", "fgsm//accuracy", margin=0.01)
    assert attacked.told("fgsm//accuracy", "rpc", scale=100) == "−2.0 [−2.0, −2.0] (lower)"
    assert Folder(folder).column("tests", "value", 2) == "0.28 to 0.55"
    (toy / "docs/results/other").mkdir()
    (toy / "docs/results/other/tests.parquet").write_bytes((folder / "tests.parquet").read_bytes())
    other = '# Other\n\n<!-- let attacked = tests("tests", "attack", of="toy") -->\n'
    other += '<!-- figure differences({"FGSM": ["fgsm//accuracy", "rpc"]}, "points", 100, attacked) -->\n![](f.png)\n'
    (toy / "docs/results/other.md").write_text(other + "<!-- end -->\n")
    assert [path.name for path in build(toy)] == ["appendix.md", "f.png", "appendix.md"]
    assert "## Tests: attacked\n\n### fgsm//accuracy" in (toy / "docs/results/other/appendix.md").read_text()
    write_csv(folder / "tests.csv", [row | {"value": 0.1} for row in rows])
    with pytest.raises(PageError, match="it is of another checkpoint"):
        Folder(folder).tests("tests", "attack", "fgsm//accuracy")


def test_claims_of_several_pages_are_one_table(toy):
    path = toy / "docs/explanations/reproduced.md"
    path.parent.mkdir()
    path.write_text('<!-- table claims_of(["toy"]) -->\n<!-- end -->\n')
    assert [*build(toy)] == [path]
    assert "| better | +2.0 [+2.0, +2.0] | holds here | [Toy](../results/toy.md) |" in path.read_text()


def test_a_claim_holds_where_all_say_so_and_fails_where_all_say_the_opposite(toy):
    words = Folder(toy / "docs/results/toy")
    pair = ["test/top1", "rpc"]
    assert words.claim("lower", pair) == "the opposite here"
    assert words.claim("higher", pair, ["val/loss", "rpc"]).startswith("mixed (1 higher, 1 ")
    with pytest.raises(PageError, match="nothing is paired"):
        words.claim("higher")
    assert words.since(2).seeds() == "2 paired seeds (2 to 3)"
    assert [words.p(*pair), words.planned(10**9).p(*pair)] == ["< 0.001", "1.000"]


def test_the_check_imports_no_torch():
    """It is the first thing that `make test` does."""
    program = "import sys, docs.pages.__main__; assert not {'torch', 'lightning'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_pages_of_results_are_short_and_in_the_table_of_contents():
    lines = (ROOT / "docs/explanations/reproduced.md").read_text(encoding="utf-8").splitlines()
    pages = [name for name in pages_of(ROOT) if name.startswith("docs/results/")]
    assert {f"docs/{line.removeprefix('../')}.md" for line in lines if line.startswith("../results/")} == {*pages}
    for name in pages:
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= 80, name
    assert json.loads((ROOT / "docs/results/figures.json").read_text()), "digests of their figures"
