"""A demonstration run of the command, and what it leaves."""

from pathlib import Path

import yaml

DEMO = "tests.lightning_tasks.demo.DemoModule"
ARGUMENTS = {"width": 32, "init_bias": False, "optimizer": "SGD"}  # of DemoModule, at their defaults
ROOT = Path(__file__).resolve().parents[3]


def last_run(name="demo"):
    return max(Path("runs", name).iterdir(), key=lambda path: int(path.name.removeprefix("version_")))


def saved_config(name="demo"):
    return yaml.safe_load((last_run(name) / "config.yaml").read_text())


def checkpoint(name="demo"):
    return next((last_run(name) / "checkpoints").glob("*.ckpt"))
