"""`--print_config`: the configuration as it will run, with what the command fills in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnswap.datamodules.shared.base import DataModule, default_workers
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tasks.callbacks.healing.drift_monitor import DriftMonitor
from lightning_tasks.callbacks.init_from import InitFromCheckpoint
from lightning_tasks.callbacks.resuming.exact_resume import ExactResume
from lightning_tasks.callbacks.resuming.save_on_stop import SaveOnStop
from lightning_tasks.callbacks.writing.prediction_table import PredictionTable
from lightning_tasks.callbacks.writing.wandb_page import WandbPage
from lightning_tasks.cli.loggers import planned_loggers
from lightning_tasks.cli.resumed_optimizer import CheckResumedOptimizer
from lightning_tasks.runs.folder import RUNS
from lightning_tasks.training.hparams import import_object, import_path

OF_LIGHTNING = {
    **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), True),
    **dict.fromkeys((f"limit_{split}_batches" for split in ("train", "val", "test", "predict")), 1.0),
    **{"num_sanity_val_steps": 2, "log_every_n_steps": 50, "val_check_interval": 1.0, "precision": "32-true"},
}
"""What a trainer takes where its arguments are null; a test compares it with Lightning's trainer."""
_EPOCHS = 1000  # of a fit that nothing else ends


def show_as_run(parser: LightningArgumentParser, command: str, recipe: Any) -> None:
    """Have the parser of a command print configurations as they run; what it parses and saves is left as it is.

    Args:
        parser: of the command.
        command: "fit", "validate", "test" or "predict".
        recipe: the name of the run's folder, None for that of the model.
    """
    dump = parser.dump

    def filled(config: Any, **options: Any) -> str:
        section = _as_run(config.clone(), command, recipe)
        return dump(section, **options) + _in_words(own_callbacks(command, section))

    parser.dump = filled  # type: ignore[method-assign]


def own_callbacks(command: str, section: Any) -> list[Callback]:
    """The callbacks that a command adds to those of its configuration.

    Args:
        command: as :func:`show_as_run` takes it.
        section: the configuration of the command.
    """
    added: list[Callback] = []
    if section.get("init_from"):
        added.append(InitFromCheckpoint(section.init_from))
    if command == "fit":
        added += [ExactResume(), *([WandbPage()] if "WandbLogger" in str(section.trainer.logger) else [])]
    if command == "fit" and section.get("ckpt_path"):
        added.append(CheckResumedOptimizer())
    added.append(SaveOnStop())
    if command == "predict":
        added.append(PredictionTable())
    return added


def keeps_teacher(callbacks: Any) -> bool:
    """Whether a callback of a configuration keeps the model as it was: a run that resumes builds that model first."""
    return any(_is_of(each, DriftMonitor) for each in _listed(callbacks))


def of_cell(trainer: Any) -> None:
    """Have the `trainer` section of a cell run on one device where it takes what there is, as `compare` plans it.

    Callbacks that keep checkpoints or show a progress bar are left out where it has none, which Lightning refuses.
    """
    if str(trainer.devices) in ("auto", "-1"):
        trainer.devices = 1
    absent = [
        kind
        for kind, wanted in ((Checkpoint, trainer.enable_checkpointing), (ProgressBar, trainer.enable_progress_bar))
        if wanted is False
    ]
    if trainer.callbacks is not None:
        trainer.callbacks = [each for each in _listed(trainer.callbacks) if not _is_of(each, tuple(absent))]


def _listed(callbacks: Any) -> list[Any]:
    return callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []


def _is_of(given: Any, kind: type | tuple[type, ...]) -> bool:
    found = import_object(given.class_path)
    return isinstance(found, type) and issubclass(found, kind)  # else a function that makes a callback


def _in_words(added: list[Callback]) -> str:
    """A comment, so that the printed file can run: as entries, each would be there twice."""
    lines = "".join(f"#   {import_path(type(each))}\n" for each in added)
    return f"# The command adds these callbacks, beside those of Lightning:\n{lines}"


def _workers(section: Any) -> int | None:
    """The loader processes that a data module of ours takes where its number of them is null.

    None where it has a number, is of another kind, or this machine lacks the devices that are asked for.
    """
    data = section.get("data")
    arguments = data.get("init_args") if data is not None else None
    if arguments is None or "num_workers" not in arguments or arguments.num_workers is not None:
        return None
    if not issubclass(import_object(data.class_path), DataModule):
        return None
    try:
        trainer = Trainer(accelerator=section.trainer.accelerator, devices=section.trainer.devices, logger=False)
    except (MisconfigurationException, ValueError, RuntimeError):
        return None
    return default_workers(trainer.num_devices)


def _as_run(section: Any, command: str, recipe: Any) -> Any:
    for name in ("trust_checkpoint", "images"):  # of one command line, in no configuration
        section.pop(name, None)
    trainer = section.trainer
    if section.get("weights_only") is None:
        section.weights_only = True
    if command == "fit" and trainer.max_epochs is None and trainer.max_steps == -1 and trainer.max_time is None:
        trainer.max_epochs = _EPOCHS
    for name, value in OF_LIGHTNING.items() if not (trainer.fast_dev_run or trainer.barebones) else ():
        if trainer[name] is None:
            trainer[name] = value
    workers = _workers(section)
    if workers is not None:
        section.data.init_args.num_workers = workers
    model = section.get("model")
    folder = recipe or (str(model.class_path).rpartition(".")[2] if model is not None else None)
    if folder and trainer.logger is not False and not trainer.fast_dev_run:
        trainer.logger = planned_loggers(trainer.logger, folder, Path(trainer.default_root_dir or RUNS))
    return section
