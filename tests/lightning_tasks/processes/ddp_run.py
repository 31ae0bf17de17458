"""Runs that a test starts as a program of its own: ddp_run.py FOLDER DEVICES BATCH_SIZE; text, then masks."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from attnswap.datamodules import DigitScenesDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_tasks import LanguageModelingTask, SegmentationTask
from lightning_tasks.callbacks import AttentionMapLogger, AttentionMonitor, PursuitMonitor, SpectrumMonitor
from tests.lightning_tasks.callbacks.resuming.test_what_follows import Own, fit
from tests.lightning_tasks.language_data import SMALL, RandomText

SEGMENTER = {
    "backbone": "deit_tiny_patch16_224",
    "img_size": 32,
    "backbone_options": {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2},
}


def segmentation(num_val: int = 2) -> tuple[SegmentationTask, DigitScenesDataModule]:
    """A task of random weights, and seven scenes one by one: of two processes one gets a scene that does not count."""
    task = SegmentationTask(SEGMENTER, mechanism="rpc")
    return task, DigitScenesDataModule(
        num_train=2, num_val=num_val, num_test=7, batch_size=1, img_size=40, crop_size=32
    )


class OwnDraws(pl.Callback):
    """Each process draws other dropout than the rest."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.manual_seed(100 + trainer.global_rank)


class LastLoss(pl.Callback):
    """What a process's own training step returned."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.value = outputs["loss"]


def resumed(folder: Path, **options: Any) -> dict[str, Any]:
    """Weights of a fit with dropout, and of one that goes on from its first epoch, seeded otherwise."""
    model = {**SMALL, "init_args": {**SMALL["init_args"], "dropout": 0.3}}
    ends = {}
    for name in ("whole", "resumed"):
        pl.seed_everything(len(ends), verbose=False)
        task = LanguageModelingTask(model)
        callbacks = [ModelCheckpoint(folder / "epochs", "{epoch}", save_top_k=-1), OwnDraws()]
        trainer = pl.Trainer(max_epochs=2, logger=False, callbacks=callbacks[: 2 - len(ends)], **options)
        trainer.fit(task, RandomText(2), ckpt_path=folder / "epochs" / "epoch=0.ckpt" if ends else None)
        ends[name] = task.model.state_dict()
    return ends


def followed(folder: Path, **options: Any) -> None:
    """Check that runs from within an epoch and from its last batch have the means of the whole one, in each process."""
    options = {name: options[name] for name in ("devices", "strategy")}
    save = {"every_n_train_steps": 2}
    ends, *whole = fit(Own("loss_epoch"), folder / "steps", save, [OwnDraws()], **options)
    for at in (2, 6, 8):
        path = str(folder / "steps" / f"step={at}.ckpt")
        later, *resumed = fit(Own("loss_epoch"), folder / "others", save, resumed=path, **options)
        assert later == ends[len(ends) - len(later) :], at
        assert resumed[0] == whole[0]
        assert resumed[2] == whole[2]
        assert all(torch.equal(resumed[1][name], value) for name, value in whole[1].items()), at


def main(folder: Path, devices: int, batch_size: int) -> None:
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    # Not Adam: the gradient of a key bias is zero but for rounding, which Adam would scale to whole steps.
    task = LanguageModelingTask(SMALL, optimizer={"class_path": "SGD", "init_args": {"lr": 0.1, "momentum": 0.9}})
    options = {
        "accelerator": "cpu",
        "devices": devices,
        "strategy": "ddp" if devices > 1 else "auto",
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(
        callbacks=[AttentionMonitor(every_n_steps=2), SpectrumMonitor(every_n_steps=4), AttentionMapLogger()],
        max_epochs=2,
        logger=CSVLogger(folder, name="logs"),
        log_every_n_steps=1,
        **options,
    )
    data = RandomText(batch_size=batch_size)
    trainer.fit(task, data)
    tested = trainer.test(task, data, verbose=False)[0]
    weights = task.model.state_dict()
    pl.seed_everything(2, verbose=False)
    masks_tested = trainer.test(*segmentation(), verbose=False)[0]
    own_loss = LastLoss()
    limits = {"max_steps": 1, "limit_val_batches": 0, "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(callbacks=[own_loss], **limits, **options)
    trainer.fit(*segmentation())
    logged = trainer.callback_metrics["train/loss"]
    losses = [trainer.strategy.all_gather(value).view(-1).tolist() for value in (own_loss.value, logged)]
    ends = resumed(folder, **options)
    followed(folder, **options)
    pl.seed_everything(2, verbose=False)
    trainer = pl.Trainer(callbacks=[PursuitMonitor()], logger=False, **options)
    trainer.validate(*segmentation(num_val=1), verbose=False)
    pursued = {name: float(value) for name, value in trainer.callback_metrics.items() if "pursuit" in name}
    if trainer.is_global_zero:
        found = {
            "weights": weights,
            "tested": tested,
            "masks_tested": masks_tested,
            "losses": losses,
            "pursued": pursued,
            **ends,
        }
        torch.save(found, folder / "result.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
