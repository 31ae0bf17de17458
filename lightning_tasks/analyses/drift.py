"""What mechanisms do to a trained model before any training: each layer swapped alone, and all together.

The model is shown text or images as it is, and with each mechanism; nothing is trained and no file of the model is
changed. Layers whose swap changes the model's output least come first in the summary.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules.analysis import swap_drift
from lightning_tasks.analyses.drift_report import FIGURE, SUMMARY, TABLE, Row, rows_of, write_report
from lightning_tasks.analyses.inputs import add_arguments, add_options, mechanism_options, read_inputs
from lightning_tasks.analyses.made_by import MADE_BY, Recording
from lightning_tasks.analyses.subjects import Subject, choose_layers, load_subject
from lightning_tasks.errors import UsageError
from lightning_tasks.runs.folder import output_folder
from lightning_tasks.training.eager import eager

_BATCH = 8


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attnswap drift",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument("--mechanism", required=True, help="names or import paths, with commas between: sink,gated,rpc")
    add_options(parser)
    parser.add_argument("--sequences", type=int, default=16, help="of text, or images (default: %(default)s)")
    parser.add_argument("--length", type=int, default=64, help="of a sequence in tokens (default: %(default)s)")
    parser.add_argument(
        "--output", required=True, type=Path, help=f"folder for {TABLE}, {FIGURE}, {SUMMARY}, {MADE_BY}"
    )
    return parser


def main(arguments: Sequence[str]) -> None:
    """Run `attnswap drift` with these arguments.

    Raises:
        UsageError: numbers that make no sense, a mechanism that there is not or that no layer takes, or an
            `--output` that is no folder or that another command holds.
        ValueError: a model, data or layers that do not load or fit.
        FileNotFoundError: missing data.
        SystemExit: arguments that the parser refuses.
    """
    options = _parser().parse_args(list(arguments))
    recording = Recording("attnswap drift", arguments)
    for name in ("sequences", "length"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} must be at least 1, got {getattr(options, name)}")
    mechanisms = [name.strip() for name in options.mechanism.split(",")]
    if "" in mechanisms or len(set(mechanisms)) < len(mechanisms):
        raise UsageError(f"--mechanism {options.mechanism!r} must name mechanisms with commas between, none twice")
    given = mechanism_options(options.options)
    if given and len(mechanisms) > 1:
        raise UsageError(f"--options {options.options} would be of each of {options.mechanism}: give one --mechanism")
    subject = load_subject(options.model, options.random, options.seed, options.trust_checkpoint)
    layers = [layer.name for layer in choose_layers(subject.model, options.layers)]
    inputs = read_inputs(options, subject, options.sequences, options.length)
    weights = f"random weights, seed {options.seed}" if options.random else "its own weights"
    head = f"{options.model} ({type(subject.model).__name__}, {weights}); {options.data}: {inputs.described}."
    rows: list[Row] = []
    with output_folder(options.output):
        for mechanism in mechanisms:
            rows += _rows(subject, layers, inputs.values, mechanism, given, options)
        text = write_report(rows, head, options.output)
        recording.write(options.output, anew=True)
    print(text, end="")


def _rows(
    subject: Subject, layers: Sequence[str], values: Tensor, mechanism: str, given: dict[str, Any], options: Any
) -> list[Row]:
    def run(model: nn.Module, batch: Tensor) -> Any:
        return model(subject.prepare(batch))

    logits = True if options.model.endswith(".ckpt") or hasattr(subject.model, "pretrained_cfg") else None
    try:
        with torch.random.fork_rng(devices=[]), eager():
            torch.manual_seed(options.seed)
            batches = list(values.split(_BATCH))
            drift = swap_drift(subject.model, mechanism, batches, where=list(layers), run=run, logits=logits, **given)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--mechanism {mechanism}: {error}") from error
    return rows_of(mechanism, options.options or "", drift)
