"""Pretrained models with other attention: their drift before training, and what healing brings back."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from docs.pages import tables
from docs.pages.figures import Figure
from docs.pages.language import Folder
from docs.pages.numbers import markdown, number, significant

MODELS = {"drift": "sentence encoder", "drift_vit": "image classifier"}
ROUNDING = 1e-5  # a relative error below it says nothing


def swapped(folder: Folder, model: str) -> dict[str, dict[str, Any]]:
    """What the swap of all layers at once does, by mechanism, the least first."""
    rows = [row for row in tables.read(folder.path / model / "drift.parquet").to_pylist() if row["layer"] == "all"]
    return {row["mechanism"]: row for row in sorted(rows, key=lambda row: row["output_error"])}


def _draw(errors: Mapping[str, Mapping[str, float]]) -> Any:
    from matplotlib.figure import Figure as Drawn

    figure = Drawn(figsize=(7, 5.4), layout="constrained")
    axes = figure.subplots()
    for (model, found), marker in zip(errors.items(), "o^", strict=True):
        axes.plot([found[name] for name in errors[MODELS["drift"]]], range(len(found)), marker, label=model)
    axes.set_yticks(range(len(found)), [*errors[MODELS["drift"]]], fontsize=8)
    axes.set_xlabel("relative error of the model's output, all layers swapped, before any training", fontsize=9)
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="0.92", linewidth=0.6)
    return figure


def words(folder: Folder) -> dict[str, Callable[..., Any]]:
    """`drift` and `drift_table` before any training; `healed`, of both comparisons."""

    def drift() -> Figure:
        """The relative errors of all mechanisms in both models."""
        found = {name: swapped(folder, model) for model, name in MODELS.items()}
        errors = {name: {key: row["output_error"] for key, row in each.items()} for name, each in found.items()}
        return Figure(lambda: _draw(errors), errors, sys.modules[__name__])

    def drift_table(model: str) -> str:
        """Errors and cosines of all mechanisms in one model; of a classifier also the KL and the same classes in %."""
        rows = []
        for name, row in swapped(folder, model).items():
            changed = row["output_error"] > ROUNDING
            cells = [significant(row["output_error"]) if changed else "0", number(row["output_cosine"], 3)]
            if not math.isnan(row["output_kl"]):
                cells += [number(max(row["output_kl"], 0.0), 3), number(100 * row["same_class"])]
            rows.append([name, *cells])
        return markdown(["mechanism", "relative error", "cosine", "KL, nats", "same class, %"][: len(rows[0])], rows)

    def healed(*mechanisms: str) -> str:
        """Each mechanism before and after healing: the encoder's cosine, the classifier's accuracy in %."""
        encoder, classifier, cosine, top1 = *map(folder.folder, ("minilm", "vit")), "test/cosine_ag_news", "test/top1"
        rows = []
        for name in mechanisms:
            both = f"{name}, not healed", name
            cosines = [encoder.mean(cosine, each, 3) for each in both]
            accuracies = [classifier.mean(top1, each, 1, 100) for each in both]
            change, left = encoder.diff(cosine, name, both[0], 3), classifier.told(top1, name, "softmax", 1, 100)
            rows.append([name, " → ".join(cosines), change, " → ".join(accuracies), left])
        heads = ["encoder: cosine", "its change", "classifier: accuracy, %", "accuracy minus softmax's, same steps"]
        return markdown(["mechanism", *heads], rows)

    return {"drift": drift, "drift_table": drift_table, "healed": healed}
