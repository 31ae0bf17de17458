"""`attnswap fit|validate|test|predict`: Lightning's command line, with recipes by name and safe checkpoints."""

from __future__ import annotations

import re
from argparse import ArgumentError
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jsonargparse import set_dumper
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_tasks.callbacks.init_from import before_copies
from lightning_tasks.callbacks.writing.run_summary import RunSummary, divergence_of
from lightning_tasks.cli.arguments import (
    RecipeParser,
    argument_refusal,
    spell_out_classes,
    warn_of_last_callback,
)
from lightning_tasks.cli.as_run import keeps_teacher, of_cell, own_callbacks, show_as_run
from lightning_tasks.cli.asked import expand_recipe_names, recipe_of
from lightning_tasks.cli.last_checkpoint import checkpoint_of_job, last_checkpoint
from lightning_tasks.cli.loggers import runs_folder, with_csv_logger
from lightning_tasks.cli.nested_keys import join_nested_keys
from lightning_tasks.cli.predict_images import arguments_of_run, recipe_of_run, sections_of_run, without_nulls
from lightning_tasks.cli.quiet import leave_out_what_is_not_known, quiet
from lightning_tasks.cli.save_config import SaveConfig, dump_plain
from lightning_tasks.cli.stopping import end_in_one_line, has_begun
from lightning_tasks.errors import HINT, UsageError, library_refusal, unknown_metric
from lightning_tasks.files.checkpoint_io import CheckedCheckpointIO, is_sharded
from lightning_tasks.files.names import GIVE_IT, allowed_names, closed_imports, stored_object
from lightning_tasks.files.stored import check_stored, plain_copy
from lightning_tasks.files.weights import read_checkpoint
from lightning_tasks.runs.folder import RUNS, existing_part, release_run_folder
from lightning_tasks.runs.wandb_runs import RunLabels, continue_run, go_offline_without_key, wandb_arguments
from lightning_tasks.training.hparams import import_object, join_arguments
from lightning_tasks.training.kinds import build_typed_classes_only

_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")
_CKPT_WORDS = ("best", "hpc", *(("registry",) if find_spec("litmodels") else ()))  # what Lightning resolves itself


