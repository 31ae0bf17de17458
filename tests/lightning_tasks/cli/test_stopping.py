"""The command: a run that is told to end says so by its exit code, and names what is saved."""

import functools
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from attnswap.datamodules.shared.windows import CutFileError

from lightning_tasks.__main__ import main
from lightning_tasks.cli.early_stop import sigterm_in_one_line
from lightning_tasks.files.checkpoint_io import UnwrittenCheckpoint
from tests.lightning_tasks.cli.runs import checkpoint, last_run
from tests.lightning_tasks.demo import DemoModule

LONG = ["--trainer.max_steps=9", "--trainer.limit_train_batches=3"]


def send(number, step, **options):
    spec = {"class_path": "tests.lightning_tasks.demo.Signal", "init_args": {"number": number, "step": step, **options}}
    return [f"--trainer.callbacks={json.dumps([spec])}"]


def ended(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return stop.value.code, [line for line in capsys.readouterr().err.splitlines() if line.startswith("attnswap: ")]


@pytest.mark.parametrize(("step", "validating", "at"), [(4, False, 5), (5, False, 6), (6, True, 6)])
def test_sigterm_saves_and_ends_with_143(demo, step, validating, at, capsys):
    """In the middle of an epoch, in its last step, and while it is validated."""
    stopped = send(signal.SIGTERM, step, validating=validating)
    code, (line,) = ended(["fit", "--config", demo, *LONG, "--trainer.limit_val_batches=2", *stopped], capsys)
    (saved,) = (last_run() / "checkpoints").glob("stopped-*.ckpt")
    assert code == 143
    assert line.startswith("attnswap: ended by SIGTERM; the newest checkpoint is ")
    assert line.endswith(f"{saved} goes on from it")
    assert torch.load(saved, weights_only=True)["global_step"] == at
    main(["fit", "--config", demo, *LONG, "--ckpt_path", "last"])
    assert torch.load(checkpoint(), weights_only=True)["global_step"] == 9


def test_without_checkpoints_nothing_is_saved(demo, capsys):
    stopped = ["--trainer.enable_checkpointing=false", *send(signal.SIGTERM, 4)]
    code, (line,) = ended(["fit", "--config", demo, *LONG, *stopped], capsys)
    assert (code, line) == (143, "attnswap: ended by SIGTERM; no checkpoint was saved")
    assert not list(Path("runs").rglob("*.ckpt"))


@pytest.fixture
def interruptible():
    """SIGINT as at a terminal: a shell starts what runs in the background with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_names_the_newest_checkpoint(demo, capsys, interruptible):
    code, (line,) = ended(["fit", "--config", demo, *LONG, *send(signal.SIGINT, 5)], capsys)
    assert code == 130
    assert line.startswith("attnswap: interrupted; the newest checkpoint is ")
    assert "epoch=0-step=3.ckpt goes on from it" in line
    code, (line,) = ended(["fit", "--config", demo, *LONG, *send(signal.SIGINT, 1)], capsys)
    assert (code, line) == (130, "attnswap: interrupted; no checkpoint was saved")


def test_sigterm_before_there_is_a_trainer_is_one_line_and_leaves_no_folder(demo, capsys, monkeypatch):
    begin = DemoModule.__init__

    def __init__(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(DemoModule, "__init__", functools.wraps(begin)(__init__))
    assert ended(["fit", "--config", demo, *LONG], capsys) == (143, ["attnswap: ended by SIGTERM"])
    assert not Path("runs").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def sleeper():
    """A process of its own, not forked: a fork of one with threads can stand still before it takes a signal."""
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    return process


@sigterm_in_one_line()
def start_processes_and_be_told(started):
    if not (forked := os.fork()):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:  # not a second process that goes on with the tests
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == -signal.SIGTERM
    started.append(sleeper())
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_ends_processes_that_were_started_too(capsys):
    """And not those that were there before, as of other tests."""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    earlier, started = sleeper(), []
    try:
        with pytest.raises(SystemExit, match="143"):
            start_processes_and_be_told(started)
        assert capsys.readouterr().err == "attnswap: ended by SIGTERM\n"
        (process,) = started
        process.join(10)
        assert process.exitcode == -signal.SIGTERM
        assert earlier.is_alive()
    finally:
        earlier.kill()
        earlier.join()


def test_a_prediction_ends_too(demo, capsys, monkeypatch):
    def step(self, batch, batch_idx):
        os.kill(os.getpid(), signal.SIGTERM)
        return batch

    monkeypatch.setattr(DemoModule, "predict_step", step)
    code, (line,) = ended(["predict", "--config", demo], capsys)
    assert (code, line) == (143, "attnswap: ended by SIGTERM; nothing of it is kept")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(28, "No space left on device", "metrics.csv"), "metrics.csv could not be written or read (No space"),
        (UnwrittenCheckpoint("the checkpoint a.ckpt could not be written"), "the checkpoint a.ckpt could not be"),
        (CutFileError("ids has 1 bytes and had 2"), "ids has 1 bytes and had 2"),
        (CutFileError("Caught in a worker\nTraceback\nmodule.CutFileError: ids has 1 bytes\n"), "ids has 1 bytes; "),
        (RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed."), "a process that loads data died"),
    ],
)
def test_what_the_machine_refuses_is_one_line(demo, error, text, capsys, monkeypatch):
    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == 5:
            raise error

    monkeypatch.setattr(DemoModule, "on_train_batch_start", on_train_batch_start)
    code, (line,) = ended(["fit", "--config", demo, *LONG], capsys)
    assert code == 1
    assert line.startswith(f"attnswap: error: {text}")
    assert "; the newest checkpoint is " in line
    monkeypatch.setenv("ATTNSWAP_TRACEBACK", "1")
    with pytest.raises(type(error)):
        main(["fit", "--config", demo, *LONG])


def test_a_folder_that_takes_no_checkpoint_is_refused_before_the_first_step(demo, capsys):
    Path("file").touch()
    keep = '--trainer.callbacks={"class_path": "ModelCheckpoint", "init_args": {"dirpath": "file/kept"}}'
    code, lines = ended(["fit", "--config", demo, keep], capsys)
    assert code == 2
    assert "file is not a folder that is writable" in lines[-1]
    assert not Path("runs").exists()
