"""What `attnswap predict` leaves: a table with a row per sample, and an image of each predicted mask."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_warn
from PIL import Image
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_tasks.callbacks.base import check_alone
from lightning_tasks.runs.files import run_folder

TABLE = "predictions.csv"


class PredictionTable(BasePredictionWriter):
    """Write what a task predicts to `predictions.csv` in the run's folder, and print where.

    A task says what a row holds: ``prediction_rows(prediction, batch)`` gives a dictionary per sample of the batch, in
    order, of what ``predict_step`` returned for it. Before that stand ``index``, the sample's place in its data set,
    and ``sample``, its name (the file, say) where the data set's ``images.name(index)`` tells it. A mask of classes
    ``[H, W]`` in a row becomes a PNG file of these numbers, ``predictions/INDEX_NAME.png``, in 8 bits where they fit
    and in 16 elsewhere, and the table has its path. Where nothing is logged the table goes into the trainer's
    ``default_root_dir``, under a name that is still free; so does a second one in a run's folder. With several
    processes each sample is there once, and each needs to see the same folder. The table is there whole or not at all.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import PredictionTable
        >>> trainer = Trainer(callbacks=[PredictionTable()], logger=False)
    """

    def __init__(self) -> None:
        super().__init__("batch")
        self._path: Path | None = None
        self._count = 0
        self._dataset: Any = None
        self._written: set[Path] = set()

    def setup(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a second one."""
        super().setup(trainer, pl_module, stage)
        check_alone(trainer, PredictionTable)

    def on_predict_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Find the place of the table, the same one in every process."""
        self._path, self._count = None, 0
        if trainer.fast_dev_run:
            return
        if not hasattr(pl_module, "prediction_rows"):
            rank_zero_warn(f"predictions are not written: {type(pl_module).__name__} has no prediction_rows")
            return
        loaders = tree_leaves(trainer.predict_dataloaders)
        if len(loaders) > 1:
            rank_zero_warn(f"predictions are not written: a table is of one loader, and there are {len(loaders)}")
            return
        self._dataset = getattr(loaders[0], "dataset", None)
        path = Path(run_folder(trainer) or trainer.default_root_dir) / TABLE  # of rank zero, which the others are told
        again = path in self._written or not trainer.loggers
        self._path = Path(trainer.strategy.broadcast(str(_free(path) if again else path)))
        self._written.add(self._path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _part(self._path, trainer.global_rank).unlink(missing_ok=True)

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Add a batch to this process's part of the table."""
        if self._path is None:
            return
        rows: list[dict[str, Any]] = pl_module.prediction_rows(prediction, batch)  # type: ignore[operator]
        indices = list(batch_indices or range(self._count, self._count + len(rows)))
        if len(indices) != len(rows) and self._dataset is not None:  # what cannot be read is left out of its batch
            indices = [index for index in indices if self._dataset[index] is not None]
        self._count += len(rows)
        name = getattr(getattr(self._dataset, "images", None), "name", None)
        named = [{"index": index, **({"sample": name(index)} if name else {})} for index in indices]
        whole = [{**one, **row} for one, row in zip(named, rows, strict=True)]
        for row in whole:
            for key, value in row.items():
                if isinstance(value, Tensor):
                    row[key] = _save_mask(self._path, value, row)
        _append(_part(self._path, trainer.global_rank), whole)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Join the parts of all processes, in the order of the data set."""
        if self._path is None:
            return
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            parts = [part for rank in range(trainer.world_size) if (part := _part(self._path, rank)).is_file()]
            rows = {int(row["index"]): row for part in parts for row in _read(part)}  # a sampler may repeat some
            for part in parts:
                part.unlink()
            whole = _part(self._path, 0)
            _append(whole, [rows[index] for index in sorted(rows)])
            whole.replace(self._path)
            print(f"predictions: {len(rows):,} in {self._path}")


def _save_mask(table: Path, mask: Tensor, row: dict[str, Any]) -> str:
    """Write the image of a mask; its path relative to the table's folder."""
    stem = re.sub(r"[^\w.-]+", "_", Path(row.get("sample", "")).stem)
    path = table.with_suffix("") / ("_".join(filter(None, (f"{row['index']:06d}", stem))) + ".png")
    path.parent.mkdir(exist_ok=True)
    classes = mask.cpu().numpy()
    Image.fromarray(classes.astype(np.uint8 if classes.max(initial=0) < 256 else np.uint16)).save(path)
    return path.relative_to(table.parent).as_posix()


def _part(path: Path, rank: int) -> Path:
    return path.with_suffix(f".part_{rank}")


def _free(path: Path) -> Path:
    number = 0
    while path.exists():
        number += 1
        path = path.with_stem(f"{Path(TABLE).stem}_{number}")
    return path


def _append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows behind others.

    Raises:
        ValueError: if one has other columns.
    """
    columns: list[str] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            columns = next(csv.reader(file), [])
    with path.open("a", newline="", encoding="utf-8", errors="backslashreplace") as file:  # names may be no Unicode
        writer = csv.DictWriter(file, columns or list(rows[0] if rows else ()))
        if rows and not columns:
            writer.writeheader()
        for row in rows:
            if row.keys() != {*writer.fieldnames}:
                raise ValueError(
                    f"prediction_rows gave {', '.join(writer.fieldnames)} before, and {', '.join(row)} now: give every "
                    "row the same names"
                )
            writer.writerow(row)


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
