"""Names of earlier versions: they mean the present ones, where the user has no package of that name."""

import json

import pytest

from tests.lightning_tasks.programs import run_forked


def look(folder):
    answer = run_forked("tests.attnswap.former_names_case", cwd=folder)
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
