"""`attnswap compare --plan`, `attnswap cell` and `--status`: a comparison by commands equals the one of one process."""

import json
import os
import shlex
from pathlib import Path

import pytest

from lightning_tasks.__main__ import main
from lightning_tasks.compare.cell import RESULT
from lightning_tasks.compare.cluster.plan_file import PLAN
from lightning_tasks.runs.log import RESULTS


def plan(comparison, output, capsys, *arguments):
    main(["compare", str(comparison), "--seeds", "0:2", "--output", str(output), "--plan", *arguments])
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def run(command):
    try:
        main(command[1:])
    except SystemExit as stop:
        return stop.code
    return 0


def test_cells_by_commands_give_the_tables_of_one_command(comparison, tmp_path, capsys, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    main(["compare", str(comparison), "--seeds", "0:2", "--output", str(whole)])
    capsys.readouterr()
    commands = plan(comparison, parts, capsys)
    assert commands == [
        ["attnswap", "cell", str(parts), name, seed] for seed in "01" for name in ("slow", "fast 1e-1", "watched")
    ]
    here = Path.cwd()
    monkeypatch.chdir("/")  # as a scheduler may start it anywhere
    assert [run(command) for command in reversed(commands)] == [0] * 6
    assert run(commands[0]) == 0, "what is finished is finished"
    monkeypatch.chdir(here)
    capsys.readouterr()
    assert plan(comparison, parts, capsys) == []
    main(["compare", str(comparison), "--seeds", "0:2", "--output", str(parts)])
    assert (parts / RESULTS).read_bytes() == (whole / RESULTS).read_bytes()
    assert not [path for path in (parts / "leases").rglob("*") if path.is_file()]


def test_status_tells_what_was_there_of_a_cell(comparison, tmp_path, capsys):
    """A cell that nobody runs any more; then one that finished by other code."""
    output = tmp_path / "out"
    command = plan(comparison, output, capsys)[0]
    log = output / "cells" / "slow" / "seed_0" / "log.txt"
    log.parent.mkdir(parents=True)
    log.touch()
    main(["compare", str(output), "--status"])
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"slow seed 0: waiting; it was begun before: {log}",
        "fast 1e-1 seed 0: waiting",
    ]
    assert run(command) == 0
    capsys.readouterr()
    result = log.with_name("result.json")
    given = json.loads(result.read_text())
    name = next(iter(given["sources"]))
    given["sources"][name] = "0" * 64
    result.write_text(json.dumps(given))
    main(["compare", str(output), "--status"])
    said = capsys.readouterr().out
    assert said.startswith("slow seed 0: waiting to be run again, as it has changed since it had finished: ")


def test_a_cell_that_another_machine_runs_is_left_to_it(comparison, tmp_path, capsys):
    output = tmp_path / "out"
    commands = plan(comparison, output, capsys)
    lease = output / "leases" / "cells" / "slow" / "seed_1"
    lease.parent.mkdir(parents=True)
    lease.write_text(
        json.dumps({"host": "node-7", "process": 3, "since": "2026-11-27T13:00:00+00:00", "token": "b", "space": ""})
    )
    assert run(commands[0]) == 0
    assert run(commands[3]) == 75
    assert "slow seed 1 is run by node-7, process 3, since 2026-11-27" in capsys.readouterr().err
    main(["compare", str(output), "--status"])
    said = capsys.readouterr().out.splitlines()
    assert said[:4] == [
        "slow seed 0: finished",
        "fast 1e-1 seed 0: waiting",
        "watched seed 0: waiting",
        "slow seed 1: run by node-7, process 3, since 2026-11-27T13:00:00+00:00",
    ]
    assert said[-1].startswith("[###.................] 1 of 6 cells finished, 1 run; about ")


@pytest.fixture
def refused(comparison, tmp_path, capsys):
    output = tmp_path / "out"
    commands = plan(comparison, output, capsys)

    def asked(*arguments):
        code = run(["attnswap", *map(str, arguments)])
        return code, capsys.readouterr().err

    return output, commands, asked


def test_what_no_plan_has_is_refused_by_name(refused, tmp_path):
    output, _, asked = refused
    assert asked("cell", output, "fats", 0)[1].startswith("attnswap: error: no variant 'fats'; there are ['slow', ")
    assert "'slow' has the seeds 0, 1, and no 5" in asked("cell", output, "slow", 5)[1]
    assert asked("cell", tmp_path / "none", "slow", 0)[0] == 2
    assert f"has no {PLAN}: attnswap compare FILE" in asked("compare", tmp_path / "none", "--status")[1]
    (output / PLAN).write_text("{")
    assert "plan.json is damaged" in asked("cell", output, "slow", 0)[1]


def test_another_plan_in_the_folder_is_refused_and_the_first_one_stays(refused, comparison):
    output, _, asked = refused
    before = (output / PLAN).read_text()
    code, said = asked("compare", comparison, "--seeds", "0:3", "--output", output, "--plan")
    assert code == 2
    assert "is a plan of other arguments: attnswap compare" in said
    assert (output / PLAN).read_text() == before


def test_code_that_is_not_that_of_the_plan_is_refused(refused):
    output, _, asked = refused
    given = json.loads((output / PLAN).read_text())
    name = next(name for name in given["sources"]["slow"] if "demo" in name)
    given["sources"]["slow"][name] = "of another version"
    (output / PLAN).write_text(json.dumps(given))
    code, said = asked("cell", output, "slow", 0)
    assert (code, name in said) == (2, True)
    assert not list(output.rglob(RESULT))


def test_a_run_that_diverges_says_so_by_its_status(demo, tmp_path, capsys):
    file = tmp_path / "diverging.yaml"
    guard = {"class_path": "lightning_tasks.callbacks.NonFiniteGuard"}
    variants = {"nan": {"model.rate": float("nan"), "trainer.callbacks+": guard}}
    file.write_text(json.dumps({"base": str(demo), "variants": variants}).replace("NaN", ".nan"))
    (command, _) = plan(file, tmp_path / "out", capsys)
    assert run(command) == 3
    assert "nan seed 0: diverged: " in capsys.readouterr().out
    assert os.listdir(tmp_path / "out" / "leases" / "cells" / "nan") == []
