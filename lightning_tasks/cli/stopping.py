"""How a run ends that somebody or the machine ends before it is done: one line, which names what is saved."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_tasks.errors import PEER_ENDED, reason
from lightning_tasks.files.checkpoint_io import UnwrittenCheckpoint

INTERRUPTED, TERMINATED = 130, 143  # as a shell says of what SIGINT and SIGTERM ended
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_WORKER = re.compile(r"DataLoader worker .*(exited unexpectedly|killed by signal)")
_PEER = re.compile(r"gloo.*(Connection (closed|reset) by peer|Broken pipe)")


def newest_checkpoint(trainer: pl.Trainer) -> Path | None:
    """The file that the checkpoint callbacks of a trainer wrote last, or went on from; None where there is none."""
    names = {str(trainer.ckpt_path)} if trainer.ckpt_path else set()
    for callback in trainer.checkpoint_callbacks:
        names |= {str(getattr(callback, name, "")) for name in ("best_model_path", "last_model_path")}
        names |= set(getattr(callback, "best_k_models", ()))
    files = [Path(name) for name in names if name and Path(name).exists()]
    return max(files, key=lambda path: path.stat().st_mtime_ns, default=None)


def has_begun(trainer: pl.Trainer) -> bool:
    """Whether a trainer has done a whole step, so that its settings fit together."""
    loops = (trainer.fit_loop.epoch_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    return any(loop.batch_progress.total.completed > 0 for loop in loops)


@contextlib.contextmanager
def end_in_one_line(trainer: pl.Trainer) -> Iterator[None]:
    """Give an interrupted or failed run its exit code, and name its newest checkpoint on stderr.

    Raises:
        SystemExit: with 143 after SIGTERM, 130 after an interrupt, 1 where the disk refused a file, or a process that
            loads data or another process of the run died.
    """
    try:
        yield
    except SIGTERMException as error:
        _end(trainer, "ended by SIGTERM", TERMINATED, error)
    except SystemExit as error:
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        _end(trainer, "interrupted", INTERRUPTED, error)
    except (OSError, RuntimeError) as error:
        text = _text(error)
        if text is None or os.environ.get("ATTNSWAP_TRACEBACK"):
            raise
        _end(trainer, f"error: {text}", 1, error)


def _text(error: OSError | RuntimeError) -> str | None:
    """What the machine refused, None for errors of another kind."""
    if isinstance(error, UnwrittenCheckpoint):
        return str(error)
    from attnswap.datamodules.shared.windows import CutFileError

    if isinstance(error, CutFileError):
        return str(error).splitlines()[-1].split("CutFileError: ")[-1]  # a worker's has its traceback before it
    if isinstance(error, OSError) and error.errno in _DISK:
        return f"{error.filename or 'a file'} could not be written or read ({error.strerror})"
    if _WORKER.search(str(error)):
        return f"a process that loads data died, for want of memory or by a signal; {reason(error)}"
    if _PEER.search(str(error)):
        return f"{PEER_ENDED}, and says why itself; {reason(error)}"
    return None


def _end(trainer: pl.Trainer, how: str, code: int, error: BaseException) -> None:
    if trainer.is_global_zero or code == 1:
        print(f"attnswap: {how}; {_saved(trainer)}", file=sys.stderr)
    raise SystemExit(code) from error


def _saved(trainer: pl.Trainer) -> str:
    if trainer.state.fn != "fit":
        return "nothing of it is kept"
    newest = newest_checkpoint(trainer)
    if newest is None:
        return "no checkpoint was saved"
    return f"the newest checkpoint is {newest}; --ckpt_path {newest} goes on from it"
