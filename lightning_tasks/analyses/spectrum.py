"""Eigenvalues of W = W_qᵀ W_k of every head: of one model, or of two side by side, as before and after training.

Bao, Hataya and Karakida (Self-attention Networks Localize When QK-eigenspectrum Concentrates, ICML 2024) tell from
their mean and variance how attention localizes. Nothing is run: only weights are read, of each self-attention layer
that a host knows. Of W's eigenvalues as many as the head is wide may differ from zero; those are kept and drawn. Mean
and variance are over all, as `attnswap.analysis.qk_statistics` defines them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules import AttentionSwapError
from attention_modules.analysis import qk_spectrum, qk_statistics
from attention_modules.hosts import attention_layers
from attention_modules.hosts.base import AttentionLayer
from lightning_tasks.analyses.inputs import MODEL, add_weights
from lightning_tasks.analyses.made_by import MADE_BY, Recording
from lightning_tasks.analyses.subjects import choose_layers, load_model
from lightning_tasks.errors import UsageError
from lightning_tasks.figures.spectrum import draw_eigenvalues
from lightning_tasks.runs.folder import output_folder
from lightning_tasks.runs.safe_files import write_rows

TABLE, EIGENVALUES, FIGURE, SUMMARY = "spectrum.csv", "eigenvalues.csv", "spectrum.png", "summary.md"
STATISTICS = ("mean", "variance", "variance_real", "scale", "max", "min", "max_abs")
_SHOWN = ("mean", "variance", "scale")
_LABELS = {1: ("model",), 2: ("before", "after")}


@dataclass(frozen=True)
class LayerSpectrum:
    """What one layer has.

    Args:
        name: of the layer.
        eigenvalues: complex ``[H, d]``.
        statistics: ``[H]`` each.
        caveat: why the spectrum is not that of the logits, if so.
    """

    name: str
    eigenvalues: Tensor
    statistics: Mapping[str, Tensor]
    caveat: str | None


@torch.no_grad()
def spectra(layers: Sequence[AttentionLayer]) -> list[LayerSpectrum]:
    """The spectra of these layers, in float64.

    Raises:
        ValueError: if queries and keys of a layer are no linear function of its input.
    """
    found = []
    for layer in layers:
        w_q, w_k = (weight.cpu().double() for weight in layer.qk_weights())
        spectrum = qk_spectrum(w_q, w_k)
        statistics = qk_statistics(w_q, w_k, spectrum)
        kept = {name: statistics[name] for name in STATISTICS}
        found.append(LayerSpectrum(layer.name, spectrum.eigenvalues, kept, layer.spectrum_caveat))
    return found


def _chosen(model: nn.Module, text: str | None) -> list[AttentionLayer]:
    names = {layer.name for layer in choose_layers(model, text)}
    try:
        known = [layer for layer in attention_layers(model) if layer.name in names]
    except AttentionSwapError as error:
        raise UsageError(f"{error}; the spectrum is of layers with q and k projections that a host knows") from error
    if strange := sorted(names - {layer.name for layer in known}):
        raise UsageError(
            f"--layers {text}: {strange[0]!r} is no attention layer that a host knows, so that its q and k are not; "
            "choose others"
        )
    return known


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attnswap analyze spectrum",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, nargs="+", help=f"{MODEL}; two: before and after training")
    add_weights(parser)
    files = f"{TABLE}, {EIGENVALUES}, {FIGURE}, {SUMMARY}, {MADE_BY}"
    parser.add_argument("--output", required=True, type=Path, help=f"folder for {files}")
    parser.epilog = "Of two models --random means the first: `--model X X --random` is X before and after training."
    return parser


def main(arguments: Sequence[str]) -> None:
    """Run `attnswap analyze spectrum` with these arguments.

    Raises:
        UsageError: more than two models, layers of which there is no spectrum, or two models that do not fit.
        ValueError: a model that does not load.
        SystemExit: arguments that the parser refuses.
    """
    options = _parser().parse_args(list(arguments))
    recording = Recording("attnswap analyze spectrum", arguments)
    if len(options.model) > 2:
        raise UsageError(f"--model takes one model, or two side by side, got {len(options.model)}: leave some out")
    if len({*options.model}) < len(options.model) and not options.random:
        raise UsageError(f"--model {options.model[0]} is given twice: name another, or --random for the first")
    heads: list[str] = []
    found: dict[str, list[LayerSpectrum]] = {}
    for label, name in zip(_LABELS[len(options.model)], options.model, strict=True):
        random = options.random and not found
        model = load_model(name, random, options.seed, options.trust_checkpoint)
        found[label] = spectra(_chosen(model, options.layers))
        weights = f"random weights, seed {options.seed}" if random else "its own weights"
        heads.append(f"{label}: {name} ({type(model).__name__}, {weights})")
    _check_alike(options.model, list(found.values()))
    with output_folder(options.output):
        text = write_report("; ".join(heads) + ".", found, options.output)
        recording.write(options.output, anew=True)
    print(text, end="")


def _check_alike(names: Sequence[str], found: Sequence[Sequence[LayerSpectrum]]) -> None:
    shapes = [[len(layer.eigenvalues) for layer in layers] for layers in found]
    if any(shape != shapes[0] for shape in shapes):
        said = " and ".join(f"{name} has {shape}" for name, shape in zip(names, shapes, strict=True))
        raise UsageError(f"two models stand side by side head by head; heads of layers: {said}; give --layers of both")


def write_report(head: str, found: Mapping[str, Sequence[LayerSpectrum]], output: Path) -> str:
    """Write the tables, the figure and the summary; the text of the summary."""
    places = [
        (label, layer, number) for label, layers in found.items() for layer in layers for number in range(_heads(layer))
    ]
    rows: list[dict[str, Any]] = [
        {"model": label, "layer": layer.name, "head": number}
        | {name: float(values[number]) for name, values in layer.statistics.items()}
        for label, layer, number in places
    ]
    write_rows(output / TABLE, list(rows[0]), rows)
    values: list[dict[str, Any]] = [
        {"model": label, "layer": layer.name, "head": number, "real": value.real, "imaginary": value.imag}
        for label, layer, number in places
        for value in layer.eigenvalues[number].tolist()
    ]
    write_rows(output / EIGENVALUES, list(values[0]), values)
    drawn = {label: [layer.eigenvalues.flatten().numpy() for layer in layers] for label, layers in found.items()}
    draw_eigenvalues(drawn, [layer.name for layer in next(iter(found.values()))]).savefig(output / FIGURE, dpi=110)
    text = summary(head, found)
    (output / SUMMARY).write_text(text, encoding="utf-8")
    return text


def _heads(layer: LayerSpectrum) -> int:
    return len(layer.eigenvalues)


def summary(head: str, found: Mapping[str, Sequence[LayerSpectrum]]) -> str:
    """A line for each layer, as Markdown: the mean over its heads, and the least and the largest."""
    columns = [f"{name} ({label})" if len(found) > 1 else name for name in _SHOWN for label in found]
    lines = [
        head,
        "",
        f"Mean over the heads of a layer [least, largest]; each head is in {TABLE}. Scale: ‖W‖_F².",
        *_caveats(found),
        "",
        f"| layer | {' | '.join(columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for layers in zip(*found.values(), strict=True):
        cells = [_cell(layer.statistics[name]) for name in _SHOWN for layer in layers]
        lines.append(f"| {' | '.join([layers[-1].name, *cells])} |")
    return "\n".join([*lines, ""])


def _caveats(found: Mapping[str, Sequence[LayerSpectrum]]) -> list[str]:
    """A line for each reason why spectra are not those of the logits, with its first layer."""
    first: dict[str, str] = {}
    for layers in found.values():
        for layer in layers:
            if layer.caveat is not None:
                first.setdefault(layer.caveat, layer.name)
    return [f"Not the spectrum of the logits in {name} and layers like it: {reason}." for reason, name in first.items()]


def _cell(values: Tensor) -> str:
    return f"{float(values.mean()):.3g} [{float(values.min()):.3g}, {float(values.max()):.3g}]"
