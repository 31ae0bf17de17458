"""`make pages` and `make pages-check`: the pages of results, made from the raw tables that are committed.

python -m docs.pages build           # write numbers, tables, figures and appendices
python -m docs.pages check           # say what differs from the raw tables; exits with 1 if anything does
python -m docs.pages csv FILE        # a raw table as CSV, on stdout
python -m docs.pages pack FOLDER     # the CSV files in a folder as raw tables, exactly
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from docs.pages import tables
from docs.pages.appendix import appendix
from docs.pages.errors import PageError
from docs.pages.figures import digest_of
from docs.pages.page import CURE, Page
from lightning_tasks.runs.safe_files import written_whole

ROOT = Path(__file__).resolve().parents[2]
DIGESTS = "docs/results/figures.json"


def pages_of(root: Path) -> list[str]:
    """The pages of results, and those that quote them, which come last."""
    found = sorted(path.relative_to(root).as_posix() for path in (root / "docs/results").glob("*.md"))
    return [*found, *(name for name in ("docs/explanations/reproduced.md", "README.md") if (root / name).is_file())]


def made(root: Path, file: str) -> tuple[Page, dict[Path, str]]:
    """A page, and the texts that its raw tables give: its own and its appendix."""
    page = Page(root, file)
    texts = {page.path: page.made}
    folder = page.path.with_suffix("")
    if page.path.parent.name == "results" and folder.is_dir():
        title = page.text.splitlines()[0].removeprefix("# ")
        texts[folder / "appendix.md"] = appendix(page.folder, title, page.named)
    return page, texts


def check(root: Path) -> Iterator[str]:
    """A sentence for each thing that is not as the raw tables say."""
    digests = _digests(root)
    for file in pages_of(root):
        try:
            page, texts = made(root, file)
            yield from page.differences()
            for path, text in texts.items():
                if path != page.path and (not path.is_file() or path.read_text(encoding="utf-8") != text):
                    yield f"{path.relative_to(root)} is not what the raw tables give; {CURE}"
            for path, figure in page.figures.items():
                if digests.get(path.relative_to(root).as_posix()) != [figure.digest, digest_of(path)]:
                    yield f"{path.relative_to(root)} was drawn of other data or by other code, or changed since; {CURE}"
        except PageError as error:
            yield str(error)


def build(root: Path) -> Iterator[Path]:
    """Write what is not as the raw tables say; yields the files that changed.

    Raises:
        PageError: a page or a raw table that cannot be used.
    """
    digests = _digests(root)
    known: dict[str, list[str]] = {}
    for file in pages_of(root):
        page, texts = made(root, file)
        for path, text in texts.items():
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                with written_whole(path) as partial:
                    partial.write_text(text, encoding="utf-8")
                yield path
        for path, figure in page.figures.items():
            name = path.relative_to(root).as_posix()
            known[name] = digests.get(name, [])
            if known[name] != [figure.digest, digest_of(path)]:
                figure.save(path)
                known[name] = [figure.digest, digest_of(path)]
                yield path
    if known != digests:
        (root / DIGESTS).write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def _digests(root: Path) -> dict[str, list[str]]:
    path = root / DIGESTS
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.pages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["build", "check", "csv", "pack"])
    parser.add_argument("path", nargs="?", type=Path, help="of csv and pack")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder in which docs/results lies")
    options = parser.parse_args(list(arguments))
    if (options.path is None) is (options.what in ("csv", "pack")):
        parser.error(f"{options.what} takes {'no' if options.path else 'a'} path")
    try:
        if options.what == "csv":
            print(tables.csv_of(options.path), end="")
        elif options.what == "pack":
            for path in sorted(options.path.rglob("*.csv")):
                print(tables.pack(path))
        elif options.what == "build":
            for path in build(options.root):
                print(path.relative_to(options.root))
        else:
            found = [*check(options.root)]
            print("\n".join(found) or f"{len(pages_of(options.root))} pages equal their raw tables", file=sys.stderr)
            return 1 if found else 0
    except PageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
