"""A comparison's folder: several commands share its cells, and nothing outside of it is deleted."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from attnswap.datamodules.shared.token_cache import CacheEntry

from lightning_tasks.__main__ import main
from lightning_tasks.compare import workers
from lightning_tasks.compare.cell import Cell
from tests.lightning_tasks.cli.runs import DEMO


@pytest.fixture
def comparison(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = {"accelerator": "cpu", "max_steps": 1, "limit_train_batches": 1}
    recipe = {"model": {"class_path": DEMO}, "trainer": trainer}
    (tmp_path / "demo.yaml").write_text(yaml.safe_dump(recipe))
    return ["compare", "demo.yaml", "--seeds=0", "--output=out"]


@pytest.mark.slow
def test_two_commands_at_once_share_the_cells_and_write_the_same_tables(comparison):
    several = [argument.replace("=0", "=0:3") for argument in comparison]
    main([argument.replace("=out", "=alone") for argument in several])
    command = [sys.executable, "-m", "attnswap", *several]
    root = str(Path(__file__).resolve().parents[3])
    others = [subprocess.Popen(command, env={**os.environ, "PYTHONPATH": root}) for _ in range(2)]
    assert [other.wait(600) for other in others] == [0, 0]
    assert Path("out/results.csv").read_bytes() == Path("alone/results.csv").read_bytes()
    starts = [each for cell in json.loads(Path("out/comparison.json").read_text())["cells"] for each in cell["runs"]]
    assert starts == [socket.gethostname()] * 3, "each cell ran once"
    assert not [path for path in Path("out/leases").rglob("*") if path.is_file()]


def test_a_cell_that_another_command_runs_is_waited_for(comparison, monkeypatch):
    lease, looks = Path("out/leases/cells/demo/seed_0"), []
    lease.parent.mkdir(parents=True)
    lease.write_text("of somebody")

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            lease.unlink()

    monkeypatch.setattr(workers, "time", SimpleNamespace(sleep=sleep))
    main(comparison)
    assert looks == [workers._LOOK] * 3
    assert Path("out/cells/demo/seed_0/result.json").is_file()


@pytest.mark.parametrize("link", ["cells", "cells/demo", "cells/demo/seed_0"])
def test_a_cell_that_is_a_link_is_refused(comparison, tmp_path, link, capsys):
    treasure = tmp_path / "elsewhere" / "demo" / "seed_0" / "file"
    treasure.parent.mkdir(parents=True)
    treasure.write_text("kept")
    place = tmp_path / "out" / link
    place.parent.mkdir(parents=True)
    target = {"cells": treasure.parents[2], "cells/demo": treasure.parents[1], "cells/demo/seed_0": treasure.parent}
    place.symlink_to(target[link])
    with pytest.raises(SystemExit) as stop:
        main(comparison)
    assert stop.value.code == 2
    assert f"out/{link} is a symbolic link" in capsys.readouterr().err
    assert treasure.read_text() == "kept"
    with pytest.raises(ValueError, match="symbolic link"):
        Cell("demo", "demo.yaml", (), 0, "out").clear()


@pytest.mark.parametrize("content", ['{"fingerprint": "a', "[3]", "\xff"])
def test_a_damaged_result_is_named_before_anything_runs(comparison, content, capsys):
    result = Path("out/cells/demo/seed_1/result.json")
    result.parent.mkdir(parents=True)
    result.write_text(content, encoding="latin-1")
    with pytest.raises(SystemExit) as stop:
        main([argument.replace("--seeds=0", "--seeds=0,1") for argument in comparison])
    assert stop.value.code == 2
    assert re.search(r"out/cells/demo/seed_1/result.json is damaged .*delete it", capsys.readouterr().err)
    assert not Path("out/cells/demo/seed_0").exists()


def test_a_cache_entry_that_is_a_link_loses_the_link_alone(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("kept")
    entry = CacheEntry.of(tmp_path / "cache", "text", {})
    entry.folder.parent.mkdir(parents=True)
    entry.folder.symlink_to(tmp_path / "elsewhere")
    entry.folder.with_name(f".{entry.folder.name}.new").symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="is corrupt and is made again"):
        entry.prepare(lambda folder: (folder / "tokens.json").write_text("{}"))
    assert entry.exists()
    assert not entry.folder.is_symlink()
    assert (tmp_path / "elsewhere" / "file").read_text() == "kept"
