"""Keys of a dictionary within a dictionary on the command line."""

from typing import Any

import jsonargparse
import pytest
import yaml

from lightning_tasks.__main__ import main
from lightning_tasks.cli.fit import run
from lightning_tasks.cli.nested_keys import join_nested_keys

RECIPE = ["fit", "--config", "quickstart/segmentation"]


def printed(capsys, *arguments):
    with pytest.raises(SystemExit):
        main([*RECIPE, *arguments, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]


class Holder:
    def __init__(self, model: str | dict[str, Any] = "x") -> None: ...


def test_jsonargparse_alone_drops_the_other_keys():
    """Why `join_nested_keys` is there: once this fails it can go."""
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(Holder, "of")
    given = parser.parse_args(["--of.model", '{"inner": {"a": 1, "b": 2}}', "--of.model.inner.a", "3"])
    assert given.of.model == {"inner": {"a": "3"}}


def test_a_key_joins_the_dictionary_that_it_is_in(capsys):
    before = printed(capsys)["model"]
    typed = ["--model.model.backbone_options.depth", "2", "--model.model.backbone_options.qk_norm=true"]
    after = printed(capsys, *typed, "--model.model.decoder=mask_transformer")["model"]
    assert before["backbone_options"] == {"patch_size": 4, "embed_dim": 64, "depth": 3, "num_heads": 2}
    assert after["backbone_options"] == {**before["backbone_options"], "depth": 2, "qk_norm": True}
    assert after == {**before, "backbone_options": after["backbone_options"], "decoder": "mask_transformer"}


def test_arguments_of_a_class_are_left_to_the_parser(capsys):
    typed = ["--model.optimizer.init_args.lr", "0.5"]
    assert join_nested_keys([*RECIPE, *typed], None) == [*RECIPE, *typed]
    assert printed(capsys, *typed)["optimizer"]["lr"] == 0.5  # joins init_args as the task is built


def test_a_dictionary_that_was_not_there_is_made():
    def parse(arguments):
        assert arguments == ["fit", "--data", "x"]
        return {"fit": {"model": {"init_args": {"model": None}}, "data": {}}}

    typed = ["--model.model.a.b.c", "1", "--data", "x", "--model.model.a.b.d=[2, e]", "--print_config"]
    found = join_nested_keys(["fit", *typed], parse)
    first, second = '--model.model.a={"b": {"c": 1}}', '--model.model.a={"b": {"c": 1, "d": [2, "e"]}}'
    assert found == ["fit", first, "--data", "x", second, "--print_config"]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("3", 3), ("gelu", "gelu"), ("[1", "[1"), ("2020-01-01", "2020-01-01")],
)
def test_values_are_read_as_those_of_other_keys(text, value, capsys):
    typed = printed(capsys, f"--model.model.backbone_options.x={text}")["model"]["backbone_options"]["x"]
    plain = printed(capsys, f"--model.model.x={text}")["model"]["x"]
    assert typed == plain == value
    assert type(typed) is type(value)


def test_the_value_may_be_missing(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*RECIPE, "--model.model.backbone_options.depth"])
    assert "expected one argument" in capsys.readouterr().err


def test_the_module_is_built_of_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ["--data.num_train=16", "--data.num_val=16", "--trainer.callbacks=[]", "--trainer.logger=false"]
    cli = run([*RECIPE, "--model.model.backbone_options.depth=1", *sizes, "--trainer.enable_checkpointing=false"])
    assert len(cli.model.model.backbone.blocks) == 1
