"""How time and memory of linear-time mechanisms grow with the tokens, beside causal softmax attention.

`python -m benchmarks.generating.growth`: one thread, float32, one sample, four heads of width 64. The calls of one
number of tokens take turns in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from attention_modules.mechanisms.linear.operator import linear_operator
from benchmarks.common import alternate, peak_memory, write_results

SHORT, PAIRED, LONG = 4_096, 16_384, 65_536  # SDPA is left out at the last


def calls(tokens: int) -> dict[str, Callable[[bool], object]]:
    """Each mechanism's operator, forward or with backward, on its own inputs."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, 4, tokens, *shape, generator=generator)

    q, k, v = F.normalize(draw(64), dim=-1), F.normalize(draw(64), dim=-1), draw(64)
    beta, token, channel = draw().sigmoid(), F.logsigmoid(draw() + 3), F.logsigmoid(draw(64) + 3)
    given: dict[str, tuple[Callable[..., Tensor], list[Tensor | None]]] = {
        "softmax (SDPA)": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), []),
        "one decay per token": (lambda *all_of: linear_operator(*all_of)[0], [token]),
        "gla": (lambda *all_of: linear_operator(*all_of)[0], [channel]),
        "gated_delta": (lambda *all_of: linear_operator(*all_of)[0], [token, beta]),
        "kda": (lambda *all_of: linear_operator(*all_of)[0], [channel, beta]),
    }

    def run(function: Callable[..., Tensor], inputs: list[Tensor], backward: bool) -> None:
        leaves = [each.detach().requires_grad_(backward) for each in inputs]
        with torch.set_grad_enabled(backward):
            out = function(*leaves)
            if backward:
                out.sum().backward()

    made: dict[str, Callable[[bool], object]] = {}
    for name, (function, gates) in given.items():
        inputs = [q, k, v, *(gate for gate in gates if gate is not None)]
        made[name] = lambda backward, function=function, inputs=inputs: run(function, inputs, backward)
    return made


def peak_of_tensors(call: Callable[[], object]) -> float:
    """MiB that the tensors of a call take at most; resident memory also counts what malloc keeps."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes)) / 2**20


def main() -> None:
    """Measure, and write a row for each mechanism."""
    torch.set_num_threads(1)
    seconds: dict[tuple[str, bool, int], float] = {}
    memory: dict[str, float | None] = {}
    tensors: dict[str, float] = {}
    for tokens, repeats in ((SHORT, 5), (PAIRED, 3), (LONG, 2)):
        made = {name: call for name, call in calls(tokens).items() if tokens != LONG or "SDPA" not in name}
        for backward in (False, True):
            found = alternate({name: partial(call, backward) for name, call in made.items()}, repeats)
            seconds |= {(name, backward, tokens): taken for name, taken in found.items()}
        if tokens == PAIRED:
            memory = {name: peak_memory(partial(call, True)) for name, call in made.items()}
            tensors = {name: peak_of_tensors(partial(call, True)) for name, call in made.items()}
    rows = []
    for name in memory:
        row: dict[str, object] = {"mechanism": name}
        for backward, mode in ((False, "forward"), (True, "both")):
            now, softmax = seconds[name, backward, PAIRED], seconds["softmax (SDPA)", backward, PAIRED]
            growth = ""
            if (name, backward, LONG) in seconds:
                ratio = seconds[name, backward, LONG] / seconds[name, backward, SHORT]
                growth = f"{math.log(ratio) / math.log(LONG / SHORT):.2f}"
            row |= {
                f"{mode}, ms at {PAIRED:,}": f"{1e3 * now:.0f}",
                f"{mode}, of SDPA": f"{now / softmax:.3f}",
                f"{mode}, exponent of growth": growth,
            }
        peak = memory[name]
        row |= {"both, MiB of tensors": f"{tensors[name]:.0f}", "both, resident MiB": f"{peak:.0f}" if peak else ""}
        rows.append(row)
    write_results(
        "growth",
        "Growth of linear-time mechanisms",
        "python -m benchmarks.generating.growth",
        rows,
        f"B 1, H 4, d 64, float32, causal; medians of wall-clock time. Exponent: from {SHORT:,} to {LONG:,} tokens.",
    )


if __name__ == "__main__":
    main()
