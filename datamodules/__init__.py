"""Lightning data modules that stand alone: nothing here knows about attention."""

from datamodules.ade20k import ADE20KDataModule as ADE20KDataModule
from datamodules.ag_news import AGNewsDataModule as AGNewsDataModule
from datamodules.camvid import CamVidDataModule as CamVidDataModule
from datamodules.cifar10 import CIFAR10DataModule as CIFAR10DataModule
from datamodules.digit_scenes import DigitScenesDataModule as DigitScenesDataModule
from datamodules.digits import DigitsDataModule as DigitsDataModule
from datamodules.gutenberg import GutenbergDataModule as GutenbergDataModule
from datamodules.imagenet import ImageNetDataModule as ImageNetDataModule
from datamodules.python_source import PythonSourceDataModule as PythonSourceDataModule
from datamodules.segmentation import SegmentationDataModule as SegmentationDataModule
from datamodules.text import TextDataModule as TextDataModule
from datamodules.token_selection import TokenSelectionDataModule as TokenSelectionDataModule
from datamodules.vision import VisionDataModule as VisionDataModule
from datamodules.wikitext import WikiTextDataModule as WikiTextDataModule
