"""The command: Weights & Biases, with its own traps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_tasks.loggers import wandb_offline_without_key
from tests.lightning_tasks.cli.runs import ROOT, last_run


def test_wandb_has_the_nested_config_and_the_saved_config_runs_again(demo):
    pytest.importorskip("wandb")
    from lightning_tasks.cli import run

    arguments = ["fit", "--config", demo, "--trainer", "logger/wandb"]
    for _ in range(2):
        cli = run(arguments)
        arguments = ["fit", "--config", str(last_run() / "config.yaml")]
        csv_logger, wandb_logger = cli.trainer.loggers
        assert Path(csv_logger.log_dir) == last_run()
        assert wandb_logger.experiment.config["model"]["init_args"]["rate"] == 0.05
        wandb_logger.experiment.finish()
    for run_folder in ("version_0", "version_1"):
        assert len(list(Path("runs/demo", run_folder, "wandb").glob("offline-run-*"))) == 1


@pytest.mark.parametrize(
    ("environment", "added"),
    [
        ({}, {"WANDB_MODE": "offline"}),
        ({"WANDB_API_KEY": "x"}, {}),
        ({"WANDB_MODE": "online"}, {}),
    ],
)
def test_wandb_is_offline_where_there_is_no_key(environment, added, tmp_path):
    assert wandb_offline_without_key({"NETRC": str(tmp_path / "netrc"), **environment}) == added


def test_a_key_in_netrc_is_a_key(tmp_path):
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert wandb_offline_without_key({"NETRC": str(tmp_path / "netrc")}) == {}


def test_one_wandb_run_a_job_under_ddp(demo):
    pytest.importorskip("wandb")
    parts = ["--trainer", "strategy/ddp", "--trainer", "logger/wandb"]
    command = [sys.executable, "-m", "lightning_tasks", "fit", "--config", demo, *parts]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, capture_output=True, timeout=240, env=environment)
    assert [path.name for path in Path("runs/demo").iterdir()] == ["version_0"]
    assert len(list(Path("runs/demo/version_0/wandb").glob("offline-run-*"))) == 1
    assert (Path("runs/demo/version_0") / "config.yaml").is_file()
