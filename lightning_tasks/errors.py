"""Errors that the user can mend: how they are recognized and printed; torch is not imported here."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError

PEER_ENDED = "another process of this run ended"
HINT = "ATTNSWAP_TRACEBACK=1 shows where"
_OURS = ("attention_modules", "lightning_tasks", "attnswap")
_TRAINER_SETTINGS = "lightning.pytorch.trainer.connectors."
_ROOT = Path(__file__).resolve().parent.parent
_FOLDERS = (*_OURS, "datamodules")  # of a checkout
_LIBRARIES = ("<", sysconfig.get_paths()["stdlib"], *(f"{_ROOT / name}{os.sep}" for name in _FOLDERS))
_METRIC = re.compile(r"conditioned on metric .+ which is not available|could not find the monitored key")
_INSTALLED = {"site-packages", "dist-packages"}


class UsageError(ValueError):
    """What was asked for cannot be done; the message names the value, what is allowed, and what to do instead."""


def reason(error: BaseException) -> str:
    """Type and text of an error in one line; what torch advises where it refuses code in a file is left out."""
    if isinstance(error, UnpicklingError):
        return "UnpicklingError: it is cut short, is of another kind, or holds more than tensors and plain data"
    return " ".join(f"{type(error).__name__}: {error}".split())


def refusal_in(error: BaseException | None) -> BaseException | None:
    """The error that a `raise` in one of our own packages made, whose text says all that the user needs, if it is one.

    Lightning's words on the trainer's settings pass as ours; jsonargparse wraps what constructors raise.
    """
    frames = [] if error is None else list(traceback.walk_tb(error.__traceback__))
    if error is None or not frames:
        return None
    frame, line = frames[-1]
    module = str(frame.f_globals.get("__name__"))
    package = module.partition(".")[0]
    if package == "jsonargparse":
        return refusal_in(error.__cause__)
    # An error that our code did not raise is one that happened to it, which its text alone does not explain.
    raised = linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise ")
    return error if raised and (package in _OURS or module.startswith(_TRAINER_SETTINGS)) else None


def library_refusal(error: Exception) -> UsageError | None:
    """An error of a library that settings led to, as one of ours; None where it is one, or the user's own code ran."""
    chain = list(_chain(error))
    if isinstance(error, UsageError) or refusal_in(error) is not None or any(map(_runs_other_code, chain)):
        return None
    return UsageError(f"{reason(_unwrapped(error))} ({HINT})")


def unknown_metric(error: Exception) -> str | None:
    """What Lightning says, after some steps, of a metric to monitor that nothing has logged; it names those that exist.

    None for other errors.
    """
    found = _METRIC.search(str(error)) and type(error).__name__ in ("RuntimeError", "MisconfigurationException")
    return reason(error) if found else None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _unwrapped(error: BaseException) -> BaseException:
    """The error of a constructor, which jsonargparse quotes among other lines."""
    wrapped = type(error).__module__.startswith("jsonargparse") or "Does not validate against any" in str(error)
    return _unwrapped(error.__cause__) if wrapped and error.__cause__ is not None else error


def _runs_other_code(error: BaseException) -> bool:
    """Whether code that is neither ours nor an installed library's took part: its author needs the traceback."""
    files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)}
    return any(not file.startswith(_LIBRARIES) and not _INSTALLED & {*Path(file).parts} for file in files)


def refusal_text(refusal: BaseException, hint: str = "") -> str:
    """What the command prints: one line, or the first one and the others indented below it, none of them empty."""
    lines = [line.rstrip() for line in str(refusal).expandtabs(4).splitlines() if line.strip()]
    first, *others = lines or [type(refusal).__name__]
    if not others:
        return f"attnswap: error: {first}" + (f" ({hint})" if hint else "")
    return "\n    ".join([f"attnswap: error: {first}", *others, *([f"({hint})"] if hint else [])])
