"""A robustness table at the end of a test: clean, attacked, corrupted, shifted, out of distribution, words swapped."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn

from lightning_tasks.callbacks.base import Callback
from lightning_tasks.callbacks.limits import check_integer, check_number
from lightning_tasks.robustness.attack_table import read_attacks, read_eps
from lightning_tasks.robustness.class_folders import class_folders, imagenet_wnids, read_wnids
from lightning_tasks.robustness.corruption_error import mean_corruption_error, relative_mean_corruption_error
from lightning_tasks.robustness.corruptions import (
    CORRUPTIONS,
    EXTRA_CORRUPTIONS,
    SEVERITIES,
    SMALLEST,
    check_corruption,
    corruption_library,
)
from lightning_tasks.robustness.image_suite import (
    Subject,
    attack_measurement,
    clean_measurement,
    corruption_measurement,
    gradient_measurement,
    mean_corruption_row,
    ood_measurement,
    shift_measurement,
)
from lightning_tasks.robustness.linf import check_batch
from lightning_tasks.robustness.segmentation_suite import (
    MaskedImages,
    clean_mask_measurement,
    corrupted_mask_measurement,
)
from lightning_tasks.robustness.suite import Measurement, RowStore, fingerprint, run_suite
from lightning_tasks.robustness.table import COLUMNS, Row, corruption_errors, markdown, read_csv, write_csv
from lightning_tasks.robustness.text_suite import Text, clean_text_measurement, word_swap_measurement

TABLE, MARKDOWN, ROWS = "robustness.csv", "robustness.md", "robustness_rows.jsonl"


class RobustnessEvaluation(Callback):
    """Measures how robust a model is when a test ends, and writes one table: CSV, Markdown, and a W&B table.

    For image classifiers whose ``forward`` takes images in [0, 1] and returns logits: accuracy clean, under each
    attack and eps, under each corruption and their mean (mCE and relative mCE against a baseline's table), on folders
    of shifted data, and how well out-of-distribution images are told. For
    :class:`~lightning_tasks.SegmentationTask`: mIoU clean and under corruptions. For
    :class:`~lightning_tasks.LanguageModelingTask`: perplexity, clean and with words swapped. `docs/robustness.md` says
    what each row means.

    Each figure is kept as soon as it is measured, so that a run which was killed goes on where it was when the same
    command is given again; figures of other weights, settings or data are never used. The images are the first
    ``num_images`` of the first test loader. Lightning's inference mode may stay on. One process only.

    Args:
        num_images: how many images, all where None. They are held in memory.
        attacks: names, or ``{"name": ..., option: value}``: fgsm, pgd, spsa, square, transfer (``source``: checkpoint
            of the twin; ``attack``: what to run on it, pgd by default), released_fgsm, released_pgd, released_spsa
            (``std``: what the model divides by). Of two with one name, one needs ``label``, its name in the table.
        eps: radii in [0, 1], as numbers or fractions ("4/255").
        corruptions: "common" (15), "all" (19), or a list of names; an empty list for none.
        severities: of 1 to 5.
        baseline: robustness.csv of the run that mCE is relative to, or its folder.
        shifts: folders of images by wnid (ImageNet-A, -R) by the name they get in the table: accuracy.
        ood: folders of images from outside of the classes (ImageNet-O), likewise: AUROC, AUPR, FPR95.
        wnids: file with the class names in the order of the logits; where None, the data module's ``wnids``, else
            those of ImageNet-1k.
        word_swap: share of the words to swap; None for none.
        word_swap_token: id of the generic token (`<unk>`), itself no word.
        word_swap_keep: ids of further tokens that are no words (`<eos>`).
        batch_size: images or windows at a time.
        num_workers: processes that corrupt and read images.
        seed: of all that is drawn.
        rows: file of the figures that are done; by default robustness_rows.jsonl beside the folders version_N of the
            recipe's runs, or in the folder of the run where it has another name.

    Raises:
        ValueError: for what is unknown or out of its limits, before anything runs.
        ImportError: when the test starts, if corruptions are asked for and their library is not installed.
    """

    def __init__(
        self,
        num_images: int | None = 500,
        attacks: list[str | dict[str, Any]] | None = None,
        eps: list[str | float] | None = None,
        corruptions: list[str] | Literal["common", "all"] = "common",
        severities: list[int] | None = None,
        baseline: str | None = None,
        shifts: dict[str, str] | None = None,
        ood: dict[str, str] | None = None,
        wnids: str | None = None,
        word_swap: float | None = 0.025,
        word_swap_token: int = 0,
        word_swap_keep: list[int] | None = None,
        batch_size: int = 100,
        num_workers: int = 0,
        seed: int = 0,
        rows: str | None = None,
    ) -> None:
        super().__init__()
        if num_images is not None:
            check_integer("num_images", num_images, 1)
        check_integer("batch_size", batch_size, 1)
        for name, value in (("num_workers", num_workers), ("seed", seed), ("word_swap_token", word_swap_token)):
            check_integer(name, value, 0)
        for value in word_swap_keep or ():
            check_integer("an id of word_swap_keep", value, 0)
        self.num_images, self.batch_size, self.num_workers, self.seed = num_images, batch_size, num_workers, seed
        self.attacks = read_attacks(["fgsm", "pgd"] if attacks is None else attacks)
        self.eps = [read_eps(each) for each in (["1/255", "4/255"] if eps is None else eps)]
        if isinstance(corruptions, str):
            corruptions = [*CORRUPTIONS, *(EXTRA_CORRUPTIONS if corruptions == "all" else ())]
        self.corruptions, self.severities = list(corruptions), list(SEVERITIES if severities is None else severities)
        for name in self.corruptions:
            for severity in self.severities:
                check_corruption(name, severity)
        self.baseline_of = baseline
        self.baseline = None if baseline is None else _read_baseline(Path(baseline), self._corrupted())
        self.shifts, self.ood, self.wnids = dict(shifts or {}), dict(ood or {}), wnids
        for root in (*self.shifts.values(), *self.ood.values()):
            class_folders(root)
        for setting in self.attacks:
            if setting.source is not None and not Path(setting.source).is_file():
                raise ValueError(f"the attack 'transfer' has source {setting.source!r}: no such file")
        if word_swap is not None:
            check_number("word_swap, the share of words that are swapped,", word_swap, minimum=0.0, maximum=1.0)
        self.word_swap = None if word_swap is None else float(word_swap)
        self.word_swap_token = word_swap_token
        self.word_swap_keep = [1] if word_swap_keep is None else list(word_swap_keep)
        self.rows = None if rows is None else Path(rows)
        self.table: list[Row] = []
        """The rows of the last test."""
        self._seen: list[tuple[Tensor, Tensor]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "test":
            return
        if trainer.world_size > 1:
            raise ValueError(
                f"RobustnessEvaluation measures in one process, got {trainer.world_size}; test with trainer.devices=1"
            )
        if self.corruptions and self.severities and not _is_language_model(pl_module):
            corruption_library()
        if _is_segmentation(pl_module):
            if self.baseline is not None:
                raise ValueError("baseline is for mCE, which is of classifiers: leave it out for a SegmentationTask")
            if self.attacks or self.shifts or self.ood:
                rank_zero_warn("attacks, shifts and ood are for classifiers: not measured of a SegmentationTask")

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seen = []

    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if dataloader_idx:
            return
        inputs, targets = _pair(batch, pl_module)
        if not _is_language_model(pl_module):
            if not _is_segmentation(pl_module):
                check_batch(inputs, targets)
            if self.num_images is not None:
                missing = self.num_images - sum(len(seen) for seen, _ in self._seen)
                inputs, targets = inputs[:missing], targets[:missing]
        if len(inputs):
            self._seen.append((inputs.detach().cpu().clone(), targets.detach().cpu().clone()))

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._seen:
            raise ValueError("RobustnessEvaluation saw no test batch: the first test loader is empty")
        with torch.inference_mode(False), torch.no_grad():
            seen, self._seen = self._seen, []
            if _is_segmentation(pl_module):
                self._measure_masks(trainer, pl_module, seen)
            else:
                inputs, targets = (torch.cat(parts) for parts in zip(*seen, strict=True))
                measure = self._measure_text if _is_language_model(pl_module) else self._measure_images
                measure(trainer, pl_module, inputs, targets)
        for row in self.table:
            if not math.isnan(row.value):
                pl_module.log(row.label, row.value)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._seen = []

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._seen = []

    def _measure_text(self, trainer: pl.Trainer, pl_module: Any, inputs: Tensor, targets: Tensor) -> None:
        text = Text(_InPrecision(pl_module, trainer), inputs, targets, pl_module.device, self.batch_size, self.seed)
        measurements = [clean_text_measurement(text)]
        if self.word_swap is not None:
            measurements.append(word_swap_measurement(text, self.word_swap, self.word_swap_token, self.word_swap_keep))

        def one_pass() -> None:
            part = slice(0, self.batch_size)
            Text(text.task, inputs[part], targets[part], text.device, self.batch_size).log_probabilities(
                inputs[part], targets[part], lambda share: None
            )

        self._run(trainer, pl_module, measurements, one_pass, len(inputs), self.batch_size, [inputs, targets])

    def _measure_masks(self, trainer: pl.Trainer, pl_module: Any, seen: Sequence[tuple[Tensor, Tensor]]) -> None:
        images = [image for batch, _ in seen for image in batch]
        masks = [mask for _, batch in seen for mask in batch]
        # The loader's batches: it knows which images have one size, and how many fit into memory.
        batch_size = 1 if len({image.shape for image in images}) > 1 else max(len(batch) for batch, _ in seen)
        classes, ignored = pl_module.hparams["num_classes"], pl_module.hparams["ignore_index"]
        model = _InPrecision(pl_module, trainer)
        subject = MaskedImages(
            *(model, images, masks, classes, ignored, pl_module.device, batch_size, self.num_workers, self.seed)
        )
        measurements = [clean_mask_measurement(subject)]
        too_small = [image for image in images if min(image.shape[1:]) < SMALLEST]
        if too_small and self.corruptions:
            rank_zero_warn(f"no corruption is measured: {_too_small(too_small[0][None])}")
        else:
            measurements += [corrupted_mask_measurement(subject, *which) for which in self._corrupted()]

        def one_pass() -> None:
            subject.scores(images[:batch_size], lambda share: None)

        self._run(trainer, pl_module, measurements, one_pass, len(images), batch_size, [*images, *masks])

    def _measure_images(self, trainer: pl.Trainer, pl_module: Any, images: Tensor, labels: Tensor) -> None:
        model = _InPrecision(pl_module, trainer)
        subject = Subject(model, images, labels, pl_module.device, self.batch_size, self.num_workers, self.seed)
        measurements = [clean_measurement(subject)]
        white_box = {setting.at_own_prediction for setting in self.attacks if setting.attack.white_box and self.eps}
        measurements += [gradient_measurement(subject, own) for own in sorted(white_box)]
        for setting in self.attacks:
            source, digest = None, ""
            if setting.source is not None:
                digest = hashlib.sha256(Path(setting.source).read_bytes()).hexdigest()
                source = cache(lambda path=setting.source: _twin(path, pl_module, trainer))
            measurements += [attack_measurement(subject, setting, eps, source, digest) for eps in self.eps]
        too_small = min(images.shape[2:]) < SMALLEST
        if not too_small:
            measurements += [corruption_measurement(subject, *which) for which in self._corrupted()]
        elif self.corruptions:
            rank_zero_warn(f"no corruption is measured: {_too_small(images)}")
        wnids = self._wnids(trainer, subject) if self.shifts or self.ood else None
        for name, root in self.shifts.items():
            if wnids is None:
                raise ValueError(f"{name} needs the class names of the model, in order: give wnids=, a file of them")
            measurements.append(shift_measurement(subject, name, root, wnids))
        measurements += [ood_measurement(subject, name, root, wnids) for name, root in self.ood.items()]
        self._warn_of_few_classes(subject)

        def one_pass() -> None:
            subject.logits(images[: self.batch_size])

        extra = [Row("mean corruption", "", "", "accuracy", math.nan, note=_too_small(images))] if too_small else []
        data = [images, labels]
        extra = extra if self.corruptions else []
        self._run(trainer, pl_module, measurements, one_pass, len(images), self.batch_size, data, extra)

    def _run(
        self,
        trainer: pl.Trainer,
        pl_module: Any,
        measurements: Sequence[Measurement[Row]],
        one_pass: Callable[[], None],
        count: int,
        batch_size: int,
        tensors: Sequence[Tensor],
        extra: Sequence[Row] = (),
    ) -> None:
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        store = RowStore(self.rows or _beside_runs(folder) / ROWS, Row)
        settings = [dict(getattr(pl_module, "hparams", {})), str(trainer.precision), self.batch_size, self.seed]
        identity = fingerprint(pl_module, settings, *tensors)
        one_pass()  # the first one also prepares what later ones find ready
        started = time.monotonic()
        one_pass()
        seconds = (time.monotonic() - started) * count / min(count, batch_size)

        def write(rows: list[Row]) -> None:
            self.table = [*_with_means(rows, self.baseline, f"against {self.baseline_of}"), *extra]
            write_csv(self.table, folder / TABLE)
            (folder / MARKDOWN).write_text(markdown(self.table), encoding="utf-8")

        def end_when_asked() -> None:
            if trainer.received_sigterm:  # which Lightning notes, and heeds between training batches alone
                raise SIGTERMException

        show = trainer.progress_bar_callback is not None
        run_suite(measurements, identity, store, seconds, show, write, between=end_when_asked)
        for logger in trainer.loggers:
            if hasattr(logger, "log_table"):  # W&B's, of either Lightning package
                data = [[getattr(row, column) for column in COLUMNS] for row in self.table]
                logger.log_table("robustness", columns=list(COLUMNS), data=data)
        print(f"\n{markdown(self.table)}\nfiles: {folder / TABLE}, {folder / MARKDOWN}; rows kept in {store.path}")

    def _corrupted(self) -> list[tuple[str, int]]:
        return [(name, severity) for name in self.corruptions for severity in self.severities]

    def _wnids(self, trainer: Any, subject: Subject) -> list[str] | None:
        classes = subject.logits(subject.images[:1]).shape[1]
        own = getattr(trainer.datamodule, "wnids", None) if self.wnids is None else read_wnids(self.wnids)
        if own is None:
            return imagenet_wnids() if classes == 1000 else None
        if len(own) != classes:
            raise ValueError(f"the model has {classes} classes, and {len(own)} wnids were given")
        return list(own)

    def _warn_of_few_classes(self, subject: Subject) -> None:
        classes = subject.logits(subject.images[:1]).shape[1]
        seen = len(subject.labels.unique())
        if seen < min(classes, len(subject.labels)) / 4:
            rank_zero_warn(
                f"the first {len(subject.labels)} test images are of {seen} of {classes} classes only: the loader goes "
                "through them class by class; set num_images: null, or give the test set in a mixed, fixed order"
            )


class _InPrecision(nn.Module):
    """A LightningModule as its trainer runs it, in the trainer's precision."""

    def __init__(self, module: Any, trainer: Any) -> None:
        super().__init__()
        self.module = module
        self._plugin = trainer.precision_plugin

    def forward(self, images: Tensor) -> Tensor:
        with self._plugin.forward_context():
            return self.module(self._plugin.convert_input(images))

    def _get_name(self) -> str:
        return type(self.module).__name__

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        with self._plugin.forward_context():
            return self.module.predict_step(batch, batch_idx)


def _is_language_model(pl_module: Any) -> bool:
    from lightning_tasks.language_modeling import LanguageModelingTask

    return isinstance(pl_module, LanguageModelingTask)


def _is_segmentation(pl_module: Any) -> bool:
    from lightning_tasks.segmentation import SegmentationTask

    return isinstance(pl_module, SegmentationTask)


def _pair(batch: Any, pl_module: Any) -> tuple[Tensor, Tensor]:
    """The two tensors of a batch.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(batch, (list, tuple)) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch):
        return batch[0], batch[1]
    raise ValueError(
        "RobustnessEvaluation needs batches (images, labels), (images, masks) of a SegmentationTask, or (inputs, "
        "targets) of a LanguageModelingTask; "
        f"{type(pl_module).__name__} is given {type(batch).__name__}"
    )


def _beside_runs(folder: Path) -> Path:
    """The folder that holds the runs where ``folder`` is one of them by its name, else ``folder`` itself."""
    return folder.parent if re.fullmatch(r"version_\d+", folder.name) else folder


def _too_small(images: Tensor) -> str:
    return f"images are {images.shape[2]} x {images.shape[3]}, the corruptions need {SMALLEST} x {SMALLEST}"


def _read_baseline(path: Path, corrupted: Sequence[tuple[str, int]]) -> list[Row]:
    """The rows of a baseline's table.

    Raises:
        ValueError: if there is none, it lacks a corruption or severity, or has no error at all under a corruption.
    """
    file = path / TABLE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"baseline {path}: no such file; give the {TABLE} of a run, or its folder")
    rows = read_csv(file)
    mean_corruption_error(dict.fromkeys(corrupted, 0.0), corruption_errors(rows)[1])
    return rows


def _with_means(rows: Sequence[Row], baseline: Sequence[Row] | None, note: str) -> list[Row]:
    """The rows, the mean over corruptions among them, and the errors relative to the baseline."""
    means = mean_corruption_row(rows)
    if means and baseline is not None:
        clean, errors = corruption_errors(rows)
        means = _with_errors(means, errors, clean, baseline, note)
    last = max((place for place, row in enumerate(rows) if row.test == "corruption"), default=-1)
    return [*rows[: last + 1], *means, *rows[last + 1 :]]


def _with_errors(
    means: list[Row], errors: Mapping[tuple[str, int], float], clean: float, baseline: Sequence[Row], note: str
) -> list[Row]:
    """The rows, and mCE and relative mCE; their note says where the baseline has another number of images."""
    base_clean, base = corruption_errors(baseline)
    samples = means[0].samples
    others = {row.samples for row in baseline if row.test == "corruption"} - {samples}
    note += f", measured on {max(others):,} images" if others else ""
    result = list(means)
    for metric, compute in (
        ("mCE", partial(mean_corruption_error, errors, base)),
        ("relative mCE", partial(relative_mean_corruption_error, errors, clean, base, base_clean)),
    ):
        try:
            value, said = compute(), note
        except ValueError as error:  # a corruption that does the baseline no harm, at the severities measured so far
            value, said = math.nan, str(error)
        result.append(Row("mean corruption", "", "", metric, value, samples, note=said))
    return result


def _twin(path: str, pl_module: Any, trainer: Any) -> nn.Module:
    """The module in a checkpoint, swapped as it was there, where the tested one is.

    Its class is the one that the checkpoint names, else that of the tested module.
    """
    from lightning_tasks.loading import load_module

    module = load_module(path, type(pl_module)).to(pl_module.device).eval().requires_grad_(False)
    return _InPrecision(module, trainer)
