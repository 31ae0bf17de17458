"""A robustness table at the end of a test: clean, attacked, corrupted, shifted, out of distribution, words swapped."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from attention_modules.hosts.report import swapped_mechanisms
from lightning_tasks.callbacks.base import Callback, check_alone
from lightning_tasks.callbacks.swap import log_acting
from lightning_tasks.files.swaps import warn_of_other_attention
from lightning_tasks.robustness.attacks.common import NonFiniteLogitsError
from lightning_tasks.robustness.evaluation import Batch, Kind, Plan, nan_rows, nan_where_given
from lightning_tasks.robustness.images import ImageKind
from lightning_tasks.robustness.masks import MaskKind
from lightning_tasks.robustness.scores import with_means
from lightning_tasks.robustness.settings import read_settings
from lightning_tasks.robustness.tested_model import InPrecision
from lightning_tasks.robustness.text import TextKind
from lightning_tasks.runs.files import run_folder
from lightning_tasks.runs.loggers import loggers_named
from lightning_tasks.runs.measurements import RowStore, fingerprint, run_suite
from lightning_tasks.runs.robustness import SHOWN, TABLE, Row, markdown, write_csv
from lightning_tasks.runs.safe_files import written_whole

MARKDOWN, ROWS = "robustness.md", "robustness_rows.jsonl"
_HALF = ("16-true", "bf16-true")


class RobustnessEvaluation(Callback):
    """Measures how robust a model is when a test ends, and writes one table: CSV, Markdown, and a W&B table.

    For image classifiers whose ``forward`` takes images in [0, 1] and returns logits: accuracy clean, under each
    attack and eps, under each corruption and their mean (mCE and relative mCE against a baseline's table), on folders
    of shifted data, and how well out-of-distribution images are told. For
    :class:`~lightning_tasks.SegmentationTask`: mIoU clean, attacked and under corruptions. For
    :class:`~lightning_tasks.LanguageModelingTask`: perplexity, clean and with words swapped. `docs/robustness.md` says
    what each row means.

    Each figure is kept as soon as it is measured, so that a run which was killed goes on where it was when the same
    command is given again; figures of other weights, settings or data are never used. The images are the first
    ``num_images`` of the first test loader. Lightning's inference mode may stay on. One process only. A callback that
    exchanges weights for a test (an average of them) comes after it.

    Args:
        num_images: how many images, all where None. They are held in memory.
        attacks: names, or ``{"name": ..., option: value}``: fgsm, pgd, spsa, square, autoattack (``attacks``,
            ``queries``), transfer (``source``: checkpoint of the twin; ``attack``: what to run on it, pgd by default;
            ``mechanism``: other options of its mechanisms, or of the model's own where there is no source),
            released_fgsm, released_pgd, released_spsa, released_noise (``std``: what the model divides by); in the L2
            norm carlini_wagner, hop_skip_jump, in the L1 norm sparse_l1_descent, released_sparse_l1_descent, which
            need ``eps``, a list of radii of their own. Of two with one name, one needs ``label``, its name in the
            table. Of a :class:`~lightning_tasks.SegmentationTask`: fgsm and pgd.
        eps: radii in [0, 1], as numbers or fractions ("4/255").
        corruptions: "common" (15), "all" (19), or a list of names; an empty list for none.
        severities: of 1 to 5.
        baseline: robustness.csv of the run that mCE is relative to, or its folder; ``"alexnet"`` for AlexNet's
            published errors, at severities 1 to 5; or a list of both.
        shifts: folders of images by wnid (ImageNet-A, -R) by the name they get in the table: accuracy. One that is not
            there is looked for where data sets are, and so are the other folders.
        ood: images from outside of the classes by the name they get: AUROC, AUPR, FPR95. A folder of folders of them
            (ImageNet-O), or a mapping: ``{"folder": ..., "classes": [...], "without": "cifar10"}`` for some of its
            folders, or none of ImageNet-1k that show a class of CIFAR-10; ``{"data": "digits"}`` for the test images of
            a data set. A folder that is not there is looked for where data sets are.
        wnids: file with the class names in the order of the logits; where None, the data module's ``wnids``, else
            those of ImageNet-1k.
        word_swap: share of the words to swap; None for none.
        word_swap_token: id of the generic token (`<unk>`), itself no word.
        word_swap_keep: ids of further tokens that are no words (`<eos>`).
        batch_size: images or windows at a time; those with masks come in the batches of the data module.
        num_workers: processes that corrupt and read images.
        seed: of all that is drawn.
        rows: file of the figures that are done; by default robustness_rows.jsonl beside the folders version_N of the
            recipe's runs, or in the folder of the run where it has another name.
        ood_scores: what tells them, by the library pytorch-ood: msp, energy, vim and knn, of which the last two are
            fitted to training images. Where None, 1 - the maximum softmax probability, without the library.
        ood_fit_images: to how many, evenly chosen; all where None.
        imagenet_c: folder of the released ImageNet-C, CORRUPTION/SEVERITY/CLASS: its images are read as they come, in
            place of corrupting the test images; ``num_images`` of each folder count, evenly chosen.

    Raises:
        ValueError: for what is unknown or out of its limits, and for a second one in the trainer, before anything
            runs; when the test starts, in ``16-true`` and ``bf16-true``.
        UsageError: when the test ends, if robustness_rows.jsonl is a link out of its folder that was not given.
        ImportError: when the test starts, if corruptions are asked for and their library is not installed.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import RobustnessEvaluation
        >>> evaluation = RobustnessEvaluation(attacks=["fgsm"], eps=["4/255"], corruptions=[])
        >>> trainer = Trainer(callbacks=[evaluation], logger=False)
    """

    def __init__(
        self,
        num_images: int | None = 500,
        attacks: list[str | dict[str, Any]] | None = None,
        eps: list[str | float] | None = None,
        corruptions: list[str] | Literal["common", "all"] = "common",
        severities: list[int] | None = None,
        baseline: str | list[str] | None = None,
        shifts: dict[str, str] | None = None,
        ood: dict[str, str | dict[str, Any]] | None = None,
        wnids: str | None = None,
        word_swap: float | None = 0.025,
        word_swap_token: int = 0,
        word_swap_keep: list[int] | None = None,
        batch_size: int = 100,
        num_workers: int = 0,
        seed: int = 0,
        rows: str | None = None,
        ood_scores: list[str] | None = None,
        ood_fit_images: int | None = None,
        imagenet_c: str | None = None,
    ) -> None:
        super().__init__()
        self.settings = read_settings(
            num_images=num_images,
            attacks=attacks,
            eps=eps,
            corruptions=corruptions,
            severities=severities,
            baseline=baseline,
            imagenet_c=imagenet_c,
            shifts=shifts,
            ood=ood,
            ood_scores=ood_scores,
            ood_fit_images=ood_fit_images,
            wnids=wnids,
            word_swap=word_swap,
            word_swap_token=word_swap_token,
            word_swap_keep=word_swap_keep,
            batch_size=batch_size,
            num_workers=num_workers,
            seed=seed,
        )
        self.rows = None if rows is None else Path(rows)
        self.table: list[Row] = []
        """The rows of the last test; none where it ended before any was measured."""
        self._seen: list[Batch] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_alone(trainer, RobustnessEvaluation)  # before a fit too, whose test would find it hours later
        half = _half_precision(trainer, pl_module)
        if stage == "fit" and half:
            rank_zero_warn(f"a test will be refused: {half}")
        if stage != "test":
            return
        self.table = []  # of an earlier test, which would stay where this one fails or has no batch
        if half:
            raise ValueError(half)
        if trainer.world_size > 1:
            raise ValueError(
                f"RobustnessEvaluation measures in one process, got {trainer.world_size}; test with trainer.devices=1"
            )
        _kind_of(pl_module).check(self.settings)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        from lightning_tasks.base import BaseTask  # with the tasks come timm and their metrics

        if not isinstance(pl_module, BaseTask):  # which warns itself
            warn_of_other_attention(pl_module, checkpoint)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seen = []
        if swapped_mechanisms(pl_module):  # also what a checkpoint brought, of which the configuration says nothing
            log_acting(trainer, pl_module)

    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if dataloader_idx:
            return
        most = self.settings.num_images
        room = None if most is None else most - sum(len(seen) for seen, _ in self._seen)
        inputs, targets = _kind_of(pl_module).first(self.settings, _pair(batch, pl_module), room)
        if len(inputs):
            self._seen.append((inputs.detach().cpu().clone(), targets.detach().cpu().clone()))

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._seen:
            raise ValueError("RobustnessEvaluation saw no test batch: the first test loader is empty")
        with torch.inference_mode(False), torch.no_grad(), unlogged(pl_module):
            seen, self._seen = self._seen, []
            model = InPrecision(pl_module, trainer)
            plan = _kind_of(pl_module).plan(self.settings, model, pl_module, trainer, seen)
            try:
                plan.one_pass()  # the first one also prepares what later ones find ready
            except NonFiniteLogitsError as error:
                rank_zero_warn(f"all figures are nan: {error}")
                rows = [row for each in plan.measurements for row in nan_rows(each)]
                self._write(_folder_of(trainer), [*with_means(rows), *plan.unmeasured])
            else:
                self._run(trainer, pl_module, plan)
        for row in self.table:
            if row.is_measured:
                pl_module.log(row.label, row.value)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._seen = []

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._seen = []

    def _write(self, folder: Path, table: list[Row]) -> None:
        self.table = table
        write_csv(table, folder / TABLE)
        with written_whole(folder / MARKDOWN) as partial:
            partial.write_text(markdown(table), encoding="utf-8")

    def _run(self, trainer: pl.Trainer, pl_module: pl.LightningModule, plan: Plan) -> None:
        folder = _folder_of(trainer)
        kept = _beside_runs(folder, loggers_named(trainer, "WandbLogger")) / ROWS
        store = RowStore(self.rows.resolve() if self.rows else kept, Row)  # a link that is given is meant
        settings = [
            dict(getattr(pl_module, "hparams", {})),
            str(trainer.precision),
            self.settings.batch_size,
            self.settings.seed,
        ]
        identity = fingerprint(pl_module, settings, *plan.data)
        started = time.monotonic()
        plan.one_pass()
        seconds = (time.monotonic() - started) * plan.count / min(plan.count, plan.batch_size)

        def write(rows: list[Row]) -> None:
            self._write(folder, [*with_means(rows, self.settings.baselines), *plan.unmeasured])

        def end_when_asked() -> None:
            if trainer.received_sigterm:  # which Lightning notes, and heeds between training batches alone
                raise SIGTERMException

        show = trainer.progress_bar_callback is not None
        measurements = [nan_where_given(each) for each in plan.measurements]
        run_suite(measurements, identity, store, seconds, show, write, between=end_when_asked)
        for logger in trainer.loggers:
            if hasattr(logger, "log_table"):  # W&B's, of either Lightning package
                data = [[getattr(row, column) for column in SHOWN] for row in self.table]
                logger.log_table("robustness", columns=list(SHOWN), data=data)
        print(f"\n{markdown(self.table)}\nfiles: {folder / TABLE}, {folder / MARKDOWN}; rows kept in {store.path}")


def _half_precision(trainer: pl.Trainer, pl_module: pl.LightningModule) -> str:
    """What speaks against measuring images in the trainer's precision; "" where nothing does."""
    precision = str(trainer.precision)
    if precision not in _HALF or isinstance(_kind_of(pl_module), TextKind):
        return ""
    return (
        f"trainer.precision is {precision}, in which images too are of half precision, and RobustnessEvaluation needs "
        f"them in float32: use {precision.replace('true', 'mixed')}, or 32-true"
    )


def _folder_of(trainer: pl.Trainer) -> Path:
    folder = Path(run_folder(trainer) or trainer.default_root_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def unlogged(pl_module: pl.LightningModule) -> Iterator[None]:
    """Nothing that the module logs in its ``forward`` counts meanwhile: it would be of attacked images."""
    names = [name for name in ("log", "log_dict") if callable(getattr(type(pl_module), name, None))]
    own = {name: vars(pl_module)[name] for name in names if name in vars(pl_module)}
    try:
        vars(pl_module).update(dict.fromkeys(names, lambda *given, **options: None))
        yield
    finally:
        for name in names:
            del vars(pl_module)[name]
        vars(pl_module).update(own)


def _kind_of(task: Any) -> Kind:
    """The kind of task that a LightningModule is: image classification, if no other."""
    from lightning_tasks.language_modeling import LanguageModelingTask  # with the tasks come timm and their metrics
    from lightning_tasks.segmentation import SegmentationTask

    kinds: dict[type, type[Kind]] = {LanguageModelingTask: TextKind, SegmentationTask: MaskKind}
    return next((kind for known, kind in kinds.items() if isinstance(task, known)), ImageKind)()


def _pair(batch: Any, pl_module: Any) -> tuple[Tensor, Tensor]:
    """The two tensors of a batch.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(batch, (list, tuple)) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch):
        return batch[0], batch[1]
    raise ValueError(
        "RobustnessEvaluation needs batches (images, labels), (images, masks) of a SegmentationTask, or (inputs, "
        f"targets) of a LanguageModelingTask; {type(pl_module).__name__} is given {_described(batch)}: give "
        "trainer.test a loader of such batches"
    )


def _described(batch: Any) -> str:
    if isinstance(batch, dict):
        return f"a dict of {', '.join(map(str, batch))}"
    if isinstance(batch, (list, tuple)):
        return f"{len(batch)} parts ({', '.join(type(part).__name__ for part in batch)})"
    return type(batch).__name__


def _beside_runs(folder: Path, wandb: list[Any]) -> Path:
    """The folder that holds the runs where ``folder`` is one of them by its name, else ``folder`` itself."""
    is_run = re.fullmatch(r"version_\d+", folder.name) or folder.name in {logger.version for logger in wandb}
    return folder.parent if is_run else folder
