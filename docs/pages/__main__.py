"""`make pages` and `make pages-check`: the pages of results, made from the raw files that are committed.

python -m docs.pages build    # write tables, numbers, summaries and figures
python -m docs.pages check    # say what differs from the raw files; exits with 1 if anything does

`--page gpu` is of that page alone, and of the tables that are made of all pages; `--root FOLDER` of the pages below
another folder than this repository.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from docs.pages import files
from docs.pages.errors import PageError
from docs.pages.list_of_pages import PAGES
from docs.pages.page import Page, differences, written

ROOT = Path(__file__).resolve().parents[2]


def check(root: Path, pages: Sequence[Page]) -> list[str]:
    """A sentence for each thing that is not as the raw files say."""
    found = []
    for page in pages:
        try:
            raw = page.raw(root)
            found += [*differences(page, raw), *files.differences(page, raw)]
        except PageError as error:
            found.append(str(error))
    return found


def build(root: Path, pages: Sequence[Page]) -> list[Path]:
    """Write what is not as the raw files say; returns the files that changed.

    Pages are made before any is written, and then those that are made of other pages.

    Raises:
        PageError: a page or a raw file that cannot be used; no page is written then.
    """
    changed: list[Path] = []
    for group in ([page for page in pages if page.name], [page for page in pages if not page.name]):
        texts: dict[Path, str] = {}
        drawn = []
        for page in group:
            raw = page.raw(root)
            texts |= dict(files.old_texts(page, raw))
            drawn.append((page, raw, files.old_figures(page, raw)))
            text, made = written(page, raw)
            texts |= {root / page.file: made} if made != text else {}
        files.write(texts)
        changed += [*texts, *(path for each in drawn for path in files.draw(*each))]
    return changed


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.pages", description=__doc__)
    parser.add_argument("what", choices=["build", "check"])
    parser.add_argument("--page", choices=[page.name for page in PAGES if page.name], help="this page alone")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder in which docs/results lies")
    options = parser.parse_args(list(arguments))
    every = options.root == ROOT  # elsewhere there may be one page alone
    pages = [page for page in PAGES if options.page in (None, page.name) or (every and not page.name)]
    if options.what == "check":
        found = check(options.root, pages)
        print("\n".join(found) if found else f"{len(pages)} pages equal their raw files", file=sys.stderr)
        return 1 if found else 0
    try:
        for path in build(options.root, pages):
            print(path.relative_to(options.root))
    except PageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
