"""The cells of a plan as jobs of submitit: on SLURM, or, to try it, as processes of this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attention_modules.extras import needed_for
from lightning_tasks.compare.cell import Cell
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


def submit(cells: Iterable[Cell], output: Path, options: Mapping[str, Any]) -> list[str]:
    """Submit the cells that are not finished, as one array of jobs; return the numbers of the jobs.

    Args:
        cells: which.
        output: the comparison's folder, in which the jobs' logs are.
        options: of submitit's ``AutoExecutor``, and ``cluster``, by default slurm.

    Raises:
        UsageError: submitit refuses an option, or cannot submit.
        ModuleNotFoundError: submitit is not installed.
    """
    with needed_for("--executor submitit", "slurm"):
        import submitit

    output, given = output.resolve(), dict(options)
    try:
        executor = submitit.AutoExecutor(folder=output / JOBS, cluster=given.pop("cluster", "slurm"))
        executor.update_parameters(name="attnswap", **given)
        with executor.batch():
            jobs = [
                executor.submit(CellJob(str(output), cell.name, cell.seed)) for cell in cells if not cell.is_finished()
            ]
    except (NameError, TypeError, ValueError, AssertionError, RuntimeError) as error:
        cure = "; --executor.cluster local runs all cells here" if "srun" in str(error) else ""
        raise UsageError(f"--executor submitit: {reason(error)}{cure}") from error
    return [str(job.job_id) for job in jobs]
