"""What the command line asks for is read, and refused, before torch is imported."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_tasks.__main__ import main
from lightning_tasks.cli.asked import check_asked, named_recipe, value_of
from lightning_tasks.errors import UsageError
from tests.lightning_tasks.cli.runs import ROOT, saved_config
from tests.rows import each_row

COMMANDS = ["fit", "validate", "test", "predict", "show-batch"]


@each_row("command", COMMANDS)
def test_nothing_to_run_says_what_to_give(command):
    with pytest.raises(UsageError, match=rf"attnswap {command} quickstart/classification.*recipes.*\n.*--config"):
        check_asked([command])
    with pytest.raises(UsageError, match="needs to know what to run"):
        check_asked([command, "--trainer.max_steps", "3"])


@pytest.mark.parametrize(
    "rest",
    [["--help"], ["--model.help", "X"], ["--print_config"], ["--model", "X"], ["--data.class_path=Y"], ["-c", "{}"]],
)
def test_what_needs_no_recipe_passes(rest):
    check_asked(["fit", *rest])


@each_row(
    ("name", "command"), itertools.product(["quickstart/classification", "rpc/imagenet_deit_tiny/softmax"], COMMANDS)
)
def test_a_recipe_follows_the_command(command, name):
    asked = named_recipe([command, name, "--seed_everything", "1"])
    assert asked == [command, "--config", name, "--seed_everything", "1"]
    check_asked(asked)


@each_row(
    ("rest", "text"),
    [
        (["quickstart/clasification"], "--config 'quickstart/clasification'.*nearest names are quickstart/classificat"),
        (["missing.yaml"], "neither a file nor a shipped recipe"),
        (["quickstart/classification", "--trainer=strategy/dpp"], "strategy/ddp"),
        (["--config"], "--config has no value: give --config RECIPE"),
        (["quickstart/classification", "--ckpt_path", "--trainer.max_steps=1"], "--ckpt_path has no value: give"),
        (["quickstart/classification", "--ckpt_path", "no.ckpt"], "--ckpt_path no.ckpt: no such file"),
        (["quickstart/classification", "--init_from=no.ckpt"], "--init_from no.ckpt: no such file"),
    ],
)
def test_names_and_paths_are_checked(rest, text):
    with pytest.raises(UsageError, match=text):
        check_asked(named_recipe(["fit", *rest]))


@pytest.mark.parametrize("path", ["last", "best", "hpc", "registry:x", "s3://bucket/x.ckpt", "null"])
def test_what_is_no_path_is_left_to_those_who_know(path):
    check_asked(["fit", "--config", "quickstart/classification", "--ckpt_path", path])


def test_the_last_value_counts():
    assert value_of(["--a", "1", "--b=2", "--a=3"], "--a") == "3"
    assert value_of(["--a"], "--a") is None


def test_a_file_of_the_user_runs(demo):
    main(["fit", demo, "--trainer.max_steps", "1"])
    assert saved_config()["trainer"]["max_steps"] == 1


def test_refusals_and_help_do_without_torch():
    program = (
        "import sys\nfrom lightning_tasks.__main__ import main\n"
        "for rest in ([], ['nothing/here'], ['quickstart/classification', '--ckpt_path', 'x.ckpt']):\n"
        "    try:\n        main(['fit', *rest])\n"
        "    except SystemExit as stop:\n        assert stop.code == 2\n"
        "    else:\n        raise AssertionError(rest)\n"
        "for command in ('compare', 'report'):\n"
        "    for rest, code in ((['--help'], 0), (['--unknown'], 2)):\n"
        "        try:\n            main([command, *rest])\n"
        "        except SystemExit as stop:\n            assert stop.code == code\n"
        "        else:\n            raise AssertionError(rest)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("attnswap: error:") == 3
    for command in ("compare", "report"):
        assert f"usage: attnswap {command}" in done.stdout
    assert not Path("runs").exists()
