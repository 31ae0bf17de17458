"""The configuration of a run as YAML, in its folder and in its W&B run, with the commit and the machine beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import yaml
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_info

from lightning_tasks.errors import UsageError
from lightning_tasks.runs.environment import this_environment
from lightning_tasks.runs.loggers import loggers_named
from lightning_tasks.runs.wandb_runs import save_run

ENVIRONMENT = "environment.json"
CONFIGURATION = "attnswap_configuration"
"""The key of a checkpoint under which the configuration of its run stands, as JSON."""
JOB = "attnswap_job"
"""The key of a checkpoint under which the queued job of its run stands."""
THIS_JOB = "ATTNSWAP_JOB"
"""The environment variable that names the queued job to the fit that it runs."""


class SaveConfig(SaveConfigCallback):
    """Save the complete configuration in the run's own folder, and in the W&B run where there is one; say where.

    `environment.json` beside it has the commit, the machine and the versions of libraries.

    Both are saved once everything is built, so that a run that cannot begin leaves no folder. Without a logger a run
    has no folder of its own, and nothing is saved: the working folder belongs to the user.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Nothing yet: the model is built after this."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save for a fit."""
        self._save(trainer, pl_module, "fit")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save in the W&B run once more, into which Lightning has put the hyper-parameters in between."""
        self._save_in_wandb(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save for a validation (that of a fit finds it saved)."""
        self._save(trainer, pl_module, "validate")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save for a test."""
        self._save(trainer, pl_module, "test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save for a prediction."""
        self._save(trainer, pl_module, "predict")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Say to which W&B run and which queued job the checkpoint belongs, and of which model, data and seed it is."""
        save_run(trainer, checkpoint)
        kept = {key: self.config.get(key) for key in ("model", "data", "seed_everything")}
        checkpoint[CONFIGURATION] = json.dumps(plain_of(kept))
        if job := os.environ.get(THIS_JOB):
            checkpoint[JOB] = job

    def _save(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.loggers and not self.already_saved:
            folder = trainer.log_dir  # asked for by every process, as it is broadcast
            assert folder is not None  # the first logger of the command writes into one
            rank_zero_info(f"attnswap: this run's files are in {folder}")
            super().setup(trainer, pl_module, stage)
            if trainer.is_global_zero:
                with get_filesystem(folder).open(os.path.join(folder, ENVIRONMENT), "w") as file:
                    json.dump(asdict(this_environment()), file, indent=1)
        if trainer.state.fn != "fit":
            self._save_in_wandb(trainer)

    def _save_in_wandb(self, trainer: Trainer) -> None:
        """Put the configuration, nested as it is, into every W&B run (rank zero only).

        It comes after the module's hyper-parameters, among which may be a `model` too, of another form.
        """
        for logger in loggers_named(trainer, "WandbLogger") if trainer.is_global_zero else ():
            logger.experiment.config.update(self.config.as_dict(), allow_val_change=True)


class PlainDumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which knows enums (their value), paths (their text), and NumPy's scalars too.

    jsonargparse leaves such values as they are where the type of the argument is another one: the `interval` of
    Lightning's `Timer` is a `str` by its signature, and an enum by its default.
    """


_PLAIN: dict[type, Callable[[Any], Any]] = {
    Enum: lambda value: value.value,
    PurePath: str,
    np.generic: lambda value: value.item(),
    tuple: list,  # named ones
    str: str.__str__,  # and other kinds of text, enums among them
}
for _kind, _plain in _PLAIN.items():
    PlainDumper.add_multi_representer(
        _kind,
        lambda dumper, value, plain=_plain: dumper.represent_data(plain(value)),  # type: ignore[misc]
    )


def dump_plain(data: Any) -> str:
    """A configuration as YAML, its keys in their order.

    Raises:
        UsageError: a value is none that YAML has; the message names its key.
    """
    try:
        return yaml.dump(data, Dumper=PlainDumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
    except yaml.representer.RepresenterError as error:
        value = error.args[-1]
        key = next(_keys_of(data, value), "a value")
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UsageError(
            f"{key} is {value!r}, of the kind {kind}, which no configuration file can hold: give text, a number, a "
            "list, a dictionary, or `{class_path, init_args}`"
        ) from error


def plain_of(data: Any) -> Any:
    """A configuration as plain data, as a file that :func:`dump_plain` wrote would give it."""
    data = {key: value.as_dict() if hasattr(value, "as_dict") else value for key, value in data.items()}
    return yaml.safe_load(dump_plain(data))


def _keys_of(data: Any, value: Any, key: str = "") -> Iterator[str]:
    """The keys under which nested data holds the very object `value`, such as `trainer.callbacks[0].init_args.x`."""
    if data is value:
        yield key
    elif isinstance(data, dict):
        for name, each in data.items():
            yield from _keys_of(each, value, f"{key}.{name}" if key else str(name))
    elif isinstance(data, (list, tuple)):
        for place, each in enumerate(data):
            yield from _keys_of(each, value, f"{key}[{place}]")
