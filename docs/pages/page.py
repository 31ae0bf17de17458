"""A page: which functions make what stands in its marked regions, and which files beside it are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from docs.pages.errors import PageError
from docs.pages.figures import Figure
from docs.pages.raw import Raw
from docs.pages.regions import filled, read_regions
from docs.pages.tables import NOTHING, Table, cells_of

CURE = "run `make pages`"
Made = TypeVar("Made")
Drawn = Callable[[Raw], Figure | None]  # None where there is nothing to draw yet
Phrases = Callable[[Raw], Mapping[str, str] | None]  # None before there are runs to tell of
Kept = TypeVar("Kept", bound=Phrases)


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, for the page and for the table of all pages.

    Args:
        claim: with the paper that makes it.
        found: the numbers that speak to it.
        verdict: by the rules of docs/compare.md where a paired difference decides.
    """

    claim: str
    found: str
    verdict: str


@dataclass
class Page:
    """A page of docs/results, and the folder of raw files beside it that has its name; `title` is what links say.

    Modules of `docs.pages.results` make one each (`rpc.shared` is what several use), and give it functions of the raw
    files by its decorators.
    """

    name: str
    title: str = ""
    file: str = ""
    tables: dict[str, Callable[[Raw], Table]] = field(default_factory=dict)
    phrases: list[Phrases] = field(default_factory=list)
    figures: dict[str, Drawn] = field(default_factory=dict)
    summaries: dict[str, str] = field(default_factory=dict)
    texts: dict[str, Callable[[Raw], str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.file = self.file or f"docs/results/{self.name}.md"

    def raw(self, root: Path) -> Raw:
        """The raw files of this page."""
        return Raw(root, f"docs/results/{self.name}")

    def table(self, make: Callable[[Raw], Table]) -> Callable[[Raw], Table]:
        """A table, by the function's name."""
        self.tables[make.__name__] = make
        return make

    def numbers(self, make: Kept) -> Kept:
        """Words of the prose, by their names."""
        self.phrases.append(make)
        return make

    def claims(self, make: Callable[[Raw], Sequence[Claim]]) -> Callable[[Raw], Sequence[Claim]]:
        """The claims, of which the page has a table too."""
        self.tables["claims"] = lambda raw: claims_table(make(raw))
        return make

    def figure(self, name: str) -> Callable[[Drawn], Drawn]:
        """A figure in the page's folder."""

        def keep(make: Drawn) -> Drawn:
            self.figures[name] = make
            return make

        return keep

    def contents(self, raw: Raw, numbers: Iterable[str]) -> dict[tuple[str, str], str]:
        """What is to stand in each region; in those of `numbers` that wait for their runs, that there are none yet."""
        found = {("table", name): str(self.made(f"table {name}", make, raw)) for name, make in self.tables.items()}
        phrases = [self.made(f"the numbers of {make.__name__}", make, raw) for make in self.phrases]
        if any(texts is None for texts in phrases):
            found |= {("number", name): NOTHING for name in numbers}
        for texts in phrases:
            found |= {("number", name): text for name, text in (texts or {}).items()}
        return found

    def made(self, what: str, make: Callable[[Raw], Made], raw: Raw) -> Made:
        """What `make` returns.

        Raises:
            PageError: the raw files hold something else than it reads.
        """
        try:
            return make(raw)
        except PageError as error:
            raise PageError(f"{self.file}: {what}: {error}") from error
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            text = f"{type(error).__name__}: {error}"
            raise PageError(f"{self.file}: {what} cannot be made of the raw files ({text})") from error


def claims_table(claims: Sequence[Claim]) -> Table:
    """What the page says of each claim."""
    return Table(["claim", "what we found", "verdict"], [[each.claim, each.found, each.verdict] for each in claims])


def written(page: Page, raw: Raw) -> tuple[str, str]:
    """The text of the page as it is, and as the raw files say.

    Raises:
        PageError: a region that nothing makes, something made that has no region, or a marker without its other half.
    """
    text = (raw.root / page.file).read_text(encoding="utf-8")
    regions = read_regions(text, page.file)
    contents = page.contents(raw, [region.name for region in regions if region.kind == "number"])
    there = {(region.kind, region.name) for region in regions}
    if strange := sorted(there - contents.keys()):
        names = ", ".join(name for kind, name in sorted(contents) if kind == strange[0][0])
        raise PageError(f"{page.file}: nothing makes the {strange[0][0]} {strange[0][1]}; there are {names or 'none'}")
    if missing := sorted(contents.keys() - there):
        kind, name = missing[0]
        raise PageError(f"{page.file}: the {kind} {name} stands nowhere; write <!-- {kind} {name} --><!-- end -->")
    return text, filled(text, regions, contents)


def differences(page: Page, raw: Raw) -> Iterator[str]:
    """A sentence for each row of a table, and each number, that the raw files say otherwise."""
    text, made = written(page, raw)
    if text == made:
        return
    for old, new in zip(read_regions(text, page.file), read_regions(made, page.file), strict=True):
        if old.content == new.content:
            continue
        place = f"{page.file}: {old.kind} {old.name}"
        if old.kind == "number":
            yield f"{place}: the page says {old.content!r}, the raw files say {new.content!r}; {CURE}"
            continue
        rows = old.content.splitlines(), new.content.splitlines()
        if len(rows[0]) != len(rows[1]):
            yield f"{place}: the page has {len(rows[0])} lines, the raw files give {len(rows[1])}; {CURE}"
            continue
        if rows[0][0] != rows[1][0]:
            yield f"{place}: the page has the columns {rows[0][0]!r}, the raw files give {rows[1][0]!r}; {CURE}"
            continue
        for row, (line, other) in enumerate(zip(*rows, strict=True), start=-1):  # the first below the heads is 1
            if line != other:
                name = next(filter(None, cells_of(other)), "")
                yield f"{place}, row {row} {name!r}: {_difference(line, other, rows[1][0])}; {CURE}"


def _difference(line: str, other: str, heads: str) -> str:
    """Which cells of two lines differ."""
    cells, others, names = cells_of(line), cells_of(other), cells_of(heads)
    if len(cells) != len(others):
        return f"the page says {line!r}, the raw files say {other!r}"
    parts = [
        f"{name or 'column ' + str(place)}: the page says {cell!r}, the raw files say {new!r}"
        for place, (name, cell, new) in enumerate(zip(names, cells, others, strict=True), start=1)
        if cell != new
    ]
    return "; ".join(parts) or "the spaces differ"
