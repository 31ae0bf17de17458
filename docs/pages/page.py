"""A page: its marked regions, and what their expressions give.

`<!-- number EXPRESSION -->` and `<!-- table EXPRESSION -->` are followed by what that gave, and `<!-- end -->`.
`<!-- figure EXPRESSION -->` is followed by a link to the image. `<!-- let NAME = EXPRESSION -->` names a value.
Expressions are those of jinja2's sandbox, over the words of `docs.pages.language` and of the page's own module.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox

from docs.pages.errors import PageError
from docs.pages.figures import Figure, figure_words
from docs.pages.language import Folder
from docs.pages.numbers import markdown
from lightning_tasks.errors import UsageError

CURE = "run `make pages`"
RESULTS = Path("docs/results")
_MARKER = re.compile(r"<!-- (?:(?P<kind>number|table|figure|let) (?P<expression>.+?)|(?P<end>end)) -->", re.DOTALL)
_LINE_START = re.compile(r"^\s*(?:[-*] +)?$")
_LINK = re.compile(r"\]\((?P<file>[^)]+)\)")
_JINJA = jinja2.sandbox.SandboxedEnvironment(undefined=jinja2.StrictUndefined)


@dataclass(frozen=True)
class Region:
    """What stands between two markers: what is there, what should be, and where that is in the file."""

    kind: str
    expression: str
    there: str
    made: Any
    start: int
    stop: int

    @property
    def same(self) -> bool:
        """Whether they are equal; a number may be wrapped like any other words of a paragraph."""
        if self.kind == "table":
            return self.there.strip("\n") == self.made
        return self.kind == "figure" or " ".join(self.there.split()) == self.made


class Page:
    """A page, read and made.

    Args:
        root: of the repository.
        file: of the page, from there.

    Raises:
        PageError: a marker without its other half, or an expression that gives nothing.
    """

    def __init__(self, root: Path, file: str) -> None:
        self.root, self.file, self.path = root, file, root / file
        self.text = self.path.read_text(encoding="utf-8")
        self.folder = Folder(root / RESULTS / self.path.stem)
        self.words: dict[str, Any] = {**words_of(root, self.folder)}
        self.named: dict[str, Any] = {}
        self.regions = [*self._read()]

    def _read(self) -> Iterator[Region]:
        opened: re.Match[str] | None = None
        for marker in _MARKER.finditer(self.text):
            line = self.text.count("\n", 0, marker.start()) + 1
            if marker["kind"] and opened is not None:
                raise PageError(f"{self.file}: {opened[0]} has no <!-- end --> before line {line}")
            if marker["kind"] == "let":
                name, _, expression = marker["expression"].partition(" = ")
                self.words[name] = self.named[name] = self._value(expression, line)
            elif marker["kind"]:
                if marker["kind"] == "number" and _LINE_START.match(self.text[: marker.start()].rpartition("\n")[2]):
                    raise PageError(f"{self.file}, line {line}: a number begins a line; put a word before it")
                opened = marker
            elif opened is None:
                raise PageError(f"{self.file}, line {line}: {marker[0]} ends nothing")
            else:
                there = self.text[opened.end() : marker.start()]
                made = self._value(opened["expression"], line)
                yield Region(opened["kind"], opened["expression"], there, made, opened.end(), marker.start())
                opened = None
        if opened is not None:
            raise PageError(f"{self.file}: {opened[0]} has no <!-- end -->")

    def _value(self, expression: str, line: int) -> Any:
        place = f"{self.file}, line {line}: `{' '.join(expression.split())}`"
        try:
            return _JINJA.compile_expression(expression, undefined_to_none=False)(**self.words)
        except (PageError, UsageError) as error:
            raise PageError(f"{place}: {error}") from error
        except Exception as error:  # an expression may call anything of its words
            raise PageError(f"{place} gives nothing ({type(error).__name__}: {error})") from error

    @property
    def made(self) -> str:
        """The text as the raw tables say."""
        text = self.text
        for region in reversed(self.regions):
            if not region.same:
                content = f"\n{region.made}\n" if region.kind == "table" else region.made
                text = text[: region.start] + content + text[region.stop :]
        return text

    @property
    def figures(self) -> dict[Path, Figure]:
        """The figures by their files."""
        found = {}
        for region in self.regions:
            if region.kind == "figure":
                link = _LINK.search(region.there)
                if link is None:
                    raise PageError(f"{self.file}: the figure {region.expression} has no link to an image")
                found[self.path.parent / link["file"]] = region.made
        return found

    def differences(self) -> Iterator[str]:
        """A sentence for each number, and each row of a table, that the raw tables say otherwise."""
        for region in self.regions:
            if region.same:
                continue
            place = f"{self.file}: {region.kind} {region.expression}"
            pairs = [(region.there, region.made)]
            if region.kind == "table":
                rows = region.there.strip("\n").splitlines(), region.made.splitlines()
                if len(rows[0]) != len(rows[1]):
                    yield f"{place}: the page has {len(rows[0])} lines, the raw tables give {len(rows[1])}; {CURE}"
                    continue
                pairs = [(one, other) for one, other in zip(*rows, strict=True) if one != other]
            for there, made in pairs:
                yield f"{place}: the page says {there!r}, the raw tables say {made!r}; {CURE}"


def words_of(root: Path, folder: Folder) -> dict[str, Any]:
    """What the expressions of a page may say: the words of its folder, of figures, and of `analyses/NAME.py`."""
    public = (word for word in dir(folder) if not word.startswith("_") and word not in ("path", "comparison"))
    words = {word: getattr(folder, word) for word in public} | figure_words(folder)
    words |= {"claims_of": lambda names: claims_of(root, names), "page": lambda other: Folder(root / RESULTS / other)}
    module = f"docs.pages.analyses.{folder.path.name}"
    if folder.path.name.isidentifier() and importlib.util.find_spec(module):
        words |= importlib.import_module(module).words(folder)
    return words


def claims_of(root: Path, names: list[str]) -> str:
    """The rows of the tables of claims of some pages, each with a link."""
    rows = []
    for name in names:
        text = (root / RESULTS / f"{name}.md").read_text(encoding="utf-8")
        title = text.splitlines()[0].removeprefix("# ")
        table = re.search(r"^\| claim \|.*?(?=\n\n|\n<!-- end|\Z)", text, re.DOTALL | re.MULTILINE)
        if table is None:
            raise PageError(f"{name}.md has no table of claims")
        for line in table[0].splitlines()[2:]:
            cells = re.sub(r"<!--.*?-->", "", line).strip().strip("|").split("|")
            rows.append([*(cell.strip() for cell in cells), f"[{title}](../results/{name}.md)"])
    return markdown(["claim", "what we found", "verdict", "experiment"], rows)
