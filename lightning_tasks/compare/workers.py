"""The cells of a comparison, each in a process of its own: a device for each, and an interrupt that ends them all."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any

from tqdm import tqdm

from lightning_tasks.compare.cell import Cell, last_error
from lightning_tasks.compare.cluster.lease import HeldError, is_free, owner_of
from lightning_tasks.compare.cluster.run import run_if_free
from lightning_tasks.errors import reason
from lightning_tasks.files.sources import Sources
from lightning_tasks.runs.environment import Code, take_code, this_environment

VISIBLE = "CUDA_VISIBLE_DEVICES"
_LOOK = 2.0  # seconds between looks at cells that other commands run
_END = 10.0  # seconds that a process has to end, once it has told how its cell did
_MOST_TEXT = 10_000  # of why one failed: a process waits where a pipe is full
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

    Each has a process of its own: no state of anybody's modules passes from one to the next, and one that ends its
    process fails alone. Of cells that have several processes, fewer run at once, those with the most first; one where
    `jobs` are fewer. One that another command runs is left to that, and waited for.

    Raises:
        KeyboardInterrupt: as it came, with the processes ended; what they were at is not finished.
    """
    waiting = [cell for cell in cells if not cell.is_finished()]
    planned = {cell: cell.sources for cell in waiting}  # as they are now: a file may be edited while others run
    count, visible = _cuda_count() if waiting else 0, os.environ.get(VISIBLE)
    failures: list[tuple[Cell, str]] = []
    elsewhere: list[Cell] = []
    with tqdm(total=len(cells), initial=len(cells) - len(waiting), unit="cell", file=sys.stderr) as bar:

        def end(cell: Cell, text: str | None) -> None:
            if text is not None:
                alike = next((other for other, known in failures if known == text), None)
                failures.append((cell, text))
                said = f"{text}; log: {cell.log}" if alike is None else f"as {alike.label}"
                tqdm.write(f"failed: {cell.label}: {said}", file=sys.stderr)
            bar.set_postfix_str(cell.label)
            bar.update()

        sizes = sorted({cell.processes for cell in waiting}, reverse=True)
        devices = {size: worker_devices(jobs, count, visible, size) for size in sizes}
        batches = [([cell for cell in waiting if cell.processes == size], devices[size]) for size in sizes]
        while batches or elsewhere:
            if not batches:
                bar.set_postfix_str(f"{elsewhere[0].label}: waiting for {owner_of(elsewhere[0].lease)}")
                time.sleep(_LOOK)
                for cell in [cell for cell in elsewhere if is_free(cell.lease)]:
                    elsewhere.remove(cell)
                    if cell.is_finished():
                        end(cell, None)
                    else:
                        batches.append(([cell], devices[cell.processes][:1]))
                continue
            for cell, outcome in _run_each(*batches.pop(0), planned):
                if isinstance(outcome, HeldError):
                    elsewhere.append(cell)
                else:
                    end(cell, outcome)
    return failures


def _run_each(
    cells: Sequence[Cell], devices: Sequence[str | None], planned: Mapping[Cell, Sources]
) -> Iterator[tuple[Cell, HeldError | str | None]]:
    """Run each cell in a process, as many at once as there are devices; tell of each how it ended, None where well."""
    context, free, left = start_context(), [*devices], deque(cells)
    given = _shared(len(devices)), this_environment().state
    running: dict[Cell, tuple[Any, Connection, str | None]] = {}
    try:
        while left or running:
            while left and free:
                cell, device = left.popleft(), free.pop(0)
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=_run_alone, args=(cell, planned[cell], there, device, *given))  # type: ignore[attr-defined]
                process.start()
                there.close()
                running[cell] = process, here, device
            ready = wait([each for process, here, _ in running.values() for each in (process.sentinel, here)])
            for cell, (process, here, device) in [*running.items()]:
                if process.sentinel in ready or here in ready:
                    outcome = _outcome(cell, process, here)
                    del running[cell]
                    free.append(device)
                    yield cell, outcome
    finally:
        for process, here, _ in running.values():
            process.kill()  # Lightning would take a gentler signal for the end of the fit, and test the model
            here.close()


def _outcome(cell: Cell, process: Any, told: Connection) -> HeldError | str | None:
    """What a process told, once it has ended; one that a thread keeps alive is ended."""
    found: list[HeldError | str | None] = []
    with told, contextlib.suppress(EOFError, OSError):  # nothing, or a part of it
        if told.poll():
            found.append(told.recv())
    process.join(_END)
    if process.is_alive():
        process.kill()
        process.join()
    if found:
        return found[0]
    status = process.exitcode
    by = f"was ended by {_signal(-status)}" if status < 0 else f"ended with {status}"
    return _with_log(cell, f"its process {by}")  # as one for which memory is too small


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one without a name
        return f"signal {number}"


def _run_alone(
    cell: Cell, planned: Sources, tell: Connection, device: str | None, environment: Mapping[str, str], code: Code
) -> None:
    """Run a cell in this process, and tell how it ended."""
    start_worker(environment, device, code)
    outcome: HeldError | str | None = None
    try:
        run_if_free(cell, planned)
    except HeldError as error:
        outcome = error
    except BaseException as error:
        outcome = failure(cell, error)[:_MOST_TEXT]
    tell.send(outcome)


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


def start_worker(environment: Mapping[str, str], device: str | None, code: Code) -> None:
    """Take over `environment`, `code` and `device`, before CUDA is initialized; end with the parent.

    Interrupts are left to the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; Lightning makes it the end of a fit
    os.environ.clear()
    os.environ.update(environment)  # a server keeps that of its own start
    take_code(code)
    # Else data loaders too would start theirs from a server of their own, which outlives a worker that is killed.
    multiprocessing.set_start_method(None, force=True)
    if device is not None:
        os.environ[VISIBLE] = device
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed comparison leaves nobody at work."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def failure(cell: Cell, error: BaseException) -> str:
    """Why a cell failed, in one line; what only ends a process says why in the log."""
    return _with_log(cell, reason(error)) if isinstance(error, SystemExit) else reason(error)


def _with_log(cell: Cell, text: str) -> str:
    printed = cell.log.read_text(encoding="utf-8", errors="replace") if cell.log.is_file() else ""
    return f"{last_error(printed) or 'nothing was printed'} ({text})"


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
