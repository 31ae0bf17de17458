"""Configurations are saved with the values that defaults of other packages' arguments have, or refused by name."""

import json
from collections import namedtuple
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from lightning.pytorch import Callback

from lightning_tasks.__main__ import main
from lightning_tasks.cli.save_config import dump_plain
from lightning_tasks.errors import UsageError
from lightning_tasks.runs.environment import parse_environment, this_environment
from tests.lightning_tasks.cli.runs import checkpoint, last_run, saved_config

Size = namedtuple("Size", ["height", "width"])
SIZE, SHARE = Size(2, 3), np.float64(0.5)


class Color(str, Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Word(str):
    pass


class Settings(Callback):
    """Takes anything, as other people's callbacks do."""

    def __init__(
        self,
        place=Path("a", "b"),
        share: float = SHARE,
        size: Any = SIZE,
        level=Level.HIGH,
        color: str = Color.RED,
    ):
        self.given = (place, share, size, level, color)


def test_plain_values_are_written_as_they_are_read():
    values = {
        "b": Path("x"),
        "a": (1, Size(2, 3)),
        "c": np.int64(4),
        "d": Color.RED,
        "e": np.bool_(True),
        "f": Word("é"),
    }
    assert yaml.safe_load(dump_plain(values)) == {
        "b": "x",
        "a": [1, [2, 3]],
        "c": 4,
        "d": "red",
        "e": True,
        "f": Word("é"),
    }
    assert dump_plain(values).startswith("b: x\na:\n")


def test_other_values_are_named():
    with pytest.raises(UsageError, match=r"trainer\.callbacks\[1\]\.x is <object.*, of the kind builtins\.object"):
        dump_plain({"trainer": {"callbacks": [1, {"x": object()}]}})


def test_a_run_with_such_defaults_runs_again_from_its_own_configuration(demo):
    timer = {"class_path": "lightning.pytorch.callbacks.Timer", "init_args": {"duration": "00:01:00:00"}}
    Path("more.yaml").write_text(
        yaml.safe_dump({"trainer": {"callbacks": [timer, {"class_path": f"{__name__}.Settings"}]}})
    )
    main(["fit", "--config", demo, "--config", "more.yaml"])
    first = saved_config()
    timer, settings = (each["init_args"] for each in first["trainer"]["callbacks"])
    assert timer["interval"] == "step"
    assert settings == {
        "place": str(Path("a", "b")),
        "share": 0.5,
        "size": [2, 3],
        "level": "HIGH",
        "color": "red",
    }
    main(["fit", "--config", str(last_run() / "config.yaml")])
    again = saved_config()
    del first["trainer"]["logger"], again["trainer"]["logger"]
    assert again == first


def environment_of(run):
    return parse_environment(json.loads((run / "environment.json").read_text(encoding="utf-8")))


def test_a_fit_and_a_test_keep_where_they_ran(demo):
    main(["fit", "--config", demo])
    assert environment_of(last_run()) == this_environment()
    fitted = last_run()
    main(["test", "--config", demo, "--ckpt_path", str(checkpoint())])
    assert last_run() != fitted
    assert environment_of(last_run()) == this_environment()
    assert not (last_run() / "checkpoints").exists()


def test_a_driver_that_cuda_refuses_does_not_end_the_run(monkeypatch):
    def refused(number):
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", refused)
    this_environment.cache_clear()
    try:
        assert this_environment().hardware.endswith(" cores")
    finally:
        this_environment.cache_clear()
