"""The command: what answers at once, and names that become files."""

import subprocess
import sys
import time

import pytest

from lightning_tasks.__main__ import main
from lightning_tasks.cli.asked import expand_recipe_names
from lightning_tasks.errors import UsageError
from lightning_tasks.recipes import CONFIGS
from tests.lightning_tasks.cli.runs import DEMO, ROOT, saved_config


@pytest.mark.parametrize("argument", ["--help", "--version", "recipes"])
def test_quick_commands_import_neither_lightning_nor_torch(argument):
    code = (
        f"import sys; from lightning_tasks.__main__ import main; main([{argument!r}]); "
        "print([name for name in ('torch', 'lightning', 'pytorch_lightning') if name in sys.modules])"
    )
    seconds = []
    while not seconds or (min(seconds) >= 1.5 and len(seconds) < 3):  # a busy machine may need another try
        started = time.monotonic()
        answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        seconds.append(time.monotonic() - started)
    assert answer.stdout.splitlines()[-1] == "[]"
    assert len(answer.stdout.splitlines()) > 1
    assert min(seconds) < 1.5


def test_version_is_that_of_the_package(capsys):
    import attention_modules

    main(["--version"])
    assert capsys.readouterr().out == f"attnswap {attention_modules.__version__}\n"


def test_no_arguments_print_the_help(capsys):
    main([])
    assert capsys.readouterr().out.startswith("usage: attnswap")


@pytest.mark.parametrize("arguments", [["fitt"], ["fit", "--config", "demoo"], ["fit", "--trainer", "strategy/dpp"]])
def test_what_does_not_exist_is_a_short_error(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("attnswap: error: ")


def test_recipe_names_become_paths():
    ddp = str(CONFIGS / "parts" / "strategy" / "ddp.yaml")
    assert expand_recipe_names(["fit", "--trainer", "strategy/ddp", "--model", DEMO]) == [
        "fit", "--trainer", ddp, "--model", DEMO,
    ]  # fmt: skip
    assert expand_recipe_names(["--trainer=strategy/ddp"]) == [f"--trainer={ddp}"]
    assert expand_recipe_names(["--trainer", '{"max_steps": 1}']) == ["--trainer", '{"max_steps": 1}']


def test_an_unknown_part_names_the_nearest():
    with pytest.raises(UsageError, match=r"--trainer 'strategy/dpp'.*strategy/ddp"):
        expand_recipe_names(["--trainer", "strategy/dpp"])


def test_a_comparison_is_no_recipe():
    with pytest.raises(UsageError, match="attnswap compare"):
        expand_recipe_names(["fit", "--config", "locater/compare_small_vocabulary"])


def test_a_part_changes_only_its_own_keys(demo):
    main(["fit", "--config", demo, "--trainer", "trainer/smoke"])
    trainer = saved_config()["trainer"]
    assert (trainer["max_steps"], trainer["log_every_n_steps"]) == (4, 1)
