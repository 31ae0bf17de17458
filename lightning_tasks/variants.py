"""What a name of a recipe stands for: a file, and what a variant of it changes, without importing torch.

A file may have a section `variants: {NAME: {KEY: VALUE}}`. In a recipe, each variant is the recipe with these keys
changed; in a comparison (a file with `base`), it is the base with them. `FILE/NAME` means one variant.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from lightning_tasks.bounded_yaml import BoundedLoader
from lightning_tasks.errors import UsageError
from lightning_tasks.recipes import (
    COMPARISON_KEYS,
    CONFIGS,
    check_recipe,
    find_recipe,
    is_comparison,
    read_settings,
    recipe_name,
)

NOT_USED = ("seed_everything", "trainer.default_root_dir")
"""Settings in whose place every cell of a comparison has its own."""
SET_BY_COMPARE = (
    *NOT_USED,
    *(f"trainer.enable_{name}" for name in ("checkpointing", "progress_bar", "model_summary")),
    "trainer.logger",
)
"""Settings that are none to choose between."""
MOST_EXACT = 2**53  # of whole numbers that are one as a floating-point number


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
        raise UsageError(f"{path} has no variant {variant!r}; {nearest(variant, variants)}")
    return variant


def nearest(name: str, known: Sequence[str]) -> str:
    """The names nearest to `name` in words, or all of them."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    if near:
        return f"the nearest are {', '.join(near)}"
    return f"they are {', '.join(known)}" if known else "it has none"


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
        found = next(each for each in _of_comparison(path, settings, root) if each.name == variant)
        return replace(
            found, name=_full_name(path, variant, root), grid=()
        )  # by itself there is nothing to choose from
    check_recipe(path)
    named = {str(key): overrides for key, overrides in settings.get("variants", {}).items()}
    overrides = () if variant is None else _arguments(path, variant, named[variant])
    return Variant(_full_name(path, variant, root), str(path), overrides)


def read_variants(name: str, root: Path = CONFIGS) -> list[Variant]:
    """The configurations that one CONFIG of a comparison stands for.

    A recipe stands for itself, and so does one variant. A comparison, a file with the keys `base` and `variants`,
    stands for one configuration for each variant: the base with the overrides listed, spelled as on the command line
    without the two dashes. Those under `settings` are for every variant; `test: true` tests each model after its fit;
    `metrics` are those of the summary, and `references` the variants whose difference to others than the first one
    stands there too. `grid` has the values of a setting of which `select` says how one is chosen.

    Raises:
        UsageError: no such file, a comparison file of another shape, a reference that is no variant of the file, or a
            grid from which nothing can be chosen.
    """
    path, variant = find_file(name, root)
    settings = read_settings(path)
    if variant is None and is_comparison(settings):
        return _of_comparison(path, settings, root)
    return [find_variant(name, root)]


def _of_comparison(path: Path, content: Mapping[str, Any], root: Path) -> list[Variant]:
    variants, settings, test = content["variants"], content.get("settings", {}), content.get("test", False)
    metrics, checkpoints = content.get("metrics", []), content.get("checkpoints", True)
    if (
        not {"base", "variants"} <= set(content) <= COMPARISON_KEYS
        or not (isinstance(variants, dict) and variants and isinstance(settings, dict))
        or not all(value is None or isinstance(value, dict) for value in variants.values())
        or not isinstance(test, bool)
        or not isinstance(checkpoints, bool)
        or not (isinstance(metrics, list) and all(isinstance(metric, str) for metric in metrics))
    ):
        raise UsageError(
            f"{path}: a comparison has the keys `base` and `variants: {{name: {{setting: value}}}}`, and may have "
            "`settings: {setting: value}` for all variants, `test: true` to test each model after its fit, "
            "`checkpoints: false` to keep none, `metrics: [name]`, of which `primary: name` is one, "
            "`margins: {name: number}`, `references: {name: [name]}`, and `grid: {setting: [value]}` with `select`"
        )
    check_endpoints(path, content.get("primary", ""), content.get("margins", {}), metrics)
    check_references(path, content.get("references", {}), [str(key) for key in variants])
    file, _ = find_file(str(content["base"]), root)
    if is_comparison(read_settings(file)):
        raise UsageError(f"{path}: its base {content['base']!r} is a comparison; give a recipe that can be fitted")
    base = find_variant(str(content["base"]), root)
    shared = (*base.overrides, *_arguments(path, "settings", settings))
    named = {str(key): overrides or {} for key, overrides in variants.items()}
    if len(named) < len(variants):
        twice = next(name for name in named if sum(str(key) == name for key in variants) > 1)
        raise UsageError(f"{path}: `variants` has {twice!r} twice, once as a number; give each another name")
    for place, overrides in (("`settings`", settings), *((f"{key!r}", each) for key, each in named.items())):
        for key in overrides:
            _check_key(path, place, str(key), NOT_USED)
    grids = _grids(path, content, named)
    return [
        Variant(key, base.config, (*shared, *_arguments(path, key, overrides)), test, grids[key])
        for key, overrides in named.items()
    ]


