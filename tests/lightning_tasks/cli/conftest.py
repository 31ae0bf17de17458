"""The command in a folder of its own, and a recipe that trains in milliseconds."""

import sys

import pytest
import yaml

from tests.lightning_tasks.cli.runs import DEMO


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["attnswap"])


@pytest.fixture
def demo(tmp_path):
    """A recipe that trains in milliseconds."""
    trainer = {
        "accelerator": "cpu",
        "max_steps": 2,
        "limit_val_batches": 1,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    recipe = {"seed_everything": 1, "model": {"class_path": DEMO, "init_args": {"rate": 0.05}}, "trainer": trainer}
    path = tmp_path / "demo.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


@pytest.fixture
def said(monkeypatch):
    """What the command says of a run."""
    lines = []
    for module in ("fit", "save_config"):
        monkeypatch.setattr(f"lightning_tasks.cli.{module}.rank_zero_info", lines.append)
    return lines
