"""Files, charts and hyper-parameters under each logger: W&B's alone, TensorBoard's, one with no more than the must."""

import json
from importlib import import_module
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from lightning_tasks.callbacks import AttentionMapLogger, AttentionMonitor, SpectrumMonitor, SwapAttention as Swap
from lightning_tasks.callbacks.robustness import _beside_runs
from lightning_tasks.runs.files import run_folder
from lightning_tasks.runs.wandb_runs import one_run
from tests.lightning_tasks.callbacks.modules import TinyLM, batches, fit
from tests.lightning_tasks.runs.logged_files import offline_runs, rows_and_updates, run_record, tensorboard_events

FILES = {"attention_heads.csv", "attention_entropy_heads.png", "val_attention_entropy_heads.png"}
FILES |= {f"attention_maps_layer_0{index}_step_00000{step}.png" for index in range(2) for step in (1, 3)}


class OnlyTheMust:
    """The abstract methods of a logger, and nothing else."""

    name, version = "my logger/ü", "0.1"

    def log_metrics(self, metrics, step=None):
        """Nothing."""

    def log_hyperparams(self, params, *args, **kwargs):
        """Nothing."""


def only_the_must(package):
    base = import_module(f"{package}.loggers").Logger
    return type("OnlyTheMust", (OnlyTheMust, base), {})()


def monitored(folder, logger, **options):
    """A fit of two epochs of two steps, with its files and charts."""
    monitors = [
        Swap("rpc", {"iterations": 2}, layers=[0]),
        AttentionMonitor(every_n_steps=1, statistics=["entropy"]),
        SpectrumMonitor(every_n_steps=1),
        AttentionMapLogger(),
    ]
    settings = {"logger": logger, "max_epochs": 2, "default_root_dir": folder, **options}
    return fit(TinyLM(lr=0.0), monitors, batches(2), batches(1), **settings)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """A folder into which W&B alone logged two runs, and what the first left before the second began."""
    pytest.importorskip("wandb")
    folder, before = tmp_path_factory.mktemp("wandb"), {}
    for _ in range(2):
        before = {path: path.read_bytes() for path in folder.glob("demo/*/*") if path.is_file()}
        with one_run():
            monitored(folder, WandbLogger(save_dir=folder, project="demo", offline=True))
    return folder, before


def test_wandb_alone_has_a_folder_a_run(two_runs):
    folder, before = two_runs
    runs = {run_record(records).run_id for records in offline_runs(folder)}
    assert {path.name for path in (folder / "demo").iterdir()} == runs
    for run in runs:
        assert {path.name for path in (folder / "demo" / run).iterdir()} >= FILES
    assert {path.name for path in folder.iterdir()} == {"demo", "wandb"}  # nothing in the folder that they share
    assert len(before) >= len(FILES)
    assert all(path.read_bytes() == content for path, content in before.items())


def test_final_charts_are_logged_once(two_runs):
    for records in offline_runs(two_runs[0]):
        history, _ = rows_and_updates(records)
        for name in ("charts/attention/entropy_table/path", "charts/val/attention/entropy_table/path"):
            assert len([row for row in history if name in row]) == 2, name  # after each validation, of two
        assert len([row for row in history if "val/attention/entropy_heads/filenames" in row]) == 2


