"""Every public name shows how it is used, by an example that runs."""

from __future__ import annotations

import doctest
import inspect
from importlib import import_module

import pytest
import torch

MODULES = ("", ".functional", ".callbacks", ".tasks", ".analysis", ".datamodules")


def _public() -> dict[str, object]:
    found = {}
    for module in (import_module(f"attnswap{name}") for name in MODULES):
        for name in getattr(module, "__all__", vars(module)):
            value = getattr(module, name)
            if not name.startswith("_") and callable(value):
                found[f"{module.__name__}.{name}"] = value
    return found


PUBLIC = _public()
NO_CODE = {name for name, value in PUBLIC.items() if not inspect.isclass(value) and not inspect.isfunction(value)}


@pytest.mark.parametrize("module", MODULES)
def test_every_name_has_an_example_that_runs(module, subtests, monkeypatch, tmp_path, capsys):
    for name in sorted(PUBLIC.keys() - NO_CODE):
        if name.rpartition(".")[0] == f"attnswap{module}":
            with subtests.test(name):
                check_example(name, monkeypatch, tmp_path, capsys)


def check_example(name, monkeypatch, tmp_path, capsys):
    if name == "attnswap.load_pretrained":
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    value = PUBLIC[name]
    (found,) = doctest.DocTestFinder(recurse=False).find(value, name, module=False, globs={"__name__": "__main__"})
    assert found.examples, f"{name} has no example"
    failures = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(found)
    assert failures.failed == 0, capsys.readouterr().out


def test_what_has_no_code_of_its_own_is_a_type():
    assert {name.rpartition(".")[2] for name in NO_CODE} <= {"Statistic"}
