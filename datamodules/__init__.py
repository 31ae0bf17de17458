"""Lightning data modules that stand alone: nothing here knows about attention."""

from datamodules.cifar10 import CIFAR10DataModule
from datamodules.digits import DigitsDataModule
from datamodules.imagenet import ImageNetDataModule
from datamodules.python_source import PythonSourceDataModule
from datamodules.text import TextDataModule
from datamodules.token_selection import TokenSelectionDataModule
from datamodules.vision import VisionDataModule
from datamodules.wikitext import WikiTextDataModule

__all__ = [
    "CIFAR10DataModule",
    "DigitsDataModule",
    "ImageNetDataModule",
    "PythonSourceDataModule",
    "TextDataModule",
    "TokenSelectionDataModule",
    "VisionDataModule",
    "WikiTextDataModule",
]
