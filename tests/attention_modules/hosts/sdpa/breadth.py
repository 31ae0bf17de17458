"""How far the host without a list reaches: a line for each of other people's tiny models.

``python -m tests.attention_modules.hosts.sdpa.breadth`` tries all and writes docs/hosts_sdpa.csv, some seconds each. It
needs the packages that the lines name, which no extra brings: ``pip install --no-deps`` them into one beside ours.
"""

from __future__ import annotations

import csv
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules import AttentionSwapError, restore_attention, swap_attention
from attention_modules.hosts.sdpa.record import arguments
from tests.attention_modules.hosts.sdpa.strangers import BUILDERS, Example, quiet

FILE = Path(__file__).parents[4] / "docs" / "hosts_sdpa.csv"


@dataclass(frozen=True)
class Line:
    """What was seen of a model: how its layers were found, and the largest differences of softmax put for softmax."""

    model: str
    package: str
    version: str
    result: str
    found: str = ""
    layers: str = ""
    hosts: str = ""
    output: str = ""
    gradient: str = ""
    sink: str = ""
    reason: str = ""


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield from [out] if out.is_floating_point() else []
    elif isinstance(out, (Mapping, list, tuple)):
        for part in out.values() if isinstance(out, Mapping) else out:
            yield from _tensors(part)
    elif hasattr(out, "__dict__"):
        yield from _tensors(vars(out))


def _run(model: nn.Module, example: Example) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients."""
    args, kwargs = arguments(example)
    model.zero_grad()
    torch.manual_seed(1)
    out = list(_tensors(model(*args, **kwargs)))
    sum(part.float().square().sum() for part in out).backward()  # type: ignore[union-attr]
    return [part.detach() for part in out], [
        value.grad.clone() for value in model.parameters() if value.grad is not None
    ]


def _apart(mine: list[Tensor], its: list[Tensor]) -> float:
    pairs = zip(mine, its, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1.0)) for a, b in pairs)


def tried(name: str) -> Line:
    """Softmax for softmax, found by code where that suffices and else by an example; restored; and one other."""
    package = name.partition("/")[0].partition(" ")[0]
    try:
        known = version(package)
    except PackageNotFoundError:
        known = ""
    torch.manual_seed(0)
    try:
        model, example = BUILDERS[name]()
        model.eval()
        for value in model.parameters():  # an output projection of zeros would hide the layer
            if not bool(value.any()):
                nn.init.normal_(value, std=0.05)
        before = _run(model, example)
    except Exception as error:
        return Line(name, package, known, "not tried", reason=_short(f"{type(error).__name__}: {error}"))
    reasons: list[str] = []
    for found, given in (("code", None), ("example", example)):
        try:
            report = swap_attention(model, "softmax", example=given)
            after = _run(model, example)
            restore_attention(model)
            restored = all(map(torch.equal, _run(model, example)[0], before[0]))
            swap_attention(model, "sink", example=example)
            other = _run(model, example)
            restore_attention(model)
        except AttentionSwapError as error:
            reasons.append(str(error))
            continue
        output, gradient, sink = _apart(after[0], before[0]), _apart(after[1], before[1]), _apart(other[0], before[0])
        good = output <= 1e-6 and gradient <= 1e-6 and restored and 0 < sink < float("inf")
        hosts = " ".join(sorted({row.host.replace(" ", "_") for row in report}))
        left = "; ".join(f"{row.name}: {row.reason}" for row in report.skipped[:2])
        numbers = (f"{value:.0e}" for value in (output, gradient, sink))
        return Line(
            name, package, known, "equal" if good else "fault", found, str(len(report)), hosts, *numbers, _short(left)
        )
    return Line(name, package, known, "refused", reason=_short(reasons[-1]))


def _short(text: str) -> str:
    """On one line, without the folder that packages stand in, of at most 240 characters."""
    text = " ".join(text.split())
    while (start := text.find("/site-packages/")) > 0:
        text = text[: text.rfind("(", 0, start) + 1] + text[start + len("/site-packages/") :]
    return text if len(text) <= 240 else f"{text[:237]}..."


def read() -> list[Line]:
    """The lines of the file."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return [Line(**row) for row in csv.DictReader(file)]


def main(asked: list[str]) -> None:
    quiet()
    logging.disable(logging.WARNING)
    lines = {line.model: line for line in read()} if FILE.is_file() and asked else {}
    for name in asked or BUILDERS:
        lines[name] = tried(name)
        print(*asdict(lines[name]).values(), flush=True)
    with FILE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Line)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(lines[name]) for name in BUILDERS if name in lines)


if __name__ == "__main__":
    main(sys.argv[1:])
