"""Lightning data modules that stand alone: nothing here knows about attention."""

from datamodules.ag_news import AGNewsDataModule
from datamodules.cifar10 import CIFAR10DataModule
from datamodules.digits import DigitsDataModule
from datamodules.gutenberg import GutenbergDataModule
from datamodules.imagenet import ImageNetDataModule
from datamodules.python_source import PythonSourceDataModule
from datamodules.text import TextDataModule
from datamodules.token_selection import TokenSelectionDataModule
from datamodules.vision import VisionDataModule
from datamodules.wikitext import WikiTextDataModule

__all__ = [
    "AGNewsDataModule",
    "CIFAR10DataModule",
    "DigitsDataModule",
    "GutenbergDataModule",
    "ImageNetDataModule",
    "PythonSourceDataModule",
    "TextDataModule",
    "TokenSelectionDataModule",
    "VisionDataModule",
    "WikiTextDataModule",
]
