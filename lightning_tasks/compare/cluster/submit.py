"""The cells of a plan, or a fit, as jobs of submitit: on SLURM, or, to try it, as processes of this machine."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from attention_modules.extras import needed_for
from lightning_tasks.cli.asked import check_asked, named_recipe
from lightning_tasks.cli.save_config import THIS_JOB
from lightning_tasks.compare.arguments import executor_options, executor_parser, without_executor
from lightning_tasks.compare.cell import Cell
from lightning_tasks.compare.cluster.lease import is_free
from lightning_tasks.errors import UsageError, reason

JOBS = "jobs"
_ENDED = (0, 3, 75)  # finished, diverged, run by another process


class CellJob:
    """Runs one cell; where its machine is taken away, the job is queued again.

    Args:
        folder: the comparison's.
        variant, seed: which cell.
    """

    def __init__(self, folder: str, variant: str, seed: int) -> None:
        self.folder, self.variant, self.seed = folder, variant, seed

    def __call__(self) -> int:
        """The exit status of `attnswap cell`.

        Raises:
            RuntimeError: the cell failed, or was refused.
        """
        command = [sys.executable, "-m", "attnswap", "cell", self.folder, self.variant, str(self.seed)]
        status = subprocess.run(command, check=False).returncode
        if status not in _ENDED:
            raise RuntimeError(f"{self.variant} seed {self.seed} ended with {status}")
        return status

    def checkpoint(self) -> Any:
        """What submitit queues when SLURM takes the machine away or its time is over: the same once more."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class FitJob:
    """Runs one fit, on as many nodes and processes as the job has; queued again, it goes on from its own checkpoint.

    Args:
        arguments: of `attnswap`.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments, self.name = [*arguments], uuid4().hex

    def __call__(self) -> None:
        """Run it.

        Raises:
            RuntimeError: it failed, or was refused.
        """
        command = [sys.executable, "-m", "attnswap", *self.arguments]
        status = subprocess.run(command, env=os.environ | {THIS_JOB: self.name}, check=False).returncode
        if status:
            raise RuntimeError(f"attnswap {shlex.join(self.arguments)} ended with {status}")

    def checkpoint(self) -> Any:
        """What submitit queues when SLURM takes the machine away or its time is over: the same once more."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit_fit(arguments: Sequence[str]) -> None:
    """Submit `attnswap fit ... --executor submitit` as one job, once its configuration was parsed and its module built.

    Raises:
        UsageError: the fit is refused, or as :func:`submit`.
    """
    from lightning_tasks.cli.fit import check_arguments

    options = executor_parser(arguments).parse_known_args(arguments)[0]
    fit = named_recipe(without_executor(arguments))
    check_asked(fit)
    check_arguments(fit)
    (number,) = _submitted([FitJob(fit)], Path(JOBS), executor_options(options))
    print(f"submitted the job {number}; its log is in {JOBS}")


def submit(cells: Iterable[Cell], output: Path, options: Mapping[str, Any]) -> list[str]:
    """Submit the cells that are neither finished nor run, as an array of jobs; return the numbers of the jobs.

    Cells of several processes are an array of their own, with a task for each where the options do not say.

    Args:
        cells: which.
        output: the comparison's folder, in which the jobs' logs are.
        options: of submitit's ``AutoExecutor``, and ``cluster``, by default slurm.

    Raises:
        UsageError: submitit refuses an option, or cannot submit.
        ModuleNotFoundError: submitit is not installed.
    """
    output = output.resolve()
    waiting: dict[int, list[CellJob]] = {}
    for cell in cells:
        if not cell.is_finished() and is_free(cell.lease):
            waiting.setdefault(cell.processes, []).append(CellJob(str(output), cell.name, cell.seed))
    numbers = []
    for processes, jobs in waiting.items():
        tasks = {"tasks_per_node": processes // int(options.get("nodes", 1))} if processes > 1 else {}
        numbers += _submitted(jobs, output / JOBS, tasks | dict(options))
    return numbers


def _submitted(jobs: Sequence[Any], folder: Path, options: Mapping[str, Any]) -> list[str]:
    with needed_for("--executor submitit", "slurm"):
        import submitit

    given = dict(options)
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=given.pop("cluster", "slurm"))
        executor.update_parameters(name="attnswap", **given)
        with executor.batch():
            submitted = [executor.submit(job) for job in jobs]
    except (NameError, TypeError, ValueError, AssertionError, RuntimeError) as error:
        cure = "; --executor.cluster local runs all here" if "srun" in str(error) else ""
        raise UsageError(f"--executor submitit: {reason(error)}{cure}") from error
    return [str(job.job_id) for job in submitted]
