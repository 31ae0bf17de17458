"""Programs of several processes that a test starts; what stalls is ended, and fails."""

import atexit
import contextlib
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from filelock import FileLock

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


class Forked:
    """``python -m MODULE ARGUMENTS`` in a session of its own, forked from a server that has imported Lightning."""

    def __init__(self, process: BaseProcess, outputs: tuple[Path, Path]):
        self._process, self._outputs = process, outputs
        process.start()
        assert process.pid is not None
        self.pid: int = process.pid

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def finish(self, timeout: float = 240) -> subprocess.CompletedProcess:
        """Wait for its end; raise a subprocess.TimeoutExpired where that does not come."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout, *self._read())
        return subprocess.CompletedProcess(self._process.name, self._process.exitcode, *self._read())

    def kill(self) -> None:
        """End it and what it started; nothing where all has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()  # before it has a session of its own, there is no such group
        self._process.join()

    def _read(self) -> tuple[str, ...]:
        return tuple(path.read_text() if path.exists() else "" for path in self._outputs)


@contextlib.contextmanager
def start_forked(module: str, *arguments: str, cwd: Path | None = None, **environment: str) -> Iterator[Forked]:
    """Start ``python -m MODULE ARGUMENTS`` in ``cwd``, this process's own if not given; at the end it is killed."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    with TemporaryDirectory() as folder:
        outputs = Path(folder, "stdout"), Path(folder, "stderr")
        given = (module, arguments, cwd or Path.cwd(), variables, outputs)
        forked = Forked(start_context().Process(target=_run_module, args=given, name=module), outputs)  # type: ignore[attr-defined]
        try:
            yield forked
        finally:
            forked.kill()


def run_forked(
    module: str, *arguments: str, cwd: Path | None = None, timeout: float = 240, **environment: str
) -> subprocess.CompletedProcess:
    """As `subprocess.run` of ``python -m MODULE ARGUMENTS``; see :func:`start_forked`."""
    with start_forked(module, *arguments, cwd=cwd, **environment) as program:
        return program.finish(timeout)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder that ``make`` fills; once for all test processes, which share the tests of a module."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"once_{name}"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            part = folder.with_suffix(".part")
            part.mkdir()
            make(part)
            part.rename(folder)
    return folder


def run_ranks(module: str, *arguments: str, ranks: int = 2, timeout: float = 240) -> list[str]:
    """Run ``python -m MODULE ARGUMENTS`` as each rank of one group; return what each printed, or raise AssertionError.

    Each is forked; see :func:`start_forked`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(start_forked(module, *arguments, cwd=ROOT, **group, LOCAL_RANK=str(rank)))
            for rank in range(ranks)
        ]
        done = [program.finish(timeout) for program in programs]
    assert [each.returncode for each in done] == [0] * ranks, "\n".join(each.stderr for each in done)
    return [each.stdout for each in done]


def _run_module(
    module: str, arguments: tuple[str, ...], cwd: Path, environment: Mapping[str, str], outputs: tuple[Path, Path]
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and pass that on
    for stream, path in enumerate(outputs, start=1):
        with path.open("w") as file:
            os.dup2(file.fileno(), stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, str(ROOT))
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # which a process of multiprocessing leaves out
