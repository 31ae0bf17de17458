import collections
import functools
import os

import pytest
import torch
from torch import optim

from attention_modules.function import FunctionAttention
from lightning_tasks.training import hparams
from tests.rows import each_row


class Mine:
    def __init__(self, *args, **options):
        self.args, self.options = args, options


def make_mine(**options):
    return Mine(**options)


ADAM = {"class_path": "torch.optim.Adam", "init_args": {}}


@each_row(
    ("value", "expected"),
    [
        ("Adam", ADAM),
        ("torch.optim.Adam", ADAM),
        ("torch.optim.adam.Adam", ADAM),
        (optim.Adam, ADAM),
        (
            functools.partial(optim.Adam, lr=0.1, betas=(0.9, 0.98)),
            {**ADAM, "init_args": {"lr": 0.1, "betas": [0.9, 0.98]}},
        ),
        ({"class_path": "Adam", "init_args": {"lr": 0.1}}, {**ADAM, "init_args": {"lr": 0.1}}),
        ({"class_path": "Adam", "init_args": None}, ADAM),
        ({"class_path": "Adam", "init_args": {"lr": 0.1}, "lr": 0.2}, {**ADAM, "init_args": {"lr": 0.2}}),
        (
            functools.partial(functools.partial(optim.Adam, lr=0.1), eps=1.0),
            {**ADAM, "init_args": {"lr": 0.1, "eps": 1.0}},
        ),
        (make_mine, {"class_path": f"{__name__}.make_mine", "init_args": {}}),
    ],
)
def test_specs(value, expected):
    spec = hparams.plain_spec(value, optim)
    assert spec == expected
    assert hparams.plain_spec(spec, optim) == spec


def test_spec_shares_nothing_with_what_was_given():
    given = {"class_path": "Adam", "init_args": {"betas": [0.9, 0.98]}}
    hparams.plain_spec(given, optim)["init_args"]["betas"].append(1)
    assert given["init_args"]["betas"] == [0.9, 0.98]


@each_row("value", [lambda params: None, functools.partial(lambda params: None)])
def test_lambda_names_the_cure(value):
    with pytest.raises(TypeError, match=r"cannot be stored in a checkpoint.*top level of a module.*class_path"):
        hparams.plain_spec(value, optim)


def test_local_class_names_the_cure():
    class Local:
        pass

    with pytest.raises(TypeError, match="cannot be stored in a checkpoint"):
        hparams.plain_spec(Local)


@each_row(
    ("value", "error", "text"),
    [
        ("Adm", ValueError, "no 'Adm' was found; looked in torch.optim"),
        ("torch.optim.Adm", ValueError, "'torch.optim.Adm' was not found"),
        ("nowhere.Adam", ValueError, "there is no module 'nowhere'"),
        ({"init_args": {}}, ValueError, "thing needs the key 'class_path', got"),
        (functools.partial(optim.Adam, 1), TypeError, "must bind by keyword"),
        (3, TypeError, "thing must be a class"),
        ({"class_path": "Adam", "init_args": {"lr": torch.ones(1)}}, TypeError, "thing.init_args.lr cannot be stored"),
    ],
)
def test_bad_specs(value, error, text):
    with pytest.raises(error, match=text):
        hparams.plain_spec(value, optim, what="thing")


def test_plain_data():
    value = {"a": (1, 2.0, None), "b": {"c": "d", "e": True}, "f": optim.Adam}
    assert hparams.plain_data(value) == {"a": [1, 2.0, None], "b": {"c": "d", "e": True}, "f": ADAM}


def test_build_gives_positional_then_stored_then_extra():
    built = hparams.build({"class_path": f"{__name__}.Mine", "init_args": {"a": 1, "b": 2}}, 0, b=3)
    assert built.args == (0,)
    assert built.options == {"a": 1, "b": 3}


def test_build_shows_what_did_not_fit():
    with pytest.raises(TypeError, match=r"torch.optim.Adam could not be built with \['speed'\]"):
        hparams.build({"class_path": "torch.optim.Adam", "init_args": {"speed": 1}}, [torch.ones(1)])


def test_shortest_path_that_names_the_same_object():
    assert hparams.import_path(collections.OrderedDict) == "collections.OrderedDict"
    assert hparams.import_path(os.path.join).endswith("path.join")
    assert hparams.import_path(FunctionAttention) == "attention_modules.function.FunctionAttention"


def test_error_inside_an_imported_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        hparams.import_object("broken_module.Thing")
