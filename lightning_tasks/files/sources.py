"""The code and the files that a cell's configuration names: what its result depends on beside its settings.

A class or function that is named by its import path counts by the file of its module, and by all that this one
imports, near or far: an installed package by its version, Python's own library not at all, every other module by its
file. A package that imports modules by names it makes up, as registries do, counts with all of its modules. A file
that is named by its path counts by its content, a folder of a model, an adapter or a tokenizer by those of its files.
Nothing is imported to find them.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import yaml

Sources = dict[str, str]
"""By module, file or package, its digest or version, under the name of the import or of the settings."""

_ROOT = Path(__file__).resolve().parents[2]
_OURS = tuple(_ROOT / name for name in ("attention_modules", "attnswap", "datamodules", "lightning_tasks"))
_SETTINGS = (".yaml", ".yml", ".json")
# What a folder holds whose files are of one model, adapter, tokenizer or sharded checkpoint.
_OF_A_MODEL = (
    *("config.json", "adapter_config.json", "model_index.json", "modules.json", ".metadata"),
    *("open_clip_config.json", "scheduler_config.json", "generation_config.json", "sentencepiece.bpe.model"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json"),
)
_WHOLE = 1 << 28  # bytes of a file that are read; a larger one counts by size and time of change
_MOST_SETTINGS, _MOST_MODULES = 1 << 16, 2_000


def sources_of(settings: Sequence[Any], folder: Path | None = None) -> Sources:
    """What plain settings, and files of settings that they name, say of code and files; by name, sorted.

    Args:
        settings: of plain data, such as a recipe's content and the values of overrides.
        folder: where the file of these settings is; they may name files beside it, and in the working folder.
    """
    PathFinder.invalidate_caches()
    found: Sources = {}
    named = dict.fromkeys(_texts(settings, folder or Path.cwd(), set()))
    texts = dict.fromkeys(text for text, _ in named if isinstance(text, str))
    for text in (*texts, *_registered({*texts})):
        if _is_import_path(text):
            found.update(_of_code(_dotted(text)))
    for stated, beside in named:
        for name, path in _paths(stated, beside).items():
            found.update(_of_path(name, path))
    return dict(sorted(found.items()))


def changed_sources(recorded: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names of what is not as it was recorded, or was not there, or is there no longer."""
    return sorted(name for name in {*recorded, *now} if recorded.get(name) != now.get(name))


def mixed_sources(recorded: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """A sentence that names what several cells ran with in different states; empty where there is nothing.

    Args:
        recorded: of each cell its variant, among whose cells it is a state, too, not to be there, and what it ran with.
    """
    of_variant: dict[str, set[str]] = {}
    for variant, each in recorded:
        of_variant.setdefault(variant, set()).update(each)
    states: dict[str, set[str | None]] = {}
    for variant, each in recorded:
        for name in of_variant[variant]:
            states.setdefault(name, set()).add(each.get(name))
    mixed = sorted(name for name, seen in states.items() if len(seen) > 1)
    return [f"the cells ran with different states of {', '.join(mixed)}"] if mixed else []


def _texts(value: Any, folder: Path, seen: set[tuple[Path, Path]]) -> Iterator[tuple[str | Path, Path]]:
    """Every string in plain data, and in the files of settings that one names; each with the folder where it stands."""
    if isinstance(value, Mapping):
        files = [key for key in value if isinstance(key, str) and any(map(Path.is_file, _paths(key, folder).values()))]
        value = [*files, *value.values()]  # as {FILE: WEIGHT} of a mixture
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each, folder, seen)
    elif isinstance(value, (str, Path)):
        yield value, folder
        for path in _paths(value, folder).values() if str(value).endswith((*_SETTINGS, ".py")) else ():
            place = path.resolve(), path.parent.resolve()  # of a link that leads to its own folder only once
            if place not in seen and path.is_file() and path.stat().st_size <= _MOST_SETTINGS:
                seen.add(place)
                with contextlib.suppress(OSError):
                    text = path.read_text(encoding="utf-8", errors="replace")
                    inner = _strings(text, path.parent) if path.suffix == ".py" else value_of(text)
                    yield from _texts(inner, path.parent, seen)


