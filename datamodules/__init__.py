"""Lightning data modules that stand alone: nothing here knows about attention."""

from . import needed as needed
from .ade20k import ADE20KDataModule as ADE20KDataModule
from .ag_news import AGNewsDataModule as AGNewsDataModule
from .camvid import CamVidDataModule as CamVidDataModule
from .cifar10 import CIFAR10DataModule as CIFAR10DataModule
from .digit_scenes import DigitScenesDataModule as DigitScenesDataModule
from .digits import DigitsDataModule as DigitsDataModule
from .gutenberg import GutenbergDataModule as GutenbergDataModule
from .imagenet import ImageNetDataModule as ImageNetDataModule
from .python_source import PythonSourceDataModule as PythonSourceDataModule
from .segmentation import SegmentationDataModule as SegmentationDataModule
from .shared.loader import ResumableLoader as ResumableLoader
from .shared.repeated import RepeatedAugmentation as RepeatedAugmentation
from .shared.windows import EpochShuffle as EpochShuffle
from .text import TextDataModule as TextDataModule
from .token_selection import TokenSelectionDataModule as TokenSelectionDataModule
from .vision import VisionDataModule as VisionDataModule
from .wikitext import WikiTextDataModule as WikiTextDataModule
