"""Runs of W&B: one a job, with a name and a group in a comparison, continued on resume, offline where no key is."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_tasks.errors import UsageError
from lightning_tasks.runs.loggers import loggers_named, wandb_library

RUN = "wandb_run"  # in a checkpoint: the run's id and project
_ID = re.compile(r"(?!\s)[^/\\#?%:;,'\x00-\x1f]{1,128}(?<!\s)")
_MOST = {"group": 128, "name": 128, "job_type": 64, "tag": 64}  # characters that W&B takes


@dataclass(frozen=True)
class RunLabels:
    """What a W&B run is called: group, name, tags, kind of job and notes, cut to the lengths that W&B takes."""

    group: str | None
    name: str | None
    tags: tuple[str, ...] = ()
    job_type: str | None = None
    notes: str | None = None

    def fill(self, arguments: Any) -> None:
        """Put the labels into the arguments of a ``WandbLogger``, where these leave them open; tags add up."""
        for key in ("group", "name", "job_type", "notes"):
            if arguments.get(key) is None and (value := getattr(self, key)) is not None:
                arguments[key] = value[: _MOST.get(key)]
        given = list(arguments.get("tags") or ())
        if tags := list(dict.fromkeys([*given, *(tag[: _MOST["tag"]] for tag in self.tags if tag)])):
            arguments["tags"] = tags


def wandb_arguments(loggers: Any) -> list[Any]:
    """The ``init_args`` of each W&B logger of a ``trainer.logger`` value.

    Raises:
        ModuleNotFoundError: there is one, and the extra ``wandb`` is not installed.
    """
    given = loggers if isinstance(loggers, list) else [loggers]
    found = [one["init_args"] for one in given if str(_class_path(one)).endswith(".WandbLogger")]
    if found:
        wandb_library()
    return found


def _class_path(logger: Any) -> Any:
    return logger.get("class_path") if hasattr(logger, "get") else None


def check_cell_loggers(loggers: Any) -> None:
    """Check the ``trainer.logger`` of a cell of a comparison, which needs a log and W&B runs of its own.

    Raises:
        UsageError: there is no logger, or a W&B logger names its run, which all cells would write into.
        ModuleNotFoundError: there is a W&B logger without the extra ``wandb``.
    """
    if loggers is False:
        raise UsageError("trainer.logger is false, so that there is nothing to compare; leave it out")
    for arguments in wandb_arguments(loggers):
        if name := arguments.get("id") or arguments.get("version"):
            raise UsageError(
                f"the W&B logger has the id {name!r}, so that all cells would write into one run; leave out `id` and "
                "`version`: each cell gets a run of its own"
            )


def continue_run(arguments: Any, checkpoint: dict[str, Any]) -> None:
    """Have a W&B logger go on with the run in which the checkpoint was written, if its arguments give it no id.

    An id belongs to a project: a logger of another project, or of another entity where both are known, starts a run of
    its own.

    Raises:
        UsageError: what the checkpoint has in the place of an id cannot be one.
    """
    saved = checkpoint.get(RUN)
    if not isinstance(saved, dict):
        return
    open_id = arguments.get("id") is None and arguments.get("version") is None
    entity = arguments.get("entity")
    same_entity = entity is None or saved.get("entity") in (None, entity)
    if open_id and same_entity and arguments.get("project") == saved.get("project"):
        run = saved.get("id")
        if not isinstance(run, str) or not _ID.fullmatch(run):
            raise UsageError(
                f"the checkpoint names the W&B run {str(run)[:80]!r}, which is no id of one (at most 128 characters, "
                "without spaces at its ends and / \\ # ? % : ; , '); give the logger an `id` of your own"
            )
        arguments["id"] = run


def save_run(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Write into a checkpoint which W&B run it belongs to, by which :func:`continue_run` finds it; on rank zero."""
    for logger in loggers_named(trainer, "WandbLogger")[:1]:
        if trainer.is_global_zero:
            checkpoint[RUN] = {"id": str(logger.version), "project": logger.name}
            if entity := getattr(logger, "_wandb_init", {}).get("entity"):
                checkpoint[RUN]["entity"] = entity


def go_offline_without_key() -> None:
    """Set W&B offline, and say so, where it has no key for its server; so it never asks for one.

    W&B itself says which server and which key: by its environment variables, its settings files and netrc.

    Raises:
        UsageError: W&B refuses the key that it finds.
    """
    if "WANDB_MODE" in os.environ:
        return
    wandb = wandb_library()
    settings = wandb.setup().settings
    try:
        needs_none = settings.mode in ("offline", "dryrun", "disabled")
        has_key = needs_none or wandb.login(prompt=False, verify=False)
    except wandb.errors.AuthenticationError as error:
        raise UsageError(f"W&B: {error}; `wandb login` saves another key") from error
    if not has_key:
        os.environ["WANDB_MODE"] = "offline"  # for the processes that this one starts,
        wandb.setup(wandb.Settings(mode="offline"))  # and for itself, which has read its settings
        rank_zero_info(
            f"W&B has no key for {settings.base_url}: the run is kept offline, and `wandb sync` sends it later"
        )


def alert(title: str, text: str) -> None:
    """Send an alert of the W&B run of this process, where there is one."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.run.alert(title=title, text=text, level=wandb.AlertLevel.WARN)


@contextlib.contextmanager
def one_run() -> Iterator[None]:
    """End the W&B run that was begun in the block, as failed where the block fails, so that the next is another."""
    failed = True
    try:
        yield
        failed = False
    finally:
        wandb = sys.modules.get("wandb")
        if wandb is not None and wandb.run is not None:
            wandb.finish(exit_code=int(failed))
