"""LightningModules whose attention is an option: language modeling, classification, segmentation, token selection."""

from lightning_tasks.base import BaseTask as BaseTask
from lightning_tasks.image_classification import ImageClassificationTask as ImageClassificationTask
from lightning_tasks.language_modeling import LanguageModelingTask as LanguageModelingTask
from lightning_tasks.segmentation import SegmentationTask as SegmentationTask
from lightning_tasks.token_selection import TokenSelectionTask as TokenSelectionTask
