"""Callbacks for any LightningModule: swaps, regularizers, monitors."""

from lightning_tasks.callbacks import *  # noqa: F403 the names that it lists, and no other
from lightning_tasks.callbacks import __all__ as __all__
