"""Names of earlier versions: they mean the present ones, where the user has no package of that name."""

import json
import subprocess
import sys

import pytest

LOOK = """
import json, sys
from lightning_tasks.cli.former_names import know_former_names
know_former_names()
know_former_names()
found = {}
for name in ("datamodules", "datamodules.vision", "datamodules.shared.images", "attnswap.datamodules.text"):
    try:
        module = __import__(name, fromlist=["_"])
        found[name] = [module.__name__, module.__spec__.name]
    except ModuleNotFoundError as error:
        found[name] = str(error)
import attnswap.datamodules
found["same"] = getattr(sys.modules["datamodules"], "DigitsDataModule", None) is attnswap.datamodules.DigitsDataModule
print(json.dumps(found))
"""


def look(folder):
    answer = subprocess.run([sys.executable, "-c", LOOK], cwd=folder, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_they_are_the_present_ones(tmp_path):
    found = look(tmp_path)
    assert found.pop("same")
    assert found.pop("attnswap.datamodules.text") == ["attnswap.datamodules.text"] * 2
    assert all(names == [f"attnswap.{name}"] * 2 for name, names in found.items())


@pytest.mark.parametrize("has_init", [True, False])
def test_a_package_of_the_users_own_comes_first(tmp_path, has_init):
    (tmp_path / "datamodules").mkdir()
    (tmp_path / "datamodules" / "vision.py").write_text("")
    if has_init:
        (tmp_path / "datamodules" / "__init__.py").write_text("")
    found = look(tmp_path)
    assert not found["same"]
    assert found["datamodules"] == ["datamodules", "datamodules"]
    assert found["datamodules.vision"] == ["datamodules.vision", "datamodules.vision"]
    assert "No module named 'datamodules.shared'" in found["datamodules.shared.images"]
    assert found["attnswap.datamodules.text"] == ["attnswap.datamodules.text"] * 2
