"""Callbacks of which a trainer takes one: a second would write the same names and files."""

from __future__ import annotations

import lightning.pytorch as pl


def check_alone(trainer: pl.Trainer, callback: pl.Callback) -> None:
    """Check that the trainer has no second callback of this class, or of one derived from it.

    Raises:
        ValueError: if it has; the text says how the options of one that a recipe brings are changed.
    """
    others: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # not declared there
    if any(other is not callback and isinstance(other, type(callback)) for other in others):
        name = type(callback).__name__
        raise ValueError(
            f"the trainer has two callbacks {name}, which would log the same names and overwrite each other's files: "
            "keep one, with the options of both. Where a recipe has it already, change its options there: in a copy "
            "of the recipe, or with --config RECIPE --config FILE, where trainer.callbacks in FILE is the whole list "
            f"and replaces that of RECIPE (--trainer.callbacks+={name} adds to the list, and "
            "--trainer.callbacks.init_args... changes its last callback only)"
        )
