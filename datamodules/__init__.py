"""Lightning data modules that stand alone: nothing here knows about attention."""

from datamodules.python_source import PythonSourceDataModule
from datamodules.text import TextDataModule
from datamodules.wikitext import WikiTextDataModule

__all__ = ["PythonSourceDataModule", "TextDataModule", "WikiTextDataModule"]
