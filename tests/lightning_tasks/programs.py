"""Programs of several processes that a test starts; what stalls is ended, and fails."""

import os
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_tasks.compare.workers import start_context

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


def run_ranks(module: str, *arguments: str, ranks: int = 2, timeout: float = 240) -> list[str]:
    """Run ``python -m MODULE ARGUMENTS`` as each rank of one group; return what each printed, or raise AssertionError.

    Each is forked from a server that has imported Lightning, which takes every fresh process eight seconds of CPU time.
    """
    context = start_context()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(ranks)]
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started = [
            context.Process(target=_run_module, args=(module, arguments, {**group, "LOCAL_RANK": str(rank)}, output))
            for rank, output in enumerate(outputs)
        ]
        try:
            for process in started:
                process.start()
            for process in started:
                process.join(timeout)
        finally:
            codes = [process.exitcode for process in started]
            for process in started:
                process.kill()
        printed = [output.read_text() if output.exists() else "" for output in outputs]
    assert codes == [0] * ranks, "\n".join(printed)
    return printed


def _run_module(module: str, arguments: tuple[str, ...], environment: dict[str, str], output: Path) -> None:
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(ROOT)
    os.environ.update({"OMP_NUM_THREADS": "1", **environment})
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
