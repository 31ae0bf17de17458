"""The command's loggers: their places, and Weights & Biases with its own traps."""

import csv
import json
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import Logger

from lightning_tasks.__main__ import main
from tests.lightning_tasks.cli.runs import last_run
from tests.lightning_tasks.programs import run_forked


def test_wandb_has_the_nested_config_and_the_saved_config_runs_again(demo):
    pytest.importorskip("wandb")
    from lightning_tasks.cli.fit import run

    arguments = ["fit", "--config", demo, "--trainer", "logger/wandb"]
    for _ in range(2):
        cli = run(arguments)
        arguments = ["fit", "--config", str(last_run() / "config.yaml")]
        csv_logger, wandb_logger = cli.trainer.loggers
        assert Path(csv_logger.log_dir) == last_run()
        assert wandb_logger.experiment.config["model"]["init_args"]["rate"] == 0.05
        wandb_logger.experiment.finish()
    for run_folder in ("version_0", "version_1"):
        assert len(list(Path("runs/demo", run_folder, "wandb").glob("offline-run-*"))) == 1


@pytest.mark.slow
def test_one_wandb_run_a_job_under_ddp(demo):
    pytest.importorskip("wandb")
    parts = ["--trainer", "strategy/ddp", "--trainer", "logger/wandb"]
    done = run_forked("lightning_tasks", "fit", "--config", demo, *parts)  # Lightning starts the second process
    assert done.returncode == 0, done.stderr
    assert [path.name for path in Path("runs/demo").iterdir()] == ["version_0"]
    assert len(list(Path("runs/demo/version_0/wandb").glob("offline-run-*"))) == 1
    assert (Path("runs/demo/version_0") / "config.yaml").is_file()


# -- places and refusals -----------------------------------------------------------------------------------------------

CSV, WANDB, BOARD = (f"lightning.pytorch.loggers.{kind}Logger" for kind in ("CSV", "Wandb", "TensorBoard"))


class OnlyTheMust(Logger):
    """The abstract methods of a logger, and nothing else."""

    name, version = "mine", "0.1"

    def log_metrics(self, metrics, step=None):
        """Nothing."""

    def log_hyperparams(self, params, *args, **kwargs):
        """Nothing."""


def fit_with(demo, *loggers):
    """The files of what `loggers` leave of a run of the command."""
    before = set(Path.cwd().rglob("*"))
    main(["fit", "--config", demo, f"--trainer.logger={json.dumps(list(loggers))}"])
    return {path.relative_to(Path.cwd()).as_posix() for path in set(Path.cwd().rglob("*")) - before if path.is_file()}


@pytest.mark.parametrize("option", ["--trainer.logger.init_args.save_dir=here", "--trainer.logger.save_dir=here"])
def test_an_option_of_the_default_logger_says_which_logger_it_is_and_how_to_set_it(demo, capsys, option):
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", demo, option])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "this one names none. Without one a run has a CSVLogger" in error
    root = ["--trainer.default_root_dir", "elsewhere"]
    named = ["--trainer.logger", CSV, "--trainer.logger.save_dir", "here", "--trainer.logger.name", "mine"]
    for cure, folder in ((root, "elsewhere/demo"), (named, "here/mine")):
        assert " ".join(cure[:1]) in error
        main(["fit", "--config", demo, *cure])
        assert Path(folder, "version_0", "config.yaml").is_file()


def test_a_csv_logger_keeps_its_place_and_its_settings(demo):
    logger = {"class_path": CSV, "init_args": {"save_dir": "here", "name": "a b/ü", "prefix": "mine"}}
    first = fit_with(demo, logger)
    before = {path: Path(path).read_bytes() for path in first}
    second = fit_with(demo, logger)
    for number, files in enumerate((first, second)):
        assert {f"here/a b/ü/version_{number}/{name}" for name in ("metrics.csv", "config.yaml")} <= files
    assert all(Path(path).read_bytes() == content for path, content in before.items())
    with Path("here/a b/ü/version_0/metrics.csv").open() as file:
        assert "mine-train/loss" in next(csv.reader(file))


def test_any_list_of_loggers(demo):
    pytest.importorskip("tensorboard", reason="the extra test is not installed")
    must = {"class_path": f"{__name__}.OnlyTheMust"}
    board = {"class_path": BOARD, "init_args": {"save_dir": "."}}
    for number in range(2):
        files = fit_with(demo, must, board)
        assert {path.split("/")[2] for path in files} == {f"version_{number}"}
        assert any(path.rsplit("/", 1)[-1].startswith("events.out") for path in files)
        assert f"runs/demo/version_{number}/metrics.csv" in files
    assert "runs/demo/version_2/metrics.csv" in fit_with(demo)  # none is the CSV log alone


def test_options_of_another_mechanism_are_refused_with_the_cure_and_leave_no_folder(tmp_path, capsys):
    tiny = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2}
    model = {"model_options": tiny, "mechanism": "rpc", "options": {"iterations": 2}}
    data = {"class_path": "attnswap.datamodules.DigitsDataModule"}
    trainer = {"accelerator": "cpu", "max_steps": 1, "enable_progress_bar": False, "enable_model_summary": False}
    trainer["logger"] = [{"class_path": WANDB}, {"class_path": CSV, "init_args": {"save_dir": "here"}}]
    recipe = {"model": {"class_path": "lightning_tasks.ImageClassificationTask", "init_args": model}, "data": data}
    Path("rpc.yaml").write_text(yaml.safe_dump({**recipe, "trainer": {**trainer, "limit_val_batches": 0}}))
    before = set(tmp_path.rglob("*"))
    command = ["fit", "--config", "rpc.yaml", "--model.mechanism", "scaled"]
    with pytest.raises(SystemExit) as ended:
        main(command)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "ScaledAttention has no option 'iterations'" in said
    assert "--model.options null" in said
    assert "Traceback" not in said
    assert set(tmp_path.rglob("*")) == before
    main([*command, "--model.options", "null", "--trainer.logger", "false"])
