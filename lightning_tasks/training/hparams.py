"""Hyper-parameters as plain data: what a checkpoint can hold, a YAML file can say, and a class can be built from."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jsonargparse

from attention_modules.extras import EXTRA_OF
from attention_modules.function import FunctionAttention
from attention_modules.mechanism import did_you_mean
from lightning_tasks.working_folder import shadow_note

Spec = dict[str, Any]


def import_path(target: Any) -> str:
    """The shortest dotted path under which a class or function can be imported again, e.g. ``torch.optim.AdamW``.

    The class that stands for a function has the function's path.

    Raises:
        TypeError: if there is none (a lambda, a local class or function); the text names the cure.
    """
    if isinstance(target, type) and issubclass(target, FunctionAttention) and target is not FunctionAttention:
        target = target.function
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__qualname__", "")
    packages = module.split(".")
    for size in range(1, len(packages) + 1):
        path = ".".join([*packages[:size], name])
        try:
            if import_object(path) is target:
                return path
        except ValueError:
            continue
    raise TypeError(
        f"{target!r} cannot be stored in a checkpoint, as it cannot be imported again. Define it at the top level of a "
        "module, or give {'class_path': ..., 'init_args': {...}} or a functools.partial of a class"
    )


def import_object(path: str, *modules: ModuleType) -> Any:
    """What a dotted path names; a bare name is looked for in ``modules``, in turn.

    Raises:
        ValueError: if there is no such thing; the text says where it was looked for.
    """
    if "." not in path:
        for module in modules:
            if hasattr(module, path):
                return getattr(module, path)
        looked = " or ".join(module.__name__ for module in modules) or "nowhere: write the whole dotted path"
        near = did_you_mean(path, [name for module in modules for name in vars(module) if not name.startswith("_")])
        raise ValueError(f"no {path!r} was found; looked in {looked}.{near}")
    found, names = find_module(path)
    try:
        return functools.reduce(getattr, names, found)
    except AttributeError as error:
        raise ValueError(f"{path!r} was not found: {error}{shadow_note(path)}") from error


def find_module(path: str) -> tuple[ModuleType, list[str]]:
    """The longest beginning of a dotted path that is a module, and the names after it.

    Raises:
        ValueError: if there is none.
    """
    parts = path.split(".")
    for size in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:size])
        try:
            return importlib.import_module(name), parts[size:]
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                continue
            raise
    extra = EXTRA_OF.get(parts[0])
    cure = "check the spelling or install it" if extra is None else f"pip install 'attnswap[{extra}]'"
    raise ValueError(f"{path!r} was not found: there is no module {parts[0]!r}; {cure}")


def plain_data(value: Any, what: str = "hyper-parameter", specs: bool = True) -> Any:
    """A deep copy that holds only None, booleans, numbers, strings, lists and dicts; classes become their specs.

    Args:
        value: nested data.
        what: how error messages call it.
        specs: whether classes and functions may stand in it; what is read as it was written cannot have them.

    Raises:
        TypeError: if some part has no such form; ``what`` names it in the text.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return str.__str__(value) if isinstance(value, str) else value
    if isinstance(value, jsonargparse.Namespace):  # what the command line leaves inside lists
        value = value.as_dict()
    if isinstance(value, Mapping):
        return {str(key): plain_data(entry, f"{what}.{key}", specs) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [plain_data(entry, f"{what}[{index}]", specs) for index, entry in enumerate(value)]
    if specs and (isinstance(value, (type, functools.partial)) or callable(value)):
        return plain_spec(value, what=what)
    raise TypeError(
        f"{what} cannot be stored in a checkpoint: {value!r} is no plain data (numbers, strings, None, lists, dicts)"
    )


def join_arguments(value: Any) -> Any:
    """Nested data in which further keys of each dict with a "class_path" have joined its "init_args".

    The command line's ``--optimizer.init_args.lr 0.1`` arrives as the key "lr" beside them.
    """
    if isinstance(value, jsonargparse.Namespace):
        value = value.as_dict()
    if isinstance(value, list):
        return [join_arguments(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    data = {key: join_arguments(entry) for key, entry in value.items()}
    if "class_path" not in data:
        return data
    further = {key: data.pop(key) for key in list(data) if key not in ("class_path", "init_args")}
    return {**data, "init_args": {**(data.get("init_args") or {}), **further}}


def plain_spec(value: Any, *modules: ModuleType, what: str = "value") -> Spec:
    """``{"class_path": ..., "init_args": {...}}`` from a name, a class, a function, a partial of one, or such a dict.

    Args:
        value: what is to be built later. A bare name is looked for in ``modules``. Further keys of a dict join its
            "init_args", see :func:`join_arguments`.
        what: how error messages call it, e.g. "optimizer".

    Raises:
        TypeError: if it is none of these, or not importable.
        ValueError: if the path names nothing, or the dict has no "class_path".
    """
    if isinstance(value, str):
        return {"class_path": import_path(import_object(value, *modules)), "init_args": {}}
    if isinstance(value, Mapping):
        if "class_path" not in value:
            keys = sorted(map(str, value))
            example = f"--model.{what} CLASS" + "".join(f" --model.{what}.{key} ..." for key in keys[:1])
            raise ValueError(
                f"{what} needs the key 'class_path', got {keys}; on the command line the class comes first: {example}"
            )
        arguments = join_arguments(value)["init_args"]
        spec = plain_spec(value["class_path"], *modules, what=what)
    elif isinstance(value, functools.partial):
        if value.args:
            raise TypeError(f"{what}: a functools.partial must bind by keyword, got positional {value.args!r}")
        arguments = value.keywords
        spec = plain_spec(value.func, *modules, what=what)
    elif isinstance(value, type) or hasattr(value, "__qualname__"):
        return {"class_path": import_path(value), "init_args": {}}
    else:
        raise TypeError(
            f"{what} must be a class, a dotted path, a functools.partial or {{'class_path': ..., 'init_args': ...}}, "
            f"got {value!r}"
        )
    return {**spec, "init_args": {**spec["init_args"], **plain_data(arguments, f"{what}.init_args")}}


def build(spec: Spec, *args: Any, **extra: Any) -> Any:
    """Call what ``spec["class_path"]`` names with ``args``, its ``init_args`` and ``extra``.

    Raises:
        TypeError: if it does not take these arguments; the text shows them.
    """
    target = import_object(spec["class_path"])
    keywords = {**spec["init_args"], **extra}
    try:
        return target(*args, **keywords)
    except TypeError as error:
        raise TypeError(f"{spec['class_path']} could not be built with {sorted(keywords)}: {error}") from error
