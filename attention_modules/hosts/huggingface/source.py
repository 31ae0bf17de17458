"""What the forward of a class says of its call to transformers' attention interface.

A layer is known by that call, not by its class: the forward reads a function from an ``AttentionInterface`` by the name
in ``self.config._attn_implementation``, and gives it itself, finished queries, keys and values, and a mask.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn
from transformers import AttentionInterface

_CONCATENATES = {"cat", "concat", "concatenate"}


def own_forward(kind: type[nn.Module]) -> Any:
    """A class's forward, without its decorators."""
    return inspect.unwrap(kind.forward)


@functools.cache
def _registries(forward: Any) -> frozenset[str]:
    """Names by which a forward reads attention functions from an interface."""
    if not isinstance(forward, FunctionType):
        return frozenset()
    names = forward.__code__.co_names
    return frozenset(name for name in names if isinstance(forward.__globals__.get(name), AttentionInterface))


def calls_interface(kind: type[nn.Module]) -> bool:
    """Whether the class's forward reads its attention function from the interface."""
    return bool(_registries(own_forward(kind)))


@dataclass(frozen=True, eq=False)
class InterfaceCall:
    """The call as the source has it.

    Args:
        forward: whose call it is.
        given: the source of what it passes by name, by the name; what it passes in one of several calls too.
        passes_on: whether it passes on the ``**kwargs`` of the forward.
        functions: attention functions that stand in the forward, as the one for "eager".
        registries: names of the interfaces.
        parameters: names of the forward's parameters, the input first.
        required: those without a default.
        statements: the body.
        times: how often the interface is called, whatever branches are taken.
    """

    forward: FunctionType
    given: Mapping[str, str]
    passes_on: bool
    functions: tuple[Callable[..., Any], ...]
    registries: frozenset[str]
    parameters: tuple[str, ...]
    required: frozenset[str]
    statements: ast.FunctionDef
    times: int

    @property
    def rotates(self) -> bool:
        """Whether rotary positions turn queries and keys, by the names in the forward."""
        return any(re.search("rot|rope", name, re.IGNORECASE) for name in self.forward.__code__.co_names)

    def function(self, implementation: str | None) -> Callable[..., Any] | None:
        """The attention function that this name stands for here; None where the forward names none for "eager"."""
        for registry in self.registries:
            known = self.forward.__globals__[registry]
            if implementation in known:
                return known[implementation]
        return self.functions[0] if self.functions else None

    def projected_from(self, projection: str) -> set[str]:
        """The sources of what the forward gives to a projection."""
        return {
            ast.unparse(call.args[0])
            for call in calls_in(self.statements)
            if ast.unparse(call.func) == f"self.{projection}" and call.args
        }

    def sequences(self, projection: str) -> set[str]:
        """The sources of what the forward gives to a projection, and the names of what it concatenates for that."""
        sources = self.projected_from(projection)
        made = [value for target, value in _assigned(self.statements) if ast.unparse(target) in sources]
        joined = [each for each in made if isinstance(each, ast.Call) and names_in(each.func) & _CONCATENATES]
        return sources.union(*(_names(each.args[0]) for each in joined if each.args))


def interface_call(kind: type[nn.Module]) -> InterfaceCall | str:
    """The call of a class's forward, or why it cannot be read."""
    return _read(own_forward(kind))


@functools.cache
def _read(forward: Any) -> InterfaceCall | str:
    registries = _registries(forward)
    parsed = _parsed(forward)
    if parsed is None:
        return "the source of its forward cannot be read, so that nobody knows what it hands to the attention interface"
    set_to = [(target.id, value) for target, value in _assigned(parsed) if isinstance(target, ast.Name)]
    variables = {name for name, value in set_to if _names(value) & registries}
    # `interface = eager` in a branch of its own, as before there was `get_interface`.
    sources = [value for name, value in set_to if name in variables]
    calls = [call for call in calls_in(parsed) if _names(call.func) & (variables or registries) and call.keywords]
    calls = [call for call in calls if call.args and ast.unparse(call.args[0]) == "self"]
    if not calls:
        return "its forward calls the attention interface in a way that cannot be read"
    names = dict.fromkeys(name for source in sources for name in sorted(_names(source)))
    functions = [forward.__globals__.get(name) for name in names]
    parameters = inspect.signature(forward).parameters
    return InterfaceCall(
        forward,
        {word.arg: ast.unparse(word.value) for call in calls for word in call.keywords if word.arg},
        all(any(word.arg is None for word in call.keywords) for call in calls),
        tuple(function for function in functions if isinstance(function, FunctionType)),
        registries,
        tuple(parameters)[1:],
        frozenset(name for name, each in parameters.items() if each.default is each.empty),
        parsed,
        sum(any(call in calls for call in calls_in(step)) for step in parsed.body if not isinstance(step, ast.If)),
    )


def arguments_at(kind: type[nn.Module], child: str, parameters: tuple[str, ...]) -> list[dict[str, str]]:
    """The sources of what the class's forward gives to a child with these parameters, at each of its calls."""
    parsed = _parsed(own_forward(kind))
    calls = [] if parsed is None else [each for each in calls_in(parsed) if ast.unparse(each.func) == f"self.{child}"]
    plain = [each for each in calls if not any(isinstance(value, ast.Starred) for value in each.args)]
    return [
        {
            **{name: ast.unparse(value) for name, value in zip(parameters, call.args, strict=False)},
            **{word.arg: ast.unparse(word.value) for word in call.keywords if word.arg},
        }
        for call in plain
    ]


@functools.cache
def _parsed(forward: Any) -> ast.FunctionDef | None:
    """The source of a forward; None where it cannot be read."""
    try:
        (parsed,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return None
    return parsed if isinstance(parsed, ast.FunctionDef) else None


def _assigned(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    plain = [(target, each.value) for each in ast.walk(node) if isinstance(each, ast.Assign) for target in each.targets]
    typed = [(each.target, each.value) for each in ast.walk(node) if isinstance(each, ast.AnnAssign) and each.value]
    return [*plain, *typed]


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def names_in(node: ast.AST) -> set[str]:
    """Every name below a node of the source, those of attributes too."""
    return _names(node) | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def calls_in(node: ast.AST) -> list[ast.Call]:
    """Every call below a node of the source."""
    return [each for each in ast.walk(node) if isinstance(each, ast.Call)]
