"""Tiny models of other people's packages, with what they take: one line each of strangers.json.

A line has the class (or function) by its import path, its ``args`` and ``options``, and the model's ``inputs``. A dict
with ``class`` is an object likewise. A tensor is its kind and shape, as in ``"normal 2 6 16"``, or
``{"tensor": [...]}``.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

Example = tuple[Any, ...] | dict[str, Any]
_TENSOR = re.compile(r"(normal|tokens|ones|zeros)((?: \d+)+)(?: (bool|long))?")


def _tensor(kind: str, shape: str, dtype: str | None) -> Tensor:
    sizes, generator = [int(size) for size in shape.split()], torch.Generator().manual_seed(0)
    if kind == "normal":
        return torch.randn(sizes, generator=generator)
    if kind == "tokens":
        return torch.randint(0, 20, sizes, generator=generator)
    return torch.full(sizes, float(kind == "ones")).to(getattr(torch, dtype or "float"))


def _value(given: Any, sequence: type = list) -> Any:
    """What a part of a line stands for; lists are of the kind ``sequence``."""
    if isinstance(given, dict):
        if "class" in given:
            return _built(given)
        if "tensor" in given:
            return torch.tensor(given["tensor"])
        return {name: _value(part, sequence) for name, part in given.items()}
    if isinstance(given, list):
        return sequence(_value(part, sequence) for part in given)
    if isinstance(given, str) and (found := _TENSOR.fullmatch(given)):
        return _tensor(*found.groups())
    return given


def _built(line: dict[str, Any]) -> Any:
    kind = resolve_name(line["class"])
    return kind(*_value(line.get("args", []), tuple), **_value(line.get("options", {}), tuple))


def _build(line: dict[str, Any]) -> tuple[nn.Module, Example]:
    inputs = _value(line["inputs"])
    return _built(line), inputs if isinstance(inputs, dict) else tuple(inputs)


_LINES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
BUILDERS: dict[str, Callable[[], tuple[nn.Module, Example]]] = {line["name"]: partial(_build, line) for line in _LINES}


def quiet() -> None:
    """Without the warnings of other packages."""
    warnings.simplefilter("ignore")
