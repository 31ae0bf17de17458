"""Semantic segmentation with any attention mechanism."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from attention_modules.mechanisms.shared.options import check_flag
from lightning_tasks.base import Buildable
from lightning_tasks.files.weights import load_backbone
from lightning_tasks.models.segmentation import segmentation_builder
from lightning_tasks.runs.files import run_folder
from lightning_tasks.training.distributed import mean_of_processes, repeated_rows
from lightning_tasks.training.hparams import plain_data
from lightning_tasks.training.kept_layers import Layers
from lightning_tasks.training.mean import WeightedMean
from lightning_tasks.training.segmentation_metrics import SegmentationScores, scores, write_class_iou
from lightning_tasks.vision import VisionTask

Batch = tuple[Tensor, Tensor]


class SegmentationTask(VisionTask):
    """A class for each pixel of images in [0, 1]; the network normalizes them itself.

    Batches are ``(images [B, 3, H, W]`` float in [0, 1]``, masks [B, H, W]`` int64``)``; in training H = W is the
    network's size, else whole images of any size come, which are predicted by windows. Logs ``train/loss``; over the
    whole split ``{val,test}/loss`` (cross-entropy in nats, a mean over the pixels that count), ``miou``,
    ``mean_accuracy`` and ``overall_accuracy``. After a test the run's folder has ``test_classes.csv`` (IoU and accuracy
    a class). With several processes each image counts once. Predictions are masks ``[B, H, W]``, and a batch to predict
    may be images alone.

    Args:
        model: the name of a timm backbone for a Segmenter, or the Segmenter's arguments, ``{"backbone": NAME,
            "img_size": 512, "decoder": "linear", "backbone_options": {...}}`` (see
            `lightning_tasks.models.segmenter.Segmenter`); or a model of mmsegmentation's (extra `[mmseg]`), with its
            own losses and its own prediction of whole images: ``{"mmseg_config": NAME_OR_PATH}`` and, where wanted,
            ``crop_size`` in pixels, ``pretrained``, and ``cfg_options``, changes of the configuration by dotted path.
        num_classes: number of classes; where None, that of the data module, kept in the hyper-parameters.
        ignore_index: the label of pixels that do not count.
        mechanism: that of the attention layers, as :func:`~attention_modules.swap_attention` takes it: short
            name, class, function, import path, or ``{class_path, init_args}``.
        options: its options by name. In a decoder's layers `scaled` by a matrix needs ``num_tokens``, that of
            the patches and the classes (512 pixels, 150 classes: 1,174).
        layers: which layers get it, counted in module order (a Segmenter's backbone first, then its
            decoder); all where None.
        other_attention: the mechanism of the other layers, with its defaults.
        backbone_checkpoint: checkpoint of an `ImageClassificationTask` whose weights the backbone starts from, in a
            fit; position embeddings are resized.
        stride: pixels from one window to the next in whole images; half a window where None.
        windows_at_once: windows that go through the network together.
        scales: factors that images are scaled by; class probabilities are averaged over them.
        flip: whether mirror images count too.
        optimizer, scheduler, scheduler_interval, scheduler_monitor: see :class:`~lightning_tasks.base.BaseTask`.
        param_groups: rules in place of timm's groups, in which norms, biases and embeddings of positions and classes
            have no weight decay; ``[]`` for one group.

    Raises:
        TypeError: if something cannot be stored in a checkpoint; the text names the cure.
        ValueError: if a backbone or mechanism is unknown (the nearest names are given), or a value is out of its
            limits; on building, if the number of classes or the size of crops does not fit the data.

    Example:
        >>> from attnswap.tasks import SegmentationTask
        >>> task = SegmentationTask("deit_tiny_patch16_224", num_classes=11, mechanism="rpc", layers=[0])
    """

    metric_names = ("scores", "loss")

    def __init__(
        self,
        model: str | dict[str, Any] = "deit_tiny_patch16_224",
        num_classes: int | None = None,
        ignore_index: int = 255,
        mechanism: Buildable = "softmax",
        options: dict[str, Any] | None = None,
        layers: Layers = None,
        other_attention: Buildable = "softmax",
        backbone_checkpoint: str | None = None,
        stride: int | None = None,
        windows_at_once: int = 1,
        scales: list[float] | None = None,
        flip: bool = False,
        optimizer: Buildable = "AdamW",
        scheduler: Buildable | None = None,
        scheduler_interval: str = "step",
        scheduler_monitor: str = "val/loss",
        param_groups: list[dict[str, Any]] | None = None,
    ) -> None:
        if num_classes is not None:
            _check_ignored(ignore_index, num_classes)
        scales = [1.0] if scales is None else [float(scale) for scale in scales]
        if not scales or not all(0 < scale < math.inf for scale in scales):
            raise ValueError(f"scales are {scales}: give at least one, all above 0")
        description = {"backbone": model} if isinstance(model, str) else plain_data(model, "model")
        inference = {"stride": stride, "windows_at_once": windows_at_once, "scales": scales}
        inference["flip"] = check_flag("flip", flip)
        builder = segmentation_builder(description, inference)  # its checks, before anything is built
        super().__init__(
            model=description,
            num_classes=num_classes,
            ignore_index=ignore_index,
            mechanism=mechanism,
            options=options,
            layers=layers,
            other_attention=other_attention,
            backbone_checkpoint=backbone_checkpoint,
            **inference,
            optimizer=optimizer,
            scheduler=scheduler,
            scheduler_interval=scheduler_interval,
            scheduler_monitor=scheduler_monitor,
            param_groups=param_groups,
        )
        self._builder = builder

    def build_model(self) -> nn.Module:
        """The network with its attention swapped, and the metrics.

        Raises:
            ValueError: if the number of classes is unknown, or the data has more, or its crops do not fit.
        """
        num_classes, datamodule = self.resolve_classes(), self.datamodule
        _check_ignored(self.hparams["ignore_index"], num_classes)
        self._check_ignore_index(datamodule)
        crops, size = getattr(datamodule, "crop_size", None), self._builder.crop_size
        if None not in (crops, size) and crops != size:
            raise ValueError(
                f"the data module gives crops of {crops} pixels, the network is built for {size}: give the data module "
                f"crop_size={size}, or the model {self._builder.size_key}={crops}"
            )
        network = self._builder.build(num_classes)
        self.swap(network)
        path = self.hparams["backbone_checkpoint"]
        if path is not None and self._trainer is not None and getattr(self._trainer, "ckpt_path", None) is None:
            load_backbone(network, path)
        for stage in ("val", "test"):
            setattr(self, f"{stage}_scores", SegmentationScores(num_classes, self.hparams["ignore_index"]))
            setattr(self, f"{stage}_loss", WeightedMean())
        return network

    def _check_ignore_index(self, datamodule: Any) -> None:
        marked = getattr(datamodule, "ignore_index", None)
        if marked is not None and marked != self.hparams["ignore_index"]:
            raise ValueError(
                f"ignore_index={self.hparams['ignore_index']}, but the data module marks pixels that do not count by "
                f"{marked}: give ignore_index={marked}"
            )

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[B, K, H, W]`` of whole images ``[B, 3, H, W]`` in [0, 1], of any size.

        With several scales, or mirror images, the logarithms of the averaged probabilities.
        """
        return torch.cat(list(self.model.bands(images)), -2)

    def predict_masks(self, images: Tensor) -> Tensor:
        """The most likely class of each pixel, ``[B, H, W]``; never holds the logits of a whole image."""
        if not len(images):
            return images.new_zeros(0, *images.shape[2:], dtype=torch.int64)
        return torch.cat([band.argmax(1) for band in self.model.bands(images)], -2)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Check a batch while it is still on the CPU."""
        if not (self.trainer.predicting and len(_parts(batch)) == 1):
            check_masks(batch, self.hparams["num_classes"], self.hparams["ignore_index"])
        return batch

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The sum of the network's loss terms; a Segmenter's is the mean cross-entropy in nats."""
        images, masks = batch
        terms = self.model.losses(images, masks, self.hparams["ignore_index"])
        loss = torch.stack(list(terms.values())).sum()
        parts = {f"train/{name}": term for name, term in terms.items()} if len(terms) > 1 else {}
        for name, value in {**parts, "train/loss": loss}.items():
            joined = mean_of_processes(self._trainer, value.detach(), len(masks))
            if joined is not None:  # else every image of the batch was damaged, in every process
                self.log(name, joined, prog_bar=name == "train/loss", batch_size=len(masks))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Add a batch to the metrics under ``val/``; returns its predicted masks."""
        return self._evaluate("val", batch, batch_idx, self.trainer.val_dataloaders)

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Add a batch to the metrics under ``test/``; returns its predicted masks."""
        return self._evaluate("test", batch, batch_idx, self.trainer.test_dataloaders)

    def predict_step(self, batch: Batch | Tensor, batch_idx: int) -> Tensor:
        """Predicted masks ``[B, H, W]``, int64, of images alone or with masks."""
        return self.predict_masks(_parts(batch)[0])

    def prediction_rows(self, prediction: Tensor, batch: Batch | Tensor) -> list[dict[str, Any]]:
        """A row per image: its mask."""
        return [{"mask": mask} for mask in prediction]

    def _evaluate(self, stage: str, batch: Batch, batch_idx: int, dataloader: Any) -> Tensor:
        images, masks = batch
        repeated = repeated_rows(dataloader, batch_idx, len(masks))
        if repeated is not None and repeated.any():
            images, masks = images[~repeated], masks[~repeated]
        if not len(masks):  # every image of the batch was damaged, or repeated
            return masks
        ignored, predicted, top = self.hparams["ignore_index"], [], 0
        mean_loss = getattr(self, f"{stage}_loss")
        for band in self.model.bands(images):
            rows = masks[:, top : top + band.shape[-2]]
            counted = (rows != ignored).sum()
            total = functional.cross_entropy(band.float(), rows, ignore_index=ignored, reduction="sum")
            mean_loss.update(total / counted.clamp(min=1), counted)
            predicted.append(band.argmax(1))
            top += band.shape[-2]
        found = torch.cat(predicted, 1)
        getattr(self, f"{stage}_scores").update(found, masks)
        return found

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of the split."""
        self._log_scores("val")

    def on_test_epoch_end(self) -> None:
        """Log the metrics of the split, and write those of each class into the run's folder."""
        confusion = self._log_scores("test")
        folder = run_folder(self.trainer)
        if folder is not None and self.trainer.is_global_zero:
            write_class_iou(folder / "test_classes.csv", self.class_names, confusion)

    def _log_scores(self, stage: str) -> Tensor:
        metric, mean_loss = getattr(self, f"{stage}_scores"), getattr(self, f"{stage}_loss")
        confusion = metric.compute().cpu()
        values = {"loss": mean_loss.compute(), **scores(confusion)}
        # Sums over all processes already: every process logs the same.
        self.log_dict({f"{stage}/{name}": float(value) for name, value in values.items()}, sync_dist=True)
        return confusion

    @property
    def head_names(self) -> list[str]:
        """Names of the modules and Parameters whose shape follows from the number of classes."""
        return [f"model.{name}" for name in self.model.head_names()]


