"""What a long run keeps is bounded; and a short trial of one."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_tasks.callbacks.monitoring import charts as layer_charts, heads as head_record
from lightning_tasks.callbacks.monitoring.charts import LayerCharts
from lightning_tasks.callbacks.monitoring.heads import HeadRecord
from lightning_tasks.runs.heads import TABLE, read_heads
from tests.reliability.long_run import main


@pytest.mark.slow
def test_a_short_run_samples_and_fires(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(head_record, "MOST_PENDING", 8)  # what waits for more is none that goes on growing
    path = tmp_path / "samples.jsonl"
    assert main(["--minutes", "0.5", "--every", "1", "--limit", "1e9", "--output", str(path)]) == 0
    out = capsys.readouterr().out
    assert "standard error" in out
    assert "LipschitzMonitor: 0" not in out
    own = {json.loads(line)["hooks"] for line in path.read_text().splitlines()}
    assert own == {3}  # one of each watched layer, which keeps PyTorch's fused path away


def test_lines_of_charts_are_bounded_and_whole():
    charts = LayerCharts("AttentionMonitor")
    trainer = SimpleNamespace(is_global_zero=True, loggers=[type("WandbLogger", (), {})()])
    for step in range(3 * layer_charts.MOST_POINTS):
        charts.add(trainer, step, {"attention/entropy/mean": float(step)})
    steps, values = charts._charts["attention/entropy"]["mean"].curve
    assert layer_charts.MOST_POINTS / 2 <= len(steps) <= layer_charts.MOST_POINTS
    assert values == [float(step) for step in steps]
    assert set(np.diff(steps)) == {4}
    assert steps[0] == 0


def test_records_of_heads_are_written_without_a_validation(tmp_path):
    logger = type("CSVLogger", (), {"log_dir": str(tmp_path)})()
    state = SimpleNamespace(fn="fit")
    trainer = SimpleNamespace(is_global_zero=True, loggers=[logger], fast_dev_run=False, state=state)
    record = HeadRecord()
    for step in range(head_record.MOST_PENDING + 3):
        record.add(trainer, "attention/entropy", step, [0], torch.ones(2, 1, 2))
    assert len(record._pending) == 3
    record.write(trainer)
    steps, _, values = read_heads(tmp_path / TABLE)["attention/entropy"]
    assert steps == list(range(head_record.MOST_PENDING + 3))
    assert (values == 1).all()
