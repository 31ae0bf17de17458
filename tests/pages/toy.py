"""A root with one page, of a comparison of two configurations."""

import csv
from pathlib import Path

import pytest

from docs.pages import __main__ as command
from docs.pages.figures import curves_of
from docs.pages.numbers import signed
from docs.pages.page import Page
from docs.pages.tables import means

ROOT = Path(__file__).resolve().parents[2]
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
