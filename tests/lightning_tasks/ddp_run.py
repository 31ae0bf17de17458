"""A fit that a test starts as a program of its own: ddp_run.py FOLDER DEVICES BATCH_SIZE."""

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_tasks import LanguageModelingTask
from lightning_tasks.callbacks import AttentionMapLogger, AttentionMonitor, SpectrumMonitor
from tests.lightning_tasks.language_data import SMALL, RandomText


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
    if trainer.is_global_zero:
        torch.save({"weights": task.model.state_dict(), "tested": tested}, folder / "result.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
