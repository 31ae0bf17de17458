"""The cells of a comparison in worker processes: a device each, and an interrupt that ends them all."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import BaseContext
from typing import Any

from tqdm import tqdm

from lightning_tasks.compare.cell import Cell, last_error, run_cell
from lightning_tasks.errors import reason

VISIBLE = "CUDA_VISIBLE_DEVICES"
_IMPORTED_ONCE = ["lightning_tasks.cli.fit", "lightning_tasks.callbacks", "timm"]


def worker_devices(jobs: int, count: int, visible: str | None = None) -> list[str | None]:
    """What each of `jobs` workers gets as CUDA_VISIBLE_DEVICES: one of `count` devices in turn, None of no devices.

    `visible` is the variable as it was given, whose names (numbers or UUIDs) are handed on.
    """
    names = [str(number) for number in range(count)] if visible is None else visible.split(",")[:count]
    return [names[job % len(names)].strip() if names else None for job in range(jobs)]


def run_cells(cells: Sequence[Cell], jobs: int) -> list[tuple[Cell, str]]:
    """Run the cells that are not finished in `jobs` processes of one thread each; return (cell, reason) of failures.

    Raises:
        KeyboardInterrupt: as it came, with the workers ended; what they were at is not finished.
    """
    waiting = [cell for cell in cells if not cell.is_finished()]
    failures: list[tuple[Cell, str]] = []
    context = start_context()
    devices = context.SimpleQueue()
    for device in worker_devices(jobs, _cuda_count() if waiting else 0, os.environ.get(VISIBLE)):
        devices.put(device)
    others = set(multiprocessing.active_children())
    with (
        ProcessPoolExecutor(jobs, context, initializer=start_worker, initargs=(_shared(jobs), devices)) as pool,
        tqdm(total=len(cells), initial=len(cells) - len(waiting), unit="cell", file=sys.stderr) as bar,
    ):
        try:
            futures = {pool.submit(run_cell, cell): cell for cell in waiting}
            for future in as_completed(futures):
                cell = futures[future]
                if (error := future.exception()) is not None:
                    failures.append((cell, failure(cell, error)))
                    tqdm.write(f"failed: {cell.label}: {failures[-1][1]}", file=sys.stderr)
                bar.set_postfix_str(cell.label)
                bar.update()
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()  # Lightning would take a gentler signal for the end of the fit, and test the model
            raise
    return failures


def _shared(jobs: int) -> dict[str, str]:
    """The environment of a worker, in which data loaders know that others share the machine."""
    from attnswap.datamodules.shared.base import default_workers

    return {"ATTNSWAP_NUM_WORKERS": str(default_workers(jobs)), **os.environ}


def start_context() -> BaseContext:
    """Fork workers from a server that has imported what a cell needs, where the system can; else start them afresh.

    This process itself cannot be forked: it may hold threads, and a CUDA context.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    return context


def start_worker(environment: Mapping[str, str], devices: Any) -> None:
    """Take over the `environment`, and the next of the `devices` before CUDA is initialized; end with the parent.

    Interrupts are left to the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; Lightning makes it the end of a fit
    os.environ.clear()
    os.environ.update(environment)  # a server keeps that of its own start
    if (device := devices.get()) is not None:
        os.environ[VISIBLE] = device
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed comparison leaves nobody at work."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def failure(cell: Cell, error: BaseException) -> str:
    """Why a cell failed, in one line, and where its log is; what only ends a process says why in the log."""
    text = reason(error)
    if isinstance(error, (SystemExit, BrokenProcessPool)):
        printed = cell.log.read_text(encoding="utf-8", errors="replace") if cell.log.is_file() else ""
        text = f"{last_error(printed) or 'nothing was printed'} ({text})"
    return f"{text}; log: {cell.log}"


def _cuda_count() -> int:
    import torch

    return torch.cuda.device_count()
