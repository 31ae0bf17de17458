"""SIGTERM for one of several processes ends them all, where Lightning's handler would wait for ever."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_tasks.callbacks import SaveOnStop
from lightning_tasks.cli.stopping import end_in_one_line
from tests.lightning_tasks.cli.runs import ROOT
from tests.lightning_tasks.demo import DemoModule

CLOSED = "[/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:2221"


@pytest.fixture
def one_of_two(tmp_path, monkeypatch):
    """A trainer that takes itself for one of two processes, of which it launched the other."""
    trainer, told = Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path), []
    monkeypatch.setattr(type(trainer), "world_size", 2)
    trainer.strategy._launcher = SimpleNamespace(kill=told.append)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_, **__: pytest.fail("it waits for the others"))
    yield trainer, told
    trainer._signal_connector.teardown()


def test_a_process_of_several_that_is_told_ends_at_once_and_tells_those_that_it_launched(one_of_two):
    trainer, told = one_of_two
    SaveOnStop().setup(trainer, DemoModule(), "fit")
    trainer._signal_connector.register_signal_handlers()
    with pytest.raises(SIGTERMException):
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # a second one disturbs nothing
    assert told == [signal.SIGTERM]
    assert trainer.received_sigterm


def test_a_process_that_lost_another_says_so_in_one_line(one_of_two, capsys):
    with pytest.raises(SystemExit, match="1"), end_in_one_line(one_of_two[0]):
        raise RuntimeError(CLOSED)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("attnswap: error: another process of this run ended, and says why itself; RuntimeError: ")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, None])
def test_two_processes_under_torchrun_end_within_seconds(demo, rank):
    spec = {"class_path": "tests.lightning_tasks.demo.Signal", "init_args": {"number": 15, "step": 5, "rank": rank}}
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    program += ["-m", "lightning_tasks", "fit", "--config", demo, "--trainer.strategy=ddp", "--trainer.devices=2"]
    program += [
        "--trainer.max_steps=500",
        "--trainer.limit_train_batches=500",
        f"--trainer.callbacks={json.dumps([spec])}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("attnswap: e")]
    assert any(line.startswith(("attnswap: ended by SIGTERM", "attnswap: error: another process")) for line in lines)
