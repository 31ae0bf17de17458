"""`attnswap test --config RECIPE --config robustness/standard`, for images and for text."""

import sys
from pathlib import Path

import pytest
import yaml

from lightning_tasks.__main__ import main
from lightning_tasks.recipes import find_recipe, read_settings
from lightning_tasks.runs.robustness import read_csv
from tests.lightning_tasks.twins import twin

RECIPE = "quickstart/language_modeling"
MODULES = "tests.lightning_tasks.robustness.modules"


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["attnswap"])
    pytest.importorskip("imagecorruptions", reason="imagecorruptions-imaug is not installed (extra `robustness`)")


@pytest.fixture
def images(tmp_path):
    """A recipe that classifies four images, too small for corruptions, with a mechanism in its layers."""
    swap = {"class_path": "lightning_tasks.callbacks.SwapAttention", "init_args": {"mechanism": "symmetric"}}
    recipe = {
        "seed_everything": 1,
        "model": {"class_path": f"{MODULES}.TinyClassifier"},
        "data": {"class_path": f"{MODULES}.TinyImages", "init_args": {"count": 4}},
        "trainer": {"accelerator": "cpu", "max_steps": 1, "enable_progress_bar": False, "callbacks": [swap]},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def checkpoint(name):
    return str(next(Path("runs", name, "version_0").glob("checkpoints/*.ckpt")))


def standard():
    (callback,) = read_settings(find_recipe("robustness/standard"))["trainer"]["callbacks+"]
    return callback["init_args"]


@pytest.mark.filterwarnings("ignore:no corruption is measured")
def test_the_standard_table_of_a_classifier(images, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)  # which images as small as these do not need
    main(["fit", "--config", images])
    command = ["test", "--config", images, "--config", "robustness/standard", "--ckpt_path", checkpoint("tiny")]
    main(command)
    rows = read_csv("runs/tiny/version_1/robustness.csv")
    attacks = [each if isinstance(each, str) else each["name"] for each in standard()["attacks"]]
    expected = [
        ("clean", "", ""),
        *[("input gradient", "", "")] * 2,
        *(("attack", name, eps) for name in attacks for eps in standard()["eps"]),
    ]
    assert [(row.test, row.name, row.setting) for row in rows] == [*expected, ("mean corruption", "", "")]
    assert "rows kept in runs/tiny/robustness_rows.jsonl" in capsys.readouterr().out
    # The same command, in a run folder of its own, finds what is done; a twin transfers from a checkpoint.
    kept = Path("runs/tiny/robustness_rows.jsonl").read_text()
    twin = f"{{name: transfer, source: {checkpoint('tiny')}, steps: 1}}"
    main([*command, f"--trainer.callbacks.attacks=[fgsm, {twin}]"])
    again = Path("runs/tiny/robustness_rows.jsonl").read_text()
    assert again.startswith(kept)
    assert len(again.splitlines()) == len(kept.splitlines()) + 2
    rows = read_csv("runs/tiny/version_2/robustness.csv")
    assert [row.name for row in rows if row.test == "attack"] == ["fgsm"] * 2 + ["transfer of pgd"] * 2
    log = Path("runs/tiny/version_2/metrics.csv").read_text()
    assert "robustness/fgsm/1_255/accuracy" in log


@pytest.mark.slow
def test_the_standard_table_of_a_language_model(tmp_path, capsys):
    recipe = twin(RECIPE, tmp_path)
    main(["fit", "--config", recipe])
    run = next(Path("runs").rglob("version_0"))
    found = str(next(run.glob("checkpoints/*.ckpt")))
    main(["test", "--config", recipe, "--config", "robustness/standard", "--ckpt_path", found])
    rows = read_csv(run.parent / "version_1" / "robustness.csv")
    assert [(row.test, row.setting, row.metric) for row in rows] == [
        ("clean", "", "perplexity"),
        ("word swap", "2.5%", "perplexity"),
        ("word swap", "2.5%", "perplexity of the words that stayed"),
        ("word swap", "2.5%", "clean perplexity of the words that stayed"),
    ]
    assert all(row.value > 1 for row in rows)
