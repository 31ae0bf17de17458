"""Figures of predicted masks beside the true ones."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lightning_tasks.callbacks.base import Callback, check_alone
from lightning_tasks.figures.masks import draw_masks
from lightning_tasks.runs.files import save_figure


class SegmentationOverlay(Callback):
    """Draw image, truth and prediction of the first images of the first process, with a legend.

    For steps that return predicted masks ``[B, H, W]``, as those of :class:`~lightning_tasks.SegmentationTask` do. In a
    fit every n-th epoch's validation is drawn, into ``val_overlay.png``, which holds the newest, and into W&B and
    TensorBoard, which keep all; ``validate``, ``test`` and ``predict`` draw once. Images that come without masks, to be
    predicted, are drawn without truth.

    Args:
        every_n_epochs: epochs from one figure to the next.
        num_images: how many images.

    Raises:
        ValueError: if a number is below 1; when a trainer starts, if it has a second ``SegmentationOverlay``.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import SegmentationOverlay
        >>> trainer = Trainer(callbacks=[SegmentationOverlay(every_n_epochs=5)], logger=False)
    """

    def __init__(self, every_n_epochs: int = 1, num_images: int = 4) -> None:
        super().__init__()
        for name, value in (("every_n_epochs", every_n_epochs), ("num_images", num_images)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}: give an integer of at least 1")
        self.every_n_epochs, self.num_images = every_n_epochs, num_images
        self._seen: list[tuple[Tensor, Tensor | None, Tensor]] = []

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        check_alone(trainer, SegmentationOverlay)
        self._seen = []  # of a run that ended before it could draw

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        due = trainer.state.fn != "fit" or (trainer.current_epoch + 1) % self.every_n_epochs == 0
        if due and dataloader_idx == 0:
            self._keep(outputs, batch)

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if dataloader_idx == 0:
            self._keep(outputs, batch)

    on_predict_batch_end = on_test_batch_end

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._draw(trainer, pl_module, "val/overlay")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._draw(trainer, pl_module, "test/overlay")

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._draw(trainer, pl_module, "predict/overlay")

    @rank_zero_only
    def _keep(self, outputs: Any, batch: Any) -> None:
        if not isinstance(outputs, Tensor):
            raise ValueError(
                f"SegmentationOverlay needs steps that return predicted masks [B, H, W], got {type(outputs).__name__}"
            )
        missing = self.num_images - len(self._seen)
        if not missing:
            return
        images, *masks = (batch,) if isinstance(batch, Tensor) else batch
        shown = [part[:missing].detach().cpu() for part in (images, *masks, outputs)]
        # Not strict: what a sampler repeated at the end of the split has no prediction.
        for image, *truth, predicted in zip(*shown, strict=False):
            self._seen.append((image.float(), truth[0] if truth else None, predicted))

    @rank_zero_only
    def _draw(self, trainer: pl.Trainer, pl_module: Any, name: str) -> None:
        seen, self._seen = self._seen, []
        if not seen or trainer.sanity_checking:
            return
        images = [image.permute(1, 2, 0).clamp(0, 1).numpy() for image, _, _ in seen]
        truth = [mask.numpy() for _, mask, _ in seen if mask is not None]
        predicted = {"prediction": [mask.numpy() for _, _, mask in seen]}
        masks = {"truth": truth, **predicted} if truth else predicted
        save_figure(trainer, draw_masks(images, masks, pl_module.class_names), name)
