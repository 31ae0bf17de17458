"""What recipes and comparisons may hold: their keys, the types of these, and what must fit together."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from lightning_tasks.bounded_yaml import BoundedLoader
from lightning_tasks.errors import UsageError
from lightning_tasks.recipes.shipped import offered

SECTIONS = (
    *("seed_everything", "model", "data", "trainer", "init_from", "ckpt_path", "weights_only"),
    *("verbose", "return_predictions"),  # of validate, test and predict
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


Overrides = Mapping[str, Any]
"""Settings by their whole name, such as `model.init_args.lr`."""


@dataclass(frozen=True)
class Comparison:
    """A comparison file, checked: one configuration for each variant, the base with the settings and its overrides.

    Args:
        path: the file.
        base: the recipe, or variant of one.
        variants: overrides by the name of the variant.
        settings: overrides of all variants.
        test: whether each model is tested after its fit.
        checkpoints: whether cells keep their last one.
        metrics: those of the summary.
        references: by variant, those whose difference to it stands in the summary too.
        primary: the metric of the primary endpoint, "" for none.
        margins: by metric, the difference that counts.
        grid: the values of settings of which `select` says how one is chosen.
        select: how.
    """

    path: Path
    base: str
    variants: Mapping[str, Overrides]
    settings: Overrides = field(default_factory=dict)
    test: bool = False
    checkpoints: bool = True
    metrics: Sequence[str] = ()
    references: Mapping[str, Sequence[str]] = field(default_factory=dict)
    primary: str = ""
    margins: Mapping[str, float] = field(default_factory=dict)
    grid: Mapping[str, Any] = field(default_factory=dict)
    select: Any = None

    @classmethod
    def of(cls, path: Path, content: Mapping[str, Any]) -> Comparison:
        """The comparison in the settings of a file.

        Raises:
            UsageError: it has another shape, a key that compare sets, a reference that is no variant of the file, or a
                grid from which nothing can be chosen.
        """
        variants = content["variants"]
        given = {"base": "", "settings": {}, "test": False, "checkpoints": True, "metrics": [], **content}
        if (
            not {"base", "variants"} <= set(content) <= COMPARISON_KEYS
            or not (isinstance(variants, dict) and variants and isinstance(given["settings"], dict))
            or not all(value is None or isinstance(value, dict) for value in variants.values())
            or not (isinstance(given["test"], bool) and isinstance(given["checkpoints"], bool))
            or not (isinstance(given["metrics"], list) and all(isinstance(each, str) for each in given["metrics"]))
        ):
            raise UsageError(
                f"{path}: a comparison has the keys `base` and `variants: {{name: {{setting: value}}}}`, and may have "
                "`settings: {setting: value}` for all variants, `test: true` to test each model after its fit, "
                "`checkpoints: false` to keep none, `metrics: [name]`, of which `primary: name` is one, "
                "`margins: {name: number}`, `references: {name: [name]}`, and `grid: {setting: [value]}` with `select`"
            )
        if ("grid" in content) != ("select" in content):
            raise UsageError(
                f"{path}: `grid` has the values, and `select` says how one is chosen; give both or neither"
            )
        if "grid" in content and not (isinstance(content["grid"], dict) and content["grid"]):
            raise UsageError(f"{path}: `grid` must be `{{setting: [value]}}`, got {content['grid']!r}")
        check_endpoints(path, given.get("primary", ""), given.get("margins", {}), given["metrics"])
        named = {str(key): overrides or {} for key, overrides in variants.items()}
        check_references(path, given.get("references", {}), [*named])
        if len(named) < len(variants):
            twice = next(name for name in named if sum(str(key) == name for key in variants) > 1)
            raise UsageError(f"{path}: `variants` has {twice!r} twice, once as a number; give each another name")
        for place, each in (("`settings`", given["settings"]), *((f"{key!r}", each) for key, each in named.items())):
            for key in each:
                _check_key(path, place, str(key), NOT_USED)
        references = {str(key): [*map(str, others)] for key, others in given.get("references", {}).items()}
        margins = {str(key): float(margin) for key, margin in given.get("margins", {}).items()}
        known = {**given, "base": str(given["base"]), "variants": named, "references": references, "margins": margins}
        return cls(path, **known)

    def configurations(self) -> dict[str, tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]]:
        """By variant, the arguments that it adds to the base, and the combinations of its grid."""
        shared, grids = arguments_of(self.path, "settings", self.settings), _grids(self)
        return {
            key: ((*shared, *arguments_of(self.path, key, overrides)), grids[key])
            for key, overrides in self.variants.items()
        }


COMPARISON_KEYS = {each.name for each in fields(Comparison)} - {"path"}


def is_comparison(settings: Mapping[str, Any]) -> bool:
    """Whether the settings of a file are those of a comparison, not of a recipe with variants."""
    return "variants" in settings and ("base" in settings or settings.keys() <= COMPARISON_KEYS)


def check_recipe(path: Path, settings: Mapping[str, Any]) -> None:
    """Check that the settings of a file have the shape of a recipe; sections are checked when they are built.

    Raises:
        UsageError: they have a section that no recipe has, variants of another shape, or are a comparison.
    """
    if is_comparison(settings):
        raise UsageError(
            f"{path} is a comparison of several runs; start it with `attnswap compare`, or one of its variants by its "
            "name: COMPARISON/VARIANT"
        )
    sections = (*SECTIONS, "variants")
    for section in settings:
        if section not in sections:
            raise UsageError(f"{path}: unknown section {section!r}; {offered(str(section), sections)}")
    variants = settings.get("variants", {})
    if not isinstance(variants, dict) or not all(each is None or isinstance(each, dict) for each in variants.values()):
        raise UsageError(f"{path}: `variants` must be `{{name: {{setting: value}}}}`, got {variants!r}")


def _grids(comparison: Comparison) -> dict[str, tuple[tuple[str, ...], ...]]:
    """For each variant the combinations of values that `grid` has of its settings, each as arguments.

    Raises:
        UsageError: `grid` has another shape, stands without `select` or `select` without it, names a variant that is
            none, has a value alone or twice (as YAML reads it), a setting that a variant of it or `settings` has too
            or of which one is a part, two settings of which one is a part of the other, or one that compare sets.
    """
    path, grid, variants = comparison.path, comparison.grid, comparison.variants
    lists: dict[str, list[list[str]]] = {name: [] for name in variants}
    searched: dict[str, list[str]] = {name: [] for name in variants}
    for key, given in grid.items():
        by_variant = given if isinstance(given, dict) and given else dict.fromkeys(variants, given)
        for name, values in ((str(name), values) for name, values in by_variant.items()):
            if name not in variants:
                raise UsageError(
                    f"{path}: `grid` of {key} has {name!r}, which is none of the variants; {offered(name, variants)}"
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
            for other in {**comparison.settings, **variants[name]}:
                if is_part_of(other, key):
                    spelled = "" if str(other) == str(key) else f", as {other}"
                    raise UsageError(
                        f"{path}: {key} of {name!r} is in `grid` and set elsewhere too{spelled}; leave one out"
                    )
            searched[name].append(str(key))
            lists[name].append([arguments_of(path, "grid", {key: value})[0] for value in values])
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
                    f"{path}: `references` has {given!r}, which is none of the variants; {offered(given, variants)}"
                )
        if len({str(name), *map(str, others)}) <= len(others):
            raise UsageError(f"{path}: `references` of {name!r} must be other variants, each once, got {others}")


def arguments_of(path: Path, name: str, overrides: Mapping[str, Any] | None) -> tuple[str, ...]:
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
