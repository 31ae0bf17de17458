"""The tests of tests/gpu, some of them with the CPU in the GPU's place, and how they are chosen and written down."""

import csv
from types import SimpleNamespace

import pytest
import torch

from tests.gpu import conftest, test_hosts, test_mechanisms, test_statistics

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["fp32", "fp16", "autocast bf16"])
def test_a_mechanism(precision):
    record = []
    test_mechanisms.test_near_its_float64("rpc", precision, CPU, lambda *row: record.append(row))
    assert [name for name, _ in record] == ["output", "gradient", "parameter"]


def test_a_mechanism_that_is_far_from_its_float64_is_named(monkeypatch):
    def broken(module, inputs, given, weights=None):
        found = run(module, inputs, given, weights)
        return found if inputs["v"].dtype == torch.float64 else {**found, "k": found["k"] * torch.nan}

    run = test_mechanisms.run
    monkeypatch.setattr(test_mechanisms, "run", broken)
    with pytest.raises(AssertionError, match=r"k under no mask: nan, limit 0\.0001; k under causal"):
        test_mechanisms.test_near_its_float64("softmax", "fp32", CPU, lambda *row: None)


def test_a_host_and_a_statistic():
    record = []
    test_hosts.test_swapped_and_restored("mha", "symmetric", "bf16", CPU, lambda *row: record.append(row))
    test_hosts.test_compiled("mha", CPU, lambda *row: record.append(row))
    assert [name for name, _ in record] == ["output", "gradient", "largest"]
    test_statistics.test_equals_the_cpu("statistics, boolean", CPU)
    test_statistics.test_log_sum_exp_comes_from_a_kernel("causal", CPU)


def test_a_gradient_that_is_no_number_is_far():
    exact = {"output": torch.ones(1), "a": torch.ones(2), "b": torch.ones(2)}
    for name in ("a", "b"):
        far = test_hosts.distances({**exact, name: torch.full((2,), torch.nan)}, exact)
        assert far["gradient"] != far["gradient"]


def test_without_a_gpu_they_are_skipped_unless_a_dry_run_is_asked_for(monkeypatch):
    device = conftest.device.__wrapped__ if hasattr(conftest.device, "__wrapped__") else conftest.device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(conftest.DRY, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no CUDA device; ATTNSWAP_GPU_TESTS=cpu"):
        device()
    monkeypatch.setenv(conftest.DRY, "cpu")
    assert device() == CPU
    monkeypatch.setenv(conftest.DRY, "1")
    with pytest.raises(ValueError, match="must be 'cpu', for a dry run without a GPU, or not be set; got '1'"):
        device()


def test_each_result_is_written_as_soon_as_it_is_there(tmp_path):
    def report(name, when, outcome, longrepr=None):
        is_ = {each: outcome == each for each in ("passed", "failed", "skipped")}
        found = [("output", "1e-3")]
        return SimpleNamespace(
            nodeid=f"tests/gpu/{name}",
            when=when,
            outcome=outcome,
            longrepr=longrepr,
            duration=1.5,
            user_properties=found,
            **is_,
        )

    path = tmp_path / "new" / "tests.csv"
    writer = conftest.ResultWriter(path)
    for each in (report("a", "setup", "passed"), report("a", "call", "passed"), report("a", "teardown", "passed")):
        writer.pytest_runtest_logreport(each)
    writer.pytest_runtest_logreport(report("b", "setup", "skipped", ("file", 1, "Skipped: no GPU")))
    writer.pytest_runtest_logreport(report("c", "call", "failed", "a long\n text"))
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["test"], row["outcome"]) for row in rows] == [("a", "passed"), ("b", "skipped"), ("c", "failed")]
    assert [row["why"] for row in rows] == ["", "Skipped: no GPU", "a long text"]
    assert rows[0]["seconds"] == "1.50"
    assert rows[0]["found"] == "output=1e-3"
    conftest.ResultWriter(path)  # another call
    assert conftest.results_in(path) == {"a", "b", "c"}
    assert conftest.results_in(tmp_path / "none.csv") == set()
