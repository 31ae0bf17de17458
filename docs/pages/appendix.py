"""The appendix of a page: every table of its comparisons, and its raw tables, in `docs/results/NAME/appendix.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from docs.pages import tables
from docs.pages.language import Folder
from docs.pages.numbers import markdown
from lightning_tasks.compare.formats import markdown as summary_of

COMMAND = "python -m docs.pages csv"


def appendix(folder: Folder, title: str, named: Mapping[str, Any]) -> str:
    """Its text: of each comparison below the page's folder the summary, what was chosen, and where it ran.

    Tables, and the summaries of later tests, follow by the names that the page gives them.
    """
    lines = [
        f"# {title}: all tables",
        "",
        f"Made by `make pages` from the raw tables beside it. `{COMMAND} FILE` gives one as CSV.",
        "",
    ]
    for path in sorted(folder.path.rglob("comparison.json")):
        if (path.parent / "results.parquet").is_file():
            place = path.parent.relative_to(folder.path).as_posix()
            where = ("", folder) if place == "." else (f" {place}", folder.folder(place))
            lines += [f"## Comparison{where[0]}", "", *_comparison(where[1])]
    for called, each in named.items():
        if isinstance(each, Folder):
            lines += [f"## Tests: {called.replace('_', ' ')}", "", summary_of(each.comparison.summary, [])]
        elif isinstance(each, str) and each.startswith("| "):
            lines += [f"## {called[0].upper()}{called[1:].replace('_', ' ')}", "", each, ""]
    rows = []
    for path in sorted(folder.path.rglob("*.parquet")):
        table, place = tables.read(path), path.relative_to(folder.path).as_posix()
        rows.append([f"`{place}`", f"{table.num_rows:,}", ", ".join(table.column_names)])
    lines += ["## Raw tables", "", markdown(["file", "rows", "columns"], rows), ""]
    return "\n".join(lines)


def _comparison(folder: Folder) -> Iterator[str]:
    found = folder.comparison
    yield f"{folder.seeds()}; ran with {folder.ran() or 'code that was not recorded'}; {folder.hours(1)} hours."
    yield ""
    yield summary_of(found.summary, found.images)
    if found.record.choices:
        yield f"### Values tried, by {found.record.choices[0].metric}"
        yield ""
        yield folder.tried(digits=4)
        yield ""
    for title, entries in found.remarks.items():
        if entries and title != "Chosen":
            yield "\n".join([f"{title}:", "", *(f"- {' '.join(each.split())}" for each in entries), ""])
