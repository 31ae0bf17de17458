"""Where a module's own forward calls ``scaled_dot_product_attention``, read from its code; nothing is run."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

TARGET = F.scaled_dot_product_attention
NAME = "scaled_dot_product_attention"
# Attention of other libraries, in which no other mechanism can act.
KERNELS = (
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "memory_efficient_attention",
    "sageattn",
)
_MISSING = object()
_DEPTH = 5  # of functions that call functions
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}
_LOCALS = {"LOAD_FAST", "LOAD_FAST_BORROW"}
_LOADS = {*_ATTRIBUTES, *_LOCALS, "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"}


@dataclass(frozen=True)
class Site:
    """A line that calls it.

    Args:
        file: of the line.
        line: its number.
        sure: whether each run of its function gets there; False under a condition.
        again: whether one run may get there several times, in a loop.
        reached: False where the object's own attributes say that it is not.
        ends: whether a condition around it ends in a return.
    """

    file: str
    line: int
    sure: bool = True
    again: bool = False
    reached: bool = True
    ends: bool = False

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass
class Calls:
    """What a module's forward, and the functions that it calls, call in turn; not what its child modules do."""

    sites: list[Site] = field(default_factory=list)
    unreached: list[Site] = field(default_factory=list)
    """Lines that a setting of the module leaves out."""
    kernels: list[str] = field(default_factory=list)
    softmax: list[Site] = field(default_factory=list)
    products: int = 0
    """How many products of matrices it makes."""
    attributes: set[str] = field(default_factory=set)
    """Names of the attributes that it reads, of whatever."""

    @property
    def ambiguous(self) -> bool:
        """Whether one forward may call it several times."""
        several = len(self.sites) > 1 and any(site.sure for site in self.sites)
        return several or any(site.again for site in self.sites)


def calls_of(module: nn.Module) -> Calls:
    """What the module's forward calls, by the code of its class and by the objects that it holds."""
    forward = getattr(type(module), "forward", None)
    calls = Calls()
    if isinstance(forward, FunctionType):
        _Walk(calls).function(forward, module, _DEPTH)
    return calls


def other_entries(kind: type[nn.Module]) -> dict[str, FunctionType]:
    """Methods of a class that call the function, and that its forward does not use."""
    walk = _Walk(Calls())
    walk.function(kind.forward, kind, _DEPTH)
    found: dict[str, FunctionType] = {}
    for name in dir(kind):
        method, calls = inspect.getattr_static(kind, name), Calls()
        if isinstance(method, FunctionType) and inspect.unwrap(method).__code__ not in walk.seen:
            _Walk(calls).function(method, kind, _DEPTH)
            if calls.sites or calls.unreached:
                found[name] = method
    return found


class _Walk:
    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.seen: set[CodeType] = set()

    def function(self, function: Any, owner: object, depth: int) -> None:
        """Look at a function, whose ``self`` is the owner where it is a method."""
        function = inspect.unwrap(function)
        if isinstance(function, functools.partial):
            function = function.func
        if isinstance(function, MethodType):
            function, owner = function.__func__, function.__self__
        if not isinstance(function, FunctionType) or _is_torchs(function) or depth == 0:
            return
        if function.__code__ not in self.seen:
            self.seen.add(function.__code__)
            source = _Source(function, owner)
            for code in _codes(function.__code__):
                self._code(code, function, owner, depth, source)

    def _code(self, code: CodeType, function: FunctionType, owner: object, depth: int, source: _Source) -> None:
        modules = [value for name in code.co_names if isinstance(value := function.__globals__.get(name), ModuleType)]
        self.calls.products += _products(code)
        for kind, name, line in _names(code):
            if kind in _ATTRIBUTES:
                self.calls.attributes.add(name)
            for value in _values(kind, name, function, owner, modules, _imported(code)):
                self._met(name, value, owner, line, depth, source)

    def _met(self, name: str, value: Any, owner: object, line: int, depth: int, source: _Source) -> None:
        if isinstance(value, functools.partial):
            value = value.func
        if value is TARGET:
            site = source.site(line, name)
            known = self.calls.sites if site.reached else self.calls.unreached
            if site not in known:
                known.append(site)
        elif (kernel := _kernel(name, value)) is not None:
            self.calls.kernels.append(kernel)
        elif isinstance(value, nn.Softmax) or (name == "softmax" and not isinstance(value, nn.Module)):
            if (site := source.site(line, name)).reached:
                self.calls.softmax.append(site)
        elif isinstance(value, (FunctionType, MethodType)):
            self.function(value, owner, depth - 1)
        elif not isinstance(value, (nn.Module, ModuleType, type, BuiltinFunctionType)) and callable(value):
            call = inspect.getattr_static(type(value), "__call__", None)
            if isinstance(call, FunctionType):
                self.function(call, value, depth - 1)


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> list[tuple[str, str, int]]:
    """The names that a code loads, with the instruction and the line of each."""
    found, line = [], code.co_firstlineno
    lines = dict(dis.findlinestarts(code))
    for step in dis.get_instructions(code):
        line = lines.get(step.offset) or line
        if step.opname in _LOADS and isinstance(step.argval, str):
            found.append((step.opname, step.argval, line))
    return found


