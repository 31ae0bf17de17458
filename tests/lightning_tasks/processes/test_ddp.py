"""Two processes on one CPU against one process at twice the batch."""

import csv
import json

import pytest
import torch
from matplotlib.figure import Figure

from lightning_tasks.runs.heads import read_heads
from tests.lightning_tasks.processes.ddp_run import main
from tests.lightning_tasks.programs import made_once, run_ranks

pytestmark = pytest.mark.costly


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    def make(folder):
        printed = run_ranks("tests.lightning_tasks.processes.ddp_run", str(folder / "two"), "2", "2")
        (folder / "printed.json").write_text(json.dumps(printed))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Figure, "savefig", lambda *_, **__: None)  # nothing is compared with those of one process
            main(folder / "one", 1, 4)

    folder = made_once(tmp_path_factory, "ddp", make)
    one, two = (torch.load(folder / name / "result.pt", weights_only=True) for name in ("one", "two"))
    printed = json.loads((folder / "printed.json").read_text())
    return {"one": one, "two": two, "printed": printed, "folder": folder / "two"}


def test_weights_are_those_of_one_process_at_twice_the_batch(runs):
    """Windows come in fixed order, so step by step both see the same ones. Tolerance: 1e-6 after 8 steps in float32."""
    two = runs["two"]["weights"]
    for name, weight in runs["one"]["weights"].items():
        torch.testing.assert_close(two[name], weight, rtol=1e-6, atol=1e-6, msg=name)


def test_each_sample_is_evaluated_once(runs):
    """Seven windows on two processes: the sampler repeats one, which must not count twice."""
    for name, value in runs["one"]["tested"].items():
        assert runs["two"]["tested"][name] == pytest.approx(value, rel=1e-5), name


def test_each_image_is_scored_once(runs):
    """Seven scenes on two processes; scores are of one confusion matrix, summed over both."""
    one, two = (runs[name]["masks_tested"] for name in ("one", "two"))
    assert set(one) == {f"test/{name}" for name in ("loss", "miou", "mean_accuracy", "overall_accuracy")}
    assert two == pytest.approx(one, rel=1e-5)
    with next((runs["folder"] / "logs").glob("version_*/test_classes.csv")).open() as file:
        assert sum(int(row["pixels"]) for row in csv.DictReader(file)) == 7 * 40 * 40


def test_the_logged_loss_of_masks_is_the_mean_over_the_processes(runs):
    own, logged = runs["two"]["losses"]
    assert own[0] != own[1]
    assert logged == pytest.approx([sum(own) / 2] * 2, rel=1e-6)


def test_a_process_without_a_sample_joins_in_what_others_saw_of_rpc(runs):
    """One scene on two processes."""
    one, two = runs["one"]["pursued"], runs["two"]["pursued"]
    assert len(one) == 3 * (4 * 4 + 2)  # layers, statistics and passes
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("processes", ["one", "two"])
def test_a_resumed_run_draws_in_each_process_what_the_whole_one_did(runs, processes):
    whole, resumed = runs[processes]["whole"], runs[processes]["resumed"]
    assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())


def test_data_is_prepared_once_and_logged_once(runs):
    # once for each of three fits and a test, by the first process alone
    assert [text.count("data prepared") for text in runs["printed"]] == [4, 0]
    logs = list((runs["folder"] / "logs").glob("version_*/metrics.csv"))
    assert len(logs) == 1
    with logs[0].open() as file:
        steps = [row["step"] for row in csv.DictReader(file) if row["train/loss"]]
    assert steps == [str(step) for step in range(8)]


def test_monitors_write_once_what_all_processes_saw(runs):
    """Figures are the first process's alone: asking the others for anything meanwhile would stall the run."""
    (folder,) = (runs["folder"] / "logs").glob("version_*")
    figures = {path.name.partition("_step_")[0].removesuffix(".png") for path in folder.glob("*.png")}
    heads = {f"{stage}attention_entropy_heads" for stage in ("", "val_")}
    assert figures == {"attention_maps_layer_00", "qk_spectrum_eigenvalues"} | heads
    steps, _, values = read_heads(folder / "attention_heads.csv")["val/attention/entropy"]
    with (folder / "metrics.csv").open() as file:
        rows = {int(row["step"]): row["val/attention/entropy/layer_00"] for row in csv.DictReader(file)}
    logged = {step: float(text) for step, text in rows.items() if text}
    assert dict(zip(steps, values.mean((1, 2)), strict=True)) == pytest.approx(logged, rel=1e-4)
    assert len(logged) == 2
