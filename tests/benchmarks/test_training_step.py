"""The training-step benchmark on a comparison of two tiny variants."""

import sys

import pytest

from benchmarks import common, training_step


@pytest.fixture
def comparison(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "base: quickstart/classification\n"
        "settings: {data.batch_size: 4}\n"
        "variants: {rpc: {}, one pass: {model.options: {iterations: 1, lam: 4.0}}}\n"
    )
    return path


@pytest.mark.slow
def test_a_row_a_variant_with_time_and_memory(comparison, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    for steps in ("WARM_UP", "TIMED", "WEIGHED"):
        monkeypatch.setattr(training_step, steps, 2)
    monkeypatch.setattr(sys, "argv", ["training_step", str(comparison), "--rounds", "1"])
    training_step.main()
    written = (tmp_path / "results" / "training_step_tiny.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in written] == ["variant", "rpc", "one pass"]
    assert written[0].split(",")[:4] == ["variant", "parameters", "CPU time per step", "to the first"]
    assert written[1].split(",")[3] == "1.00"
    assert int(written[1].split(",")[1]) == int(written[2].split(",")[1]) > 1000
