"""A project with a plain LightningCLI and a YAML file, in which our callbacks are named and nothing else of ours."""

import json
import re
import runpy
import shutil
import signal
import sys
from functools import partial, update_wrapper
from pathlib import Path
from types import MethodType

import pytest
import torch
from lightning.pytorch.cli import LightningCLI

from lightning_tasks.callbacks import SwapAttention
from tests.lightning_tasks.callbacks.modules import TinyLM, fit, weights_of

PROJECT = Path(__file__).parent / "project"
TOLD = {"class_path": "tests.lightning_tasks.demo.Signal", "init_args": {"number": int(signal.SIGTERM), "step": 5}}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Its program, run in its own folder with the arguments of a command line."""
    shutil.copytree(PROJECT, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.syspath_prepend(str(tmp_path / "project"))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["main.py", *arguments])
        runpy.run_path("main.py", run_name="__main__")
        return max(Path("logs/reader").iterdir(), key=lambda path: path.stat().st_ctime_ns)

    yield run
    sys.modules.pop("own_project", None)


def saved(run):
    (path,) = (run / "checkpoints").glob("epoch*.ckpt")
    return path, torch.load(path, weights_only=True)


def test_a_run_is_watched_stopped_resumed_and_tested(project, capsys):
    """It ends with the weights and the optimizer of a run that nobody stopped."""
    _, whole = saved(project("fit", "--config", "config.yaml"))
    assert re.search(r"val/loss: 0\.\d+ before, 0\.\d+ after training", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        project("fit", "--config", "config.yaml", f"--trainer.callbacks+={json.dumps(TOLD)}")
    (stopped,) = Path("logs").rglob("stopped-*.ckpt")
    resumed = project("fit", "--config", "config.yaml", "--ckpt_path", str(stopped))
    path, ended = saved(resumed)
    assert ended["global_step"] == whole["global_step"] == 12
    torch.testing.assert_close(ended["state_dict"], whole["state_dict"], rtol=0, atol=0)
    torch.testing.assert_close(ended["optimizer_states"], whole["optimizer_states"], rtol=0, atol=0)
    assert "val/attention/entropy/mean" in (resumed / "metrics.csv").read_text()
    tested = project("test", "--config", "config.yaml", "--ckpt_path", str(path))
    assert "test/attention/entropy/mean" in (tested / "metrics.csv").read_text()


def with_optimizer(module, parameters, **options):
    """The module with an optimizer as LightningCLI binds one to it."""
    optimizer = torch.optim.SGD(parameters(module), **options)
    bound = partial(LightningCLI.configure_optimizers, optimizer=optimizer)
    module.configure_optimizers = MethodType(update_wrapper(bound, LightningCLI.configure_optimizers), module)
    return module


def test_the_optimizer_of_the_command_line_follows_the_swap():
    """As though it were built after it; one that was given its Parameters otherwise stays as it is."""

    def swaps():
        return [SwapAttention("rpc", layers=[0]), SwapAttention("scaled", {"variant": "scalar"}, layers=[1])]

    straight = TinyLM(lr=0.1)
    fit(straight, swaps(), max_steps=3)
    module = with_optimizer(TinyLM(), lambda module: module.parameters(), lr=0.1, momentum=0.9)
    fit(module, swaps(), max_steps=3)
    assert torch.equal(weights_of(module), weights_of(straight))
    part = with_optimizer(TinyLM(), lambda module: module.net["encoder"].parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="was built before the attention was swapped"):
        fit(part, [SwapAttention("rpc")], max_steps=1)
