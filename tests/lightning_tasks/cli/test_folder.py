"""The command: one folder per run."""

import csv
import json
from pathlib import Path

from lightning_tasks.__main__ import main
from tests.lightning_tasks.cli.runs import checkpoint, last_run, saved_config


def test_a_run_has_csv_config_and_checkpoint_in_one_folder(demo):
    main(["fit", "--config", demo])
    folder = last_run()
    with (folder / "metrics.csv").open() as file:
        assert any(row["train/loss"] for row in csv.DictReader(file))
    assert checkpoint().is_relative_to(folder)


def test_the_next_run_gets_the_next_folder(demo):
    main(["fit", "--config", demo])
    main(["fit", "--config", demo])
    assert sorted(path.name for path in Path("runs/demo").iterdir()) == ["version_0", "version_1"]


def test_the_saved_config_is_complete_and_runs_again(demo):
    main(["fit", "--config", demo, "--model.width=32"])
    saved = saved_config()
    assert saved["model"]["init_args"] == {
        "width": 32,
        "rate": 0.05,
        "note": "none",
        "init_bias": False,
        "optimizer": "SGD",
    }
    assert saved["seed_everything"] == 1
    assert saved["trainer"]["gradient_clip_val"] is None  # defaults are there too
    log = last_run() / "metrics.csv"
    before = log.read_text()
    main(["fit", "--config", str(last_run() / "config.yaml")])
    assert last_run().name == "version_1"
    assert saved_config()["model"] == saved["model"]
    assert (last_run() / "metrics.csv").read_text() == before
    assert log.read_text() == before  # the log of the first run is still there


def test_two_runs_in_one_folder_are_fine(demo):
    given = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "here", "version": "same"}}
    for _ in range(2):
        main(["fit", "--config", demo, f"--trainer.logger={json.dumps(given)}"])
    assert len(list(Path("here").rglob("config.yaml"))) == 2
