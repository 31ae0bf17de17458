import csv

import pytest
import torch

from benchmarks import common, rpc


def test_measures_and_writes_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(rpc, "CASES", (rpc.Case("tiny", (1, 2, 16, 8), True, 3),))
    rpc.main(["--threads", "1", "--no_compile"])
    with (tmp_path / "rpc.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["mode"] for row in rows] == ["forward", "forward + backward"]
    assert all(float(row["eager / floor"]) > 0 and float(row["naive / eager"]) > 0 for row in rows)
    assert "python -m benchmarks.rpc --threads 1 --no_compile" in (tmp_path / "rpc.md").read_text()


def test_peak_memory_sees_a_tensor_of_64_mebibytes():
    peak = common.peak_memory(lambda: torch.ones(16 * 2**20))
    if peak is None:
        pytest.skip("Linux' memory counters are missing")
    assert 60 <= peak <= 80


def test_each_form_runs_on_another_device():
    case = rpc.Case("tiny", (1, 2, 16, 8), False, 1)
    for call in rpc.calls(case, True, rpc.attentions_of(case, compiled=False), "meta").values():
        call()
