"""What a name of a recipe stands for: a file, and what a variant of it changes, without importing torch.

A file may have a section `variants: {NAME: {KEY: VALUE}}`. In a recipe, each variant is the recipe with these keys
changed; in a comparison (a file with `base`), it is the base with them. `FILE/NAME` means one variant.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_tasks.errors import UsageError
from lightning_tasks.recipes.schema import Comparison, arguments_of, check_recipe, is_comparison
from lightning_tasks.recipes.settings import read_settings
from lightning_tasks.recipes.shipped import CONFIGS, find_recipe, offered, recipe_name


@dataclass(frozen=True)
class Variant:
    """A configuration: a name, the file that it starts from, and what the command line adds to it.

    With `test` a comparison tests the model after its fit. Of the overrides in `grid` it adds those that do best.
    """

    name: str
    config: str
    overrides: tuple[str, ...] = ()
    test: bool = False
    grid: tuple[tuple[str, ...], ...] = ()


def find_file(name: str, root: Path = CONFIGS) -> tuple[Path, str | None]:
    """The file that `name` means, and the variant of it, None where `name` is that of the whole file.

    Raises:
        UsageError: nothing is called `name`, or the file has no such variant; the message lists the nearest names.
    """
    try:
        return find_recipe(name, root), None
    except UsageError:
        parts = name.removesuffix(".yaml").split("/")
        for cut in range(len(parts) - 1, 0, -1):
            try:
                path = find_recipe("/".join(parts[:cut]), root)
            except UsageError:
                continue
            return path, _known("/".join(parts[cut:]), path)
        raise


def _known(variant: str, path: Path) -> str:
    found = read_settings(path).get("variants")
    variants = [str(name) for name in found] if isinstance(found, dict) else []
    if variant not in variants:
        raise UsageError(f"{path} has no variant {variant!r}; {offered(variant, variants)}")
    return variant


def full_name(name: str, root: Path = CONFIGS) -> str:
    """The name of a file, with that of a variant behind it: RECIPE_VARIANT, which the folder of its runs has."""
    return _full_name(*find_file(name, root), root)


def _full_name(path: Path, variant: str | None, root: Path) -> str:
    return recipe_name(path, root) + ("" if variant is None else "_" + re.sub(r"[^\w.-]+", "_", variant))


def find_variant(name: str, root: Path = CONFIGS) -> Variant:
    """What can be fitted under `name`: a recipe, or one variant of a recipe or of a comparison; see `full_name`.

    Raises:
        UsageError: nothing is called `name`, the file has not the shape of a recipe, or it is a whole comparison.
    """
    path, variant = find_file(name, root)
    settings = read_settings(path)
    if variant is not None and is_comparison(settings):
        found = next(each for each in variants_of(Comparison.of(path, settings), root) if each.name == variant)
        return replace(found, name=_full_name(path, variant, root), grid=())  # by itself there is nothing to choose
    check_recipe(path)
    named = {str(key): overrides for key, overrides in settings.get("variants", {}).items()}
    overrides = () if variant is None else arguments_of(path, variant, named[variant])
    return Variant(_full_name(path, variant, root), str(path), overrides)


def read_variants(name: str, root: Path = CONFIGS) -> list[Variant]:
    """The configurations that one CONFIG of a comparison stands for.

    A recipe stands for itself, and so does one variant; a comparison, see :class:`.Comparison`, for all of its own.

    Raises:
        UsageError: no such file, or as :meth:`.Comparison.of`.
    """
    comparison, variant = find_comparison(name, root)
    return [find_variant(name, root)] if comparison is None or variant is not None else variants_of(comparison, root)


def find_comparison(name: str, root: Path = CONFIGS) -> tuple[Comparison | None, str | None]:
    """The comparison in the file that `name` means, None for a recipe; and the variant, as :func:`find_file`."""
    path, variant = find_file(name, root)
    settings = read_settings(path)
    return Comparison.of(path, settings) if is_comparison(settings) else None, variant


def variants_of(comparison: Comparison, root: Path = CONFIGS) -> list[Variant]:
    """The configurations of a comparison.

    Raises:
        UsageError: its base is none that can be fitted.
    """
    if is_comparison(read_settings(find_file(comparison.base, root)[0])):
        raise UsageError(
            f"{comparison.path}: its base {comparison.base!r} is a comparison; give a recipe that can be fitted"
        )
    base = find_variant(comparison.base, root)
    return [
        Variant(key, base.config, (*base.overrides, *added), comparison.test, grid)
        for key, (added, grid) in comparison.configurations().items()
    ]
