"""`attnswap show-batch`: a figure of the first batch of a data module, as the model will get it."""

from __future__ import annotations

import json
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, seed_everything
from lightning.pytorch.cli import LightningArgumentParser

from lightning_tasks.cli.arguments import argument_refusal
from lightning_tasks.cli.asked import value_of
from lightning_tasks.errors import UsageError
from lightning_tasks.recipes import read_settings
from lightning_tasks.recipes.variants import find_variant
from lightning_tasks.training.hparams import import_object
from lightning_tasks.training.kinds import build_typed_classes_only


def data_arguments(recipe: str) -> tuple[list[str], int | None]:
    """The arguments that say what the data of a recipe, by name or path, are, and its seed.

    Raises:
        UsageError: there is no such recipe, or it has no data.
    """
    variant = find_variant(recipe)
    settings = read_settings(Path(variant.config))
    if not isinstance(settings.get("data"), dict):
        raise UsageError(f"{variant.config} has no section 'data'; give --data CLASS")
    seed = settings.get("seed_everything")
    seed = seed if isinstance(seed, int) and not isinstance(seed, bool) else None
    changed = [argument for argument in variant.overrides if argument.startswith("--data")]
    return ["--data", json.dumps(settings["data"]), *changed], seed


def main(arguments: Sequence[str]) -> None:
    """Run `attnswap show-batch` with these arguments.

    Raises:
        UsageError: no data module was given, one whose batches are no images, or
            arguments that the parser refuses.
    """
    build_typed_classes_only()
    parser = LightningArgumentParser(
        prog="attnswap show-batch",
        description="Draw the first images of a data module, as the model will get them.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=str | None, default=None, help="A recipe, by name or path; its data is taken.")
    parser.add_argument("--output", type=str, default="batch.png", help="The PNG file to write.")
    parser.add_argument("--split", type=str, default="train", help="train, validation or test.")
    parser.add_argument("--num_images", type=int, default=16, help="How many images.")
    parser.add_argument("--seed", type=int | None, default=None, help="Seed of order and augmentation.")
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True, required=False)
    given, seed = list(arguments), None
    recipe = value_of(given, "--config")
    if recipe is not None:
        section, seed = data_arguments(recipe)
        given = [*section, *given]
    try:
        options = parser.parse_args(given)
    except ArgumentError as error:
        raise argument_refusal(error, parser._option_string_actions) from error
    if options.data is None:
        raise UsageError("show-batch needs --config RECIPE or --data CLASS")
    if not hasattr(import_object(options.data.class_path), "show_batch"):
        raise UsageError(f"{options.data.class_path} has no show_batch: its batches are no images")
    seed_everything(next((value for value in (options.seed, seed) if value is not None), 0), verbose=False)
    datamodule: Any = parser.instantiate_classes(options).data
    datamodule.prepare_data()
    datamodule.setup({"train": "fit", "validation": "validate"}.get(options.split, options.split))
    print(f"figure: {datamodule.show_batch(options.output, options.split, options.num_images)}")
