"""Local Lipschitz constants: ours against power iteration a sequence at a time, as published.

    python -m benchmarks.lipschitz [--threads 1] [--repeats 3] [--tol 1e-3] [--print_only]

The published procedure repeats ``torch.autograd.functional`` products: jvp, then vjp, each of which runs the layer
again. Both stop at the same relative residual, or after ``--max_iter`` iterations, in which case the ratio is a lower
bound for the work and ``converged`` says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_modules import SelfAttention
from attention_modules.analysis import local_lipschitz
from benchmarks.common import alternate, write_results


@dataclass(frozen=True)
class Case:
    """B sequences of n tokens of a layer."""

    batch: int
    tokens: int
    dim: int
    heads: int


CASES = (Case(8, 64, 768, 12),)


def published(fn: Callable[[Tensor], Tensor], x: Tensor, tol: float, max_iter: int) -> tuple[Tensor, int, int]:
    """Values ``[B]``, iterations of all sequences together, and how many converged."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randn(x.shape, generator=generator)
    values, iterations, converged = [], 0, 0
    with sdpa_kernel(SDPBackend.MATH):
        for sample, v in zip(x.split(1), starts.split(1), strict=True):
            v = v / v.norm()
            for _ in range(max_iter):
                iterations += 1
                _, u = torch.autograd.functional.jvp(fn, sample, v)
                value = u.norm()
                _, w = torch.autograd.functional.vjp(fn, sample, u / value)
                if (w - value * v).norm() <= tol * value:
                    converged += 1
                    break
                v = w / w.norm()
            values.append(value)
    return torch.stack(values), iterations, converged


def measure(case: Case, repeats: int, tol: float, max_iter: int) -> dict[str, object]:
    """One row of the table."""
    torch.manual_seed(0)
    layer = SelfAttention(case.dim, case.heads, qkv_bias=True).eval().requires_grad_(False)
    x = torch.nn.functional.layer_norm(torch.randn(case.batch, case.tokens, case.dim), (case.dim,))
    found: dict[str, Any] = {}

    def ours() -> None:
        found["ours"] = local_lipschitz(layer, x, tol=tol)

    def theirs() -> None:
        found["published"] = published(layer, x, tol, max_iter)

    seconds = alternate({"ours": ours, "published": theirs}, repeats, cpu_time=True)
    estimate, (values, iterations, converged) = found["ours"], found["published"]
    return {
        "B, n, d, H": f"{case.batch}, {case.tokens}, {case.dim}, {case.heads}",
        "iterations": estimate.iterations,
        "converged": f"{int(estimate.converged.sum())} of {case.batch}",
        "published: iterations a sequence": f"{iterations / case.batch:.0f}",
        "published: converged": f"{converged} of {case.batch}",
        "largest relative difference": f"{((estimate.value - values).abs() / estimate.value).max().item():.1e}",
        "published / ours": f"{seconds['published'] / seconds['ours']:.1f}",
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tol", type=float, default=1e-3)
    parser.add_argument("--max_iter", type=int, default=200)
    parser.add_argument("--print_only", action="store_true", help="write no file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows = [measure(case, options.repeats, options.tol, options.max_iter) for case in CASES]
    if options.print_only:
        print(*rows, sep="\n")
        return
    command = (
        f"python -m benchmarks.lipschitz --threads {options.threads} --repeats {options.repeats} "
        f"--tol {options.tol:g} --max_iter {options.max_iter}"
    )
    notes = (
        "Ratio of medians of process CPU time, calls alternating; random weights, normalized random tokens, float32."
    )
    print(write_results("lipschitz", "Local Lipschitz constants", command, rows, notes).read_text())


if __name__ == "__main__":
    main()
