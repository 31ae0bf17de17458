"""The code and the files that a cell's configuration names: what its result depends on beside its settings.

A class or function that is named by its import path counts by the file of its module, and by the modules of the same
project that this one imports, as far as these are in no installed package; an installed package counts by its version.
A file that is named by its path counts by its content, a folder of a model by those of its weights, configuration and
tokenizer. Nothing is imported to find them.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

Sources = dict[str, str]
"""By module, file or package, its digest or version, under the name of the import or of the settings."""

_OURS = ("attention_modules", "attnswap", "datamodules", "lightning_tasks")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".txt")
_WHOLE = 1 << 28  # bytes of a file that are read; a larger one counts by size and time of change
_MOST_SETTINGS, _MOST_MODULES = 1 << 20, 2_000


def sources_of(settings: Sequence[Any]) -> Sources:
    """What plain settings, and files of settings that they name, say of code and files; by name, sorted.

    Args:
        settings: of plain data, such as a recipe's content and the values of overrides.
    """
    found: Sources = {}
    for text in dict.fromkeys(_texts(settings, set())):
        if _DOTTED.fullmatch(text):
            found.update(_of_code(text))
        if path := _path(text):
            found.update(_of_path(text, path))
    found.update(source for name in _registered(settings) for source in _of_code(name).items())
    return dict(sorted(found.items()))


def changed_sources(recorded: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names of what is not as it was recorded, or was not there, or is there no longer."""
    return sorted(name for name in {*recorded, *now} if recorded.get(name) != now.get(name))


def mixed_sources(recorded: Sequence[Mapping[str, str]]) -> list[str]:
    """A sentence that names what several cells ran with in different states; empty where there is nothing."""
    states: dict[str, set[str]] = {}
    for each in recorded:
        for name, state in each.items():
            states.setdefault(name, set()).add(state)
    mixed = sorted(name for name, seen in states.items() if len(seen) > 1)
    return [f"the cells ran with different states of {', '.join(mixed)}"] if mixed else []


def _texts(value: Any, seen: set[Path]) -> Iterator[str]:
    """Every string in plain data, and in the files of settings that such a string names."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each, seen)
    elif isinstance(value, str):
        yield value
        path = _path(value) if value.endswith((".yaml", ".yml")) else None
        if path is not None and path not in seen and path.is_file() and path.stat().st_size <= _MOST_SETTINGS:
            seen.add(path)
            yield from _texts(value_of(path.read_text(encoding="utf-8", errors="replace")), seen)


def value_of(text: str) -> Any:
    """What a text says as YAML; the text itself where it is none."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def _registered(settings: Sequence[Any]) -> set[str]:
    """The import paths of mechanisms that strings name by their short names."""
    from attention_modules.mechanism import available_mechanisms, mechanism_class

    names = {text for text in _texts(settings, set()) if text.isidentifier()} & {*available_mechanisms()}
    kinds = [mechanism_class(name) for name in names]
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}


def _path(text: str) -> Path | None:
    """The file or folder of this name; None where there is none, or the name is nobody's path."""
    if not text or len(text) > 4_096 or "\0" in text:
        return None
    try:
        path = Path(text).expanduser()
        return path.resolve() if path.exists() else None
    except (OSError, RuntimeError):
        return None


def _of_path(name: str, path: Path) -> Sources:
    if path.is_file():
        return {name: _digest(path)}
    if not path.is_dir() or (not (path / "config.json").is_file() and not (path / "tokenizer.json").is_file()):
        return {}
    files = [each for each in sorted(path.iterdir()) if each.suffix in _MODEL_FILES and each.is_file()]
    return {f"{name}/{each.name}": _digest(each) for each in files}


