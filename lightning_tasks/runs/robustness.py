"""The table of a robustness evaluation: its rows, and how they are written as CSV and Markdown."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from lightning_tasks.runs.metric_names import robustness_name
from lightning_tasks.runs.safe_files import write_rows

CORRUPTIONS = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
"""The fifteen that the mean corruption error is taken over."""
GIVES_NAN = "the model gives nan"
"""The note of a figure that is nan, and was measured."""


def right_as_text(right: Any) -> str:
    """Booleans ``[N]`` (a tensor or an array) as hexadecimal digits, four samples each."""
    return np.packbits(np.asarray(right, dtype=bool)).tobytes().hex()


def right_from_text(text: str, samples: int) -> np.ndarray:
    """What :func:`right_as_text` was given, ``[samples]``.

    Raises:
        ValueError: if the text is no such digits, or of another number of samples.
    """
    packed = np.frombuffer(bytes.fromhex(text), dtype=np.uint8)
    if samples < 0 or len(packed) != (samples + 7) // 8:
        raise ValueError(f"{len(packed)} bytes are not the bits of {samples} samples")
    return np.unpackbits(packed, count=samples).astype(bool)


@dataclass(frozen=True)
class Row:
    """One figure.

    Args:
        test: "clean", "input gradient", "attack", "corruption", "mean corruption", "shift", "out of distribution" or
            "word swap".
        name: the attack, corruption or folder.
        setting: eps, severity or share, as text.
        metric: "accuracy", "mIoU", "perplexity", "auroc", "l1" (of the input gradient, in nats per unit of the image),
            "median_l2" (of the smallest change that makes an image wrong; inf where most stand), ...
        value: the figure; nan where it could not be measured, or the model gives nan: `note` says which.
        samples: images or tokens it was measured on.
        gradient_l1, gradient_l2: mean norm of the clean images' input gradient, beside white-box figures.
        seconds: time it took.
        note: what else to know.
        right: which images were right, where that is known (:func:`right_as_text`).
    """

    test: str
    name: str
    setting: str
    metric: str
    value: float
    samples: int = 0
    gradient_l1: float = math.nan
    gradient_l2: float = math.nan
    seconds: float = math.nan
    note: str = ""
    right: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether `value` is what the model gives, nan too."""
        return not math.isnan(self.value) or self.note == GIVES_NAN

    @property
    def label(self) -> str:
        """A name for loggers: ``robustness/pgd/4_255/accuracy``, ``robustness/word_swap/2.5/perplexity``."""
        what = self.test if self.test == "word swap" else self.name or self.test
        return robustness_name(what, self.setting.removesuffix("%"), self.metric)


TABLE = "robustness.csv"
"""The file's name in the folder of a run."""
COLUMNS = [field.name for field in fields(Row)]
SHOWN = COLUMNS[:-1]
"""Those that people read."""


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write the rows, whole or not at all."""
    write_rows(path, COLUMNS, ({key: _text(value) for key, value in asdict(row).items()} for row in rows))


def read_csv(path: str | Path) -> list[Row]:
    """The rows that :func:`write_csv` wrote, also in a version that did not say which images were right.

    Raises:
        ValueError: if the file has other columns.
    """
    with Path(path).open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames not in (COLUMNS, SHOWN):
            raise ValueError(f"{path} is no table of a robustness evaluation: its columns are {reader.fieldnames}")
        return [Row(**{key: _parsed(key, text) for key, text in line.items()}) for line in reader]


def _text(value: Any) -> Any:
    return "" if isinstance(value, float) and math.isnan(value) else value


def _parsed(key: str, text: str) -> Any:
    if key == "samples":
        return int(text)
    if key in ("value", "gradient_l1", "gradient_l2", "seconds"):
        return float(text or "nan")
    return text


def markdown(rows: Sequence[Row]) -> str:
    """The table as Markdown; corruptions by severity in a second one."""
    lines = [
        "| test | setting | metric | value | samples | input gradient L1 / L2 | note |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.test == "corruption":
            continue
        name = row.test if not row.name else f"{row.test}: {row.name}"
        norms = "" if math.isnan(row.gradient_l2) else f"{row.gradient_l1:.3g} / {row.gradient_l2:.3g}"
        lines.append(
            f"| {name} | {row.setting} | {row.metric} | {figure(row)} | {row.samples:,} | {norms} | {row.note} |"
        )
    return "\n".join([*lines, "", *_by_severity([row for row in rows if row.test == "corruption"])])


def figure(row: Row) -> str:
    """The value as the table shows it: shares as percentages."""
    if math.isnan(row.value):
        return "NaN" if row.is_measured else "not measured"
    if row.test == "input gradient" or row.metric == "median_l2":
        return f"{row.value:.3g}"
    return f"{row.value:.2f}" if "perplexity" in row.metric else f"{100 * row.value:.1f}%"


def _by_severity(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    severities = sorted({row.setting for row in rows})
    heading = f"corruption, {rows[0].metric} at severity"
    lines = [f"| {heading} | {' | '.join(severities)} |", "|---" * (len(severities) + 1) + "|"]
    for name in dict.fromkeys(row.name for row in rows):
        shown = {row.setting: figure(row) for row in rows if row.name == name}
        lines.append(f"| {name} | {' | '.join(shown.get(severity, '') for severity in severities)} |")
    return [*lines, ""]
