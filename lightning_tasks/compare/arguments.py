"""The arguments of `attnswap compare`, known before torch is imported."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DESCRIPTION = (
    "`attnswap compare`: configurations x seeds, paired by seed, resumable, into one long table and one summary."
)
FILE_FORM = """\
a comparison file:
  base: RECIPE                              (or RECIPE/VARIANT) what every variant starts from
  variants: {NAME: {KEY: VALUE}}            what each changes, spelled as on the command line without the dashes
  settings: {KEY: VALUE}                    for all variants
  references: {NAME: [OTHER, ...]}          differences of NAME to each OTHER too, beside those to the first variant
  test: true                                test each model after its fit
  checkpoints: false                        keep no checkpoint; else each cell keeps last.ckpt, of the end of its fit
  metrics: [METRIC]                         of the summary
  primary: METRIC                           the one that decides; the p-values of all others are corrected together
  margins: {METRIC: NUMBER}                 differences below which two variants count as equivalent
  grid: {KEY: [VALUE, ...]}                 values of which each variant gets its best; {KEY: {NAME: [...]}} for some
  select: {metric: METRIC, mode: max, seeds: [SEED]}   how: by the mean over seeds that the table does not use
"""


class Once(argparse.Action):
    """Keeps a value, and refuses a second one, which argparse would take in place of the first without a word."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        """Keep it."""
        given = vars(namespace).setdefault("_given", set())
        if self.dest in given:
            parser.error(f"{option} is given twice")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def cell_parser() -> argparse.ArgumentParser:
    """The parser of `attnswap cell`."""
    arguments = argparse.ArgumentParser(
        prog="attnswap cell",
        allow_abbrev=False,
        description="Run one cell of a comparison that `attnswap compare --plan` wrote. Ends with 0 where it is "
        "finished, 1 where it failed, 2 where it was refused, 3 where its run diverged, 75 where another process runs "
        "it, 143 where SIGTERM ended it.",
    )
    arguments.add_argument("folder", metavar="DIR", type=Path, help="--output of the comparison")
    arguments.add_argument("variant", metavar="VARIANT", help="its name")
    arguments.add_argument("seed", metavar="SEED", type=int, help="its seed")
    return arguments


def executor_parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of `--executor` and of those `--executor.KEY` that are given."""
    arguments = argparse.ArgumentParser(prog="attnswap", add_help=False, allow_abbrev=False)
    arguments.add_argument(
        "--executor",
        action=Once,
        choices=["submitit"],
        help="submit what is asked for as jobs (of --plan one a cell), and end; --executor.KEY VALUE are options of "
        "submitit's AutoExecutor (timeout_min, nodes, gpus_per_node, slurm_partition, slurm_array_parallelism, ...), "
        "and cluster: slurm (the default) or local",
    )
    for option in dict.fromkeys(text.partition("=")[0] for text in given if text.startswith("--executor.")):
        arguments.add_argument(option, action=Once, dest=option[2:], help=argparse.SUPPRESS)
    return arguments


def executor_options(options: argparse.Namespace) -> dict[str, Any]:
    """What `--executor.KEY VALUE` say, numbers as numbers."""
    import yaml

    given = {key.partition(".")[2]: value for key, value in vars(options).items() if key.startswith("executor.")}
    return {key: yaml.safe_load(value) for key, value in given.items()}


def without_executor(arguments: Sequence[str]) -> list[str]:
    """The arguments without `--plan` and those of the executor."""
    kept, skips = [], False
    for argument in arguments:
        name = argument.partition("=")[0]
        ours = name == "--executor" or name.startswith("--executor.")
        if not (skips or ours or name == "--plan"):
            kept.append(argument)
        skips = ours and "=" not in argument
    return kept


def parser(given: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of `attnswap compare`; for `--status` there is no `--output`."""
    arguments = argparse.ArgumentParser(
        prog="attnswap compare",
        parents=[executor_parser(given)],
        allow_abbrev=False,
        description=DESCRIPTION,
        epilog=FILE_FORM,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument("configs", nargs="+", metavar="CONFIG", help="recipes, or files with `base` and `variants`")
    arguments.add_argument("--seeds", action=Once, default="0:8", help="0:8 or 0,3,5 (default: %(default)s)")
    arguments.add_argument(
        "--output", action=Once, required="--status" not in given, type=Path, help="folder for the cells and the tables"
    )
    arguments.add_argument(
        "--plan", action="store_true", help="run nothing, and print a command for each cell, for a scheduler of yours"
    )
    arguments.add_argument(
        "--status", action="store_true", help="CONFIG is the folder of a plan: say what became of its cells"
    )
    arguments.add_argument(
        "--jobs",
        action=Once,
        type=int,
        default=1,
        help="processes, one thread and one CUDA device each (default: %(default)s)",
    )
    arguments.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME",
        help="run this variant and those that it is compared with; may be repeated (default: all)",
    )
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override in every cell")
    arguments.add_argument(
        "--keep",
        action="store_true",
        help="keep finished cells whose code or files have changed since; without it they are run again",
    )
    arguments.add_argument("--no_checkpoints", action="store_true", help="keep no checkpoint of any cell")
    arguments.add_argument(
        "--metrics",
        action=Once,
        help="metrics of the summary, by the last value of each (default: what CONFIG says in `metrics`)",
    )
    return arguments
