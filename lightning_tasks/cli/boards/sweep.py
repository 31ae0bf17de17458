"""`attnswap sweep`: a W&B sweep over the options of a mechanism, written from their types and limits."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from attention_modules import AttentionSpec
from attention_modules.mechanism import build_mechanism, mechanism_class
from lightning_tasks.errors import UsageError
from lightning_tasks.recipes.variants import find_named
from lightning_tasks.runs.divergence import is_loss
from lightning_tasks.runs.safe_files import written_whole

_SPEC = AttentionSpec(64, 4, 16, num_tokens=16)
# Ends of names of which less is better.
_SMALL = ("error", "error_rate", "kl", "nll", "mse", "rmse", "mae", "ece", "bits_per_byte")


def parser() -> argparse.ArgumentParser:
    """The parser of `attnswap sweep`."""
    arguments = argparse.ArgumentParser(
        prog="attnswap sweep",
        allow_abbrev=False,
        description="Write a W&B sweep file over the options of a mechanism; `wandb sweep FILE` starts it.",
    )
    arguments.add_argument("recipe", metavar="RECIPE", help="what is fitted, a shipped recipe or a file")
    arguments.add_argument("--mechanism", required=True, metavar="NAME", help="whose options vary")
    arguments.add_argument("--metric", help="what is best (default: that of the recipe's RunSummary)")
    arguments.add_argument("--seeds", type=int, default=3, help="how many seeds (default: %(default)s)")
    arguments.add_argument("--output", type=Path, default=Path("sweep.yaml"), help="file (default: %(default)s)")
    return arguments


def option_values(mechanism: str) -> dict[str, list[Any]]:
    """The values of each option that a sweep tries: all of a choice, else around the default, within its limits.

    Options without a default that says a size (None, 0) are left out, and so are `eps`.
    """
    kind = mechanism_class(mechanism)
    hints = get_type_hints(kind.__init__)
    found = {}
    for name, option in inspect.signature(kind).parameters.items():
        tries = _tries(hints.get(name), option.default)
        firsts = [next((value for value in each if _is_accepted(mechanism, name, value)), None) for each in tries]
        kept = [value for value in dict.fromkeys(firsts) if value is not None]
        if name != "eps" and len(kept) > 1:
            found[name] = kept
    return found


def _tries(hint: Any, default: Any) -> list[list[Any]]:
    """Of each list the first value that is accepted."""
    if get_origin(hint) is Literal:
        return [[choice] for choice in get_args(hint)]
    if hint is bool:
        return [[False], [True]]
    if hint is int and isinstance(default, int):
        return [[default // 2], [default], [2 * default]]
    return [[default / 2, default / 1.5], [default], [2 * default, default / 0.75]] if hint is float and default else []


def _is_accepted(mechanism: str, name: str, value: Any) -> bool:
    try:
        build_mechanism(mechanism, _SPEC, **{name: value})
    except (ValueError, TypeError):
        return False
    return True


def sweep_of(recipe: str, mechanism: str, metric: str | None, seeds: int) -> dict[str, Any]:
    """The content of a sweep file.

    Raises:
        UsageError: the recipe has no metric of its own, or the mechanism no option to vary.
    """
    settings = find_named(recipe).settings
    callbacks = settings.get("trainer", {}).get("callbacks") or []
    of_summary = [
        each.get("init_args", {}).get("metric", "val/perplexity")
        for each in callbacks
        if str(each.get("class_path")).endswith("RunSummary")
    ]
    chosen = metric or next(iter(of_summary), None)
    if chosen is None:
        raise UsageError(f"{recipe} has no RunSummary, which would name what is best: give --metric")
    if not (values := option_values(mechanism)):
        raise UsageError(f"{mechanism} has no option to vary; `attnswap compare` takes mechanisms as variants")
    parameters: dict[str, Any] = {f"model.options.{name}": {"values": each} for name, each in values.items()}
    parameters["seed_everything"] = {"values": list(range(seeds))}
    command = ["${program}", "fit", recipe, "--trainer", "logger/wandb", "--model.mechanism", mechanism, "${args}"]
    small = is_loss(chosen) or any(part.endswith(_SMALL) for part in chosen.split("/"))
    goal = "minimize" if small else "maximize"
    return {
        "program": "attnswap",
        "command": command,
        "method": "grid",
        "metric": {"name": chosen, "goal": goal},
        "parameters": parameters,
    }


def main(arguments: Sequence[str]) -> None:
    """Run `attnswap sweep` with these arguments.

    Raises:
        UsageError: as :func:`sweep_of`; no such recipe or mechanism, or `--seeds` below 1.
    """
    options = parser().parse_args(list(arguments))
    if options.seeds < 1:
        raise UsageError(f"--seeds {options.seeds} must be at least 1")
    try:
        content = sweep_of(options.recipe, options.mechanism, options.metric, options.seeds)
    except ValueError as error:  # of a mechanism's name
        raise UsageError(str(error)) from error
    with written_whole(options.output) as path:
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    runs = 1
    for each in content["parameters"].values():
        runs *= len(each["values"])
    print(f"{options.output}: {runs} runs; `wandb sweep {options.output}` starts it")
