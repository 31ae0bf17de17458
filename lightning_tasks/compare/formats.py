"""The summary of a comparison as Markdown, LaTeX and CSV."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from lightning_tasks.compare.summary import ImageInterval, SummaryRow
from lightning_tasks.runs.safe_files import write_rows, written_whole

HEADS = (
    *("configuration", "seeds", "mean ± std", "compared with", "difference [95%]", "p, corrected", "detectable"),
    "verdict",
)
_TEX = {sign: f"\\{sign}" for sign in "&%$#_{}"}
_TEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}"}
_TEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "±": r"$\pm$"}


IMAGES = "images.csv"
WRITTEN = ("summary.csv", "tables.tex", "summary.md", IMAGES)
OVER_IMAGES = "over images [95%]"
_AFTER = "difference [95%]"  # the column beside which that of `OVER_IMAGES` stands
Intervals = Mapping[tuple[str, str, str], ImageInterval]


def _heads(over_images: bool) -> list[str]:
    place = HEADS.index(_AFTER) + 1
    return [*HEADS[:place], *([OVER_IMAGES] if over_images else []), *HEADS[place:]]


def _cells(row: SummaryRow, intervals: Intervals) -> list[str]:
    """A row of the tables, under their heads."""
    difference = "" if row.pairs == 0 else f"{row.difference:+.4g} [{row.low:+.4g}, {row.high:+.4g}]"
    detectable = "" if row.pairs == 0 else f"{row.detectable:.3g}"
    mean = f"{row.mean:.5g}" + ("" if math.isnan(row.std) else f" ± {row.std:.2g}")
    seeds = f"{row.seeds}, {row.diverged} diverged" if row.diverged else str(row.seeds)
    p = "" if row.pairs == 0 else f"{row.corrected:.2g}"
    found = intervals.get((row.metric, row.config, row.reference))
    images = f"[{found.low:+.4g}, {found.high:+.4g}]" if found else ""
    over_images = [images] if intervals else []
    return [row.config, seeds, mean, row.reference, difference, *over_images, p, detectable, row.verdict]


def _of_metric(intervals: Sequence[ImageInterval], metric: str) -> Intervals:
    return {(each.metric, each.config, each.reference): each for each in intervals if each.metric == metric}


def _title(metric: str, rows: Sequence[SummaryRow]) -> str:
    """The metric, whether it decides, and its margin."""
    said = ["primary endpoint"] if rows[0].primary else []
    said += [f"equivalent within ±{rows[0].margin:g}"] if not math.isnan(rows[0].margin) else []
    return f"{metric} ({', '.join(said)})" if said else metric


def _by_metric(summary: Sequence[SummaryRow]) -> dict[str, list[SummaryRow]]:
    found: dict[str, list[SummaryRow]] = {}
    for row in summary:
        found.setdefault(row.metric, []).append(row)
    return found


def markdown(summary: Sequence[SummaryRow], images: Sequence[ImageInterval] = ()) -> str:
    """The summary as Markdown, one table per metric; those that have intervals over images, with a column of them."""
    lines: list[str] = []
    for metric, rows in _by_metric(summary).items():
        intervals = _of_metric(images, metric)
        heads = _heads(bool(intervals))
        lines += [f"### {_markdown(_title(metric, rows))}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        lines += [*(f"| {' | '.join(map(_markdown, _cells(row, intervals)))} |" for row in rows), ""]
    return "\n".join(lines)


def _markdown(text: str) -> str:
    """The text in one line, without what Markdown takes for the end of a cell."""
    return " ".join(text.split()).replace("|", r"\|")


def latex(summary: Sequence[SummaryRow], images: Sequence[ImageInterval] = ()) -> str:
    """The same tables in LaTeX, for the package booktabs; special characters of names are escaped."""
    lines: list[str] = []
    for metric, rows in _by_metric(summary).items():
        intervals = _of_metric(images, metric)
        heads = _heads(bool(intervals))
        lines += [r"\begin{tabular}{" + "l" * len(heads) + "}", r"\toprule"]
        lines += [rf"\multicolumn{{{len(heads)}}}{{l}}{{{_tex(_title(metric, rows))}}} \\", r"\midrule"]
        lines += [_tex_row(heads), r"\midrule", *(_tex_row(_cells(row, intervals)) for row in rows)]
        lines += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(lines)


def _tex_row(cells: Sequence[str]) -> str:
    return rf"{' & '.join(map(_tex, cells))} \\"


def _tex(text: str) -> str:
    """The text without what LaTeX takes for a command; a bracket at the beginning of a cell is none of `\\\\`."""
    plain = "".join(_TEX.get(sign, sign) for sign in " ".join(text.split()))
    return f"{{{plain}}}" if plain.startswith(("[", "*")) else plain


def said_of(intervals: Sequence[ImageInterval]) -> list[str]:
    """What tables say once of their intervals; nothing where there are none over images."""
    counts = sorted({each.images for each in intervals})
    if not counts:
        return []
    images = " or ".join(f"{count:,}" for count in counts)
    return [
        "difference [95%]: over seeds, for these images",
        f"over images [95%]: for these runs, over the {images} test images, which a paired bootstrap draws anew",
    ]


def write_summary(
    summary: Sequence[SummaryRow],
    remarks: Mapping[str, Sequence[str]],
    output: Path,
    images: Sequence[ImageInterval] = (),
) -> str:
    """Write summary.csv, tables.tex, and summary.md, which ends with lists of `remarks` by title; return the latter.

    Where there are intervals over `images`, they stand in a column of the tables, and in images.csv.
    """
    table, tex, page, _ = WRITTEN
    write_rows(output / table, [field.name for field in fields(SummaryRow)], map(asdict, summary))
    (output / IMAGES).unlink(missing_ok=True)
    if images:
        write_rows(output / IMAGES, [field.name for field in fields(ImageInterval)], map(asdict, images))
    lists = [
        [f"{title}:", "", *(f"- {' '.join(each.splitlines())}" for each in entries), ""]
        for title, entries in remarks.items()
        if entries
    ]
    text = "\n".join([markdown(summary, images), *(line for lines in lists for line in lines)])
    with written_whole(output / tex) as path:
        path.write_text(latex(summary, images), encoding="utf-8")
    with written_whole(output / page) as path:
        path.write_text(text, encoding="utf-8")
    return text
