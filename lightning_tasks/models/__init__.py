"""Models that the tasks train; plain modules, usable without Lightning."""

from lightning_tasks.models.segmenter import Segmenter
from lightning_tasks.models.transformer_lm import TransformerLM

__all__ = ["Segmenter", "TransformerLM"]
