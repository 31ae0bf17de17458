"""`--print_config`: the configuration as it will run, with what the command fills in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser

from lightning_tasks.cli.loggers import planned_loggers
from lightning_tasks.runs.folder import RUNS

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
        return dump(_as_run(config.clone(), command, recipe), **options)

    parser.dump = filled  # type: ignore[method-assign]


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
    model = section.get("model")
    folder = recipe or (str(model.class_path).rpartition(".")[2] if model is not None else None)
    if folder and trainer.logger is not False and not trainer.fast_dev_run:
        trainer.logger = planned_loggers(trainer.logger, folder, Path(trainer.default_root_dir or RUNS))
    return section