def _check_ignored(ignore_index: int, num_classes: int) -> None:
    if 0 <= ignore_index < num_classes:
        raise ValueError(f"ignore_index={ignore_index} is one of the {num_classes} classes: give another number")


def _parts(batch: Any) -> Sequence[Tensor]:
    return (batch,) if isinstance(batch, Tensor) else batch


def check_masks(batch: Any, num_classes: int, ignore_index: int) -> None:
    """Raise a ValueError where a batch is not (images ``[B, 3, H, W]``, masks ``[B, H, W]`` of known labels).

    Values are looked at on the CPU only: on a device this would wait for it.
    """
    if len(_parts(batch)) != 2:
        raise ValueError(f"a batch must be (images [B, 3, H, W], masks [B, H, W]), got {len(_parts(batch))} parts")
    images, masks = batch
    if images.ndim != 4 or masks.shape != (len(images), *images.shape[2:]):
        raise ValueError(
            f"a batch must be (images [B, 3, H, W], masks [B, H, W]), got {list(images.shape)} and {list(masks.shape)}"
        )
    if masks.dtype != torch.int64 or not images.dtype.is_floating_point:
        raise ValueError(
            f"images must be floating point in [0, 1] and masks int64, got {images.dtype} and {masks.dtype}"
        )
    if masks.device.type != "cpu" or not masks.numel():
        return
    wrong = masks[((masks < 0) | (masks >= num_classes)) & (masks != ignore_index)]
    if len(wrong):
        raise ValueError(
            f"a mask has the label {int(wrong.max())}: there are {num_classes} classes, and ignore_index={ignore_index}"
        )
