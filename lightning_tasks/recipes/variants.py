"""What a name of a recipe stands for: a file, and what a variant of it changes, without importing torch.

A file may have a section `variants: {NAME: {KEY: VALUE}}`. In a recipe, each variant is the recipe with these keys
changed; in a comparison (a file with `base`), it is the base with them. `FILE/NAME` means one variant.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

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


class Named(NamedTuple):
    """What a name means: a file, its settings, and the variant of it, None where the name is that of the whole file."""

    path: Path
    settings: dict[str, Any]
    variant: str | None

    @property
    def comparison(self) -> Comparison | None:
        """The comparison in the file, None where it is a recipe."""
        return Comparison.of(self.path, self.settings) if is_comparison(self.settings) else None

    def full_name(self, root: Path) -> str:
        """See :func:`full_name`."""
        behind = "" if self.variant is None else "_" + re.sub(r"[^\w.-]+", "_", self.variant)
        return recipe_name(self.path, root) + behind


def find_named(name: str, root: Path = CONFIGS) -> Named:
    """The file that `name` means, read.

    Raises:
        UsageError: nothing is called `name`, or the file has no such variant; the message lists the nearest names.
    """
    path, variant = _find(name, root)
    settings = read_settings(path)
    known = settings.get("variants")
    names = [str(each) for each in known] if isinstance(known, dict) else []
    if variant is not None and variant not in names:
        raise UsageError(f"{path} has no variant {variant!r}; {offered(variant, names)}")
    return Named(path, settings, variant)


def _find(name: str, root: Path) -> tuple[Path, str | None]:
    """The file, or the longest beginning of `FILE/NAME` that is one, and what stands behind it."""
    try:
        return find_recipe(name, root), None
    except UsageError:
        parts = name.removesuffix(".yaml").split("/")
        for cut in range(len(parts) - 1, 0, -1):
            with contextlib.suppress(UsageError):
                return find_recipe("/".join(parts[:cut]), root), "/".join(parts[cut:])
        raise


def full_name(name: str, root: Path = CONFIGS) -> str:
    """The name of a file, with that of a variant behind it: RECIPE_VARIANT, which the folder of its runs has."""
    return find_named(name, root).full_name(root)


def find_variant(name: str, root: Path = CONFIGS) -> Variant:
    """What can be fitted under `name`: a recipe, or one variant of a recipe or of a comparison; see `full_name`.

    Raises:
        UsageError: nothing is called `name`, the file has not the shape of a recipe, or it is a whole comparison.
    """
    return _variant_of(find_named(name, root), root)


def _variant_of(named: Named, root: Path) -> Variant:
    path, settings, variant = named
    if variant is not None and (comparison := named.comparison):
        found = next(each for each in variants_of(comparison, root) if each.name == variant)
        return replace(found, name=named.full_name(root), grid=())  # by itself there is nothing to choose
    check_recipe(path, settings)
    changes = {str(key): overrides for key, overrides in settings.get("variants", {}).items()}
    overrides = () if variant is None else arguments_of(path, variant, changes[variant])
    return Variant(named.full_name(root), str(path), overrides)


def read_variants(name: str, root: Path = CONFIGS) -> list[Variant]:
    """The configurations that one CONFIG of a comparison stands for.

    A recipe stands for itself, and so does one variant; a comparison, see :class:`.Comparison`, for all of its own.

    Raises:
        UsageError: no such file, or as :meth:`.Comparison.of`.
    """
    named = find_named(name, root)
    whole = None if named.variant is not None else named.comparison
    return [_variant_of(named, root)] if whole is None else variants_of(whole, root)


def variants_of(comparison: Comparison, root: Path = CONFIGS) -> list[Variant]:
    """The configurations of a comparison.

    Raises:
        UsageError: its base is none that can be fitted.
    """
    named = find_named(comparison.base, root)
    if named.comparison:
        raise UsageError(
            f"{comparison.path}: its base {comparison.base!r} is a comparison; give a recipe that can be fitted"
        )
    base = _variant_of(named, root)
    return [
        Variant(key, base.config, (*base.overrides, *added), comparison.test, grid)
        for key, (added, grid) in comparison.configurations().items()
    ]
