"""Chunked cross-entropy of a vocabulary head, ours and torch's, against plain: time and peak memory with gradients.

    python benchmarks/cross_entropy.py [--device cuda] [--output benchmarks/results/cross_entropy.json]

Each peak is measured in a process of its own (on the CPU: Linux), over what it held before. Times are medians of
alternating calls in one process with one thread (process CPU time on the CPU, wall time on CUDA).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_tasks.models.losses import chunked_cross_entropy

SHAPES = {"locater": (4096, 128, 33_278), "small vocabulary": (4096, 128, 4_000), "gpt2": (1024, 768, 50_257)}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The loss from all logits at once."""
    return nn.functional.cross_entropy(hidden @ weight.T, targets)


def torch_chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """torch's own, from 2.14 on, in chunks of the same size."""
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=256)
    return nn.functional.linear_cross_entropy(hidden, weight, targets, options=options)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"plain": plain, "chunked": chunked_cross_entropy}
if hasattr(nn.functional, "linear_cross_entropy"):
    LOSSES["torch chunked"] = torch_chunked


def inputs(shape: str, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states ``[tokens, D]``, weight ``[V, D]`` and targets ``[tokens]``."""
    tokens, dim, vocabulary = SHAPES[shape]
    torch.manual_seed(0)
    options = {"device": device, "dtype": DTYPES[device], "requires_grad": True}
    hidden, weight = torch.randn(tokens, dim, **options), torch.randn(vocabulary, dim, **options)
    return hidden, weight, torch.randint(vocabulary, (tokens,), device=device)


def seconds(loss: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: tuple[Tensor, Tensor, Tensor]) -> float:
    """Time of one loss with its gradients."""
    on_cuda = tensors[0].is_cuda
    clock = time.perf_counter if on_cuda else time.process_time
    if on_cuda:
        torch.cuda.synchronize()
    start = clock()
    torch.autograd.grad(loss(*tensors), tensors[:2])
    if on_cuda:
        torch.cuda.synchronize()
    return clock() - start


def peak_megabytes(name: str, shape: str, device: str) -> float:
    """Peak memory of one loss with its gradients, over that of its inputs; call it in a fresh process."""
    tensors = inputs(shape, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds(LOSSES[name], tensors)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    before = resident_megabytes("VmRSS")
    seconds(LOSSES[name], tensors)
    return resident_megabytes("VmHWM") - before


def resident_megabytes(field: str) -> float:
    """Linux on this process: VmRSS (now) or VmHWM (its peak; that of getrusage is inherited from the parent)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def peak_in_new_process(name: str, shape: str, device: str) -> float:
    """:func:`peak_megabytes` where nothing else was held before."""
    program = [sys.executable, __file__, "--device", device, "--peak", name, shape]
    return float(subprocess.run(program, capture_output=True, text=True, check=True).stdout)


def measure(shape: str, device: str, rounds: int) -> dict[str, float]:
    """Median times and peaks of the losses, and how ours compares with the plain one."""
    tensors = inputs(shape, device)
    times: dict[str, list[float]] = {name: [] for name in LOSSES}
    for turn in range(rounds + 1):
        for name, loss in LOSSES.items():
            taken = seconds(loss, tensors)
            if turn:  # the first round warms up
                times[name].append(taken)
    row = {f"{name} seconds": round(statistics.median(values), 5) for name, values in times.items()}
    row |= {f"{name} peak MB": round(peak_in_new_process(name, shape, device), 1) for name in LOSSES}
    row["times faster"] = round(row["plain seconds"] / row["chunked seconds"], 2)
    row["times less memory"] = round(row["plain peak MB"] / row["chunked peak MB"], 1)
    return row


def main() -> None:
    """Measure all shapes, or one peak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DTYPES, default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--peak", nargs=2, metavar=("LOSS", "SHAPE"), help="only this peak, in MB")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak:
        print(peak_megabytes(*arguments.peak, arguments.device))
        return
    result = {
        "command": f"python benchmarks/cross_entropy.py --device {arguments.device} --rounds {arguments.rounds}",
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine(),
        "dtype": str(DTYPES[arguments.device]),
        "shapes (tokens, width, vocabulary)": SHAPES,
        "results": {shape: measure(shape, arguments.device, arguments.rounds) for shape in SHAPES},
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
