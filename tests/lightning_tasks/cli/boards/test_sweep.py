"""`attnswap sweep` writes a file that W&B takes, whose every run the command accepts."""

from itertools import islice, product

import pytest
import yaml

from attention_modules import available_mechanisms
from lightning_tasks.__main__ import main
from lightning_tasks.cli.asked import named_recipe
from lightning_tasks.cli.boards.sweep import option_values
from lightning_tasks.cli.fit import check_arguments


def sweep(*arguments):
    main(["sweep", "quickstart/classification", "--output", "sweep.yaml", *arguments])
    with open("sweep.yaml") as file:
        return yaml.safe_load(file)


def test_each_run_of_the_sweep_is_one_that_the_command_accepts(capsys):
    content = sweep("--mechanism", "rpc", "--seeds", "2")
    assert content["metric"] == {"name": "val/top1", "goal": "maximize"}
    assert content["parameters"] == {
        "model.options.iterations": {"values": [2, 4, 8]},
        "model.options.threshold": {"values": ["released", "head", "ratio"]},
        "seed_everything": {"values": [0, 1]},
    }
    assert "18 runs; `wandb sweep sweep.yaml` starts it" in capsys.readouterr().out
    names, values = zip(*((name, each["values"]) for name, each in content["parameters"].items()), strict=True)
    for combination in islice(product(*values), 0, None, 7):
        given = [f"--{name}={value}" for name, value in zip(names, combination, strict=True)]
        (place,) = [place for place, part in enumerate(content["command"]) if part == "${args}"]
        check_arguments(named_recipe([*content["command"][1:place], *given]))


@pytest.mark.parametrize("metric", ["val/loss", "val_loss", "train/loss_epoch", "val/calibration_error"])
def test_what_is_best_where_it_is_smallest_is_minimized(metric):
    assert sweep("--mechanism", "rpc", "--metric", metric)["metric"] == {"name": metric, "goal": "minimize"}


def test_values_are_those_that_a_mechanism_accepts():
    found = {name: option_values(name) for name in available_mechanisms()}
    assert found["entmax"] == {"alpha": [1.0, 1.5, 2.0]}  # and no other
    assert found["l2"] == {"shared": [False, True]}
    assert found["softmax"] == {}
    assert all(len(values) > 1 for options in found.values() for values in options.values())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--mechanism", "softmax"], "softmax has no option to vary"),
        (["--mechanism", "rcp"], "rpc"),
        (["--mechanism", "rpc", "--seeds", "0"], "--seeds 0 must be at least 1"),
    ],
)
def test_what_cannot_be_swept_is_refused(arguments, text, capsys):
    with pytest.raises(SystemExit):
        sweep(*arguments)
    assert text in capsys.readouterr().err
