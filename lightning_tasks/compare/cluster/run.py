"""Running a cell: by one process at a time, from where a killed one was, its output in a file."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from lightning_tasks.compare.cell import RESULT, Cell
from lightning_tasks.compare.cluster.lease import HeldError, LostError, held, is_free, owner_of
from lightning_tasks.compare.cluster.several import LEADER, end_with_parent, rank_of, run_by_command
from lightning_tasks.errors import UsageError
from lightning_tasks.files.sources import Sources, changed_sources
from lightning_tasks.runs.log import read_metrics
from lightning_tasks.runs.safe_files import written_whole


def run_held(cell: Cell, planned: Sources | None = None) -> None:
    """Run a cell while this process holds its lease, as :func:`.run_cell`; nothing where it is finished by then.

    A further process of a cell on several devices needs no lease: the first one holds it.

    Raises:
        HeldError: another process holds it.
        LostError: another process has taken it over.
    """
    cell.refuse_links()
    if rank_of(cell):
        end_with_parent(int(os.environ.get(LEADER, os.getppid())))
        if not cell.is_finished():
            run_cell(cell, planned)
        return
    with held(cell.lease, cell.label) as lease:
        if not cell.is_finished():
            run_cell(cell, planned, lease.check)


def run_if_free(cell: Cell, planned: Sources) -> None:
    """Run a cell, as :func:`run_held`, which nobody else runs.

    Raises:
        HeldError: another process does; this one does not wait for its end.
    """
    if not is_free(cell.lease):
        raise HeldError(f"{cell.label} is run by {owner_of(cell.lease)}")
    if cell.processes > 1:
        run_by_command(cell, planned)
    else:
        run_held(cell, planned)


def run_cell(cell: Cell, planned: Sources | None = None, may_write: Callable[[], None] = lambda: None) -> None:
    """Run `cell` in this process with one torch thread, its output in log.txt, and write its result.

    It goes on from the last checkpoint of a run of it that was killed. Of several processes the first one writes.

    Args:
        cell: which.
        planned: the code and files of its configuration as they were when the comparison started.
        may_write: called before the result is written, and raises where it must not be.

    Raises:
        UsageError: they have changed since.
    """
    import torch

    from lightning_tasks.cli.fit import run
    from lightning_tasks.compare.cluster.progress import (
        KeepProgress,
        Progress,
        checkpoint_of,
        forget_or_note,
        forget_progress,
        ran_with,
        read_progress,
    )
    from lightning_tasks.compare.images import FILE, ROBUSTNESS_FILE, RecordImages, robustness_values, write_images
    from lightning_tasks.compare.pairing import RecordPairing
    from lightning_tasks.runs.environment import this_environment
    from lightning_tasks.runs.wandb_runs import RunLabels, one_run
    from lightning_tasks.training.non_finite import NonFiniteError

    torch.set_num_threads(1)
    fingerprint, sources = cell.fingerprint, cell.sources  # now: they may be edited while it runs
    if planned is not None and (changed := changed_sources(planned, sources)):
        raise UsageError(f"{', '.join(changed)} changed while the comparison ran; the same command goes on with it")
    arguments = [*cell.arguments, f"--trainer.default_root_dir={cell.folder / 'runs'}"]
    if first := rank_of(cell) == 0:
        os.environ[LEADER] = str(os.getpid())  # for those that Lightning starts
    here = socket.gethostname() + (f", {cell.processes} processes" if cell.processes > 1 else "")
    if (before := read_progress(cell, sources)) is None:
        start = Progress(fingerprint, sources, ran_with(), 0, 0.0, [], [here])
        if first:
            cell.clear()
    else:
        start = replace(before, runs=[*before.runs, f"{here} from step {before.step}"])
        arguments.append(f"--ckpt_path={checkpoint_of(cell, before.step)}")
        if first:
            os.utime(cell.folder)
    progress = KeepProgress(cell, start, may_write)
    pairing, images = RecordPairing(), RecordImages()
    labels = RunLabels(cell.comparison, cell.label, (cell.name, f"seed {cell.seed}"), "cell")
    stopped = ""
    with _output_to(cell.log) if first else contextlib.nullcontext(), one_run():
        try:
            cli = run(arguments, callbacks=[progress, pairing, images], labels=labels)
        except NonFiniteError as error:  # a result too: the same would come of it again
            stopped = str(error)
            print(stopped, file=sys.stderr)
        except Exception as error:
            if first and not (progress.made or isinstance(error, LostError)):
                forget_or_note(cell, before, start)
            raise
        else:
            if first:
                may_write()
            if cell.keep:
                cli.trainer.save_checkpoint(cell.checkpoint)
            if cell.test:
                cli.trainer.test(cli.model, datamodule=cli.datamodule)
            cli.trainer.strategy.barrier()  # a result only where every process got here: one that fails ends the others
    if not first:
        return
    if pairing.folder is None:
        raise ValueError(f"{cell.label}: trainer.logger is false, so that there is nothing to compare")
    tested = images.values
    write_images(tested, cell.folder / FILE)
    write_images(robustness_values(Path(pairing.folder), tested), cell.folder / ROBUSTNESS_FILE)
    result = {
        "config": cell.name,
        "seed": cell.seed,
        "fingerprint": fingerprint,
        "settings": cell.arguments[3:],
        "environment": asdict(this_environment()),
        "sources": sources,
        "seconds": round(progress.seconds, 1),
        "runs": start.runs,
        "log": os.path.relpath(pairing.folder, cell.folder),
        "initial_weights": pairing.initial_weights,
        "training_data": pairing.training_data,
        "stopped": stopped,
        "rows": start.rows + read_metrics(Path(pairing.folder) / "metrics.csv"),
    }
    may_write()
    with written_whole(cell.folder / RESULT) as partial:
        partial.write_text(json.dumps(result), encoding="utf-8")
    forget_progress(cell)


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Send the process's standard output and error, also that of loggers made earlier, into a file."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with path.open("a", encoding="utf-8") as file:
        kept = [os.dup(1), os.dup(2)]
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):  # of a full disk
                    stream.flush()
            for number, descriptor in enumerate(kept, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
