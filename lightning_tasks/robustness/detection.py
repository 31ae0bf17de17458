"""How well images from outside of the classes are told: scores of logits and of features, and what they tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attention_modules.precision import to_float64
from lightning_tasks.robustness.scores import OOD_METRICS
from lightning_tasks.robustness.tested_model import held_still

if TYPE_CHECKING:
    from attnswap.datamodules.shared.images import ImageDataset

LIBRARY = "pytorch-ood"
SCORES = ("msp", "energy", "vim", "knn")
FITTED = ("vim", "knn")
"""Those that are fitted to features of training images."""
NEIGHBORS = 50  # of knn: the choice of Sun et al. (ICML 2022) for CIFAR-10


@dataclass(frozen=True)
class Outputs:
    """What a classifier gives for some images: logits ``[M, classes]``, and what enters its last layer, ``[M, D]``."""

    logits: Tensor
    features: Tensor


def ood_library() -> Any:
    """The library.

    Raises:
        ImportError: without the extra `robustness`.
    """
    try:
        import pytorch_ood
        import pytorch_ood.detector
        import pytorch_ood.metrics
    except ModuleNotFoundError as error:
        raise ImportError(f"ood_scores needs {LIBRARY}: pip install 'attnswap[robustness]'", name=error.name) from error
    return pytorch_ood


def check_scores(scores: Sequence[str]) -> tuple[str, ...]:
    """The scores.

    Raises:
        ValueError: if one is unknown, or there twice.
    """
    if unknown := [each for each in scores if each not in SCORES]:
        raise ValueError(f"ood_scores has {unknown[0]!r}; known are {', '.join(SCORES)}")
    if len(set(scores)) < len(scores):
        raise ValueError(f"ood_scores {list(scores)} has one of them twice")
    return tuple(scores)


def last_layer(model: nn.Module, images: Tensor) -> nn.Linear:
    """The linear layer whose outputs are the logits.

    Raises:
        ValueError: if there is none.
    """
    called: list[tuple[nn.Linear, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda layer, args, out: called.append((layer, out)))
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        with held_still(model, gradients=False):
            logits = model(images)
    finally:
        for handle in handles:
            handle.remove()
    found = [layer for layer, out in called if _same(out, logits)]
    if not found:
        raise ValueError(
            f"{' and '.join(FITTED)} need the features that enter a model's last layer, and the logits of "
            f"{model._get_name()} are those of no linear layer: leave them out of ood_scores"
        )
    return found[-1]


def _same(out: Tensor, logits: Tensor) -> bool:
    return out.shape == logits.shape and torch.allclose(out.float(), logits.float(), rtol=0, atol=0, equal_nan=True)


@contextmanager
def features_of(layer: nn.Linear) -> Iterator[list[Tensor]]:
    """What enters the layer meanwhile, on the CPU."""
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().float().cpu()))
    try:
        yield seen
    finally:
        handle.remove()


class Detectors:
    """The scores of the library pytorch-ood.

    Args:
        scores: their names.
        layer: the model's last layer; None where no score is fitted.
        training: gives the outputs for training images, to which ``FITTED`` are fitted, and no others.
        classes: those of the logits that count; all where None.
    """

    def __init__(
        self,
        scores: Sequence[str],
        layer: nn.Linear | None,
        training: Callable[[], Outputs],
        classes: Sequence[int] | None = None,
    ) -> None:
        self.names, self._layer, self._training, self._classes = scores, layer, training, classes

    @cached_property
    def _fitted(self) -> dict[str, Any]:
        library, outputs, layer = ood_library().detector, self._training(), self._layer
        if layer is None:
            raise ValueError(f"{' and '.join(FITTED)} need the model's last layer")
        weight = layer.weight.detach().float().cpu()
        bias = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach().float().cpu()
        if self._classes is not None:
            weight, bias = weight[[*self._classes]], bias[[*self._classes]]
        labels, found = torch.zeros(len(outputs.features), dtype=torch.int64), {}
        if "vim" in self.names:
            detector = library.ViM(None, d=weight.shape[1] // 2, w=weight, b=bias)
            found["vim"] = detector.fit_features(outputs.features, labels)
        if "knn" in self.names:
            detector = library.KNN(None, k=min(NEIGHBORS, len(outputs.features)))
            found["knn"] = detector.fit_features(outputs.features, labels)
        return found

    def scores(self, outputs: Outputs) -> dict[str, Tensor]:
        """The scores ``[M]`` by name, higher for what seems from outside."""
        library = ood_library().detector
        logits = to_float64(outputs.logits if self._classes is None else outputs.logits[:, [*self._classes]])
        direct = {"msp": library.MaxSoftmax.score, "energy": library.EnergyBased.score}
        return {
            name: direct[name](logits) if name in direct else self._fitted[name].predict_features(outputs.features)
            for name in self.names
        }


def told_apart(inside: Tensor, outside: Tensor) -> dict[str, float]:
    """AUROC, AUPR and FPR95 of scores by the library; images from outside are the positive class."""
    functional = ood_library().metrics.functional
    scores = torch.cat([to_float64(inside), to_float64(outside)])
    labels = torch.cat([torch.zeros(len(inside), dtype=torch.int64), -torch.ones(len(outside), dtype=torch.int64)])
    found = {
        "auroc": functional.auroc(scores, labels),
        "aupr": functional.aupr(scores, labels, positive="ood"),
        "fpr95": functional.fpr_at_tpr(scores, labels, tpr=0.95),
    }
    return {name: float(found[name]) for name in OOD_METRICS}


def training_images(datamodule: Any, most: int | None) -> tuple[ImageDataset, Sequence[int]]:
    """The training images by the transform of an evaluation, and the places of those that are fitted to, evenly chosen.

    Raises:
        ValueError: if there is no data module of images with labels.
    """
    if not hasattr(datamodule, "dataset") or not hasattr(datamodule, "class_names"):
        raise ValueError(
            f"{' and '.join(FITTED)} are fitted to training images without augmentation, which a VisionDataModule of "
            f"attnswap.datamodules gives, got {type(datamodule).__name__}: test with one, or leave them out of "
            "ood_scores"
        )
    images = datamodule.dataset("train", training=False, multiple_of=1)
    count = len(images) if most is None else min(most, len(images))
    return images, [place * len(images) // count for place in range(count)]
