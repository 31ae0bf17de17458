"""Image classification with any timm model and any attention mechanism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
)

from attention_modules.mechanisms.shared.options import check_flag
from lightning_tasks.base import Buildable
from lightning_tasks.figures.confusion import draw_confusion
from lightning_tasks.models.timm_model import (
    InputLimits,
    build_timm_model,
    check_batch,
    check_model_name,
    head_names,
    normalization,
)
from lightning_tasks.runs.files import run_folder, save_figure, save_table
from lightning_tasks.training.distributed import mean_of_processes, repeated_rows
from lightning_tasks.training.kept_layers import Layers
from lightning_tasks.training.mean import WeightedMean
from lightning_tasks.training.mixup import Mixing, step_seed
from lightning_tasks.vision import VisionTask

Batch = tuple[Tensor, Tensor]
TOP_K = 5


class ImageClassificationTask(VisionTask):
    """Classification of images in [0, 1] with a timm model; it normalizes them itself.

    Batches are ``(images [B, C, H, W]`` float in [0, 1]``, labels [B]`` int64``)``, of any B, also none. Logs
    ``train/loss`` (of the mixed targets) and ``train/top1`` (against the class with the largest share); over the whole
    split ``{val,test}/loss`` (cross-entropy in nats, without smoothing), ``top1``, ``top5`` (only where there are more
    than five classes), ``calibration_error`` (expected, 15 bins) and ``class_accuracy`` (the mean over classes). After
    a test the run's folder has ``test_classes.csv`` (accuracy a class) and ``test_confusion.png``, and W&B has both
    where its logger is there. With several processes each sample counts once.

    Args:
        model: the name of a timm model, ``NAME`` or ``NAME.WEIGHTS``.
        num_classes: number of classes; where None, that of the data module, kept in the hyper-parameters.
        mechanism: that of the attention layers: short name, class, or ``{class_path, init_args}``.
        options: its options by name.
        layers: which layers get it, counted in module order; all where None; ``{"keep_every": 4}`` for three of
            four, as :class:`~attnswap.callbacks.SwapAttention` says.
        other_attention: the mechanism of the other layers, with its defaults.
        pretrained: start from timm's weights (a download where they are not in its cache).
        model_options: further arguments of ``timm.create_model``: img_size, in_chans, patch_size, embed_dim, depth,
            num_heads, drop_path_rate, ...
        mixup, cutmix, mix_prob, mix_switch_prob, label_smoothing, random_erasing: see
            :class:`~lightning_tasks.training.mixup.Mixing`.
        layer_decay: factor on the learning rate from one layer to the one below, or None for one rate.
        mean, std: a channel, for the normalization; where None, those of the timm model.
        optimizer, scheduler, scheduler_interval, scheduler_monitor: see :class:`~lightning_tasks.base.BaseTask`.
        param_groups: rules in place of timm's groups, in which norms, biases and position embeddings have no weight
            decay; ``[]`` for one group.

    Raises:
        TypeError: if something cannot be stored in a checkpoint; the text names the cure.
        ValueError: if timm has no such model (the nearest names are given), a mechanism is unknown, or a value is out
            of its limits; on building, if the number of classes, the channels or the size do not fit the data, or
            timm's weights cannot be had.

    Example:
        >>> from attnswap.tasks import ImageClassificationTask
        >>> options = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
        >>> task = ImageClassificationTask(num_classes=10, mechanism="rpc", layers=[0], model_options=options)
    """

    image_mean: Tensor
    image_std: Tensor

    metric_names = ("top1", "metrics", "loss", "classes", "confusion")

    def __init__(
        self,
        model: str = "vit_tiny_patch16_224",
        num_classes: int | None = None,
        mechanism: Buildable = "softmax",
        options: dict[str, Any] | None = None,
        layers: Layers = None,
        other_attention: Buildable = "softmax",
        pretrained: bool = False,
        model_options: dict[str, Any] | None = None,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        mix_prob: float = 1.0,
        mix_switch_prob: float = 0.5,
        label_smoothing: float = 0.0,
        random_erasing: float = 0.0,
        layer_decay: float | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        optimizer: Buildable = "AdamW",
        scheduler: Buildable | None = None,
        scheduler_interval: str = "step",
        scheduler_monitor: str = "val/loss",
        param_groups: list[dict[str, Any]] | None = None,
    ) -> None:
        if layer_decay is not None and param_groups is not None:
            raise ValueError("layer_decay makes the optimizer's groups, and so does param_groups: give one of the two")
        mixing = {
            "mixup": mixup,
            "cutmix": cutmix,
            "mix_prob": mix_prob,
            "mix_switch_prob": mix_switch_prob,
            "label_smoothing": label_smoothing,
            "random_erasing": random_erasing,
        }
        Mixing(num_classes=2, **mixing)  # its checks, before anything is built
        super().__init__(
            model=check_model_name(model),
            num_classes=num_classes,
            mechanism=mechanism,
            options=options,
            layers=layers,
            other_attention=other_attention,
            pretrained=check_flag("pretrained", pretrained),
            model_options=model_options,
            **mixing,
            layer_decay=layer_decay,
            mean=mean,
            std=std,
            optimizer=optimizer,
            scheduler=scheduler,
            scheduler_interval=scheduler_interval,
            scheduler_monitor=scheduler_monitor,
            param_groups=param_groups,
        )
        self._mixing_options = mixing
        self._soft_loss = SoftTargetCrossEntropy()

    def build_model(self) -> nn.Module:
        """The timm model with its attention swapped, the normalization and the metrics.

        Raises:
            ValueError: if the number of classes is unknown, or the data has more, or other images.
        """
        num_classes, datamodule = self.resolve_classes(), self.datamodule
        options = self.hparams["model_options"] or {}
        model = build_timm_model(self.hparams["model"], num_classes, self.hparams["pretrained"], options)
        self._limits = InputLimits.of(model, self.hparams["model"], options)
        self.in_chans = self._limits.channels
        if getattr(datamodule, "img_size", None) is not None and hasattr(datamodule, "in_chans"):
            self._limits.check((datamodule.in_chans, datamodule.img_size, datamodule.img_size))
        self.swap(model)
        for name, values in zip(("mean", "std"), self._normalization(model), strict=True):
            self.register_buffer(f"image_{name}", torch.tensor(values).view(-1, 1, 1), persistent=False)
        self.mixing = Mixing(num_classes, **self._mixing_options)
        self._make_metrics(num_classes)
        return model

    def _normalization(self, model: nn.Module) -> tuple[list[float], list[float]]:
        return normalization(model, self.in_chans, self.hparams["mean"], self.hparams["std"])

    def _make_metrics(self, num_classes: int) -> None:
        unchecked: dict[str, Any] = {"validate_args": False}  # check_batch did, without waiting for the device
        measures: dict[str, Metric | MetricCollection] = {
            "top1": MulticlassAccuracy(num_classes, average="micro", **unchecked),
            "class_accuracy": MulticlassAccuracy(num_classes, average="macro", **unchecked),
            "calibration_error": MulticlassCalibrationError(num_classes, n_bins=15, **unchecked),
        }
        if num_classes > TOP_K:
            measures["top5"] = MulticlassAccuracy(num_classes, average="micro", top_k=TOP_K, **unchecked)
        # No compute groups: torchmetrics would take top1 and top5 for one where they agree on the first batch.
        collection = MetricCollection(measures, compute_groups=False)
        self.train_top1 = MulticlassAccuracy(num_classes, average="micro", **unchecked)
        self.val_metrics, self.test_metrics = collection.clone(prefix="val/"), collection.clone(prefix="test/")
        self.val_loss, self.test_loss = WeightedMean(), WeightedMean()
        self.test_classes = MulticlassAccuracy(num_classes, average=None, **unchecked)
        self.test_confusion = MulticlassConfusionMatrix(num_classes, **unchecked)

    def normalize(self, images: Tensor) -> Tensor:
        """Images as the network wants them, from images ``[B, C, H, W]`` in [0, 1].

        Raises:
            ValueError: if channels or size are not the model's.
        """
        if images.ndim != 4:
            raise ValueError(f"images must be [B, C, H, W], got {list(images.shape)}")
        self._limits.check(images.shape[1:])
        return (images - self.image_mean) / self.image_std

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[B, num_classes]`` of images ``[B, C, H, W]`` in [0, 1]."""
        return self.model(self.normalize(images))

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Check a batch while it is still on the CPU."""
        check_batch(batch, self.hparams["num_classes"])
        return batch

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean cross-entropy in nats against the mixed and smoothed targets."""
        images, labels = batch
        seed = step_seed(self.current_epoch, self.global_rank, batch_idx)
        images, targets = self.mixing(self.normalize(images), labels, seed)
        logits = self.model(images)
        if len(labels):
            loss = self._soft_loss(logits.float(), targets)
            self.train_top1(logits, targets.argmax(1))
            self.log("train/top1", self.train_top1, batch_size=len(labels))
        else:  # every image of the batch was damaged
            loss = logits.float().sum()
        joined = mean_of_processes(self._trainer, loss.detach(), len(labels))
        if joined is not None:  # else every process's were
            self.log("train/loss", joined, prog_bar=True, batch_size=len(labels))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to the metrics under ``val/``."""
        self._evaluate("val", batch, batch_idx, self.trainer.val_dataloaders)

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Add a batch to the metrics under ``test/`` and to the report a class; returns its logits, float32."""
        return self._evaluate("test", batch, batch_idx, self.trainer.test_dataloaders)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Probabilities ``[B, num_classes]``, float32."""
        return self(batch[0]).float().softmax(-1)

    def prediction_rows(self, prediction: Tensor, batch: Batch) -> list[dict[str, Any]]:
        """A row per sample of probabilities ``[B, num_classes]``: class, name, probability, and the best five."""
        names, size = self.class_names, min(TOP_K, prediction.shape[1])
        probabilities, classes = (part.tolist() for part in prediction.topk(size))
        return [
            {
                "class": best[0],
                "name": names[best[0]],
                "probability": f"{shares[0]:.6f}",
                f"top{size}": " ".join(map(str, best)),
                f"top{size}_probabilities": " ".join(f"{share:.6f}" for share in shares),
            }
            for best, shares in zip(classes, probabilities, strict=True)
        ]

    def _evaluate(self, stage: str, batch: Batch, batch_idx: int, dataloader: Any) -> Tensor:
        images, labels = batch
        repeated = repeated_rows(dataloader, batch_idx, len(labels))
        if repeated is not None and repeated.any():
            images, labels = images[~repeated], labels[~repeated]
        metrics, mean_loss = getattr(self, f"{stage}_metrics"), getattr(self, f"{stage}_loss")
        logits = images.new_zeros(0, self.hparams["num_classes"])
        if len(labels):
            logits = self(images).float()
            mean_loss.update(functional.cross_entropy(logits, labels), len(labels))
            probabilities = logits.softmax(-1)
            metrics.update(probabilities, labels)
            if stage == "test":
                self.test_classes.update(probabilities, labels)
                self.test_confusion.update(probabilities, labels)
        self.log(f"{stage}/loss", mean_loss, prog_bar=True, batch_size=len(labels))
        self.log_dict(metrics, prog_bar=False, batch_size=len(labels))
        return logits

    def on_test_epoch_end(self) -> None:
        """Write the accuracy a class and the confusion matrix into the run's folder."""
        accuracy, confusion = self.test_classes.compute().cpu(), self.test_confusion.compute().cpu()
        folder = run_folder(self.trainer)
        if folder is None or not self.trainer.is_global_zero:
            return
        names = self.class_names
        table = class_table(names, confusion.sum(1), accuracy)
        save_table(self.trainer, folder / "test_classes.csv", "test/classes", table)
        save_figure(self.trainer, draw_confusion(confusion, names), "test/confusion")

    @property
    def head_names(self) -> list[str]:
        """Names of the modules whose shape follows from the number of classes."""
        return [f"model.{name}" for name in head_names(self.model)]


def class_table(names: Sequence[str], counts: Tensor, accuracy: Tensor) -> list[dict[str, Any]]:
    """A row per class: its number and name, how many samples, and their accuracy, None where there are none."""
    rows = zip(names, counts.tolist(), accuracy.tolist(), strict=True)
    return [
        {"class": index, "name": name, "samples": count, "accuracy": round(share, 4) if count else None}
        for index, (name, count, share) in enumerate(rows)
    ]
