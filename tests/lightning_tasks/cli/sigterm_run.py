"""A program that starts processes and is told to end, in a process of its own, which has no other children."""

import multiprocessing
import os
import signal
import time

from lightning_tasks.cli.early_stop import sigterm_in_one_line

STARTED = []


@sigterm_in_one_line()
def start_processes_and_be_told():
    if not (forked := os.fork()):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:  # not a second process that goes on
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == -signal.SIGTERM
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    process = context.Process(target=lambda: begun.set() or time.sleep(60))
    process.start()
    STARTED.append(process)
    begun.wait(10)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    try:
        start_processes_and_be_told()
    except SystemExit as stop:
        (process,) = STARTED
        process.join(10)
        print(stop.code, process.exitcode)
