"""Lightning tasks, callbacks and the command; what is named here is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_tasks.base import BaseTask as BaseTask
    from lightning_tasks.files.load import load_swapped as load_swapped
    from lightning_tasks.image_classification import ImageClassificationTask as ImageClassificationTask
    from lightning_tasks.language_modeling import LanguageModelingTask as LanguageModelingTask
    from lightning_tasks.segmentation import SegmentationTask as SegmentationTask
    from lightning_tasks.token_selection import TokenSelectionTask as TokenSelectionTask

for _name in (
    *("lightning", "timm", "torchmetrics", "jsonargparse", "yaml", "numpy", "scipy", "matplotlib", "PIL", "tqdm"),
    *("jinja2", "filelock"),
):
    _spec = find_spec(_name)
    if _spec is None or _spec.origin is None:  # nothing, or a folder without __init__.py, such as one of data
        raise ModuleNotFoundError(
            f"callbacks, tasks and the command need {_name}, which is not installed: pip install 'attnswap[train]'",
            name=_name,
        )

_HOMES = {
    "BaseTask": "lightning_tasks.base",
    "ImageClassificationTask": "lightning_tasks.image_classification",
    "LanguageModelingTask": "lightning_tasks.language_modeling",
    "SegmentationTask": "lightning_tasks.segmentation",
    "TokenSelectionTask": "lightning_tasks.token_selection",
    "load_swapped": "lightning_tasks.files.load",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
