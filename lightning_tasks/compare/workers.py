"""The cells of a comparison in worker processes: a device each, and an interrupt that ends them all."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from typing import Any

from tqdm import tqdm

from lightning_tasks.compare.cell import Cell, last_error
from lightning_tasks.compare.cluster.lease import HeldError, is_free, owner_of
from lightning_tasks.compare.cluster.run import run_if_free
from lightning_tasks.errors import reason
from lightning_tasks.runs.environment import Code, take_code, this_environment

VISIBLE = "CUDA_VISIBLE_DEVICES"
_LOOK = 2.0  # seconds between looks at cells that other commands run
_IMPORTED_ONCE = ["lightning_tasks.cli.fit", "lightning_tasks.callbacks", "timm"]


def worker_devices(jobs: int, count: int, visible: str | None = None, each: int = 1) -> list[str | None]:
    """What each worker gets as CUDA_VISIBLE_DEVICES: `each` of `count` devices in turn, None of no devices.

    `jobs` are the processes in all, of which a worker starts `each`. `visible` is the variable as it was given, whose
    names (numbers or UUIDs) are handed on.
    """
    names = [str(number) for number in range(count)] if visible is None else visible.split(",")[:count]
    turns = [range(job * each, (job + 1) * each) for job in range(max(1, jobs // each))]
    own = [dict.fromkeys(names[place % len(names)].strip() for place in turn) if names else None for turn in turns]
    return [None if mine is None else ",".join(mine) for mine in own]


def run_cells(cells: Sequence[Cell], jobs: int) -> list[tuple[Cell, str]]:
    """Run the cells that are not finished in `jobs` processes of one thread each; return (cell, reason) of failures.

    Of cells that have several processes, fewer run at once, those with the most first; one where `jobs` are fewer.
    A cell that ends its process, as one does for which memory is too small, fails alone. One that another command runs
    is left to that, and waited for.

    Raises:
        KeyboardInterrupt: as it came, with the workers ended; what they were at is not finished.
    """
    waiting = [cell for cell in cells if not cell.is_finished()]
    count, visible = _cuda_count() if waiting else 0, os.environ.get(VISIBLE)
    failures: list[tuple[Cell, str]] = []
    elsewhere: list[Cell] = []
    with tqdm(total=len(cells), initial=len(cells) - len(waiting), unit="cell", file=sys.stderr) as bar:

        def end(cell: Cell, error: BaseException | None) -> None:
            if isinstance(error, HeldError):
                elsewhere.append(cell)
                return
            if error is not None:
                text = failure(cell, error)
                alike = next((other for other, known in failures if known == text), None)
                failures.append((cell, text))
                said = f"{text}; log: {cell.log}" if alike is None else f"as {alike.label}"
                tqdm.write(f"failed: {cell.label}: {said}", file=sys.stderr)
            bar.set_postfix_str(cell.label)
            bar.update()

        sizes = sorted({cell.processes for cell in waiting}, reverse=True)
        devices = {size: worker_devices(jobs, count, visible, size) for size in sizes}
        pools = [([cell for cell in waiting if cell.processes == size], devices[size]) for size in sizes]
        while pools or elsewhere:
            if not pools:
                bar.set_postfix_str(f"{elsewhere[0].label}: waiting for {owner_of(elsewhere[0].lease)}")
                time.sleep(_LOOK)
                for cell in [cell for cell in elsewhere if is_free(cell.lease)]:
                    elsewhere.remove(cell)
                    if cell.is_finished():
                        end(cell, None)
                    else:
                        pools.append(([cell], devices[cell.processes][:1]))
                continue
            asked, given = pools.pop(0)
            begun, others = _run_in_pool(asked, given, end)
            if len(begun) == 1:
                end(*begun.popitem())
            pools += [([cell], given[:1]) for cell in begun]  # which of them ended its process is seen one by one
            pools += [(others, given)] if others else []
    return failures


def _run_in_pool(
    cells: Sequence[Cell], devices: Sequence[str | None], end: Callable[[Cell, BaseException | None], None]
) -> tuple[dict[Cell, BaseException], list[Cell]]:
    """Run `cells` in a process for each of the `devices`, and call `end` with each that returned or raised.

    Returns:
        where a process ended, which ends all: the cells that had begun (all that are left if none had), and the others.
    """
    context = start_context()
    queue = context.SimpleQueue()
    for device in devices:
        queue.put(device)
    others = set(multiprocessing.active_children())
    before = {cell: _last_start(cell) for cell in cells}
    lost: dict[Cell, BaseException] = {}
    here = this_environment()
    initial = _shared(len(devices)), queue, here.state
    with ProcessPoolExecutor(len(devices), context, initializer=start_worker, initargs=initial) as pool:
        try:
            futures = {pool.submit(run_if_free, cell, cell.sources): cell for cell in cells}
            for future in as_completed(futures):
                if isinstance(error := future.exception(), BrokenProcessPool):
                    lost[futures[future]] = error
                else:
                    end(futures[future], error)
        except BrokenProcessPool as error:  # before all were submitted
            lost = {cell: error for cell in cells}
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()  # Lightning would take a gentler signal for the end of the fit, and test the model
            raise
    begun = {cell: error for cell, error in lost.items() if _last_start(cell) != before[cell]} or lost
    return begun, [cell for cell in cells if cell in lost and cell not in begun]


def _last_start(cell: Cell) -> int | None:
    """Another number after each start of the cell, which makes its folder anew."""
    return cell.folder.stat().st_ctime_ns if cell.folder.is_dir() else None


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


def start_server() -> None:
    """Have that server import while this process does, which takes as long."""
    if start_context().get_start_method() == "forkserver":
        forkserver.ensure_running()


def start_worker(environment: Mapping[str, str], devices: Any, code: Code) -> None:
    """Take over `environment`, `code` and the next of `devices`, before CUDA is initialized; end with the parent.

    Interrupts are left to the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; Lightning makes it the end of a fit
    os.environ.clear()
    os.environ.update(environment)  # a server keeps that of its own start
    take_code(code)
    # Else data loaders too would start theirs from a server of their own, which outlives a worker that is killed.
    multiprocessing.set_start_method(None, force=True)
    if (device := devices.get()) is not None:
        os.environ[VISIBLE] = device
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed comparison leaves nobody at work."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def failure(cell: Cell, error: BaseException) -> str:
    """Why a cell failed, in one line; what only ends a process says why in the log."""
    text = reason(error)
    if isinstance(error, (SystemExit, BrokenProcessPool)):
        printed = cell.log.read_text(encoding="utf-8", errors="replace") if cell.log.is_file() else ""
        text = f"{last_error(printed) or 'nothing was printed'} ({text})"
    return text


def failures_by_reason(failures: Sequence[tuple[Cell, str]]) -> list[str]:
    """A line for each reason, with the first cell that failed of it and its log: missing data end every cell."""
    cells: dict[str, list[Cell]] = {}
    for cell, text in failures:
        cells.setdefault(text, []).append(cell)
    return [
        f"{first.label}{f' and {len(others)} more' if others else ''}: {text}; log: {first.log}"
        for text, (first, *others) in cells.items()
    ]


def _cuda_count() -> int:
    import torch

    return torch.cuda.device_count()
