"""The W&B sweep that `attnswap sweep` writes: what W&B's agent would call is a command that `attnswap fit` takes."""

import itertools

import pytest
import yaml

from lightning_tasks.__main__ import main
from lightning_tasks.cli.boards.sweep import sweep_of


def calls(sweep):
    """The arguments of each run of a grid, put together by W&B's own agent."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    names = list(sweep["parameters"])
    for values in itertools.product(*(sweep["parameters"][name]["values"] for name in names)):
        command = {"args": {name: {"value": value} for name, value in zip(names, values, strict=True)}}
        made = utils.create_sweep_command_args(command)["args"]
        yield [part for word in sweep["command"][1:] for part in (made if word == "${args}" else [word])]


def test_every_run_of_the_sweep_is_a_command_that_fit_takes(tmp_path, monkeypatch, capsys):
    sweep = sweep_of("quickstart/classification", "rpc", None, 3)
    assert sweep["program"] == "attnswap"
    assert sweep["command"][0] == "${program}"
    assert sweep["metric"]["name"] == "val/top1"
    all_calls = list(calls(sweep))
    assert len(all_calls) == 27
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([*all_calls[-1], "--print_config"])
    assert ended.value.code in (0, None)
    settings = yaml.safe_load(capsys.readouterr().out)
    assert settings["seed_everything"] == 2
    assert settings["model"]["init_args"]["mechanism"] == "rpc"
    assert settings["model"]["init_args"]["options"] == {"iterations": 8, "threshold": "ratio", "lam": 4.0}
    assert "WandbLogger" in str(settings["trainer"]["logger"])
