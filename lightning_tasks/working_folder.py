"""Modules of the working folder, which the configurations of a command may name; what is installed comes first."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

_DOTTED = re.compile(r"\b([A-Za-z_]\w*)(?:\.[A-Za-z_]\w*)+")

_NOTE = "which comes before"


@contextlib.contextmanager
def modules_of_working_folder() -> Iterator[None]:
    """Append the working folder to the import path while a command runs; processes that it starts take the path over.

    As it comes last, it hides nothing that is installed.
    """
    folder = str(Path.cwd())
    if folder in {str(Path(entry).resolve()) for entry in sys.path}:
        yield
        return
    sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def comes_from_working_folder(package: str) -> bool:
    """Whether importing a package, which is not imported yet, would run a file of the working folder."""
    place = _place(package) if package not in sys.modules else None
    return place is not None and place.parent == Path.cwd()


def shadow_note(text: str) -> str:
    """A sentence on a module of the working folder that an installed one hides and a dotted name in `text` may mean.

    Empty where there is none, and where the text has it already.
    """
    if _NOTE in text:
        return ""
    for package in dict.fromkeys(match[1] for match in _DOTTED.finditer(text)):
        own = next((path for path in (Path(f"{package}.py"), Path(package)) if _has_code(path)), None)
        place = _place(package) if own is not None else None
        if own is not None and place is not None and place != own.resolve():
            return (
                f". Python finds the module {package!r} in {place}, {_NOTE} {own} of the working folder; if that one "
                "is meant, rename it"
            )
    return ""


def _has_code(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and any(path.glob("*.py")))


def _place(package: str) -> Path | None:
    """The file or folder of a top-level package, as the import system would find it."""
    spec = getattr(sys.modules.get(package), "__spec__", None) or PathFinder.find_spec(package)
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    found = folders[0] if folders else spec.origin
    return Path(found).resolve() if found else None