def _digest(path: Path) -> str:
    """Of a file's content, or of its size and time of change where that is large."""
    try:
        stat = path.stat()
        return _content_digest(str(path), stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        return f"not readable: {type(error).__name__}"


@lru_cache(maxsize=4_096)  # a command asks for each cell, and again
def _content_digest(path: str, size: int, changed: int) -> str:
    if size > _WHOLE:
        return f"{size} bytes of {changed}"
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _of_code(name: str) -> Sources:
    """The files behind an import path, or the version of the package that it is in; nothing where there is no such."""
    file = _module_file(name)
    if file is None:
        return {}
    if _is_installed(file):
        return _package(name.partition(".")[0])
    modules = _with_packages(name)[-1:] if name.partition(".")[0] in _OURS else _imported(name)
    return {f"{module} ({path.name})": _digest(path) for path, module in modules}


def _package(top: str) -> Sources:
    names = _distributions().get(top, ())
    try:
        return {f"package {name}": version(name) for name in sorted(set(names))}
    except PackageNotFoundError:
        return {}


@lru_cache(maxsize=1)
def _distributions() -> Mapping[str, list[str]]:
    return packages_distributions()


def _is_installed(file: Path) -> bool:
    """Whether a file is of an installed package, or of Python itself."""
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    return not {"site-packages", "dist-packages"}.isdisjoint(file.parts) or file.is_relative_to(standard)


def _module_file(name: str) -> Path | None:
    """The file of the module that an import path is in or names, found without importing anything."""
    folders = tuple(dict.fromkeys([os.getcwd(), *(entry or os.getcwd() for entry in sys.path)]))
    found = _found_module(name, folders)
    if found is not None and not found.is_file():  # it was deleted since
        _found_module.cache_clear()
        found = _found_module(name, folders)
    return found


@lru_cache(maxsize=4_096)
def _found_module(name: str, folders: tuple[str, ...]) -> Path | None:
    file, parts = None, name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _spec(".".join(parts[:depth]), folders)
        if spec is None:
            break
        if spec.origin and spec.has_location:
            file = Path(spec.origin).resolve()
        if spec.submodule_search_locations is None:
            break
        folders = tuple(spec.submodule_search_locations)
    return file


def _spec(name: str, folders: tuple[str, ...]) -> ModuleSpec | None:
    PathFinder.invalidate_caches()
    spec = PathFinder.find_spec(name, list(folders))
    if spec is not None or "." in name:
        return spec
    try:
        return find_spec(name)  # of an editable installation; without a dot nothing is imported for it
    except ValueError:  # __main__
        return None


def _imported(name: str) -> list[tuple[Path, str]]:
    """A module, and those that it imports, near or far, and that are in no installed package: files and names."""
    found: dict[Path, str] = {}
    waiting = _with_packages(name)
    while waiting and len(found) < _MOST_MODULES:
        file, name = waiting.pop()
        if file in found:
            continue
        found[file] = name
        stat = file.stat()
        for other in _imports(file, name, stat.st_size, stat.st_mtime_ns):
            if other.partition(".")[0] in _OURS:
                continue
            waiting += _with_packages(other)
    return list(found.items())


def _with_packages(name: str) -> list[tuple[Path, str]]:
    """The module of an import path and the packages around it, which Python runs first: files and names.

    Of installed packages there are none.
    """
    parts = name.split(".")
    found: list[tuple[Path, str]] = []
    for depth in range(1, len(parts) + 1):
        outer = ".".join(parts[:depth])
        file = _module_file(outer)
        if file is not None and _is_installed(file):
            return []
        if file is not None and (not found or found[-1][0] != file):  # else it names something in the module
            found.append((file, outer))
    return found


@lru_cache(maxsize=4_096)
def _imports(file: Path, name: str, size: int, changed: int) -> tuple[str, ...]:
    """The import paths that a module's text imports, also in functions; none where it is no text of Python."""
    try:
        parsed = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    package, found = _package_of(file, name), []
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            found += [f"{base}.{alias.name}" if base else alias.name for alias in node.names]
    return tuple(found)


def _package_of(file: Path, name: str) -> list[str]:
    """The package in which a module's relative imports start: that of the import path, as far as it names files."""
    parts = name.split(".")
    while parts and parts[-1] != file.stem and not (file.stem == "__init__" and parts[-1] == file.parent.name):
        parts.pop()
    return parts if file.stem == "__init__" else parts[:-1]