def test_the_tables_of_charts_are_one_artifact(two_runs):
    (records, _) = offline_runs(two_runs[0])
    artifacts = [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
    run = run_record(records).run_id
    names = {f"run-{run}-charts-{monitor}" for monitor in ("AttentionMonitor", "SpectrumMonitor")}
    assert {artifact.name for artifact in artifacts} == names
    # one after each of two validations, and of the weights' spectra none that would show the same
    assert len(artifacts) == 4
    history, _ = rows_and_updates(records)
    last = [row for row in history if "charts/qk_spectrum/scale_table/artifact_path" in row][-1]
    table = json.loads(
        next(two_runs[0].glob(f"wandb/*{run}/files/{last['charts/qk_spectrum/scale_table/path']}")).read_text()
    )
    assert [row[0] for row in table["data"] if row[1] == "mean"] == [0, 1, 2, 3]
    assert last["charts/qk_spectrum/scale_table/artifact_path"].startswith("wandb-client-artifact://")
    for name in ("attention/entropy", "val/attention/entropy", "qk_spectrum/scale"):
        assert sum(
            f"charts/{name}_table.table.json" in entry.path for one in artifacts for entry in one.manifest.contents
        )


def test_a_disabled_wandb_run_takes_everything(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    import wandb

    wandb.teardown()
    try:
        with one_run():
            monitored(tmp_path, WandbLogger(save_dir=tmp_path, project="demo"))
    finally:
        wandb.teardown()


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_logger_with_no_more_than_the_must(tmp_path, package):
    """It has no folder: files lie where Lightning puts its checkpoints."""
    pytest.importorskip(package)
    if package == "lightning.pytorch":
        trainer = monitored(tmp_path, only_the_must(package), enable_checkpointing=True)
    else:
        loggers = [import_module(f"{package}.loggers").CSVLogger(tmp_path, name="csv"), only_the_must(package)]
        trainer = import_module(package).Trainer(logger=loggers[::-1], default_root_dir=tmp_path)
        assert run_folder(trainer) == tmp_path / "my logger/ü/0.1"
        trainer = import_module(package).Trainer(logger=loggers, default_root_dir=tmp_path)
        assert run_folder(trainer) == tmp_path / "csv/version_0"
        return
    assert {path.name for path in (tmp_path / "my logger/ü/0.1").iterdir()} >= FILES
    assert trainer.checkpoint_callback.best_model_path.startswith(str(tmp_path / "my logger/ü/0.1"))


class Recorder:
    """An experiment that keeps the calls that it gets."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


@pytest.mark.parametrize(("kind", "call"), [("MLFlowLogger", "log_artifact"), ("CometLogger", "log_image")])
def test_mlflow_and_comet_get_the_figures(tmp_path, kind, call):
    """Neither is a dependency: both were run by hand."""
    experiment = {"experiment": Recorder(), "run_id": "1", "save_dir": str(tmp_path)}
    logger = type(kind, (OnlyTheMust, import_module("lightning.pytorch.loggers").Logger), experiment)()
    monitored(tmp_path, logger)
    files = {Path(next(x for x in args if str(x).endswith(".png"))).name for name, args, _ in logger.experiment.calls}
    assert {name for name, _, _ in logger.experiment.calls} == {call}
    assert files >= {name for name in FILES if name.endswith(".png")}


def test_no_logger_no_files(tmp_path):
    monitored(tmp_path, False)
    assert not list(tmp_path.rglob("*.png"))
    assert not list(tmp_path.rglob("*.csv"))


def test_figures_that_are_measured_are_found_by_the_next_wandb_run(tmp_path):
    logger = type("WandbLogger", (), {"version": "abc"})()
    assert _beside_runs(tmp_path / "demo/abc", [logger]) == tmp_path / "demo"
    assert _beside_runs(tmp_path / "demo/other", [logger]) == tmp_path / "demo/other"
    assert _beside_runs(tmp_path / "demo/version_3", []) == tmp_path / "demo"


def test_tensorboard_hparams_name_the_swap_beside_those_of_the_module(tmp_path):
    """TensorBoard shows what is logged first of a name, and nothing later."""
    pytest.importorskip("tensorboard", reason="the extra test is not installed")
    from tensorboard.plugins.hparams import plugin_data_pb2

    class WithHparams(TinyLM):
        def __init__(self, lr):
            super().__init__(lr)
            self.save_hyperparameters()

    loggers = [TensorBoardLogger(tmp_path, name="board"), CSVLogger(tmp_path, name="csv")]
    swap = Swap("rpc", {"iterations": 2}, layers=[0])
    fit(WithHparams(lr=0.0), [swap], batches(1), batches(1), logger=loggers, max_epochs=1)
    shown = {}
    for tag, metadata in tensorboard_events(loggers[0].log_dir).summary_metadata.items():
        if tag.endswith("session_start_info"):
            data = plugin_data_pb2.HParamsPluginData.FromString(metadata.plugin_data.content)
            shown = dict(data.session_start_info.hparams)
    assert shown["lr"].number_value == 0.0
    assert shown["swapped_attention/0/mechanism"].string_value == "rpc"
    assert "self_attn" in shown["swapped_attention/0/layers"].string_value
