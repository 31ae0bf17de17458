"""The command: Weights & Biases, with its own traps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_one_wandb_run_a_job_under_ddp(demo):
    pytest.importorskip("wandb")
    parts = ["--trainer", "strategy/ddp", "--trainer", "logger/wandb"]
    command = [sys.executable, "-m", "lightning_tasks", "fit", "--config", demo, *parts]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, capture_output=True, timeout=240, env=environment)
    assert [path.name for path in Path("runs/demo").iterdir()] == ["version_0"]
    assert len(list(Path("runs/demo/version_0/wandb").glob("offline-run-*"))) == 1
    assert (Path("runs/demo/version_0") / "config.yaml").is_file()
