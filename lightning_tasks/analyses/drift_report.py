"""The rows of a drift, and what is written of them: a table, a figure, and a summary in Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_tasks.runs.safe_files import write_rows

if TYPE_CHECKING:
    from attention_modules.analysis import Agreement, Drift

TABLE, FIGURE, SUMMARY = "drift.csv", "drift.png", "summary.md"
TOGETHER = "all"  # in place of a layer's name


@dataclass(frozen=True)
class Row:
    """What a mechanism does in one layer alone, or in all together.

    Args:
        mechanism: its name.
        options: that it was built with, as text.
        layer: name of the layer; "all" for all together.
        relative_error: of the layer's output on the input that it had before; nan for all together.
        entropy_before, entropy_after: of its attention, in nats.
        output_error, output_cosine, output_kl, same_class: of the model's output, as
            :class:`~attention_modules.analysis.Agreement` says.
        refused: why the layer cannot be swapped alone.
    """

    mechanism: str
    options: str
    layer: str
    relative_error: float
    entropy_before: float
    entropy_after: float
    output_error: float
    output_cosine: float
    output_kl: float
    same_class: float
    refused: str = ""


def rows_of(mechanism: str, options: str, drift: Drift) -> list[Row]:
    """A row for each layer and one for all."""

    def row(layer: str, found: Agreement, *of_layer: float, refused: str = "") -> Row:
        error, before, after = of_layer or (math.nan,) * 3
        output = (found.relative_error, found.cosine, found.kl, found.same_class)
        return Row(mechanism, options, layer, error, before, after, *output, refused)

    alone = [
        row(each.layer, each.output, each.relative_error, each.entropy_before, each.entropy_after, refused=each.refused)
        for each in drift.layers
    ]
    return [*alone, row(TOGETHER, drift.output)]


def write_report(rows: Sequence[Row], head: str, output: Path) -> str:
    """Write table, figure and summary; the text of the summary."""
    write_rows(output / TABLE, [field.name for field in fields(Row)], map(asdict, rows))
    draw(output / FIGURE, rows)
    text = summary(rows, head)
    (output / SUMMARY).write_text(text, encoding="utf-8")
    return text


def summary(rows: Sequence[Row], head: str) -> str:
    """For each mechanism, all layers together, and each alone, those first that change the model's output least."""
    logits = any(not math.isnan(row.output_kl) for row in rows)
    more = [" KL in nats | same class |", "---|---|"] if logits else ["", ""]
    lines = [
        head,
        "",
        "Relative error: ‖after - before‖ / ‖before‖, of a layer's output on the input that it had before, and of the",
        "model's output. Entropy in nats, of the map that acts.",
    ]
    for mechanism, found in _by_mechanism(rows).items():
        lines += [
            "",
            f"## {mechanism}",
            "",
            f"| layer swapped | its output | entropy before | after | model's output | its cosine |{more[0]}",
            f"|---|---|---|---|---|---|{more[1]}",
        ]
        for row in sorted(found, key=_cost):
            numbers = [row.relative_error, row.entropy_before, row.entropy_after, row.output_error, row.output_cosine]
            cells = [*numbers, row.output_kl, row.same_class] if logits else numbers
            lines.append(f"| {row.layer} | {' | '.join(map(_number, cells))} |")
        lines += [f"\nNot swapped alone: {row.layer}, as {row.refused}." for row in found if row.refused]
    return "\n".join([*lines, ""])


def _cost(row: Row) -> tuple[bool, bool, float]:
    return row.layer != TOGETHER, math.isnan(row.output_error), row.output_error


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3g}"


def _by_mechanism(rows: Sequence[Row]) -> Mapping[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.mechanism + (f" {row.options}" if row.options else ""), []).append(row)
    return groups


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Write the figure: errors of the layers' outputs, and of the model's with one layer swapped, by the layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True)
    for mechanism, found in _by_mechanism(rows).items():
        layers = [row for row in found if row.layer != TOGETHER]
        left.plot([row.relative_error for row in layers], "o-", markersize=3, linewidth=1, label=mechanism)
        right.plot([row.output_error for row in layers], "o-", markersize=3, linewidth=1)
    for axes, title in ((left, "the layer's output"), (right, "the model's output, this layer swapped")):
        axes.set_title(title, loc="left", fontsize="small")
        axes.set_xlabel("layer")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("relative error")
    figure.legend(fontsize="x-small", frameon=False, loc="outside right upper")
    figure.savefig(path, dpi=110, format="png")
