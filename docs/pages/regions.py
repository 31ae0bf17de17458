"""The marked regions of a Markdown file: `<!-- table NAME -->` or `<!-- number NAME -->`, and then `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from docs.pages.errors import PageError

_MARKER = re.compile(r"<!-- (?:(?P<kind>table|number) (?P<name>[^ ]+)|(?P<end>end)) -->")
_LINE_START = re.compile(r"^\s*(?:[-*] +)?$")


@dataclass(frozen=True)
class Region:
    """What stands between two markers.

    Args:
        kind: "table" or "number".
        name: of the table or number.
        text: between the markers.
        start, stop: where that is in the file.
    """

    kind: str
    name: str
    text: str
    start: int
    stop: int

    @property
    def content(self) -> str:
        """The text as it counts: a number may be wrapped like any other words of a paragraph."""
        return self.text.strip("\n") if self.kind == "table" else " ".join(self.text.split())


def read_regions(text: str, file: str) -> list[Region]:
    """The regions of a Markdown text, in its order.

    Raises:
        PageError: a region has no end, or an end no beginning; or a number begins a line, where Markdown takes a
            comment for the beginning of HTML.
    """
    found: list[Region] = []
    opened: re.Match[str] | None = None
    for marker in _MARKER.finditer(text):
        line = text.count("\n", 0, marker.start()) + 1
        if marker["end"] is None:
            if opened is not None:
                raise PageError(f"{file}: {opened[0]} has no <!-- end --> before {marker[0]} in line {line}")
            if marker["kind"] == "number" and _LINE_START.match(text[: marker.start()].rpartition("\n")[2]):
                raise PageError(f"{file}, line {line}: {marker[0]} begins a line; put a word before it")
            opened = marker
        elif opened is None:
            raise PageError(f"{file}, line {line}: {marker[0]} ends nothing")
        else:
            start, stop = opened.end(), marker.start()
            found.append(Region(opened["kind"], opened["name"], text[start:stop], start, stop))
            opened = None
    if opened is not None:
        raise PageError(f"{file}: {opened[0]} has no <!-- end -->")
    return found


def filled(text: str, regions: list[Region], contents: Mapping[tuple[str, str], str]) -> str:
    """The text with these contents, by kind and name, in its regions; those that are equal stay as they are."""
    for region in reversed(regions):
        content = contents[region.kind, region.name]
        if content != region.content:
            content = f"\n{content}\n" if region.kind == "table" else content
            text = text[: region.start] + content + text[region.stop :]
    return text
