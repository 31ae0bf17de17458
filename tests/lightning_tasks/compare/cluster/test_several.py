"""A cell on two processes: it is counted, held, killed and resumed as one of one process is."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback

from lightning_tasks.__main__ import main
from lightning_tasks.compare.cluster import several
from lightning_tasks.compare.cluster.plan_file import read_plan
from lightning_tasks.compare.cluster.progress import FILE, KeepProgress, Progress
from lightning_tasks.compare.cluster.several import LEADER, processes_of, rank_of
from lightning_tasks.compare.plan import plan_cells
from lightning_tasks.compare.workers import worker_devices
from lightning_tasks.recipes.variants import Variant, read_variants
from tests.reliability import kill_trials

TWO = {"trainer.devices": 2, "trainer.strategy": "ddp"}


class WorldSize(Callback):
    """Logs of how many processes a fit is, and ends its own one at a step, once."""

    def __init__(self, folder: str, kill_at: int = -1) -> None:
        self.folder, self.kill_at = folder, kill_at

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.log("world", float(trainer.world_size))
        marker = os.path.join(self.folder, "killed")
        if trainer.global_step == self.kill_at and trainer.is_global_zero and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


def two_processes(tmp_path, kill_at=-1):
    """A small language model on two processes, with a mechanism, as `cell` arguments."""
    command = kill_trials.command("language", tmp_path)
    watch = {"class_path": f"{__name__}.WorldSize", "init_args": {"folder": str(tmp_path), "kill_at": kill_at}}
    overrides = [each for each in command[3:] if "ModelCheckpoint" not in each]
    overrides += [f"--{key}={value}" for key, value in TWO.items()]
    overrides.append(f"--trainer.callbacks={json.dumps([kill_trials.SWAP, watch])}")
    return command[2], overrides


def compare(tmp_path, place, *arguments, kill_at=-1):
    config, overrides = two_processes(tmp_path, kill_at)
    settings = [argument for each in overrides for argument in ("--set", each.removeprefix("--"))]
    output = tmp_path / place
    given = ["compare", config, "--seeds", "3:4", "--output", str(output), "--metrics", "world", *settings, *arguments]
    return given, output


def run(given):
    return subprocess.run(
        [sys.executable, "-m", "attnswap", *given], capture_output=True, text=True, check=False, timeout=300
    )


def rows_of(output):
    (file,) = output.rglob("result.json")
    return json.loads(file.read_text())


class FailsInTest(Callback):
    """Ends the second process as its test starts."""

    def on_test_start(self, trainer, pl_module):
        if trainer.global_rank:
            raise RuntimeError("the second one is unwell")


@pytest.mark.slow
def test_a_process_that_fails_last_leaves_no_result(demo, tmp_path):
    callback = f"--trainer.callbacks={__name__}.FailsInTest"
    variant = Variant("it", str(demo), (*(f"--{key}={value}" for key, value in TWO.items()), callback), test=True)
    cell = replace(plan_cells([variant], [3], tmp_path / "out")[0], processes=2)
    with pytest.raises(RuntimeError):
        several.run_by_command(cell, cell.sources)
    assert "the second one is unwell" in cell.log.read_text()
    assert not cell.is_finished()


def test_processes_with_different_settings_do_not_begin(tmp_path):
    start = Progress("mine", {}, {}, 0, 0.0, [], [])
    strategy = SimpleNamespace(broadcast=lambda own: ("theirs", 0))
    with pytest.raises(RuntimeError, match="different settings, of a file that was edited"):
        KeepProgress(None, start, None).on_train_start(SimpleNamespace(world_size=2, strategy=strategy), None)


@pytest.mark.slow
def test_killed_at_a_step_it_goes_on_and_ends_as_one_that_was_not(tmp_path, capsys):
    """One by a line of its plan, the other by `compare`."""
    given, whole = compare(tmp_path, "whole", "--plan")
    main(given)
    (line,) = capsys.readouterr().out.splitlines()
    assert [*read_plan(whole).processes.values()] == [2]
    main(["compare", str(whole), "--status"])
    assert ": waiting (2 processes)" in capsys.readouterr().out
    done = run(line.split()[1:])
    assert done.returncode == 0, done.stderr[-2_000:]
    expected = rows_of(whole)
    assert {row["value"] for row in expected["rows"] if row["metric"] == "world"} == {2.0}
    assert expected["runs"][0].endswith(", 2 processes")
    assert not [path for path in (whole / "leases").rglob("*") if path.is_file()]

    given, cut = compare(tmp_path, "cut", "--jobs", "2", kill_at=5)
    assert run(given).returncode == 1
    assert list(cut.rglob(FILE)), "a checkpoint that counts"
    time.sleep(1.0)
    left = subprocess.run(["pgrep", "-f", str(cut)], capture_output=True, text=True, check=False).stdout
    assert left == "", "no process of a killed cell is left"
    done = run(given)
    assert done.returncode == 0, done.stderr[-2_000:]
    found = rows_of(cut)
    assert found["rows"] == expected["rows"]
    assert found["initial_weights"] == expected["initial_weights"]
    assert len(found["runs"]) == 2
    assert "from step" in found["runs"][1]


@pytest.mark.parametrize(
    ("trainer", "count"),
    [
        ({"devices": "auto"}, 1),
        ({"devices": -1}, 1),
        ({"devices": "-1"}, 1),
        ({"devices": 2}, 2),
        ({"devices": "2"}, 2),
        ({"devices": [1]}, 1),
        ({"devices": "0,3,"}, 2),
        ({"devices": 4, "num_nodes": 2}, 8),
    ],
)
def test_processes_are_those_that_the_trainer_names(trainer, count):
    assert processes_of(SimpleNamespace(**({"num_nodes": 1, "strategy": "auto"} | trainer))) == count


def test_what_cannot_run_as_a_command_is_refused_before_anything_runs(demo, tmp_path, capsys):
    given = ["compare", str(demo), "--output", str(tmp_path / "out"), "--set", "trainer.devices=2"]
    refused = {
        "trainer.strategy=ddp_spawn": "a cell of 2 processes starts them by a command, not by 'ddp_spawn'",
        "trainer.num_nodes=2": "a cell on 2 nodes is no work for one machine; give --plan, or --executor",
    }
    for setting, text in refused.items():
        with pytest.raises(SystemExit):
            main([*given, "--set", setting])
        assert text in " ".join(capsys.readouterr().err.split())
    main([*given, "--set", "trainer.num_nodes=2", "--seeds", "0:1", "--plan"])
    assert set(read_plan(tmp_path / "out").processes.values()) == {4}


def test_workers_take_as_many_devices_as_a_cell_has_processes():
    assert worker_devices(4, 4, None, 2) == ["0,1", "2,3"]
    assert worker_devices(5, 4, "6,7,8,9", 2) == ["6,7", "8,9"]
    assert worker_devices(1, 2, None, 4) == ["0,1"]
    assert worker_devices(4, 0, None, 2) == [None, None]


def test_a_task_of_slurm_is_another_process_of_a_cell_that_has_several(comparison, tmp_path):
    cell = plan_cells(read_variants(str(comparison)), [0], tmp_path)[0]
    assert rank_of(cell, {"SLURM_PROCID": "3"}) == 0, "an array may start cells of one process side by side"
    spread = plan_cells([Variant("it", cell.config)], [0], tmp_path)[0]
    spread = type(spread)(**{**vars(spread), "processes": 4})
    assert rank_of(spread, {"SLURM_PROCID": "3"}) == 3
    assert rank_of(cell, {"LOCAL_RANK": "1", LEADER: "7"}) == 1
    assert rank_of(cell, {"RANK": "1", "LOCAL_RANK": "1"}) == 0, "of whoever started a cell of one process by itself"


def test_the_processes_of_a_cell_are_started_as_by_nobody_else():
    launched = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "SLURM_PROCID", "TORCHELASTIC_RUN_ID", LEADER]
    assert all(several._LAUNCHED.fullmatch(name) for name in launched)
    assert not any(several._LAUNCHED.fullmatch(name) for name in ("PATH", "CUDA_VISIBLE_DEVICES", "ATTNSWAP_DATA"))
