"""The kernels of flash-linear-attention on a CPU, by Triton's interpreter, beside our operator and the recurrence.

python -m tests.attention_modules.mechanisms.linear.interpreted [KIND ...]

Prints, for each kind of gate, the largest distances of outputs, states and gradients to the recurrence in float64,
relative to the norm: of the kernels, and of our operator on the same half precision numbers.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
from triton.runtime import autotuner, interpreter

from attention_modules.mechanisms.linear import fla
from attention_modules.mechanisms.linear.operator import linear_operator
from attention_modules.naive import naive_recurrence
from tests.attention_modules.mechanisms.linear.test_operator import GATES, both, sample

TOKENS = 150  # three chunks, of which the last is not full


class Index(int):
    """A loop's index, which kernels take for a number of Triton's."""

    def to(self, dtype: Any) -> Any:
        return interpreter._implicit_cvt(int(self)).to(dtype)


def indices(*given: int) -> Iterator[Index]:
    """``range`` in kernels."""
    return map(Index, builtins.range(*given))


def by_kernels(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Our call of the kernels, as the operator makes it on a GPU."""
    decay = given.get("log_decay")
    if decay is not None and decay.dim() == 1:
        decay = decay[None, :, None].expand(1, q.shape[1], q.shape[2])
    state = given["initial_state"].float()
    fla._kernel(0 if decay is None else decay.dim(), "beta" in given)  # imports its modules
    for name, module in [*sys.modules.items()]:
        if name.startswith("fla.ops"):
            module.range = indices  # type: ignore[attr-defined]
    return fla.by_kernels(q, k, v, decay, given.get("beta"), state, q.shape[-1] ** -0.5)


def distances(kind: str, dtype: torch.dtype = torch.float16) -> dict[str, tuple[float, float]]:
    """Of each output and gradient: the kernels' distance to the recurrence, and our operator's."""
    rounded = {name: x.to(dtype) for name, x in sample(kind, TOKENS, batch=2, width=16, values=16).items()}
    if "log_decay" in rounded:
        rounded["log_decay"] = rounded["log_decay"].float()
    exact = both(naive_recurrence, {name: x.double() for name, x in rounded.items()})
    found = [both(function, rounded) for function in (by_kernels, linear_operator)]
    return {
        name: tuple(float((each[name].double() - x).norm() / x.norm()) for each in found)  # type: ignore[misc]
        for name, x in exact.items()
    }


def main(kinds: list[str]) -> None:
    """Print them."""
    autotuner.Autotuner.do_bench = staticmethod(lambda call, quantiles=None: [1.0] * 3)  # nothing is timed here
    for kind in kinds or GATES:
        for name, (kernels, ours) in distances(kind).items():
            print(f"{kind},{name},{kernels:.2e},{ours:.2e}")


if __name__ == "__main__":
    main(sys.argv[1:])
