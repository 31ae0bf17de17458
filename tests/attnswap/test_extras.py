"""Where a library is not installed, the error names the extra that brings it."""

import ast
import importlib.util
import runpy
import sys
from configparser import ConfigParser
from importlib.machinery import ModuleSpec
from pathlib import Path

import jsonargparse._typehints
import pytest
import torch
from attnswap.datamodules.shared.tokenizers import BPETokenizer

import attnswap
from attention_modules.extras import EXTRA_OF
from lightning_tasks.__main__ import main
from lightning_tasks.analyses.inputs import pretrained_tokenizer
from lightning_tasks.analyses.subjects import load_subject
from lightning_tasks.models.causal_lm import build_causal_lm
from lightning_tasks.models.mmseg_config import load_mmseg
from lightning_tasks.robustness.corruptions import corruption_library
from lightning_tasks.runs.loggers import wandb_library
from lightning_tasks.training.hparams import import_object

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("attention_modules", "attnswap", "datamodules", "lightning_tasks")
GUARDS = {
    "lightning_tasks": "lightning_tasks/__init__.py",
    "datamodules": "datamodules/needed.py",
}  # these need [train]
# Imported where the user has them and asks for them; no extra of ours brings them.
OPTIONAL = {"omegaconf", "pytorch_lightning", "rich"}
BROUGHT_BY = {"markupsafe": "jinja2"}
# Files that run where another has imported the library: a host beside its models, the rest behind `load_mmseg`.
BEHIND = ("attention_modules/hosts/", "lightning_tasks/models/mmseg_builder.py")


def imported(node):
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and not node.level:
        return {str(node.module).partition(".")[0]}
    return set()


def libraries(path):
    """The libraries that a file imports, except for types alone."""
    tree = ast.parse(path.read_text())
    types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = {name for node in ast.walk(tree) if id(node) not in types for name in imported(node)}
    return found - set(sys.stdlib_module_names) - set(FOLDERS) - OPTIONAL - {"torch"}


@pytest.fixture(scope="module")
def files():
    return {
        path.relative_to(ROOT).as_posix(): libraries(path)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }


def there(name):
    """What `find_spec` gives of a package that is installed."""
    return ModuleSpec(name, None, origin="here")


def asked_for(monkeypatch, guard):
    """The libraries that the guard of a package looks for."""
    asked = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: asked.append(name) or there(name))
    runpy.run_path(str(ROOT / guard))
    return asked


@pytest.mark.parametrize("folder", GUARDS)
def test_a_package_looks_for_every_library_of_train_that_it_imports(files, folder, monkeypatch):
    found = {name for path, names in files.items() if path.startswith(f"{folder}/") for name in names}
    others = set(EXTRA_OF) - {"scipy"}  # which [train] brings too
    asked = asked_for(monkeypatch, GUARDS[folder])
    assert {BROUGHT_BY.get(name, name) for name in found - others} == set(asked)
    for missing in asked:
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, missing=missing: None if name == missing else there(name)
        )
        with pytest.raises(ModuleNotFoundError, match=rf"need {missing}, .*pip install 'attnswap\[train\]'") as raised:
            runpy.run_path(str(ROOT / GUARDS[folder]))
        assert raised.value.name == missing


def test_every_file_that_imports_a_library_of_another_extra_names_the_extra(files):
    for path, names in files.items():
        if path.startswith(BEHIND):
            continue
        if not path.startswith(tuple(GUARDS)):
            assert names <= set(EXTRA_OF), path
        elif "scipy" in names:
            names = names - {"scipy"}
        text = (ROOT / path).read_text()
        for extra in {EXTRA_OF[name] for name in names & set(EXTRA_OF)}:
            assert f"attnswap[{extra}]" in text or f', "{extra}"):' in text, (path, extra)


def test_the_extras_that_are_named_exist():
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    assert set(EXTRA_OF.values()) <= set(parser["options.extras_require"])


def fit_with_wandb(*more):
    def call(folder):
        main(["fit", "quickstart/classification", "--trainer", "logger/wandb", "--trainer.max_steps", "1", *more])

    return call


def compare_with_wandb(folder):
    main(
        [
            "compare",
            "quickstart/classification",
            "quickstart/language_modeling",
            "--seeds",
            "0:2",
            "--output",
            "out",
            "--set",
            "trainer=logger/wandb",
        ]
    )


KEYS = torch.randn(4, 3, 2)
CALLS = {
    "a W&B part of a recipe": ("wandb", "wandb", fit_with_wandb()),
    "a W&B part of a trial run": ("wandb", "wandb", fit_with_wandb("--trainer.fast_dev_run", "1")),
    "a comparison": ("wandb", "wandb", compare_with_wandb),
    "what logs to W&B": ("wandb", "wandb", lambda folder: wandb_library()),
    "a max-margin direction": (
        "scipy",
        "analysis",
        lambda folder: attnswap.analysis.max_margin_direction(KEYS, torch.zeros(4, dtype=torch.long)),
    ),
    "matched values": (
        "scipy",
        "analysis",
        lambda folder: attnswap.analysis.compare_values(torch.randn(1, 1, 4, 2), torch.randn(1, 1, 4, 2)),
    ),
    "a saved Hugging Face model": ("transformers", "hf", lambda folder: attnswap.load_pretrained(object, folder)),
    "a language model": ("transformers", "hf", lambda folder: build_causal_lm("gpt2", 10, "softmax", {}, None)),
    "a class of a configuration": ("transformers", "hf", lambda folder: import_object("transformers.GPT2Model")),
    "a model to analyze": ("transformers", "hf", lambda folder: load_subject("bert-base", random=True)),
    "its tokenizer": ("transformers", "hf", lambda folder: pretrained_tokenizer("bert-base")),
    "a BPE tokenizer": ("tokenizers", "hf", lambda folder: BPETokenizer.train([["a"]], 300)),
    "corruptions": ("imagecorruptions", "robustness", lambda folder: corruption_library()),
    "mmsegmentation": ("mmseg", "mmseg", lambda folder: load_mmseg()),
}


@pytest.mark.parametrize("what", CALLS)
def test_what_needs_an_extra_names_it(what, monkeypatch, tmp_path, capsys):
    library, extra, call = CALLS[what]
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    # jsonargparse keeps the options that a class had here: none of W&B's own, which later tests give.
    monkeypatch.setattr(jsonargparse._typehints, "_cached_class_parsers", {}, raising=False)
    with pytest.raises((ImportError, ValueError, SystemExit)) as raised:
        call(tmp_path)
    text = str(raised.value)
    if isinstance(raised.value, SystemExit):
        text = capsys.readouterr().err
        assert raised.value.code == 2
        assert text.startswith("attnswap: error: "), text
        assert not list(tmp_path.iterdir()), "nothing was begun"
    assert f"pip install 'attnswap[{extra}]'" in text