@lru_cache(maxsize=256)
def value_of(text: str) -> Any:
    """What a text says as YAML; the text itself where it is none."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def _strings(text: str, folder: Path) -> list[str | Path]:
    """The strings in settings that are Python, as of mmengine, and the files beside them that they import."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the file that is read
            nodes = [*ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    texts = [each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    files: list[Path] = []
    for each in nodes:
        if isinstance(each, ast.ImportFrom) and each.level:
            package = Path(os.path.abspath(folder.joinpath(*[".."] * (each.level - 1))))
            parts = each.module.split(".") if each.module else []
            inside = [package.joinpath(*parts[: number + 1]) for number in range(len(parts))]
            inside += [package.joinpath(*parts, alias.name) for alias in each.names if alias.name != "*"]
            files += [path.with_name(f"{path.name}.py") for path in inside]
            files += [path / "__init__.py" for path in (package, *inside)]
    return [*texts, *(file for file in files if file.is_file())]


def _registered(texts: set[str]) -> list[str]:
    """The import paths of mechanisms that strings name by their short names."""
    from attention_modules.mechanism import available_mechanisms, mechanism_class

    kinds = [mechanism_class(name) for name in sorted(texts & {*available_mechanisms()})]
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]


def _paths(text: str | Path, folder: Path) -> dict[str, Path]:
    """The files and folders that a text in `folder` may mean, also behind `file://` or `local-dir:`; by their names."""
    found: dict[str, Path] = {}
    if isinstance(text, Path):  # of a file that is there
        return {os.path.relpath(text): text}
    if len(text) > 4_096 or "\0" in text:
        return found
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        url = urlsplit(text)
        for spelled in filter(None, (text, unquote(url.path) if url.netloc in ("", "localhost") else "")):
            here, beside = (Path(os.path.abspath(place / Path(spelled).expanduser())) for place in (Path(), folder))
            if here.exists():
                found.setdefault(text, here)
            if beside != here and beside.exists():
                found[os.path.relpath(beside)] = beside
    return found


def _of_path(name: str, path: Path) -> Sources:
    if path.is_file():
        return {name: _digest(path)}
    if not any((path / each).is_file() for each in _OF_A_MODEL):
        return {}
    return {f"{name}/{each.relative_to(path).as_posix()}": _digest(each) for each in _files_below(path)}


def _files_below(path: Path) -> list[Path]:
    """All files that are not hidden, behind links to folders too, each folder once."""
    found, seen = list[Path](), set[str]()
    for folder, inner, files in os.walk(path, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(each for each in inner if not each.startswith("."))
        found += [Path(folder, each) for each in files if not each.startswith(".") and Path(folder, each).is_file()]
    return sorted(found)


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
    """What is behind an import path: of ours its file; else its modules and packages, and all that these import."""
    found: Sources = {}
    seen: set[Path] = set()
    files, waiting = _with_packages(name), [name]
    if files and _is_ours(files[-1][0]):
        return _of_module(*files[-1])
    while waiting and len(seen) < _MOST_MODULES:
        for file, module in _with_packages(waiting.pop()):
            if file in seen or _is_ours(file):
                continue
            seen.add(file)
            if _is_installed(file, module):
                found.update(_package(module))
            else:
                found.update(_of_module(file, module))
                stat = file.stat()
                waiting += _imports(file, module, stat.st_size, stat.st_mtime_ns)
    return found


def _of_module(file: Path, name: str) -> Sources:
    return {f"{name} ({file.name})": _digest(file)}


def _package(module: str) -> Sources:
    """The version of each distribution that an installed module may be of."""
    top = module.partition(".")[0]
    with contextlib.suppress(PackageNotFoundError):
        return {f"package {name}": str(version(name)) for name in sorted(set(_distributions().get(top, [top])))}
    return {}


@lru_cache(maxsize=1)
def _distributions() -> Mapping[str, list[str]]:
    return packages_distributions()


@lru_cache(maxsize=4_096)
def _is_installed(file: Path, module: str) -> bool:
    """Whether a module is of an installed distribution, or of Python itself."""
    if is_in_packages(file):
        return bool(_package(module))
    return file.is_relative_to(Path(sysconfig.get_path("stdlib")).resolve())


def is_in_packages(file: Path) -> bool:
    """Whether a file is one of an installed package."""
    return not {"site-packages", "dist-packages"}.isdisjoint(file.parts)


def is_of_attnswap(file: Path) -> bool:
    """Whether a file is one of attnswap, in a checkout or installed."""
    return any(map(file.is_relative_to, _OURS))


def _is_ours(file: Path) -> bool:
    """Whether a file is of this checkout of attnswap, whose commit is recorded."""
    return is_of_attnswap(file) and not is_in_packages(file)


class _Module(NamedTuple):
    """The file of the module that an import path is in or names, and the folders of the package that it names."""

    file: Path | None
    folders: tuple[str, ...] | None


def _module(name: str) -> _Module:
    """Found without importing anything."""
    folders = tuple(dict.fromkeys([*(entry or os.getcwd() for entry in sys.path), os.getcwd()]))
    found = _found_module(name, folders)
    if found.file is not None and not found.file.is_file():  # it was deleted since
        _found_module.cache_clear()
        found = _found_module(name, folders)
    return found


@lru_cache(maxsize=1 << 16)
def _found_module(name: str, folders: tuple[str, ...]) -> _Module:
    file, parts = None, name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _spec(parts[:depth], folders, file is None)
        if spec is None:
            return _Module(file, None)
        if spec.origin and spec.has_location:
            file = Path(spec.origin).resolve()
        if spec.submodule_search_locations is None:
            return _Module(file, None)
        folders = tuple(spec.submodule_search_locations)
    return _Module(file, folders)


def _spec(parts: list[str], folders: tuple[str, ...], bare: bool) -> ModuleSpec | None:
    """By the last part of an import path, as nested folders without `__init__.py` are asked of Python by all of it.

    In such folders (`bare`) an editable installation may map a module too; find_spec() would import what is around it.
    """
    spec = PathFinder.find_spec(parts[-1], list(folders))
    if spec is not None:
        return spec
    if parts[1:]:
        finders = [each for each in sys.meta_path if bare and each is not PathFinder and hasattr(each, "find_spec")]
        return next(filter(None, (each.find_spec(".".join(parts), folders) for each in finders)), None)
    try:
        return find_spec(parts[0])
    except ValueError:  # __main__
        return None


def _with_packages(name: str) -> list[tuple[Path, str]]:
    """The module of an import path and the packages around it, which Python runs first, up to an installed one."""
    parts = name.split(".")
    found: list[tuple[Path, str]] = []
    for depth in range(1, len(parts) + 1):
        outer = ".".join(parts[:depth])
        file = _module(outer).file
        if file is not None and (not found or found[-1][0] != file):  # else it names something in the module
            found.append((file, outer))
            if _is_installed(file, outer):
                break
    return found


@lru_cache(maxsize=4_096)
def _imports(file: Path, name: str, size: int, changed: int) -> tuple[str, ...]:
    """The import paths that a module's text imports or has as strings, also in functions; none of other than Python."""
    try:
        parsed = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    package, found = _package_of(name), []
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute("." * node.level + (node.module or ""), package)
            found += [f"{base}.{alias.name}" if base else alias.name for alias in node.names]
            if node.names[0].name == "*":  # whose __all__ may name modules
                found += _siblings(base.split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_import_path(node.value):
            found.append(_dotted(node.value))
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            values = [*node.args, *(each.value for each in node.keywords)]
            parts = [each for value in values for each in ast.walk(value)]  # of a name that is put together, too
            texts = [each.value for each in parts if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            packages = [package, *([*takewhile(str.isidentifier, text.split("."))] for text in texts)]
            found += [_absolute(text.rstrip("."), each) for text in texts for each in packages]
            if not (values and isinstance(values[0], ast.Constant)):  # a name that is made at run time
                found += [inner for each in packages for inner in _siblings(each)]
    return tuple(dict.fromkeys(found))


def _siblings(package: list[str]) -> list[str]:
    """The import paths of all modules in a package."""
    folders = _module(".".join(package)).folders if package else None
    files = [each for folder in folders or () for each in Path(folder).glob("*")]
    inner = {each.stem for each in files if each.suffix == ".py" or (each / "__init__.py").is_file()}
    return [".".join([*package, each]) for each in sorted(inner) if each.isidentifier()]


def _is_import_path(text: str) -> bool:
    return "." in _dotted(text) and all(map(str.isidentifier, _dotted(text).split(".")))


def _dotted(text: str) -> str:
    """An import path of one spelling; that of entry points is `package.module:name`."""
    return text.replace(":", ".", 1)


def _called(node: ast.Call) -> str:
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def _absolute(name: str, package: list[str]) -> str:
    """A name, with a dot for each step out of `package` that it starts from, as an import path."""
    inner = name.lstrip(".")
    level = len(name) - len(inner)
    return ".".join([*(package[: len(package) - level + 1] if level else []), *([inner] if inner else [])])


def _package_of(name: str) -> list[str]:
    """The package in which a module's relative imports start."""
    parts = name.split(".")
    return parts if _module(name).folders is not None else parts[:-1]
