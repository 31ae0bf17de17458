"""What a comparison is of: variants of a recipe, seeds, references and metrics, and the cells that follow from them."""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_tasks.compare.cell import Cell
from lightning_tasks.errors import UsageError, reason, refusal_in
from lightning_tasks.recipes import find_recipe, read_settings, recipe_name

MAX_SEEDS = 10_000
KEYS = {"base", "variants", "settings", "test", "metrics", "references"}
METRICS = (
    "val/perplexity",
    "val/loss",
    "val/attention/entropy/mean",
    "qk_spectrum/variance/layer_00",
    "qk_spectrum/scale/layer_00",
)


@dataclass(frozen=True)
class Variant:
    """One configuration of a comparison: a name, the file it starts from, and what the command line adds to it."""

    name: str
    config: str
    overrides: tuple[str, ...] = ()
    test: bool = False


def parse_seeds(text: str) -> list[int]:
    """Seeds from "0:8" (0 to 7) or "0,3,5".

    Raises:
        UsageError: `text` is neither form, or names no seed.
    """
    try:
        if ":" in text:
            start, stop = (int(part) for part in text.split(":"))
            seeds: Sequence[int] = range(start, stop)
        else:
            seeds = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--seeds {text!r} is neither a range such as 0:8 nor a list such as 0,3,5") from error
    if seeds and (seeds[-1] - seeds[0] >= MAX_SEEDS if isinstance(seeds, range) else len(seeds) > MAX_SEEDS):
        raise UsageError(f"--seeds {text!r} names more than {MAX_SEEDS} seeds; compare fewer")
    seeds = list(seeds)
    if strange := [seed for seed in seeds if not 0 <= seed < 1 << 32]:
        raise UsageError(f"--seeds {text!r}: {strange[0]} is none; a seed is at least 0 and below 2**32")
    if not seeds or len(set(seeds)) < len(seeds):
        raise UsageError(f"--seeds {text!r} must name at least one seed, and none twice")
    return seeds


def override_arguments(overrides: dict[str, Any]) -> tuple[str, ...]:
    """Overrides as the command line spells them: {"trainer.callbacks+": {...}} -> "--trainer.callbacks+={...}"."""
    return tuple(
        f"--{key}={value if isinstance(value, str) else _yaml_of(json.dumps(value))}"
        for key, value in overrides.items()
    )


def _yaml_of(text: str) -> str:
    """JSON as YAML reads it: the two differ in infinity and nan, which are also words that a string may hold."""
    words = {"Infinity": ".inf", "NaN": ".nan"}
    return re.sub(r'"(?:[^"\\]|\\.)*"|Infinity|NaN', lambda found: words.get(found[0], found[0]), text)


def read_variants(name: str) -> list[Variant]:
    """The configurations that one CONFIG of the command stands for.

    A recipe stands for itself. A file with the keys `base` and `variants` stands for one configuration a variant,
    each the base with the overrides listed, spelled as on the command line without the two dashes. Those under
    `settings` are for every variant; `test: true` tests each model after its fit; `metrics` are those of the summary,
    and `references` the variants whose difference to others than the first one stands there too.

    Raises:
        UsageError: no such file, a comparison file of another shape, or a reference that is no variant of the file.
    """
    path = find_recipe(name)
    content = read_settings(path)
    if "variants" not in content:
        return [Variant(recipe_name(path), str(path))]
    variants, settings, test = content["variants"], content.get("settings", {}), content.get("test", False)
    metrics = content.get("metrics", [])
    if (
        not {"base", "variants"} <= set(content) <= KEYS
        or not (isinstance(variants, dict) and variants and isinstance(settings, dict))
        or not all(value is None or isinstance(value, dict) for value in variants.values())
        or not isinstance(test, bool)
        or not (isinstance(metrics, list) and all(isinstance(metric, str) for metric in metrics))
    ):
        raise UsageError(
            f"{path}: a comparison has the keys `base` and `variants: {{name: {{setting: value}}}}`, and may have "
            "`settings: {setting: value}` for all variants, `test: true` to test each model after its fit, "
            "`metrics: [name]`, and `references: {name: [name]}`"
        )
    check_references(path, content.get("references", {}), [str(key) for key in variants])
    base = str(find_recipe(str(content["base"])))
    if "variants" in read_settings(Path(base)):
        raise UsageError(f"{path}: its base {content['base']!r} is a comparison; give a recipe that can be fitted")
    try:
        shared = override_arguments(settings)
        found = [
            Variant(str(key), base, (*shared, *override_arguments(value or {})), test)
            for key, value in variants.items()
        ]
        "".join(text for variant in found for text in (variant.name, *variant.overrides)).encode()
    except (TypeError, UnicodeEncodeError) as error:  # a date, a set, bytes, half of a surrogate pair
        raise UsageError(f"{path}: a name or value is no plain data ({error}); put it into quotes") from error
    return found


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
                near = difflib.get_close_matches(given, variants, n=3, cutoff=0.4)
                hint = f"the nearest are {', '.join(near)}" if near else f"they are {', '.join(variants)}"
                raise UsageError(f"{path}: `references` has {given!r}, which is none of the variants; {hint}")
        if len({str(name), *map(str, others)}) <= len(others):
            raise UsageError(f"{path}: `references` of {name!r} must be other variants, each once, got {others}")


def summary_references(names: Sequence[str]) -> dict[str, list[str]]:
    """The references that comparison files ask for, by variant."""
    asked = [read_settings(find_recipe(name)).get("references", {}) for name in names]
    return {str(name): [str(other) for other in others] for each in asked for name, others in each.items()}


def summary_metrics(names: Sequence[str]) -> list[str]:
    """The metrics that comparison files ask for, or those of the language models where none does."""
    asked = [metric for name in names for metric in read_settings(find_recipe(name)).get("metrics", ())]
    return list(dict.fromkeys(asked)) or list(METRICS)


def plan_cells(
    variants: Sequence[Variant], seeds: Sequence[int], output: Path, extra: Sequence[str] = (), comparison: str = ""
) -> list[Cell]:
    """Every cell of the comparison of that name, seed by seed, so that an interrupted run leaves complete pairs.

    Raises:
        UsageError: two configurations have one name, or names of one folder.
    """
    cells = [
        Cell(variant.name, variant.config, (*variant.overrides, *extra), seed, str(output), variant.test, comparison)
        for seed in seeds
        for variant in variants
    ]
    if len({cell.folder for cell in cells}) < len(cells):
        names = ", ".join(variant.name for variant in variants)
        raise UsageError(f"configurations must have different names, also with _ for other signs, got {names}")
    return cells


def check_cells(cells: Iterable[Cell]) -> None:
    """Parse what the cells of each configuration ask for and build its module, before the first of them runs.

    Raises:
        UsageError: some of them are refused, or cannot be built.
    """
    from lightning_tasks.cli.fit import check_arguments
    from lightning_tasks.runs.wandb_runs import check_cell_loggers

    refused = {}
    for cell in {cell.name: cell for cell in cells}.values():
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                check_cell_loggers(check_arguments(cell.arguments))
        except Exception as error:
            refusal = error if isinstance(error, UsageError) else refusal_in(error)
            refused[cell.name] = reason(error) if refusal is None else str(refusal)
    if refused:
        lines = "".join(f"\n{name}: {text}" for name, text in refused.items())
        raise UsageError(f"nothing was run, as configurations are refused: {', '.join(refused)}{lines}")
