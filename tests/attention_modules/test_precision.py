"""Float64 exists on the CPU only, for all that this code knows (MPS has none)."""

import ast
from pathlib import Path

import pytest
import torch

from attention_modules import precision
from attention_modules.precision import to_float64

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("attention_modules", "lightning_tasks") for path in (ROOT / folder).rglob("*.py"))


def careless(tree: ast.AST) -> list[int]:
    """Lines that make float64 of a tensor that may lie on any device: `.double()`, but for `.cpu().double()`."""
    lines = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        receiver = node.func.value
        from_cpu = isinstance(receiver, ast.Call) and getattr(receiver.func, "attr", "") == "cpu"
        names = {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
        cast = node.func.attr == "double" or (node.func.attr == "to" and names & {"float64", "double"})
        placed = "float64" in names and any(keyword.arg == "device" for keyword in node.keywords)
        if placed or (cast and not from_cpu):
            lines.append(node.lineno)
    return lines


def test_no_tensor_becomes_float64_where_its_device_may_have_none():
    assert len(SOURCES) > 100
    own = {ROOT / "attention_modules" / name for name in ("precision.py", "testing.py")}  # the latter is of the CPU
    found = {path: careless(ast.parse(path.read_text())) for path in SOURCES if path not in own}
    assert {path.name: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize("line", ["x.double()", "x.to(torch.float64)", "torch.zeros(2, dtype=torch.float64, device=d)"])
def test_the_search_finds(line):
    assert careless(ast.parse(line)) == [1]
    assert careless(ast.parse("x.cpu().double(), torch.zeros(2, dtype=torch.float64), x.to(device)")) == []


class Elsewhere:
    """Stands for a tensor on a device without float64."""

    device = torch.device("mps")

    def cpu(self):
        return torch.ones(2)

    def double(self):
        raise TypeError("no float64")


def test_a_device_without_float64_hands_over_to_the_cpu():
    found = to_float64(Elsewhere())
    assert (found.device.type, found.dtype) == ("cpu", torch.float64)
    assert precision.widest(Elsewhere.device) is torch.float32
    assert precision.widest(torch.device("cpu")) is torch.float64
    meta = torch.empty(2, device="meta")
    assert to_float64(meta).device == meta.device
