"""Lines of other packages that say nothing about a run are left out while the command runs, by their exact texts."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary, RichProgressBar

_PACKAGES = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
_LINES = (
    "💡 Tip: For seamless cloud logging and experiment tracking, try installing [litlogger]",
    "💡 Tip: For seamless cloud uploads and versioning, try installing [litmodels]",
)
_OF_A_RUN = r"['\"].*[/\\]version_\d+[/\\]checkpoints['\"]"
_WARNINGS = {  # the module that warns, and a pattern of how its text begins
    "lightning.pytorch.utilities._pytree": re.escape("`isinstance(treespec, LeafSpec)` is deprecated"),
    "lightning.fabric.utilities.seed": "No seed found, seed set to ",  # "Seed set to 0" follows
    # A run has a folder of its own, so that one which resumes always has another. A dirpath of the user's is no such.
    "lightning.pytorch.callbacks.model_checkpoint": f"The dirpath has changed from {_OF_A_RUN} to {_OF_A_RUN},",
}
_NO_FLOPS = re.compile(r"^(\x1b\[[\d;]*m)*(Total FLOPs(\x1b\[[\d;]*m)*: 0|0\s+Total Flops)\b.*\n?", re.MULTILINE)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out these lines, and put everything back at the end."""
    logs = [logging.getLogger(f"{package}.utilities.rank_zero") for package in _PACKAGES]
    for log in logs:
        log.addFilter(_is_kept)
    try:
        with warnings.catch_warnings():
            for module, pattern in _WARNINGS.items():
                warnings.filterwarnings("ignore", pattern, module=re.escape(module))
            yield
    finally:
        for log in logs:
            log.removeFilter(_is_kept)


def _is_kept(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_LINES)  # with its arguments it may fail, which logging reports by itself


def leave_out_what_is_not_known(trainer: Trainer) -> None:
    """Have summaries leave out the line "Total FLOPs: 0", of a module without an example; bars the last epoch "-2"."""
    for callback in vars(trainer)["callbacks"]:
        if type(callback) is RichProgressBar and trainer.max_epochs == -1:  # steps alone end the fit
            described: Callable[[int], str] = callback._get_train_description
            vars(callback)["_get_train_description"] = partial(_without_last, described)
        if type(callback) in (ModelSummary, RichModelSummary):
            callback.summarize = partial(_summarize, type(callback).summarize)


def _without_last(described: Callable[[int], str], epoch: int) -> str:
    return described(epoch).replace("/-2", "   ")


def _summarize(summarize: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if summarize is RichModelSummary.summarize:
        from rich import get_console

        console = get_console()
        with console.capture() as captured:
            summarize(*args, **kwargs)
        console.file.write(_NO_FLOPS.sub("", captured.get()))
        return
    log = logging.getLogger(ModelSummary.__module__)
    log.addFilter(_without_flops)
    try:
        summarize(*args, **kwargs)
    finally:
        log.removeFilter(_without_flops)


def _without_flops(record: logging.LogRecord) -> bool:
    record.msg = _NO_FLOPS.sub("", str(record.msg)).rstrip("\n")
    return True
