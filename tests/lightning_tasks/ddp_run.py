"""Runs that a test starts as a program of its own: ddp_run.py FOLDER DEVICES BATCH_SIZE; text, then masks."""

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger

from datamodules import DigitScenesDataModule
from lightning_tasks import LanguageModelingTask, SegmentationTask
from lightning_tasks.callbacks import AttentionMapLogger, AttentionMonitor, SpectrumMonitor
from tests.lightning_tasks.language_data import SMALL, RandomText

SEGMENTER = {
    "backbone": "deit_tiny_patch16_224",
    "img_size": 32,
    "backbone_options": {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2},
}


def segmentation() -> tuple[SegmentationTask, DigitScenesDataModule]:
    """A task of random weights, and seven scenes one by one: of two processes one gets a scene that does not count."""
    task = SegmentationTask(SEGMENTER, attention="rpc")
    return task, DigitScenesDataModule(num_train=2, num_val=2, num_test=7, batch_size=1, img_size=40, crop_size=32)


def main(folder: Path, devices: int, batch_size: int) -> None:
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    # Not Adam: the gradient of a key bias is zero but for rounding, which Adam would scale to whole steps.
    task = LanguageModelingTask(SMALL, optimizer={"class_path": "SGD", "init_args": {"lr": 0.1, "momentum": 0.9}})
    strategy = "ddp" if devices > 1 else "auto"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        callbacks=[AttentionMonitor(every_n_steps=2), SpectrumMonitor(every_n_steps=4), AttentionMapLogger()],
        max_epochs=2,
        logger=CSVLogger(folder, name="logs"),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = RandomText(batch_size=batch_size)
    trainer.fit(task, data)
    tested = trainer.test(task, data, verbose=False)[0]
    weights = task.model.state_dict()
    pl.seed_everything(2, verbose=False)
    masks_tested = trainer.test(*segmentation(), verbose=False)[0]
    if trainer.is_global_zero:
        torch.save({"weights": weights, "tested": tested, "masks_tested": masks_tested}, folder / "result.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
