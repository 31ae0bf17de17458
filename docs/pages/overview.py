"""The tables of claims that README and docs/explanations/reproduced.md have, made from those of the pages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from docs.pages.page import Page
from docs.pages.raw import Raw
from docs.pages.regions import read_regions
from docs.pages.tables import Table, cells_of


def overviews(pages: Sequence[Page]) -> list[Page]:
    """The files with a table of what the pages say: every claim, and in README the first one of each page."""
    every = Page("", file="docs/explanations/reproduced.md")
    every.tables["claims"] = partial(_claims, pages, every.file, 0)
    readme = Page("", file="README.md")
    readme.tables["claims"] = partial(_claims, pages, readme.file, 1)
    return [every, readme]


def _claims(pages: Sequence[Page], file: str, most: int, raw: Raw) -> Table:
    """The rows of the pages' tables, `most` of each page (0: all), with a link from `file`."""
    rows = []
    for page in pages:
        text = (raw.root / page.file).read_text(encoding="utf-8")
        for region in read_regions(text, page.file):
            if (region.kind, region.name) == ("table", "claims"):
                link = f"[{page.title}]({os.path.relpath(page.file, os.path.dirname(file))})"
                lines = region.content.splitlines()[2:]
                rows += [[*cells_of(line), link] for line in (lines[:most] if most else lines)]
    return Table(["claim", "what we found", "verdict", "experiment"], rows)
