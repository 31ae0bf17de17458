"""The optimizer of a LightningCLI, which is built with the module, before any callback can swap."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import lightning.pytorch as pl
from torch.optim import Optimizer


@contextlib.contextmanager
def followed_by_cli_optimizer(pl_module: pl.LightningModule) -> Iterator[None]:
    """Have the optimizer of a command line's ``optimizer`` section hold what the module has after this block.

    As though it were built then: ``LightningCLI`` gives it all of the module's Parameters, in one group. One that has
    stepped, or holds others, stays as it is.
    """
    optimizer = _cli_optimizer(pl_module)
    held = [] if optimizer is None or optimizer.state else optimizer.param_groups[0]["params"]
    whole = len(held) > 0 and [*map(id, held)] == [*map(id, pl_module.parameters())]
    yield
    if whole:
        held[:] = pl_module.parameters()


def _cli_optimizer(pl_module: pl.LightningModule) -> Optimizer | None:
    """What ``LightningCLI`` bound to ``configure_optimizers`` of the module, None where it did not."""
    bound = getattr(vars(pl_module).get("configure_optimizers"), "__func__", None)
    optimizer = bound.keywords.get("optimizer") if isinstance(bound, partial) else None
    return optimizer if isinstance(optimizer, Optimizer) else None
