"""A comparison's folder: one comparison at a time, and nothing outside of it is deleted."""

import multiprocessing
import re
from pathlib import Path

import pytest
import yaml
from attnswap.datamodules.shared.token_cache import CacheEntry

from lightning_tasks.__main__ import main
from lightning_tasks.compare.cell import Cell
from lightning_tasks.runs.folder import output_folder
from tests.lightning_tasks.cli.runs import DEMO


@pytest.fixture
def comparison(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = {"model": {"class_path": DEMO}, "trainer": {"accelerator": "cpu", "max_steps": 1}}
    (tmp_path / "demo.yaml").write_text(yaml.safe_dump(recipe))
    return ["compare", "demo.yaml", "--seeds=0", "--output=out"]


def hold(output, ready, done):
    with output_folder(output):
        ready.set()
        done.wait(60)


def test_a_second_comparison_in_one_folder_is_refused(comparison, capsys):
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    Path("out").mkdir()
    other = context.Process(target=hold, args=(Path("out"), ready, done))
    other.start()
    try:
        assert ready.wait(60)
        with pytest.raises(SystemExit) as stop:
            main(comparison)
    finally:
        done.set()
        other.join()
    assert stop.value.code == 2
    assert "--output out: another attnswap command is at work there" in capsys.readouterr().err
    assert not Path("out/cells").exists()
    with output_folder(Path("out")):
        pass


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
