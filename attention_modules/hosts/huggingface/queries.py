"""What a forward does with its queries alone, on their way from the projection to the attention interface.

Without a query, keys stand in for it at the interface. That is only right where both went the same way, or where it is
known what the queries were multiplied by.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from attention_modules.hosts.huggingface.source import InterfaceCall, calls_in, names_in

# By these names forwards speak of queries and keys, and of their projections.
_QUERY = re.compile(r"\b(mixed_|linear_|to_)?(queries|query|q)(?=_|\b)|\bWq\b")
_QUERIES_OR_KEYS = re.compile(r"(mixed_|linear_|to_)?(queries|query|q|keys|key|k)(_states|_layer|_heads)?")
_KEY = re.compile(r"\b(mixed_|linear_|to_)?(keys|key|k)(?=_|\b)|\bWk\b")
_KEY_FOR = {"queries": "keys", "query": "key", "q": "k"}
# What only arranges a tensor's numbers, or says something of it.
_ARRANGING = {
    *("view", "reshape", "transpose", "permute", "contiguous", "flatten", "unflatten", "squeeze", "unsqueeze"),
    *("expand", "chunk", "split", "unbind", "movedim", "swapaxes", "swapdims", "view_as", "clone"),
    "_shape",  # of many layers
    *("to", "float", "half", "bfloat16", "double", "type", "type_as"),
    *("size", "dim", "numel", "len", "stride", "is_contiguous", "is_floating_point", "get_device"),
}
_NEW = {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}  # other tensors, of their kind


@dataclass(frozen=True)
class QueryPath:
    """What happens to queries and not to keys.

    Args:
        factors: sources of numbers, made of ``self`` alone, that queries are multiplied by.
        other: the source of anything else.
    """

    factors: tuple[str, ...] = ()
    other: str | None = None

    def factor(self, layer: nn.Module) -> float | None:
        """The product of the factors in this layer; None where one is no number."""
        product = 1.0
        for source in self.factors:
            value: Any = eval(source, {"__builtins__": {}}, {"self": layer})  # of the layer's own forward
            if not isinstance(value, (int, float)):
                return None
            product *= value
        return product


@functools.cache
def query_path(call: InterfaceCall) -> QueryPath:
    """What a forward does with queries alone, besides calling modules that the layer has for them."""
    works = _works(call.statements)
    sources = {ast.unparse(work) for work in works}
    unconditional = {id(node) for node in _unconditional(call.statements)}
    factors = []
    for work in works:
        source, names = ast.unparse(work), names_in(work)
        if not any(map(_QUERY.match, names)) or any(map(_KEY.match, names)) or _about_keys(source) in sources:
            continue
        factor = _factor(work) if id(work) in unconditional else None
        if factor is None:
            return QueryPath(other=source)
        factors.append(factor)
    return QueryPath(tuple(factors))


def _works(forward: ast.FunctionDef) -> list[ast.AST]:
    """What computes in a forward: outermost products and sums, changes in place, and calls."""
    inner = {id(part) for node in ast.walk(forward) if isinstance(node, ast.BinOp) for part in (node.left, node.right)}
    sums = [node for node in ast.walk(forward) if isinstance(node, ast.BinOp) and id(node) not in inner]
    changes = [node for node in ast.walk(forward) if isinstance(node, ast.AugAssign) or _replaces(node)]
    calls = [call for call in calls_in(forward) if not _arranges(call)]
    raised = {id(node) for each in ast.walk(forward) if isinstance(each, ast.Raise) for node in ast.walk(each)}
    return [work for work in (*sums, *changes, *calls) if id(work) not in raised]


def _replaces(node: ast.AST) -> bool:
    """Whether a statement sets items of a tensor, or puts a new one in the place of queries or keys."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    pairs: list[tuple[ast.expr, ast.expr]] = [(target, node.value) for target in targets]
    if isinstance(node.value, ast.Tuple) and isinstance(targets[0], ast.Tuple):
        pairs = [*zip(targets[0].elts, node.value.elts, strict=False)]
    held = [value for target, value in pairs if any(map(_QUERIES_OR_KEYS.fullmatch, names_in(target)))]
    made = [ast.unparse(call.func).rpartition(".")[2] for value in held for call in calls_in(value)]
    return not _NEW.isdisjoint(made) or any(isinstance(target, ast.Subscript) for target in targets)


def _arranges(call: ast.Call) -> bool:
    """Whether a call computes nothing, or is one of a module for queries (`self.q_proj`)."""
    called = ast.unparse(call.func)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else called
    return name in _ARRANGING | _NEW or (
        called.startswith("self.") and bool(_QUERY.match(called.removeprefix("self.")))
    )


def _unconditional(node: ast.AST) -> list[ast.AST]:
    """What runs whenever the forward does."""
    found = [node]
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.If, ast.IfExp, ast.For, ast.While, ast.Try)):
            found += _unconditional(child)
    return found


def _about_keys(source: str) -> str:
    """The same source, of keys."""
    return _QUERY.sub(lambda found: (found[1] or "") + _KEY_FOR[found[2]] if found[2] else "Wk", source)


def _factor(work: ast.AST) -> str | None:
    """The source of the number that queries are multiplied by, if the work is that."""
    if not isinstance(work, ast.BinOp) or not isinstance(work.op, ast.Mult):
        return None
    for number, queries in ((work.left, work.right), (work.right, work.left)):
        names = {node.id for node in ast.walk(number) if isinstance(node, ast.Name)}
        if names <= {"self"} and not calls_in(number) and any(map(_QUERY.match, names_in(queries))):
            return ast.unparse(number)
    return None
