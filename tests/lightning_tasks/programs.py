"""Programs of several processes that a test starts; what stalls is ended, and fails."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_program(*arguments: str, timeout: float = 240, **environment: str) -> str:
    """Run ``python ARGUMENTS`` and what it starts, and return its output; raise an AssertionError where it fails."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    program = [sys.executable, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        program, cwd=ROOT, env=variables, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as run:
        try:
            output, errors = run.communicate(timeout=timeout)
        except BaseException:
            os.killpg(run.pid, signal.SIGKILL)  # its other processes too
            raise
    assert run.returncode == 0, errors
    return output