def _grids(
    path: Path, content: Mapping[str, Any], variants: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[tuple[str, ...], ...]]:
    """For each variant the combinations of values that `grid` has of its settings, each as arguments.

    Raises:
        UsageError: `grid` has another shape, stands without `select` or `select` without it, names a variant that is
            none, has a value alone or twice (as YAML reads it), a setting that a variant of it or `settings` has too
            or of which one is a part, two settings of which one is a part of the other, or one that compare sets.
    """
    grid = content.get("grid", {})
    if ("grid" in content) != ("select" in content):
        raise UsageError(f"{path}: `grid` has the values, and `select` says how one is chosen; give both or neither")
    if "grid" in content and not (isinstance(grid, dict) and grid):
        raise UsageError(f"{path}: `grid` must be `{{setting: [value]}}`, got {grid!r}")
    lists: dict[str, list[list[str]]] = {name: [] for name in variants}
    searched: dict[str, list[str]] = {name: [] for name in variants}
    for key, given in grid.items():
        by_variant = given if isinstance(given, dict) and given else dict.fromkeys(variants, given)
        for name, values in ((str(name), values) for name, values in by_variant.items()):
            if name not in variants:
                raise UsageError(
                    f"{path}: `grid` of {key} has {name!r}, which is none of the variants; {nearest(name, [*variants])}"
                )
            if not isinstance(values, list) or len(set(map(_read, values))) < max(2, len(values)):
                raise UsageError(
                    f"{path}: `grid` of {key} must be two or more values, none twice, for all variants or as "
                    f"`{{variant: [value]}}`, got {values!r}"
                )
            _check_key(path, f"`grid` of {name!r}", str(key), SET_BY_COMPARE)
            for other in searched[name]:
                if is_part_of(other, key) or is_part_of(key, other):
                    raise UsageError(
                        f"{path}: `grid` of {name!r} has {other} and {key}, one of which would take the place of the "
                        "other; leave one out"
                    )
            for other in {**content.get("settings", {}), **variants[name]}:
                if is_part_of(other, key):
                    spelled = "" if str(other) == str(key) else f", as {other}"
                    raise UsageError(
                        f"{path}: {key} of {name!r} is in `grid` and set elsewhere too{spelled}; leave one out"
                    )
            searched[name].append(str(key))
            lists[name].append([_arguments(path, "grid", {key: value})[0] for value in values])
    return {name: tuple(product(*each)) if each else () for name, each in lists.items()}


def is_part_of(key: Any, other: Any) -> bool:
    """Whether a setting is the same as another or a part of it, in any spelling of the two.

    jsonargparse takes `model.lr` for `model.init_args.lr`, and `callbacks+` adds to `callbacks`.
    """
    own, whole = (
        [part for part in str(name).removesuffix("+").split(".") if part != "init_args"] for name in (key, other)
    )
    return own[: len(whole)] == whole


