"""Lightning data modules that stand alone: nothing here knows about attention."""

from datamodules.ade20k import ADE20KDataModule
from datamodules.ag_news import AGNewsDataModule
from datamodules.camvid import CamVidDataModule
from datamodules.cifar10 import CIFAR10DataModule
from datamodules.digit_scenes import DigitScenesDataModule
from datamodules.digits import DigitsDataModule
from datamodules.gutenberg import GutenbergDataModule
from datamodules.imagenet import ImageNetDataModule
from datamodules.python_source import PythonSourceDataModule
from datamodules.segmentation import SegmentationDataModule
from datamodules.text import TextDataModule
from datamodules.token_selection import TokenSelectionDataModule
from datamodules.vision import VisionDataModule
from datamodules.wikitext import WikiTextDataModule

__all__ = [
    "ADE20KDataModule",
    "AGNewsDataModule",
    "CIFAR10DataModule",
    "CamVidDataModule",
    "DigitScenesDataModule",
    "DigitsDataModule",
    "GutenbergDataModule",
    "ImageNetDataModule",
    "PythonSourceDataModule",
    "SegmentationDataModule",
    "TextDataModule",
    "TokenSelectionDataModule",
    "VisionDataModule",
    "WikiTextDataModule",
]
