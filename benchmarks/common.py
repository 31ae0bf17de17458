"""Timing and memory for the benchmarks: alternating in one process, medians, peaks of resident memory."""

from __future__ import annotations

import csv
import ctypes
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def alternate(
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    cpu_time: bool = False,
    seconds_of: Callable[[Callable[[], object]], float] | None = None,
) -> dict[str, float]:
    """Median seconds of each call; the calls take turns, so that a change of the machine's load meets all.

    Args:
        calls: what to time, by name; each is run once before.
        repeats: number of rounds.
        cpu_time: process CPU time in place of wall-clock time.
        seconds_of: measures a call in place of these clocks.
    """
    seconds_of = seconds_of or partial(host_seconds, time.process_time if cpu_time else time.perf_counter)
    for call in calls.values():
        call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            taken[name].append(seconds_of(call))
    return {name: statistics.median(times) for name, times in taken.items()}


def host_seconds(clock: Callable[[], float], call: Callable[[], object]) -> float:
    """By a clock of the host."""
    start = clock()
    call()
    return clock() - start


def gpu_seconds(call: Callable[[], object], number: int = 5) -> float:
    """Mean of some calls in a row, by CUDA events: the device is busy while the host sends what comes next."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(number):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / number


def gpu_peak_memory(call: Callable[[], object]) -> float:
    """MiB by which the memory of tensors on the GPU rises at most while the call runs."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


class ResidentPeak:
    """By how much resident memory rises at most from here on.

    Raises:
        OSError: where Linux' counters are missing.
    """

    _STATUS = Path("/proc/self/status")

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier calls freed must not be there to be reused
        self._before = self._read("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")

    def rise(self) -> float:
        """MiB up to now."""
        return (self._read("VmHWM") - self._before) / 1024

    def _read(self, name: str) -> int:
        line = next(line for line in self._STATUS.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1])


def peak_memory(call: Callable[[], object]) -> float | None:
    """MiB by which resident memory rises at most while the call runs; None where Linux' counters are missing."""
    try:
        peak = ResidentPeak()
    except OSError:
        return None
    call()
    return peak.rise()


def machine() -> str:
    """One line on what the numbers were measured with."""
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    )


def write_results(name: str, title: str, command: str, rows: Sequence[Mapping[str, object]], notes: str = "") -> Path:
    """Write ``results/NAME.csv`` and ``results/NAME.md``; returns the Markdown file."""
    RESULTS.mkdir(exist_ok=True)
    columns = list(rows[0])
    with (RESULTS / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row[column]) for column in columns) + " |" for row in rows]
    path = RESULTS / f"{name}.md"
    text = f"# {title}\n\nCommand: `{command}`\n\nMeasured with {machine()}.\n\n" + "\n".join(lines) + "\n"
    path.write_text(text + (f"\n{notes}\n" if notes else ""))
    return path
