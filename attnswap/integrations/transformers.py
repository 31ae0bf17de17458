"""In the Trainer of transformers: :class:`Watch`."""

from lightning_tasks.integrations.transformers import Watch as Watch

__all__ = ["Watch"]
