"""The wheel: what is in it, and that it works where the source is not."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from lightning_tasks.__main__ import version
from lightning_tasks.recipes import CONFIGS
from tests.lightning_tasks.programs import made_once

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("attention_modules", "attnswap", "lightning_tasks")
SOURCES = (*PACKAGES, "datamodules", "configs", "setup.cfg", "pyproject.toml", "LICENSE")
OWN = """
import datamodules
import attnswap.callbacks, lightning_tasks.callbacks
from attnswap.datamodules import DigitsDataModule
from lightning_tasks.robustness import class_folders
class MyDigits(DigitsDataModule):
    def setup(self, stage=None):
        print("my own digits,", MyDigits.__mro__[1].__module__, attnswap.callbacks.LocAteR.__module__)
        super().setup(stage)
"""


def test_a_checkout_hides_no_part_of_itself():
    """Where Python starts in the clone, its folder `attnswap`, without data modules, comes before an installed one."""
    code = "from importlib.util import find_spec; print(*(find_spec(f'attnswap.{n}').origin for n in %r), sep=chr(10))"
    names = ("datamodules", "callbacks")
    command = [sys.executable, "-S", "-c", code % (names,)]  # without what an editable install maps
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert found == [str(ROOT / "datamodules" / "__init__.py"), str(ROOT / "attnswap" / "callbacks.py")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy so that the work tree stays as it is; beside it `site`, where it is installed."""

    def make(folder):
        source = folder / "source"
        source.mkdir()
        for name in SOURCES:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, source / name)
        (source / "README.md").write_text("attnswap\n")
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
        built = subprocess.run(command, capture_output=True, text=True)
        assert built.returncode == 0, built.stdout + built.stderr
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
        (made,) = folder.glob("attnswap-*.whl")
        subprocess.run([*pip, str(folder / "site"), str(made)], check=True, capture_output=True)

    return next(made_once(tmp_path_factory, "wheel", make).glob("attnswap-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel):
    """The environment of a process that sees the installed wheel and not the source."""
    return {**os.environ, "PYTHONPATH": str(wheel.parent / "site")}


def attnswap(arguments, folder, environment):
    command = [sys.executable, "-c", "from lightning_tasks.__main__ import main; main()", *arguments]
    answer = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_the_wheel_holds_the_packages_and_every_recipe(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"attnswap/configs/{path.relative_to(CONFIGS).as_posix()}" for path in CONFIGS.rglob("*.yaml")} <= names
    pages = ("report/page.html.j2", "explore/page.html.j2", "explore/page.js", "explore/page.css")
    assert {f"lightning_tasks/{page}" for page in pages} <= names
    tops = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert tops == set(PACKAGES), "other top-level names are those of users' own packages"


def test_the_wheel_holds_every_module_and_that_it_is_typed(wheel):
    """setup.cfg lists the packages, as two of them have another name than their folder."""
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {path.relative_to(ROOT).as_posix() for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    sources |= {f"attnswap/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "datamodules").rglob("*.py")}
    assert sources == {name for name in names if name.endswith(".py")}
    assert {f"{name}/py.typed" for name in (*PACKAGES, "attnswap/datamodules")} <= names


def test_the_wheel_has_the_version_and_the_entry_points(wheel):
    archive = zipfile.ZipFile(wheel)
    info = wheel.name.replace("-py3-none-any.whl", ".dist-info")
    assert f"\nVersion: {version()}\n" in archive.read(f"{info}/METADATA").decode()
    entries = archive.read(f"{info}/entry_points.txt").decode()
    assert "attnswap = attnswap.__main__:main" in entries
    assert "[attnswap.mechanisms]" in entries


def test_the_installed_command_lists_the_recipes(installed, tmp_path):
    place = attnswap(["--version"], tmp_path, installed)
    assert place == f"attnswap {version()}\n"
    listed = attnswap(["recipes"], tmp_path, installed)
    assert "quickstart/language_modeling\n" in listed
    assert "locater/wikitext2\n" in listed


@pytest.fixture(params=[pytest.param("a package", marks=pytest.mark.slow), "a folder without __init__"])
def project(request, tmp_path):
    """A project of a user whose folders have the names of ours."""
    for folder in ("datamodules", "configs"):
        (tmp_path / folder).mkdir()
        if request.param == "a package":
            (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "datamodules" / "own.py").write_text(OWN)
    recipe = {
        "model": {
            "class_path": "lightning_tasks.ImageClassificationTask",
            "init_args": {
                "model": "vit_tiny_patch16_224",
                "num_classes": 10,
                "model_options": {
                    "img_size": 8,
                    "in_chans": 1,
                    "patch_size": 4,
                    "embed_dim": 8,
                    "num_heads": 2,
                    "depth": 1,
                },
                "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
                "mechanism": "rpc",
            },
        },
        "data": {"class_path": "datamodules.own.MyDigits", "init_args": {"batch_size": 64, "num_workers": 0}},
        "trainer": {"max_steps": 1, "accelerator": "cpu", "limit_val_batches": 1},
    }
    (tmp_path / "configs" / "mine.yaml").write_text(json.dumps(recipe))
    return tmp_path


def test_a_project_with_folders_of_the_same_names(installed, project):
    """By YAML and `python -m`, and from Python that the YAML names; the working folder comes first on the path."""
    environment = {**installed, "PYTHONPATH": f".{os.pathsep}{installed['PYTHONPATH']}"}
    fit = [sys.executable, "-m", "lightning_tasks", "fit", "--config", "configs/mine.yaml"]
    if not (project / "datamodules/__init__.py").exists():  # and then a recipe by its name
        small = ["--model.model.init_args.dim=16", "--model.model.init_args.mlp_dim=16", "--data.num_tokens=16"]
        small += ["--data.max_bytes=200000", "--trainer.accelerator=cpu"]
        shipped = ["fit", "--config", "quickstart/language_modeling", "--trainer", "trainer/smoke", *small]
        both = f"from lightning_tasks.__main__ import main; main({fit[3:]}); main({shipped})"
        fit = [sys.executable, "-c", both]
    answer = subprocess.run(fit, cwd=project, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert "my own digits, attnswap.datamodules.digits lightning_tasks.callbacks.locater" in answer.stdout
    assert "data:\n  class_path: datamodules.own.MyDigits" in next(project.rglob("config.yaml")).read_text()
    if "-c" in fit:
        assert "swapped layers: model.layers.0.attn (RPCAttention, iterations=4, lam=4.0)\n" in answer.stdout
        assert (project / "runs/quickstart/language_modeling/version_0/run.png").is_file()


def test_every_pin_is_exact():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split(" ;")[0] for line in lines if line and not line.startswith("#")]
    assert all(pin.count("==") == 1 for pin in pins)
    assert {"torch==2.14.1", "torchvision==0.29.2", "lightning==2.6.6"} <= set(pins)


def test_the_package_alone_needs_torch_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    needed = [each for each in metadata.get_all("Requires-Dist") if "extra ==" not in each]
    assert [each.split(">=")[0] for each in needed] == ["torch"]
    extras = {"train", "wandb", "hf", "lora", "fla", "mmseg", "slurm", "robustness", "analysis", "docs", "test", "all"}
    assert set(metadata.get_all("Provides-Extra")) == extras


# What an environment with torch alone lacks. (find_spec of what is set to None raises; a finder hides as pip would.)
BARE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name.partition(".")[0] in {hidden} else found(name, *args)
"""
ALONE = """
import torch, attnswap
from attnswap import functional, analysis
model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
attnswap.swap_attention(model, "rpc", iterations=2)
attnswap.check_mechanism
assert model(torch.randn(1, 5, 16)).isfinite().all()
functional.uniform_attention(*torch.randn(3, 1, 2, 5, 4))
for name in ("callbacks", "tasks", "datamodules", "load_swapped"):
    try:
        getattr(attnswap, name)
    except ModuleNotFoundError as error:
        assert "pip install 'attnswap[train]'" in str(error), error
    else:
        raise AssertionError(name)
from attnswap.__main__ import main
main()
"""


def test_with_torch_alone_models_are_swapped_and_the_rest_names_the_extra(installed, tmp_path):
    hidden = {"lightning", "pytorch_lightning", "timm", "torchmetrics", "datasets", "torchvision", "jsonargparse"}
    hidden |= {"yaml", "matplotlib", "sklearn", "scipy", "filelock", "transformers", "wandb", "jinja2"}
    code = BARE.format(hidden=hidden) + ALONE
    answer = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=installed, capture_output=True, text=True)
    assert answer.returncode == 2, answer.stderr
    line = "attnswap: error: callbacks, tasks and the command need lightning, which is not installed: "
    assert answer.stderr == f"{line}pip install 'attnswap[train]'\n"