@functools.lru_cache(maxsize=4096)
def _imported(code: CodeType) -> dict[str, str]:
    """What a code imports from modules itself: by its name there, that in the module."""
    steps = [*dis.get_instructions(code)]
    pairs = ((step, after) for step, after in itertools.pairwise(steps) if step.opname == "IMPORT_FROM")
    return {str(after.argval): str(step.argval) for step, after in pairs}


def _kernel(name: str, value: Any) -> str | None:
    """The kernel of another library, or the program, that a name stands for, if so; its value is None if unknown."""
    if isinstance(value, torch.jit.ScriptFunction):
        return f"{name}, a program of torch.jit.script" if NAME in str(value.code) else None
    if value is None:
        return name if name in KERNELS else None
    if isinstance(value, _Imported):
        return str(value)
    called = inspect.unwrap(value) if callable(value) else None  # flex_attention is compiled, mostly
    found = getattr(called, "__name__", None)
    if called is None or not {name, found} & {*KERNELS}:
        return None
    return f"{getattr(called, '__module__', '')}.{found or name}".lstrip(".")


class _Imported(str):
    """A kernel that a function imports when it runs."""


@functools.lru_cache(maxsize=4096)
def _products(code: CodeType) -> int:
    named = sum(name in ("matmul", "bmm", "baddbmm", "einsum") for _, name, _ in _names(code))
    steps = ((step.opname, step.argrepr) for step in dis.get_instructions(code))
    return named + sum(name == "BINARY_MATRIX_MULTIPLY" or shown == "@" for name, shown in steps)


def _values(
    kind: str, name: str, function: FunctionType, owner: object, modules: list[ModuleType], imported: dict[str, str]
) -> Iterator[Any]:
    """What a name that an instruction loads may stand for; None for an attribute of something unknown."""
    if kind in ("LOAD_GLOBAL", "LOAD_NAME"):
        if name in function.__globals__:
            yield function.__globals__[name]
    elif kind in _ATTRIBUTES:
        known = [vars(module)[name] for module in modules if name in vars(module)]
        called = name in ("forward", "__call__")  # of a child, unless it is super's
        own = _above(function, owner, name) if called else inspect.getattr_static(owner, name, _MISSING)
        part = vars(owner).get("_modules", {}).get(name) if isinstance(owner, nn.Module) else None
        if name == NAME and not known and own is _MISSING:  # torch.nn.functional.scaled_dot_product_attention
            known = [TARGET]
        yield from known
        if own is not _MISSING:
            yield from () if own is None else (getattr(own, "__func__", own),)
        elif part is not None or not known:
            yield part
    elif name in imported:
        if imported[name] == NAME:
            yield TARGET
        elif imported[name] in KERNELS:
            yield _Imported(imported[name])
    else:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if name in cells:
            try:
                yield cells[name].cell_contents
            except ValueError:  # not filled yet
                return


