"""RPC-Attention (n = 4) against its naive twin and against n attention passes.

Run from the repository's root: ``python -m benchmarks.rpc`` (about five minutes on two cores).
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_modules import rpc_attention
from attention_modules.naive import naive_rpc
from benchmarks.common import alternate, peak_memory, write_results

ITERATIONS = 4
MODES = ("forward", "forward + backward")
Attention = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A shape ``[B, H, N, d]`` and how often to time it."""

    name: str
    shape: tuple[int, int, int, int]
    is_causal: bool
    repeats: int


CASES = (
    Case("DeiT-tiny", (16, 3, 197, 64), False, 9),
    Case("LM, causal", (16, 8, 256, 16), True, 9),
    Case("Segmenter", (2, 3, 1025, 64), False, 5),
    Case("long", (1, 3, 4096, 64), False, 3),
)


def forward(attention: Attention, k: Tensor, v: Tensor) -> None:
    with torch.no_grad():
        attention(k, v)


def forward_backward(attention: Attention, k: Tensor, v: Tensor, grad: Tensor) -> None:
    torch.autograd.grad(attention(k, v), (k, v), grad)


def calls(
    case: Case,
    backward: bool,
    attentions: Mapping[str, Attention],
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Callable[[], None]]:
    """What to time, by name, on the same tensors: each attention, and n passes of attention(k, k, v) as the floor."""
    torch.manual_seed(0)
    k, v, grad = (torch.randn(case.shape).to(device, dtype) for _ in range(3))
    k.requires_grad_()
    v.requires_grad_()
    run = partial(forward_backward, grad=grad) if backward else forward
    found = {name: partial(run, attention, k=k, v=v) for name, attention in attentions.items()}
    one_pass = partial(_symmetric, is_causal=case.is_causal)
    return {**found, "floor": partial(_repeat, partial(run, one_pass, k=k, v=v))}


def attentions_of(case: Case, compiled: bool) -> dict[str, Attention]:
    """The naive form, ours, and ours compiled."""
    options = {"iterations": ITERATIONS, "is_causal": case.is_causal}
    found: dict[str, Attention] = {"naive": partial(_naive, **options), "eager": partial(rpc_attention, **options)}
    if compiled:
        found["compiled"] = torch.compile(found["eager"], dynamic=False)
    return found


def _naive(k: Tensor, v: Tensor, **options: Any) -> Tensor:
    with k.device:  # it makes its masks where tensors are made
        return naive_rpc(k, v, **options)


def measure(case: Case, cpu_time: bool, compiled: bool) -> list[dict[str, object]]:
    """Rows of the table for one shape: forward, and forward with backward."""
    attentions = attentions_of(case, compiled)
    rows = []
    for mode in MODES:
        timed = calls(case, mode != "forward", attentions)
        seconds = alternate(timed, case.repeats, cpu_time)
        peaks = {name: peak_memory(timed[name]) for name in ("naive", "eager")}
        row: dict[str, object] = {"shape (B, H, N, d)": f"{case.name} {case.shape}", "mode": mode}
        row["floor ms"] = f"{1e3 * seconds['floor']:.1f}"
        for name in timed:
            if name != "floor":
                row[f"{name} / floor"] = f"{seconds[name] / seconds['floor']:.2f}"
        row["naive / eager"] = f"{seconds['naive'] / seconds['eager']:.2f}"
        row["naive MiB"], row["eager MiB"] = (_mebibytes(peaks[name]) for name in ("naive", "eager"))
        rows.append(row)
        print(row, flush=True)
        gc.collect()
    torch.compiler.reset()
    return rows


def _symmetric(k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return scaled_dot_product_attention(k, k, v, is_causal=is_causal)


def _repeat(call: Callable[[], None]) -> None:
    for _ in range(ITERATIONS):
        call()


def _mebibytes(peak: float | None) -> str:
    return "not measured" if peak is None else f"{peak:.0f}"


def main(args: list[str] | None = None) -> None:
    """Measure, print and write ``benchmarks/results/rpc.md`` and ``.csv``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument(
        "--cpu_time", action="store_true", help="process CPU time (on a busy machine, with --threads 1)"
    )
    parser.add_argument("--no_compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="one shape only; writes no file")
    options = parser.parse_args(args)
    torch.set_num_threads(options.threads)
    given = sys.argv[1:] if args is None else args
    command = " ".join(["python -m benchmarks.rpc", *given])
    clock = "process CPU time" if options.cpu_time else "wall-clock time"
    notes = (
        f"RPC-Attention with n = {ITERATIONS}, float32, medians of {clock}, the calls of a row taking turns in one "
        f"process. Floor: {ITERATIONS} passes of scaled_dot_product_attention(k, k, v), each with its backward. "
        "Naive: the equations with every map in memory (attention_modules/naive). MiB: rise of resident "
        "memory during one call."
    )
    rows: list[dict[str, object]] = []
    for case in CASES:
        if options.case in (None, case.name):
            rows += measure(case, options.cpu_time, not options.no_compile)
        if options.case is None:  # after each shape: an interrupted run keeps what it has
            write_results("rpc", "RPC-Attention", command, rows, notes)


if __name__ == "__main__":
    main()
