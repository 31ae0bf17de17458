"""Which share of the code's lines refuses, checks or handles errors: `python -m tests.defence`.

Counted are lines of code, without comments and docstrings: those of `raise`, `assert` and `except` with what
belongs to them, of conditions that only lead to one, and of functions that are named for refusing or checking.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("attention_modules", "lightning_tasks", "datamodules")
NAMED = re.compile(r"^_?(check|refuse|validate|warn|reject|ensure)(_|$)|_refusal$|^refusal")


def lines_of(node: ast.AST) -> set[int]:
    """The lines of a statement."""
    return set(range(node.lineno, node.end_lineno + 1))  # type: ignore[attr-defined]


def defends(node: ast.AST) -> bool:
    """Whether a statement only refuses, checks or handles."""
    if isinstance(node, (ast.Raise, ast.Assert, ast.ExceptHandler)):
        return True
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return bool(NAMED.search(node.name)) or node.name.endswith("Error")
    if isinstance(node, ast.If):
        return all(defends(inner) for inner in (*node.body, *node.orelse))
    called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    return bool(NAMED.search(getattr(called, "id", getattr(called, "attr", ""))))


def count(path: Path) -> tuple[int, int]:
    """Lines of code of a file, and those of defence."""
    text = path.read_text(encoding="utf-8")
    tree, code, defence = ast.parse(text), set[int](), set[int]()
    plain = {number for number, line in enumerate(text.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            plain -= lines_of(node)
        elif isinstance(node, (ast.stmt, ast.ExceptHandler)):
            code |= lines_of(node)
            defence |= lines_of(node) if defends(node) else set()
    return len(code & plain), len(defence & plain)


if __name__ == "__main__":
    for package in PACKAGES:
        counts = [count(path) for path in (ROOT / package).rglob("*.py")]
        code, defence = (sum(each) for each in zip(*counts, strict=True))
        print(f"{package}: {defence:,} of {code:,} lines, {defence / code:.1%}")