def _check_key(path: Path, place: str, key: str, forbidden: Sequence[str]) -> None:
    """Check that a setting is none of those that `attnswap compare` gives each cell.

    Raises:
        UsageError: it is.
    """
    if found := [name for name in forbidden if is_part_of(key, name)]:
        raise UsageError(
            f"{path}: {place} has {key}, and `attnswap compare` sets {found[0]} of each cell; leave it out"
        )


def _read(value: Any) -> str:
    """A value as the command line reads it, in one spelling: "1e-3" is 0.001, and so is 1.0e-3; true is not 1."""
    if isinstance(value, str):
        try:
            value = yaml.load(value, Loader=BoundedLoader)
        except yaml.YAMLError:
            return value
        with contextlib.suppress(ValueError, TypeError):  # YAML takes 1e-3, without a point, for a text
            value = float(value) if isinstance(value, str) else value
    if isinstance(value, dict):
        return repr(sorted((str(key), _read(each)) for key, each in value.items()))
    if isinstance(value, list):
        return repr([_read(each) for each in value])
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return repr(float(value)) if number and abs(value) < MOST_EXACT else repr(value)


def check_endpoints(path: Path, primary: Any, margins: Any, metrics: Sequence[str]) -> None:
    """Check that `primary` and `margins` of the file at `path` are of its `metrics`, and margins positive numbers.

    Raises:
        UsageError: they are not.
    """
    if not isinstance(primary, str) or not isinstance(margins, dict):
        raise UsageError(
            f"{path}: `primary` must be a metric and `margins` `{{metric: number}}`, got {primary!r} and {margins!r}"
        )
    for name in (*filter(None, [primary]), *map(str, margins)):
        if name not in metrics:
            raise UsageError(f"{path}: {name!r} is in `primary` or `margins` and not in `metrics`; add it there")
    for name, margin in margins.items():
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 < margin < math.inf:
            raise UsageError(f"{path}: `margins` of {name} must be a number above 0, got {margin!r}")


def check_references(path: Path, references: Any, variants: Sequence[str]) -> None:
    """Check that `references` names, for some of the `variants` of the file at `path`, lists of others of them.

    Raises:
        UsageError: it has another shape, a name that is no variant (the nearest is given), or one twice.
    """
    if not isinstance(references, dict) or not all(isinstance(others, list) for others in references.values()):
        raise UsageError(f"{path}: `references` must be `{{name: [other names]}}`, got {references!r}")
    for name, others in references.items():
        for given in map(str, (name, *others)):
            if given not in variants:
                raise UsageError(
                    f"{path}: `references` has {given!r}, which is none of the variants; {nearest(given, variants)}"
                )
        if len({str(name), *map(str, others)}) <= len(others):
            raise UsageError(f"{path}: `references` of {name!r} must be other variants, each once, got {others}")


def _arguments(path: Path, name: str, overrides: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The overrides that a file has under a name, as arguments.

    Raises:
        UsageError: they, or the name, are something else than plain data.
    """
    try:
        arguments = override_arguments(overrides or {})
        "".join((name, *arguments)).encode()
    except (TypeError, UnicodeEncodeError) as error:  # a date, a set, bytes, half of a surrogate pair
        raise UsageError(f"{path}: a name or value is no plain data ({error}); put it into quotes") from error
    return arguments


def override_arguments(overrides: Mapping[str, Any]) -> tuple[str, ...]:
    """Overrides as the command line spells them: {"trainer.callbacks+": {...}} -> "--trainer.callbacks+={...}"."""
    return tuple(
        f"--{key}={value if isinstance(value, str) else _yaml_of(json.dumps(value))}"
        for key, value in overrides.items()
    )


def _yaml_of(text: str) -> str:
    """JSON as YAML reads it: the two differ in infinity and nan, which are also words that a string may hold."""
    words = {"Infinity": ".inf", "NaN": ".nan"}
    return re.sub(r'"(?:[^"\\]|\\.)*"|Infinity|NaN', lambda found: words.get(found[0], found[0]), text)
