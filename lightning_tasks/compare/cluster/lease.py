"""Who is at work: a file that is kept fresh while its owner lives, which processes on any machine respect."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from uuid import uuid4

from lightning_tasks.compare.cell import Cell, run_cell
from lightning_tasks.errors import UsageError
from lightning_tasks.files.sources import Sources

BEAT, PATIENCE = 10.0, 120.0  # seconds from one sign of life to the next, and without one until a lease is free
ENDING = 5.0  # seconds that a process on this machine has to end, as one whose parent was killed does
_MOST_BYTES = 1_000


class HeldError(UsageError):
    """Another process holds the lease."""


class LostError(UsageError):
    """Another process has taken the lease over, as this one gave no sign of life."""


@dataclass(frozen=True)
class Owner:
    """Who holds a lease.

    Args:
        host: its machine.
        process: its number there.
        since: when it took the lease, in UTC by its clock.
        token: of this lease alone.
    """

    host: str = "an unknown machine"
    process: int = 0
    since: str = ""
    token: str = ""

    def __str__(self) -> str:
        return f"{self.host}, process {self.process}, since {self.since or 'an unknown time'}"


class Lease:
    """A lease that this process holds.

    Args:
        path: its file.
        owner: this process.
    """

    def __init__(self, path: Path, owner: Owner) -> None:
        self._path, self._owner = path, owner
        self._ended = threading.Event()

    def check(self) -> None:
        """Check that nobody has taken it over.

        Raises:
            LostError: somebody has.
        """
        if owner_of(self._path) != self._owner:
            time.sleep(1.0)  # somebody may be putting it back
            if (now := owner_of(self._path)) != self._owner:
                raise LostError(
                    f"{self._path} was taken over{f' by {now}' if now else ''}: for more than {PATIENCE:.0f} s this "
                    "process gave no sign of life; what it did is left out"
                )

    def keep(self) -> None:
        """Give signs of life until :meth:`release`."""
        while not self._ended.wait(BEAT):
            with contextlib.suppress(OSError):
                if owner_of(self._path) == self._owner:
                    os.utime(self._path)

    def release(self) -> None:
        """Let go of it."""
        self._ended.set()
        with contextlib.suppress(OSError):
            if owner_of(self._path) == self._owner:
                self._path.unlink()


def run_held(cell: Cell, planned: Sources | None = None) -> None:
    """Run a cell while this process holds its lease, as :func:`.run_cell`; nothing where it is finished by then.

    Raises:
        HeldError: another process holds it.
        LostError: another process has taken it over.
    """
    cell.refuse_links()
    with held(cell.lease, cell.label) as lease:
        if not cell.is_finished():
            run_cell(cell, planned, lease.check)


@contextlib.contextmanager
def held(path: Path, what: str) -> Iterator[Lease]:
    """Hold the lease of this file inside; `what` says of what it is.

    Its age is measured by the clock of the file system, whatever those of the machines say, and no lock is needed, so
    that it works on shared folders too. One without a sign of life for two minutes is taken over, and at once one of a
    process that ended on this machine.

    Raises:
        HeldError: another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    owner = Owner(socket.gethostname(), os.getpid(), now, uuid4().hex)
    began = time.monotonic()
    while not _made(path, owner):
        found, seen = owner_of(path), _state(path)
        if is_free(path):
            _take_away(path, seen, owner)
        elif found is not None and found.host == owner.host and time.monotonic() - began < ENDING:
            time.sleep(0.1)
        else:
            raise HeldError(f"{what} is run by {found or Owner()}")
    lease = Lease(path, owner)
    threading.Thread(target=lease.keep, daemon=True).start()
    try:
        yield lease
    finally:
        lease.release()


def owner_of(path: Path) -> Owner | None:
    """Who holds the lease of this file; None where nobody does, or it cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            given = json.loads(file.read(_MOST_BYTES))
        owner = Owner(str(given["host"]), int(given["process"]), str(given["since"]), str(given["token"]))
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return owner if owner.process > 0 and str(owner).isprintable() else None


def is_free(path: Path) -> bool:
    """Whether there is no lease, or one whose owner ended on this machine, or gave no sign of life for long."""
    owner = owner_of(path)
    if owner is not None and owner.host == socket.gethostname() and not _lives(owner.process):
        return True
    try:
        with tempfile.TemporaryFile(dir=path.parent) as now:
            return os.fstat(now.fileno()).st_mtime - path.lstat().st_mtime > PATIENCE
    except FileNotFoundError:
        return True


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _made(path: Path, owner: Owner) -> bool:
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(asdict(owner), file)
    return True


def _state(path: Path) -> tuple[int, int] | None:
    """What changes when another file takes its place, or its owner gives a sign of life."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _take_away(path: Path, dead: tuple[int, int] | None, owner: Owner) -> None:
    """Remove the lease of an owner who gave no sign of life; of several processes that try it, one does."""
    aside = path.with_name(f"{path.name}.{owner.token}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        if _state(aside) != dead:  # meanwhile another one took it over, or its owner woke up: it goes back
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()
