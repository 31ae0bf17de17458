"""Who is at work: a file that is kept fresh while its owner lives, which processes on any machine respect."""

from __future__ import annotations

import contextlib
import hashlib
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

from lightning_tasks.errors import UsageError

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
        space: among which processes its number counts: two containers may have one name.
    """

    host: str = "an unknown machine"
    process: int = 0
    since: str = ""
    token: str = ""
    space: str = ""

    @property
    def is_here(self) -> bool:
        """Whether it runs, or ran, beside this process."""
        return (self.host, self.space) == (socket.gethostname(), _space())

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
        if (now := owner_of(self._path)) != self._owner:
            raise LostError(
                f"{self._path} was taken over{f' by {now}' if now else ''}: for more than {PATIENCE:.0f} s this "
                "process gave no sign of life; what it did is left out"
            )

    def keep(self) -> None:
        """Give signs of life until :meth:`release`."""
        while not self._ended.wait(BEAT):
            with contextlib.suppress(OSError):
                if _read(last := _chain(self._path)[-1]) == self._owner:
                    os.utime(last)

    def release(self) -> None:
        """Let go of it."""
        self._ended.set()
        with contextlib.suppress(OSError):
            chain = _chain(self._path)
            if _read(chain[-1]) == self._owner:
                for each in chain:  # the first one first: whoever follows it by then finds another one, or none
                    each.unlink()


@contextlib.contextmanager
def held(path: Path, what: str, most: float = 0.0) -> Iterator[Lease]:
    """Hold the lease of this file inside; `what` says of what it is.

    Where another process holds it, wait `most` seconds, or as long as one on this machine may take to end.

    Its age is measured by the clock of the file system, whatever those of the machines say, and no lock is needed, so
    that it works on shared folders too. One without a sign of life for two minutes is taken over, and at once one of a
    process that ended on this machine. Who takes it over writes a file beside it, whose name is a digest of the last
    owner's: a file system makes one of that name, so that of several processes one succeeds.

    Raises:
        HeldError: another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    owner = Owner(socket.gethostname(), os.getpid(), now, uuid4().hex, _space())
    began = time.monotonic()
    while not _took(path, owner):
        found = owner_of(path)
        ends = ENDING if is_free(path) or (found is not None and found.is_here) else 0.0
        if time.monotonic() - began >= max(most, ends):
            raise HeldError(f"{what} is run by {found or Owner()}")
        time.sleep(0.1)
    lease = Lease(path, owner)
    threading.Thread(target=lease.keep, daemon=True).start()
    try:
        yield lease
    finally:
        lease.release()


def owner_of(path: Path) -> Owner | None:
    """Who holds the lease of this file; None where nobody does, or it cannot be read."""
    return _read(_chain(path)[-1])


def is_free(path: Path) -> bool:
    """Whether there is no lease, or one whose owner ended on this machine, or gave no sign of life for long."""
    return _is_over(_chain(path)[-1])


def _took(path: Path, owner: Owner) -> bool:
    """Whether this process has the lease now."""
    last = _chain(path)[-1]
    if last == path and not os.path.lexists(path):
        return _made(path, owner)
    if not _is_over(last) or (following := _following(path, last)) is None or not _made(following, owner):
        return False
    if following in _chain(path):
        return True
    following.unlink()  # meanwhile another process took it over and let go of it
    return False


def _chain(path: Path) -> list[Path]:
    """The files of a lease: of its first owner, and of each who took it over from the one before."""
    chain = [path]
    while (following := _following(path, chain[-1])) is not None and os.path.lexists(following):
        chain.append(following)
    return chain


def _following(path: Path, last: Path) -> Path | None:
    """The file of who takes over the lease from the owner of `last`; None where that has ended."""
    try:
        with last.open("rb") as file:
            content = last.name.encode() + file.read(_MOST_BYTES)  # two that nothing could be written into are alike
    except OSError:
        return None
    return path.with_name(f"{path.name}.{hashlib.sha256(content).hexdigest()[:32]}")


def _read(path: Path) -> Owner | None:
    try:
        with path.open(encoding="utf-8") as file:
            given = json.loads(file.read(_MOST_BYTES))
        process, texts = int(given["process"]), {name: str(given[name]) for name in ("host", "since", "token", "space")}
        owner = Owner(process=process, **texts)
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return owner if owner.process > 0 and str(owner).isprintable() else None


def _is_over(path: Path) -> bool:
    owner = _read(path)
    if owner is not None and owner.is_here and not _lives(owner.process):
        return True
    try:
        return _now(path.parent) - path.lstat().st_mtime > PATIENCE
    except FileNotFoundError:
        return True


def _now(folder: Path) -> float:
    """The time by the clock of the folder's file system; of this machine's where nothing can be written there."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def _space() -> str:
    """This start of the machine and this container; "" where the system does not tell."""
    try:
        return f"{os.stat('/proc/self/ns/pid').st_ino} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return ""


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
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(owner), file)
    except OSError:  # a full disk
        path.unlink(missing_ok=True)
        raise
    return True
