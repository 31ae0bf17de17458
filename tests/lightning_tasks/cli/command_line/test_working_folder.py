"""The command finds modules of the working folder, after all that is installed."""

import importlib.util
import runpy
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import pytest
import yaml

from lightning_tasks.__main__ import main
from lightning_tasks.files.names import stored_object
from lightning_tasks.working_folder import modules_of_working_folder
from tests.lightning_tasks.cli.runs import last_run, saved_config

OWN = """\
from tests.lightning_tasks.demo import DemoModule


class Mine(DemoModule):
    pass
"""


@pytest.fixture
def own(demo, request):
    """A recipe of a class in a module of the working folder, whose name no other test uses."""
    name = f"own_{request.node.originalname}"
    Path(f"{name}.py").write_text(OWN)
    recipe = yaml.safe_load(Path(demo).read_text())
    recipe["model"]["class_path"] = f"{name}.Mine"
    Path("my.yaml").write_text(yaml.safe_dump(recipe))
    yield name
    sys.modules.pop(name, None)


def test_a_configuration_names_a_class_of_the_folder(own):
    before = list(sys.path)
    main(["fit", "--config", "my.yaml"])
    assert saved_config("my")["model"]["class_path"] == f"{own}.Mine"
    assert sys.path == before


def test_workers_of_a_comparison_find_it_too(own):
    main(["compare", "my.yaml", "--seeds", "0", "--output", "out", "--metrics", "train/loss"])
    assert len(list(Path("out").rglob("result.json"))) == 1


@pytest.mark.parametrize("option", ["--model", "--data", "--trainer.callbacks+", "--model.optimizer"])
def test_an_installed_module_of_the_same_name_wins_and_that_is_said(option, capsys):
    Path("datasets.py").write_text(OWN)
    base = ["--model", "lightning_tasks.LanguageModelingTask", "--data", "tests.lightning_tasks.demo.DemoText"]
    with pytest.raises(SystemExit) as stop:
        main(["fit", *base, f"{option}=datasets.Mine"])
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    assert "Python finds the module 'datasets' in " in printed
    assert "which comes before datasets.py of the working folder; if that one is meant, rename it" in printed


def test_the_folder_comes_last_and_once():
    with modules_of_working_folder():
        assert sys.path[-1] == str(Path.cwd())
        with modules_of_working_folder():
            assert sys.path.count(str(Path.cwd())) == 1
    assert str(Path.cwd()) not in sys.path


def test_a_checkpoint_names_no_file_of_the_folder(monkeypatch):
    """Not even where the file has the name of a library whose classes it may name, and which is not installed."""
    Path("transformers.py").write_text("raise SystemExit('ran')")
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    with modules_of_working_folder(), pytest.raises(ValueError, match="nothing of the package 'transformers'"):
        stored_object("transformers.Evil", (), "model")


def test_a_checkpoint_of_the_folders_class_needs_the_configuration(own, capsys):
    main(["fit", "--config", "my.yaml"])
    checkpoint = next((last_run("my") / "checkpoints").glob("*.ckpt"))
    sys.modules.pop(own)
    with pytest.raises(SystemExit):
        main(["validate", "--model", "tests.lightning_tasks.demo.DemoModule", "--ckpt_path", str(checkpoint)])
    assert own not in sys.modules


def test_a_folder_without_code_hides_no_installed_package(tmp_path):
    """Also with PYTHONPATH=. and `python -m`, which put the working folder first."""
    names = ["wandb", "datasets", "timm", "lightning"]
    for name in names:
        (tmp_path / name).mkdir(exist_ok=True)
    for name in names:
        spec = PathFinder.find_spec(name, [str(tmp_path), *sys.path])
        assert Path(spec.origin).name == "__init__.py"
        assert not Path(spec.origin).is_relative_to(tmp_path)


@pytest.mark.parametrize("module", ["lightning_tasks", "attnswap.datamodules.needed"])
def test_a_folder_without_code_is_no_installed_package(module, monkeypatch):
    place = importlib.util.find_spec(module).origin
    found = importlib.util.find_spec
    folder = ModuleSpec("timm", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: folder if name == "timm" else found(name))
    with pytest.raises(ModuleNotFoundError, match=r"timm, which is not installed: pip install 'attnswap\[train\]'"):
        runpy.run_path(place)
