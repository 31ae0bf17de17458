"""SIGTERM while no trainer handles it: before one does, and after."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator


class Terminated(BaseException):
    """SIGTERM, where it came."""


@contextlib.contextmanager
def sigterm_in_one_line() -> Iterator[None]:
    """End with one line on SIGTERM, and clean up on the way: folders, and processes that were started meanwhile.

    While a trainer runs, its own handler comes before this one, and ends the run after its step.

    Raises:
        SystemExit: with 143, as a shell says of what SIGTERM ended.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    own, before = os.getpid(), {*multiprocessing.active_children()}

    def end(number: int, frame: object) -> None:
        if signal.getsignal(number) is not end:  # called by the trainer's
            return
        signal.signal(number, signal.SIG_DFL)  # a second one ends what does not let go
        if os.getpid() != own:  # a process that was forked meanwhile, which ends as it would without this
            os.kill(os.getpid(), number)
        raise Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    except Terminated:
        for child in {*multiprocessing.active_children()} - before:  # of `ddp_spawn`: Python would wait for their end
            child.terminate()
        print("attnswap: ended by SIGTERM", file=sys.stderr)
        raise SystemExit(143) from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
