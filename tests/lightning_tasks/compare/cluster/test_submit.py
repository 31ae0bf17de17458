"""`--executor submitit`: processes of this machine finish the cells, and SLURM is asked as sbatch wants it."""

import os
import pickle
import time
from pathlib import Path

import pytest

from lightning_tasks.__main__ import main
from lightning_tasks.compare.arguments import executor_options, parser, without_executor
from lightning_tasks.compare.cluster.lease import held
from lightning_tasks.compare.cluster.submit import CellJob, FitJob
from lightning_tasks.compare.plan import plan_cells
from lightning_tasks.recipes.variants import read_variants

submitit = pytest.importorskip("submitit")
SBATCH = """#!/bin/bash
for file; do :; done
cp "$file" "$ASKED"
echo "Submitted batch job 42"
"""


def compare(comparison, output, *arguments):
    main(["compare", str(comparison), "--seeds", "0:1", "--output", str(output), *arguments])


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """`sbatch` writes what it was asked for into a file."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sbatch", "srun"):
        (tools / name).write_text(SBATCH)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked.sh"))
    return tmp_path / "asked.sh"


def test_processes_of_this_machine_finish_the_cells(demo, tmp_path, capsys):
    output = tmp_path / "out"
    compare(demo, output, "--executor", "submitit", "--executor.cluster", "local", "--executor.timeout_min=5")
    assert "submitted 1 jobs, " in capsys.readouterr().out
    cells = plan_cells(read_variants(str(demo)), [0], output, comparison=demo.stem)
    for _ in range(600):
        if cells[0].is_finished():
            break
        time.sleep(0.5)
    main(["compare", str(output), "--status"])
    assert "1 of 1 cells finished, 0 run" in capsys.readouterr().out
    compare(demo, output, "--executor", "submitit", "--executor.cluster", "local")
    assert "submitted 0 jobs;" in capsys.readouterr().out


def test_cells_of_two_processes_are_an_array_with_a_task_for_each(demo, tmp_path, capsys, stub):
    several = ["--set", "trainer.devices=2", "--set", "trainer.strategy=ddp", "--executor.timeout_min=5"]
    compare(demo, tmp_path / "out", "--executor", "submitit", *several)
    assert "#SBATCH --ntasks-per-node=2\n" in stub.read_text()


def test_slurm_is_asked_for_an_array_that_is_queued_again(comparison, tmp_path, capsys, stub):
    options = {"timeout_min": 90, "gpus_per_node": 1, "slurm_partition": "long"}
    given = [f"--executor.{key}={value}" for key, value in options.items()]
    compare(comparison, tmp_path / "out", "--executor=submitit", *given, "--executor.slurm_array_parallelism", "2")
    assert "submitted 3 jobs, 42_0 the first and 42_2 the last; their logs are in " in capsys.readouterr().out
    asked = stub.read_text()
    for line in ("array=0-2%2", "time=90", "gpus-per-node=1", "partition=long", "job-name=attnswap", "signal=USR2@90"):
        assert f"#SBATCH --{line}\n" in asked
    cells = plan_cells(read_variants(str(comparison)), [0], tmp_path / "out", comparison=comparison.stem)
    with held(cells[0].lease, "a cell"):
        compare(comparison, tmp_path / "out", "--executor=submitit", *given)
        assert "submitted 2 jobs" in capsys.readouterr().out
    job = CellJob("out", "slow", 0)
    assert job.checkpoint().function is job


def test_a_fit_is_one_job_on_several_nodes_that_goes_on_where_it_was(demo, tmp_path, capsys, stub, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"nodes": 2, "tasks_per_node": 4, "gpus_per_node": 4, "timeout_min": 30}
    given = [f"--executor.{key}={value}" for key, value in options.items()]
    main(["fit", str(demo), "--trainer.num_nodes=2", "--executor", "submitit", *given])
    assert "submitted the job 42; its log is in jobs" in capsys.readouterr().out
    asked = stub.read_text()
    for line in ("nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "time=30", "signal=USR2@90"):
        assert f"#SBATCH --{line}\n" in asked
    job = FitJob(["fit", "--config", str(demo)])
    assert job.checkpoint().function is job
    assert job.name != FitJob(job.arguments).name


@pytest.mark.slow
def test_a_fit_runs_on_this_machine(demo, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[4]))
    main(
        ["fit", "--config", str(demo), "--executor", "submitit", "--executor.cluster=local", "--executor.timeout_min=5"]
    )
    for _ in range(240):
        if results := list(tmp_path.glob("jobs/*_result.pkl")):
            break
        time.sleep(0.5)
    assert pickle.loads(results[0].read_bytes()) == ("success", None)
    assert list(tmp_path.glob("runs/demo/version_0/metrics.csv"))


@pytest.mark.parametrize("wrong", ["--model.rates=1", "--executor.gpu=1"])
def test_a_fit_that_is_refused_is_not_submitted(demo, wrong, stub, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fit", str(demo), "--executor", "submitit", wrong])
    assert stop.value.code == 2
    assert not stub.exists()


def test_nothing_runs_here_where_slurm_was_meant(comparison, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # without srun
    with pytest.raises(SystemExit) as stop:
        compare(comparison, tmp_path / "out", "--executor", "submitit")
    assert stop.value.code == 2
    assert "--executor.cluster local runs all here" in capsys.readouterr().err
    assert not [*(tmp_path / "out").glob("jobs/*")]


def test_an_option_that_submitit_does_not_know_is_refused(comparison, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        compare(comparison, tmp_path / "out", "--executor", "submitit", "--executor.cluster=local", "--executor.gpu=1")
    assert stop.value.code == 2
    assert "--executor submitit: " in (said := capsys.readouterr().err)
    assert "gpu" in said


def test_a_plan_keeps_nothing_of_the_executor():
    given = ["a", "--executor", "submitit", "--seeds", "0:2", "--executor.mem_gb", "4", "--executor.nodes=1", "--plan"]
    assert without_executor([*given, "--jobs", "2"]) == ["a", "--seeds", "0:2", "--jobs", "2"]
    options = parser([*given, "--output", "o"]).parse_args([*given, "--output", "o"])
    assert executor_options(options) == {"mem_gb": 4, "nodes": 1}


@pytest.mark.parametrize(("status", "fails"), [(0, False), (3, False), (75, False), (1, True), (2, True), (-9, True)])
def test_a_job_fails_where_its_cell_does(status, fails, monkeypatch):
    monkeypatch.setattr("subprocess.run", lambda command, check: type("Done", (), {"returncode": status}))
    job = CellJob("out", "slow", 0)
    if fails:
        with pytest.raises(RuntimeError, match=f"slow seed 0 ended with {status}"):
            job()
    else:
        assert job() == status
