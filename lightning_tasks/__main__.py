"""The command `attnswap`. What answers at once (help, version, recipes) imports neither lightning nor torch."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

HELP = """\
usage: attnswap <command> [arguments]

Change what happens between the projections of any attention layer, train it with Lightning, see what it did.

commands:
  fit, validate, test, predict  run a recipe: attnswap fit quickstart/language_modeling
                                or a variant of one: attnswap fit rpc/imagenet_deit_tiny/softmax
                                or a file of yours, which may name classes of the working folder:
                                attnswap fit my.yaml (or --config my.yaml)
                                override any key of the recipe: --trainer.max_steps 100 --model.mechanism rpc
                                a class and its arguments: --model.optimizer SGD --model.optimizer.lr 0.5
                                a section can be a file: --trainer strategy/ddp --trainer logger/wandb
                                a job of SLURM: --executor submitit --executor.nodes 2 --executor.gpus_per_node 4
                                classify or segment a folder of images by what a run trained:
                                attnswap predict --ckpt_path CHECKPOINT --images FOLDER
  recipes                       list the shipped recipes: name, summary, paper, what each needs, variants
  compare                       run configurations x seeds, paired, resumable, into one table
  cell                          one cell of a comparison, on any machine: attnswap compare FILE --plan prints them
  report                        one HTML page of runs: attnswap report RUN [RUN ...] --output report.html
  explore                       one HTML page of every attention map of a model, or of several side by side:
                                attnswap explore MODEL --images FOLDER --mechanism softmax --mechanism rpc
  drift                         what a mechanism does to a trained model before any training:
                                attnswap drift --model FOLDER --mechanism rpc --data ag_news --output DIR
  sweep                         a W&B sweep over a mechanism's options: attnswap sweep RECIPE --mechanism rpc
  workspace                     a W&B workspace for what monitors log: attnswap workspace ENTITY/PROJECT
  analyze                       run an analysis: attnswap analyze token-selection --output DIR
  show-batch                    draw a batch as the model gets it: attnswap show-batch RECIPE --output PNG

options:
  -h, --help                    show this text; `attnswap fit --help` lists the trainer's,
                                `attnswap fit --model.help CLASS` those of a task
  --version                     show the version

Errors in what was asked for have no traceback; ATTNSWAP_TRACEBACK=1 in the environment shows where they come from.
"""
TRAINER_COMMANDS = ("fit", "validate", "test", "predict")
RECIPE_COMMANDS = (*TRAINER_COMMANDS, "show-batch")


def version() -> str:
    """The version, read from the text of `attention_modules/__init__.py` so that torch is not imported.

    A checkout on PYTHONPATH has no metadata to ask, and an editable install that of the day it was installed.
    """
    source = Path(__file__).resolve().parent.parent / "attention_modules" / "__init__.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(getattr(t, "id", None) == "__version__" for t in node.targets):
            return str(ast.literal_eval(node.value))
    raise RuntimeError(f"{source} defines no __version__")


def until_closed(show: Callable[[], None]) -> None:
    """Call what prints; a reader that has seen enough, such as `head`, ends it without an error."""
    try:
        show()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends


def _run(command: str, arguments: list[str]) -> None:
    """Run one command; what can be refused without importing torch is."""
    from lightning_tasks.errors import UsageError

    if command == "fit" and any(each.partition("=")[0] == "--executor" for each in arguments):
        from lightning_tasks.compare.cluster.submit import submit_fit

        submit_fit(arguments)
        return
    if command in RECIPE_COMMANDS:
        from lightning_tasks.cli.asked import check_asked, named_recipe

        arguments = named_recipe(arguments)
        check_asked(arguments)
    if command == "predict":
        from lightning_tasks.cli.predict_images import settings_of_run

        settings_of_run(arguments)
    if command in ("-h", "--help"):
        until_closed(lambda: print(HELP, end=""))
    elif command == "--version":
        print(f"attnswap {version()}")
    elif command == "recipes":
        from lightning_tasks.recipes import print_recipes

        until_closed(print_recipes)
    elif command == "compare":
        from lightning_tasks.compare.arguments import parser

        options = parser(arguments).parse_args(arguments[1:])  # its help and refusals come at once
        if not (options.plan or options.status or options.executor or (options.output / "results.csv").exists()):
            from lightning_tasks.compare.workers import start_server

            start_server()
        from lightning_tasks.compare.command import main as compare

        compare(arguments[1:])
    elif command == "cell":
        from lightning_tasks.cli.early_stop import sigterm_in_one_line
        from lightning_tasks.compare.arguments import cell_parser

        cell_parser().parse_args(arguments[1:])
        with sigterm_in_one_line():
            from lightning_tasks.compare.command import run_one

            run_one(arguments[1:])
    elif command == "report":
        from lightning_tasks.report.arguments import parser as report_parser

        report_parser().parse_args(arguments[1:])  # its help and refusals come at once
        from lightning_tasks.report.page import main as report

        report(arguments[1:])
    elif command == "explore":
        from lightning_tasks.explore.arguments import parser as explore_parser

        explore_parser().parse_args(arguments[1:])  # its help and refusals come at once
        from lightning_tasks.explore.command import main as explore

        explore(arguments[1:])
    elif command == "analyze":
        from lightning_tasks.analyses import main as analyze

        analyze(arguments[1:])
    elif command == "drift":
        from lightning_tasks.analyses.drift import main as drift

        drift(arguments[1:])
    elif command == "sweep":
        from lightning_tasks.cli.boards.sweep import main as sweep

        sweep(arguments[1:])
    elif command == "workspace":
        from lightning_tasks.cli.boards.workspace import main as workspace

        workspace(arguments[1:])
    elif command == "show-batch":
        from lightning_tasks.cli.show_batch import main as show_batch

        show_batch(arguments[1:])
    elif command in TRAINER_COMMANDS:
        from lightning_tasks.cli.early_stop import sigterm_in_one_line

        with sigterm_in_one_line():
            from lightning_tasks.cli.fit import run

            run(arguments)
    else:
        others = "recipes, compare, cell, report, explore, sweep, workspace, drift, analyze, show-batch"
        known = ", ".join((*TRAINER_COMMANDS, others))
        raise UsageError(f"unknown command {command!r}; the commands are {known}")


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line `args` (by default that of the process).

    Raises:
        SystemExit: with code 2 where what was asked for is refused, by the command line or on building and running it;
            the message is on stderr; with 130 on an interrupt, and 143 where SIGTERM ends a trainer's command. Errors
            of a training step and of the user's own code pass as they are.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    command = arguments[0] if arguments else "--help"
    from lightning_tasks.errors import HINT, UsageError, library_refusal, refusal_in, refusal_text
    from lightning_tasks.working_folder import modules_of_working_folder

    try:
        with modules_of_working_folder():
            _run(command, arguments)
    except Exception as error:
        refusal = error if isinstance(error, UsageError) else refusal_in(error)
        if refusal is None and command not in TRAINER_COMMANDS:  # a fit can fail in its thousandth step
            refusal = library_refusal(error)
        if refusal is None or os.environ.get("ATTNSWAP_TRACEBACK"):
            raise
        wraps = refusal.__cause__ is not None and not isinstance(error, UsageError)
        print(refusal_text(refusal, HINT if wraps else ""), file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        if os.environ.get("ATTNSWAP_TRACEBACK"):
            raise
        print("attnswap: interrupted", file=sys.stderr)
        raise SystemExit(130) from None  # as a shell says of what SIGINT ended


if __name__ == "__main__":
    main()
