"""The files beside a page that are made as well: summaries of comparisons, other texts, and figures."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from docs.pages.figures import DIGESTS, Figure
from docs.pages.page import CURE, Page
from docs.pages.raw import Raw, json_of
from lightning_tasks.compare.formats import write_summary
from lightning_tasks.runs.safe_files import written_whole

SUMMARIES = ("summary.csv", "summary.md")


def made_texts(page: Page, raw: Raw) -> Iterator[tuple[Path, str]]:
    """Each file of text and what it is to hold."""
    for place, recipe in page.summaries.items():
        if not (raw.folder / place).is_dir():
            continue  # a comparison that is still to come; a table that needs it says so
        texts = page.made(f"the summary of {recipe}", partial(_summary, place, recipe), raw)
        for name, text in texts.items():
            yield raw.folder / place / name, text
    for name, make in page.texts.items():
        yield raw.folder / name, page.made(name, make, raw)


def _summary(place: str, recipe: str, raw: Raw) -> dict[str, str]:
    """The files that `attnswap compare` writes of a summary, by name."""
    comparison = raw.comparison(place, recipe)
    with tempfile.TemporaryDirectory() as folder:
        write_summary(comparison.summary, comparison.remarks, Path(folder), comparison.images)
        return {name: (Path(folder) / name).read_bytes().decode() for name in SUMMARIES}


def old_texts(page: Page, raw: Raw) -> Iterator[tuple[Path, str]]:
    """Those that hold something else; numbers of a table may differ in their last digits."""
    for path, text in made_texts(page, raw):
        there = path.read_bytes().decode() if path.is_file() else ""
        if there != text and not (path.suffix == ".csv" and _same_table(there, text)):
            yield path, text


def _same_table(one: str, other: str) -> bool:
    rows = [list(csv.reader(io.StringIO(text))) for text in (one, other)]
    if list(map(len, rows[0])) != list(map(len, rows[1])):
        return False
    return all(_same_cell(*cells) for lines in zip(*rows, strict=True) for cells in zip(*lines, strict=True))


def _same_cell(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        return math.isclose(float(one), float(other), rel_tol=1e-6, abs_tol=1e-15)
    except ValueError:
        return False


def old_figures(page: Page, raw: Raw) -> dict[str, Figure]:
    """The figures that were not drawn of today's raw files by today's code."""
    kept = json_of(raw.folder / DIGESTS) or {}
    made = {name: figure for name, make in page.figures.items() if (figure := page.made(name, make, raw)) is not None}
    return {
        name: each
        for name, each in made.items()
        if kept.get(name) != {"drawn_of": each.digest, "file": digest_of(raw.folder / name)}
    }


def digest_of(path: Path) -> str:
    """The digest of a file; "" where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def differences(page: Page, raw: Raw) -> Iterator[str]:
    """A sentence for each file that is not what the raw files give."""
    for path, text in old_texts(page, raw):
        there = path.read_bytes().decode().splitlines() if path.is_file() else []
        lines = text.splitlines()
        place = next((n for n, pair in enumerate(zip(there, lines, strict=False), 1) if pair[0] != pair[1]), 0)
        place = place or min(len(there), len(lines)) + 1
        yield f"{path.relative_to(raw.root)}, line {place}: it is not what the raw files give; {CURE}"
    for name in old_figures(page, raw):
        figure = (raw.folder / name).relative_to(raw.root)
        yield f"{figure}: drawn of other data or by other code, or changed since; {CURE}"


def write(texts: Mapping[Path, str]) -> None:
    """Write files of text, each whole or not at all."""
    for path, text in texts.items():
        with written_whole(path) as partial:
            partial.write_bytes(text.encode())


def draw(page: Page, raw: Raw, figures: Mapping[str, Figure]) -> list[Path]:
    """Draw the figures, and keep what they were drawn of; returns their files."""
    folder = raw.folder
    digests = json_of(folder / DIGESTS) or {}
    for name, figure in figures.items():
        with written_whole(folder / name) as partial:
            figure.draw(partial)
        digests[name] = {"drawn_of": figure.digest, "file": digest_of(folder / name)}
    if figures:
        kept = {name: digest for name, digest in sorted(digests.items()) if name in page.figures}
        (folder / DIGESTS).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return [folder / name for name in figures]
