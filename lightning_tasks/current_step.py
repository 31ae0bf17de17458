"""The step that logged values belong to."""

from __future__ import annotations

from typing import Any


def current_step(trainer: Any) -> int:
    """Steps taken so far, as Lightning's own metrics count them: one a batch that stepped, for any optimizers."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped  # type: ignore[no-any-return]
