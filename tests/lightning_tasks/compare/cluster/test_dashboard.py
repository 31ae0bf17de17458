"""The verdict of a comparison in W&B, read from its offline files."""

import json

import pytest
import yaml

from lightning_tasks.compare.cluster.dashboard import log_verdict
from lightning_tasks.compare.plan import plan_cells
from lightning_tasks.compare.summary import SummaryRow
from lightning_tasks.recipes.variants import Variant
from tests.lightning_tasks.demo import DemoModule
from tests.lightning_tasks.runs.logged_files import offline_runs, rows_and_updates, run_record

LOGGER = {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": {"project": "demo"}}
SUMMARY = [
    SummaryRow("val/loss", "plain", 5, 0.5, 0.1),
    SummaryRow("val/loss", "rpc", 5, 0.4, 0.1, "plain", 5, -0.1, -0.2, -0.05, 0.02, corrected=0.01, primary=True),
    SummaryRow("val/top1", "rpc", 5, 0.4, 0.1, "plain", 5),
]


@pytest.fixture
def cells(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    model = {"class_path": f"{DemoModule.__module__}.DemoModule"}
    recipe = {"model": model, "trainer": {"accelerator": "cpu", "logger": [LOGGER]}}
    (tmp_path / "demo.yaml").write_text(yaml.safe_dump(recipe))
    return plan_cells([Variant("plain", "demo.yaml")], [0], tmp_path / "out", comparison="digits")


def test_it_is_a_run_in_the_group_of_the_cells(cells, tmp_path):
    output = tmp_path / "out"
    for _ in range(2):  # whoever writes the tables again goes on with it
        log_verdict(cells, SUMMARY, output)
    runs = offline_runs(output)
    records = [run_record(run) for run in runs]
    assert {(run.run_group, run.display_name, run.job_type) for run in records} == {("digits", "verdict", "comparison")}
    assert len({run.run_id for run in records}) == 1
    history, _ = rows_and_updates(runs[0])
    (shown,) = [row for row in history if "differences/path" in row]
    assert "forest/val/loss/path" in shown
    assert not any("val/top1" in name for name in shown), "nothing of it is finite"
    (table,) = [path for path in output.rglob("differences*.table.json")][:1]
    told = json.loads(table.read_text())
    assert [row[told["columns"].index("verdict")] for row in told["data"]] == ["", "lower", "undecided"]
    said = {
        "/".join(item.nested_key) or item.key: json.loads(item.value_json)
        for record in runs[0]
        if record.WhichOneof("record_type") == "summary"
        for item in record.summary.update
    }
    key = "verdict/val/loss/rpc - plain"
    assert {name: value for name, value in said.items() if name.startswith("verdict/")} == {
        f"{key}/difference": -0.1,
        f"{key}/low": -0.2,
        f"{key}/high": -0.05,
        f"{key}/verdict": "lower",
    }


def test_nothing_is_logged_where_the_cells_log_nothing_there(cells, tmp_path):
    (tmp_path / "demo.yaml").write_text((tmp_path / "demo.yaml").read_text().replace("WandbLogger", "CSVLogger"))
    log_verdict(cells, SUMMARY, tmp_path / "out")
    assert not list(tmp_path.rglob("wandb"))