def _above(function: FunctionType, owner: object, name: str) -> Any:
    """What ``super()`` of a method gives; None where it does not ask it."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    kind = cells["__class__"].cell_contents if "__class__" in cells else None
    return getattr(super(kind, owner), name, None) if kind is not None and isinstance(owner, kind) else None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of what is defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_torchs(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").partition(".")[0] == "torch"


class _Source:
    """The text of a function, for what stands around a line; read where it is asked for."""

    def __init__(self, function: FunctionType, owner: object) -> None:
        self.function = function
        self.owner = owner
        self.file = function.__code__.co_filename

    @functools.cached_property
    def tree(self) -> ast.AST | None:
        """None where it was written in a shell, or generated."""
        try:
            lines, first = inspect.getsourcelines(self.function)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, SyntaxError, TypeError):
            return None
        return ast.increment_lineno(tree, first - 1)

    def site(self, line: int, name: str) -> Site:
        """The line as a call of what has this name there."""
        sure, again, reached, ends = self.tree is not None, False, True, False
        for node, arm in self._around(line, name):
            if isinstance(node, (ast.If, ast.IfExp)):
                taken = _truth(node.test, self.owner)
                reached = reached and taken in (None, arm)
                sure = sure and taken is not None
                ends = ends or _returns(node, arm)
            else:
                again = again or not isinstance(node, ast.Try)
                sure = sure and not isinstance(node, ast.Try)
        return Site(self.file, line, sure, again, reached, ends)

    def _around(self, line: int, name: str) -> Iterator[tuple[ast.AST, bool]]:
        """The statements around a name; of a condition, whether the name stands where it holds."""
        for node in ast.walk(self.tree) if self.tree is not None else ():
            if isinstance(node, _SEVERAL) and _holds(node, line, name):
                yield node, True
            elif isinstance(node, (ast.If, ast.IfExp)):
                for arm, body in ((True, node.body), (False, node.orelse)):
                    inside = body if isinstance(body, list) else [body]
                    if any(_holds(part, line, name) for part in inside):
                        yield node, arm


_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SEVERAL = (ast.For, ast.While, ast.Try, *_COMPREHENSIONS)


def _returns(node: ast.If | ast.IfExp, arm: bool) -> bool:
    """Whether what a condition chooses returns from the function."""
    body = node.body if arm else node.orelse
    return isinstance(body, list) and any(isinstance(each, ast.Return) for part in body for each in ast.walk(part))


def _holds(node: ast.AST, line: int, name: str) -> bool:
    """Whether the name is read in this line of the node."""
    found = (part for part in ast.walk(node) if name in (getattr(part, "id", None), getattr(part, "attr", None)))
    return any(part.lineno <= line <= (part.end_lineno or line) for part in found)  # type: ignore[attr-defined]


def _truth(test: ast.expr, owner: object) -> bool | None:
    """Whether a condition holds that reads a setting below ``self`` alone; None for any other."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _truth(test.operand, owner)
        return None if inner is None else not inner
    if isinstance(test, ast.Compare):
        nothing = isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value is None
        path = _path(test.left)
        if len(test.ops) > 1 or not nothing or path is None or not isinstance(test.ops[0], (ast.Is, ast.IsNot)):
            return None
        return (_read(owner, path) is None) == isinstance(test.ops[0], ast.Is)
    path = _path(test)
    value = None if path in (None, ["training"]) else _read(owner, path)
    return value if isinstance(value, bool) else None


def _path(node: ast.expr) -> list[str] | None:
    """The names after ``self``, if the expression is such an attribute."""
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.insert(0, node.attr)
        node = node.value
    return path if path and isinstance(node, ast.Name) and node.id == "self" else None


def _read(owner: Any, path: list[str]) -> Any:
    for name in path:
        owner = getattr(owner, name, None)
    return owner