class AttnswapCLI(LightningCLI):
    """LightningCLI with `--init_from`, one folder per run, and checkpoints that override nothing and run no code."""

    def __init__(self, *args: Any, recipe: str | None = None, labels: RunLabels | None = None, **kwargs: Any) -> None:
        """Parse, build and run `recipe`; a run that cannot begin leaves no folder."""
        self._named = recipe
        self._labels = labels
        self._claimed: tuple[Path, Path] | None = None
        self._asked = kwargs["args"][0]
        self._folder: str | None = None
        self._imports = ExitStack()  # closed where a checkpoint has a say
        try:
            with self._imports:
                super().__init__(*args, **kwargs)
        except BaseException as error:
            if self._claimed is not None:
                release_run_folder(*self._claimed)
            refusal = self._refusal(error) if isinstance(error, Exception) else None
            if refusal is not None:
                raise refusal from error
            raise

    def _refusal(self, error: Exception) -> UsageError | None:
        """The error as one of what was asked for; None where it is one already, or none of that."""
        trainer = getattr(self, "trainer", None)
        if trainer is None or not has_begun(trainer):
            return library_refusal(error)
        unknown = unknown_metric(error)
        if unknown is None:
            return None
        kept = "" if self._claimed is None else f" (the run's files stay in {self._claimed[0]})"
        return UsageError(f"after {trainer.global_step} steps{kept}: {unknown} ({HINT})")

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The one that was asked for: each other's parser would take a quarter of a second."""
        return {self._asked: LightningCLI.subcommands()[self._asked]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `--init_from`, `--trust_checkpoint`, and `--images` to `predict`."""
        if self._asked == "predict":
            parser.add_argument(
                "--images",
                type=str | None,
                default=None,
                help="Folder of images to predict in place of the test split, at any depth and under any names; model "
                "and data are those of the checkpoint's run where no --config is given.",
            )
        parser.add_argument(
            "--init_from",
            type=str | None,
            default=None,
            help="Checkpoint to take the weights from, and nothing else (--ckpt_path resumes the whole run). What "
            "a classifier's or segmenter's head has for each class is left out where the classes are others, with a "
            "warning.",
        )
        parser.add_argument(
            "--trust_checkpoint",
            action="store_true",
            help="Import and call whatever the checkpoint of --ckpt_path names. Without it, only classes of attnswap, "
            "torch.nn, torch.optim, torchvision, torchmetrics, lightning, timm, transformers and the packages that "
            "your own configuration names.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, and remember what was given explicitly by the command line and its files."""
        if any(argument.startswith("--print_config") for argument in args):
            show_as_run(self._subcommand_parsers[args[0]], args[0], self._named)
        try:
            args = join_nested_keys(args, parser.parse_args)
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            known = self._subcommand_parsers[args[0]]._option_string_actions
            raise argument_refusal(error, known) from error
        self._given = parser.parse_args(args, defaults=False)
        warn_of_last_callback(args, self.config[self.config.subcommand].trainer.callbacks)

    def _parse_ckpt_path(self) -> None:
        """Let the checkpoint's hyper-parameters fill what neither configuration nor command line gave."""
        section = self.config[self.config.subcommand]
        fits = self.config.subcommand == "fit"
        takes_both = fits and (self._labels or keeps_teacher(section.trainer.callbacks))
        if fits and (own := checkpoint_of_job(section, self._recipe)):
            section.ckpt_path = str(own)
            section.init_from = section.init_from if takes_both else None
            rank_zero_info(f"attnswap: this job goes on from its own {own}")
        if section.get("ckpt_path") and section.get("init_from") and not takes_both:
            raise UsageError(
                "--ckpt_path resumes a run and --init_from starts a new one; give only one of the two (where a saved "
                "config.yaml has the other: --init_from null, or --ckpt_path null)"
            )
        if str(section.get("ckpt_path")) == "last":
            given = self._given[self.config.subcommand].as_dict().get("model") or {}
            section.ckpt_path = str(last_checkpoint(section, given, self._recipe, resumes=fits))
            rank_zero_info(f"attnswap: --ckpt_path last is {section.ckpt_path}")
        if section.get("ckpt_path") and is_sharded(section.ckpt_path) and not section.trust_checkpoint:
            raise UsageError(
                f"--ckpt_path {section.ckpt_path}: torch reads a sharded checkpoint by unpickling, which runs what it "
                "holds; if it is yours or you trust it, give --trust_checkpoint"
            )
        stored = _stored_model(section.get("ckpt_path"), self.config.subcommand)
        section_given = self._given[self.config.subcommand].as_dict()
        given = section_given.get("model") or {}
        if section.get("images"):  # the configuration of a run says null where its data module told
            given = without_nulls(given)
        allowed = None if section.trust_checkpoint else allowed_names(section_given)
        file = f"--ckpt_path {section.get('ckpt_path')}"
        if allowed is not None:
            stored = plain_copy(stored, file)
        check_stored({key: stored[key] for key in stored if key == "class_path"}, allowed, file, given=given)
        model = fill(given, stored, allowed)
        check_stored(model, allowed, file, given=given)
        if model != given and "class_path" in model:
            self._imports.enter_context(closed_imports(allowed, model, self.config.as_dict()))
            try:
                self.config = self.parser.parse_object({self.config.subcommand: {"model": model}}, self.config)
            except ArgumentError as error:
                raise UsageError(f"{file}: {error}; {GIVE_IT}") from error

    def instantiate_classes(self) -> None:
        """Build everything; the images of a folder take the place of the data module."""
        super().instantiate_classes()
        if (folder := self._folder) is not None:
            from attnswap.datamodules.shared.folder import FolderDataModule

            self.datamodule = FolderDataModule(self.datamodule, folder)
            if others := self.datamodule.others:
                left = ", ".join(f"{count} of {suffix}" for suffix, count in sorted(others.items()))
                rank_zero_info(f"attnswap: --images {folder}: files that are no images are left out: {left}")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The trainer, whose checkpoint files are written whole or not at all, and checked when they are read."""
        trainer = super().instantiate_trainer(**kwargs)
        trainer.callbacks = before_copies(vars(trainer)["callbacks"])  # type: ignore[attr-defined]
        leave_out_what_is_not_known(trainer)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = CheckedCheckpointIO()
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        with end_in_one_line(self.trainer):
            super()._run_subcommand(subcommand)

    @property
    def _recipe(self) -> str:
        """The name of the recipe that runs, or of the module where there is no configuration file."""
        return self._named or str(self.config[self.config.subcommand].model.class_path).rsplit(".", 1)[-1]

    def before_instantiate_classes(self) -> None:
        """Give the run its folder and loggers before they are built, so that the saved configuration names them."""
        section = self.config[self.config.subcommand]
        section.pop("trust_checkpoint", None)  # in no saved configuration, which may run with another file
        self._folder = section.pop("images", None)
        if section.weights_only is None:  # left open, it depends on the environment and on where the file is
            section.weights_only = True
        arguments = section.model.get("init_args") or {}
        for name in list(arguments.keys()):
            arguments[name] = join_arguments(arguments[name])
        if self.config.subcommand != "fit" and not (section.init_from or section.ckpt_path):
            rank_zero_warn(
                "no --ckpt_path and no --init_from: untrained weights; the model is as it was built (random, or what "
                "its own settings load, such as pretrained: true)"
            )
        self.trainer_defaults["callbacks"] += own_callbacks(self.config.subcommand, section)
        trainer, wandb_runs = section.trainer, wandb_arguments(section.trainer.logger)
        if self._labels is not None:
            of_cell(trainer)
        if trainer.logger is False or trainer.fast_dev_run:
            return
        root = Path(trainer.default_root_dir or RUNS)
        own_place = self._labels is None
        kept = existing_part(runs_folder(trainer.logger if own_place else None, self._recipe, root))
        trainer.logger, folder = with_csv_logger(trainer.logger, self._recipe, root, own_place)
        self._claimed = folder, kept
        self._prepare_wandb(wandb_runs, section)

    def after_fit(self) -> None:
        """Say of a loss that is not finite, where no RunSummary does."""
        callbacks: list[Callback] = vars(self.trainer)["callbacks"]  # an attribute that Lightning does not declare
        if not any(isinstance(callback, RunSummary) for callback in callbacks):
            for line in divergence_of(self.trainer):
                rank_zero_info(f"attnswap: {line}")

    def _prepare_wandb(self, runs: list[Any], section: Any) -> None:
        """Name the W&B runs, have a resumed one go on, and need no key."""
        if not runs:
            return
        command = self.config.subcommand
        labels = self._labels or RunLabels(None, None, (), command, f"attnswap {command} {self._recipe}")
        for arguments in runs:
            labels.fill(arguments)
        if command == "fit" and section.ckpt_path and Path(section.ckpt_path).is_file():
            continue_run(runs[0], read_checkpoint(section.ckpt_path))
        go_offline_without_key()


def fill(given: dict[str, Any], stored: dict[str, Any], allowed: frozenset[str] | None = None) -> dict[str, Any]:
    """`given` with what it leaves open taken from `stored`, level by level; arguments of another class stay out.

    The levels are those of classes: a plain dictionary that is given is whole. Options of a mechanism stay out where
    the mechanism itself is given. `allowed` are the packages that may be imported to compare classes; None for any.
    """
    if not _same_class(given.get("class_path"), stored.get("class_path"), allowed):
        return given
    arguments, kept = given.get("init_args") or {}, dict(stored.get("init_args") or {})
    for name in [name for name in arguments if arguments[name] != kept.get(name)]:
        kept.pop("options" if name == "mechanism" else f"{name}_options", None)
    for name in arguments.keys() & kept.keys():
        if all(
            isinstance(value, dict) and {"class_path", "init_args"} & value.keys()
            for value in (arguments[name], kept[name])
        ):
            kept[name] = fill(arguments[name], kept[name], allowed)
        else:
            kept[name] = arguments[name]
    filled = {**stored, **given}
    return {**filled, "init_args": {**kept, **{name: arguments[name] for name in arguments.keys() - kept.keys()}}}


def _same_class(one: str | None, other: Any, allowed: frozenset[str] | None) -> bool:
    """Whether two paths name one class (a package and its module may both export it), or one of them is open.

    The other one comes from a checkpoint: of a package that is not allowed, it is not imported, and is another class.
    """
    if one is None or other is None or one == other:
        return True
    try:
        found = import_object(other) if allowed is None else stored_object(other, allowed, "")
        return import_object(one) is found
    except (TypeError, ValueError):
        return False


def _stored_model(path: str | None, command: str) -> dict[str, Any]:
    """`{class_path, init_args}` of the model in a checkpoint file, as far as it is there; Lightning's own words pass.

    Raises:
        UsageError: the file cannot be read, is not of a Lightning run, or holds weights only where a fit resumes.
    """
    if not path or str(path).split(":")[0] in _CKPT_WORDS or is_sharded(path):
        return {}
    try:
        content = read_checkpoint(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--ckpt_path {error}") from error
    if "pytorch-lightning_version" not in content:
        raise UsageError(
            f"--ckpt_path {path}: weights, but no checkpoint of a Lightning run (it has no 'pytorch-lightning_version')"
            "; take them by --init_from in its place"
        )
    if command == "fit" and "optimizer_states" not in content:
        raise UsageError(
            f"--ckpt_path {path}: weights only, so that a fit cannot go on from it; take them by --init_from in its "
            "place"
        )
    hparams = dict(content.get("hyper_parameters", {}))
    hparams.pop("_instantiator", None)
    class_path = hparams.pop("_class_path", None)
    return {**({"class_path": class_path} if class_path else {}), **({"init_args": hparams} if hparams else {})}


class _ParsingCLI(AttnswapCLI):
    """Parses, builds the module alone, whose constructor checks its arguments, and runs nothing."""

    def before_instantiate_classes(self) -> None:
        """Nothing: no folder is claimed."""

    def instantiate_classes(self) -> None:
        """The module."""
        parser = LightningArgumentParser()
        parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
        section = self.config[self.config.subcommand]
        parser.instantiate_classes(parser.parse_object({"model": section.model.as_dict()}))

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing."""


def run(arguments: Sequence[str], callbacks: Sequence[Callback] = (), labels: RunLabels | None = None) -> AttnswapCLI:
    """Run one trainer command; `arguments` start with its name, `callbacks` come on top of the configured ones.

    A W&B run gets the `labels` where the configuration gives it none.

    Raises:
        UsageError: a recipe or part that does not exist, or an argument that the parser refuses.
    """
    return _command_line(AttnswapCLI, arguments, callbacks, labels=labels)


def check_arguments(arguments: Sequence[str]) -> Any:
    """Parse the arguments of :func:`run` and build the module, and run nothing; return the trainer's section.

    Raises:
        UsageError: as there.
        Exception: from the module's constructor.
    """
    config = _command_line(_ParsingCLI, arguments, ()).config
    return config[config.subcommand].trainer


def _command_line(
    kind: type[AttnswapCLI], arguments: Sequence[str], callbacks: Sequence[Callback], **options: Any
) -> AttnswapCLI:
    build_typed_classes_only()
    set_dumper("yaml", dump_plain)
    recipe = recipe_of(arguments)
    imports: AbstractContextManager[None] = nullcontext()
    if arguments[0] == "predict" and (sections := sections_of_run(arguments)):
        words = _DOTTED.findall(" ".join(arguments))
        imports = closed_imports(None if "--trust_checkpoint" in arguments else allowed_names(), sections, words)
        recipe, arguments = recipe or recipe_of_run(arguments), arguments_of_run(arguments)
    expanded = spell_out_classes(expand_recipe_names(arguments))
    with imports, quiet():
        return kind(
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},
            parser_class=RecipeParser,
            parser_kwargs={"prog": "attnswap", "exit_on_error": False, "allow_abbrev": False},
            trainer_defaults={"callbacks": list(callbacks)},
            args=expanded,
            recipe=recipe,
            auto_configure_optimizers=False,  # made before the model is built or swapped, it would train other weights
            **options,
        )
