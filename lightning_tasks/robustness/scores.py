"""The mean corruption error, against a baseline, and its relative form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torchmetrics.functional.classification import (
    binary_auroc,
    binary_average_precision,
    binary_specificity_at_sensitivity,
)

from attention_modules.precision import to_float64
from lightning_tasks.robustness.corruptions import CORRUPTIONS, SEVERITIES
from lightning_tasks.runs.robustness import GIVES_NAN, TABLE, Row, read_csv

Errors = Mapping[tuple[str, int], float]
"""Error rate in [0, 1] by (corruption, severity)."""
OOD_METRICS = ("auroc", "aupr", "fpr95")
ALEXNET = "alexnet"
"""The baseline that is published, not measured."""
_ALEXNET_CLEAN = 0.435  # Hendrycks and Dietterich, ICLR 2019, table 1
# Means over the five severities of ImageNet-C, in the order of CORRUPTIONS: those that the authors' repository and the
# code released with RPC-Attention divide by.
_ALEXNET_ERRORS = (
    *(0.886428, 0.894468, 0.922640, 0.819880, 0.826268, 0.785948, 0.798360, 0.866816),
    *(0.826572, 0.819324, 0.564592, 0.853204, 0.646056, 0.717840, 0.606500),
)


@dataclass(frozen=True)
class Baseline:
    """What mCE is relative to.

    Args:
        of: what notes call it.
        setting: that of its rows in the table.
        clean: error rate on clean images.
        errors: under corruptions.
        samples: numbers of images that it was measured on.
        whole: whether its errors are known as means over all severities alone.
    """

    of: str
    setting: str
    clean: float
    errors: Errors
    samples: frozenset[int] = frozenset()
    whole: bool = False

    def comparable(self, errors: Errors) -> Errors:
        """Those of a model's errors that can be set against it: where ``whole``, of corruptions at all severities."""
        if not self.whole:
            return errors
        return {key: value for key, value in errors.items() if all((key[0], each) in errors for each in SEVERITIES)}


def mean_corruption_error(errors: Errors, baseline: Errors) -> float:
    """mCE: the mean over corruptions of Σ errors / Σ baseline errors, both over severities; 1 is the baseline.

    Hendrycks and Dietterich (ICLR 2019), who multiply by 100 and take AlexNet as the baseline. It is taken over those
    of the fifteen corruptions, and the severities, that ``errors`` has.

    Args:
        errors: of the model.
        baseline: of the baseline, for at least the same corruptions and severities.

    Raises:
        ValueError: if the baseline lacks one, has no error at all for one, or there is none of the fifteen.
    """
    return _mean_ratio(errors, baseline, 0.0, 0.0, relative=False)


def relative_mean_corruption_error(errors: Errors, clean: float, baseline: Errors, baseline_clean: float) -> float:
    """Relative mCE: as :func:`mean_corruption_error`, of how much each error rate exceeds that on clean images.

    Args:
        errors: of the model.
        clean: its error rate on clean images.
        baseline, baseline_clean: the same of the baseline.

    Raises:
        ValueError: as :func:`mean_corruption_error`, or if a corruption does not harm the baseline at all.
    """
    return _mean_ratio(errors, baseline, clean, baseline_clean, relative=True)


def _mean_ratio(errors: Errors, baseline: Errors, clean: float, baseline_clean: float, relative: bool) -> float:
    names = [name for name in CORRUPTIONS if any(name == known for known, _ in errors)]
    if not names:
        raise ValueError("the mean corruption error needs at least one of the fifteen corruptions")
    ratios = []
    for name in names:
        keys = [key for key in errors if key[0] == name]
        if missing := [key for key in keys if key not in baseline]:
            raise ValueError(
                f"the baseline has no {name} at severity {', '.join(str(severity) for _, severity in missing)}; "
                "measure it with the same corruptions and severities"
            )
        above = sum(baseline[key] - baseline_clean for key in keys)
        if above <= 0:
            exceeds = " above that on clean images" if relative else ""
            raise ValueError(f"the baseline has no error{exceeds} under {name}: a ratio to it means nothing")
        ratios.append(sum(errors[key] - clean for key in keys) / above)
    return sum(ratios) / len(ratios)


def read_baseline(given: str, corrupted: Sequence[tuple[str, int]]) -> Baseline:
    """The baseline that is named: ``"alexnet"``, or the table of a run.

    Raises:
        ValueError: AlexNet, and a corruption is measured at some severities only, or none of the fifteen is.
        ValueError: if there is none, it lacks a corruption or severity, has nan, or no error at all under a corruption.
    """
    if given == ALEXNET:
        errors = {
            (name, severity): error
            for name, error in zip(CORRUPTIONS, _ALEXNET_ERRORS, strict=True)
            for severity in SEVERITIES
        }
        alexnet = Baseline("AlexNet's published errors", ALEXNET, _ALEXNET_CLEAN, errors, whole=True)
        asked = {key: 0.0 for key in corrupted if key[0] in CORRUPTIONS}
        if not asked or len(alexnet.comparable(asked)) < len(asked):
            raise ValueError(
                f"baseline {ALEXNET}: its published errors are means over severities 1 to 5 of the fifteen "
                f"corruptions; severities are {sorted({severity for _, severity in corrupted})}: give "
                "severities=[1, 2, 3, 4, 5] and corruptions='common'"
            )
        return alexnet
    path = Path(given)
    file = path / TABLE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"baseline {path}: no such file; give the {TABLE} of a run, or its folder")
    rows = read_csv(file)
    if nan := [row.label for row in rows if row.test in ("clean", "corruption") and math.isnan(row.value)]:
        raise ValueError(f"baseline {path}: {nan[0]} is nan, and so would be each ratio to it; give another run's")
    clean, measured = corruption_errors(rows)
    mean_corruption_error(dict.fromkeys(corrupted, 0.0), measured)
    samples = frozenset(row.samples for row in rows if row.test == "corruption")
    return Baseline(given, "", clean, measured, samples)


def with_means(rows: Sequence[Row], baselines: Sequence[Baseline] = ()) -> list[Row]:
    """The rows, the mean over corruptions among them, and the errors relative to the baselines."""
    means = _mean_row(rows)
    if means and baselines:
        clean, errors = corruption_errors(rows)
        means += [row for each in baselines for row in _relative_errors(means[0], errors, clean, each)]
    last = max((place for place, row in enumerate(rows) if row.test == "corruption"), default=-1)
    return [*rows[: last + 1], *means, *rows[last + 1 :]]


def _relative_errors(mean: Row, errors: Errors, clean: float, baseline: Baseline) -> list[Row]:
    """mCE and relative mCE; their note says where the baseline has another number of images."""
    others = baseline.samples - {mean.samples}
    note = f"against {baseline.of}" + (f", measured on {max(others):,} images" if others else "")
    errors = baseline.comparable(errors)
    result = []
    for metric, compute in (
        ("mCE", partial(mean_corruption_error, errors, baseline.errors)),
        (
            "relative mCE",
            partial(relative_mean_corruption_error, errors, clean, baseline.errors, baseline.clean),
        ),
    ):
        try:
            value, said = compute(), note
        except ValueError as error:  # no severity that harms the baseline, or not all of them, is measured so far
            value, said = math.nan, str(error)
        if math.isnan(mean.value):
            value, said = math.nan, GIVES_NAN
        result.append(Row("mean corruption", "", baseline.setting, metric, value, mean.samples, note=said))
    return result


def _mean_row(rows: Sequence[Row]) -> list[Row]:
    """The mean over those of the fifteen corruptions, and the severities, that were measured."""
    measured = [row for row in rows if row.test == "corruption" and row.name in CORRUPTIONS]
    if not measured:
        return []
    names = {row.name for row in measured}
    note = f"{len(names)} of 15 corruptions, severities {', '.join(sorted({row.setting for row in measured}))}"
    mean = sum(row.value for row in measured) / len(measured)
    note = GIVES_NAN if math.isnan(mean) else note
    return [Row("mean corruption", "", "", measured[0].metric, mean, measured[0].samples, note=note)]


def anomaly_scores(logits: Tensor) -> Tensor:
    """1 - the maximum softmax probability of each row of ``[N, classes]``, ``[N]`` in float64."""
    # 1 - max p = Σ of the others: sure predictions, which 1 - p rounds to 0, keep their order.
    probabilities = to_float64(logits).softmax(1)
    highest = probabilities.argmax(1, keepdim=True)
    return probabilities.scatter(1, highest, 0.0).sum(1)


def detection_metrics(inside: Tensor, outside: Tensor) -> dict[str, float]:
    """AUROC, AUPR and FPR95 of anomaly scores; the images from outside are the positive class, as for ImageNet-O.

    AUPR depends on the share of outside images, which is its value at chance. FPR95 is the share of inside images
    that are taken for outside where at least 95% of the outside ones are found. Definitions of Hendrycks and Gimpel
    (ICLR 2017) and Hendrycks et al. (CVPR 2021), computed by torchmetrics.

    Args:
        inside: scores ``[N]`` of images of the classes, each in [0, 1], higher for what seems from outside.
        outside: scores ``[M]`` of the others.

    Raises:
        ValueError: if one of them is empty, or a score is not in [0, 1].
    """
    if not len(inside) or not len(outside):
        raise ValueError(f"{len(inside)} images inside and {len(outside)} outside: at least one of each is needed")
    inside, outside = to_float64(inside), to_float64(outside)
    scores = torch.cat([inside, outside])
    if not (scores.min() >= 0 and scores.max() <= 1):
        raise ValueError(f"scores are in [{scores.min():g}, {scores.max():g}]: give them in [0, 1]")
    target = torch.cat([torch.zeros_like(inside, dtype=torch.int64), torch.ones_like(outside, dtype=torch.int64)])
    specificity, _ = binary_specificity_at_sensitivity(scores, target, min_sensitivity=0.95)
    return {
        "auroc": float(binary_auroc(scores, target)),
        "aupr": float(binary_average_precision(scores, target)),
        "fpr95": 1 - float(specificity),
    }


def corruption_errors(rows: Sequence[Row]) -> tuple[float, Errors]:
    """Error rate on clean images, and that of each (corruption, severity).

    Raises:
        ValueError: if the rows have no accuracy on clean images.
    """
    clean = [row.value for row in rows if row.test == "clean" and row.metric == "accuracy"]
    if not clean:
        raise ValueError("the table has no accuracy on clean images")
    if other := next((row.metric for row in rows if row.test == "corruption" and row.metric != "accuracy"), None):
        raise ValueError(f"the table's corruptions have {other}, and errors are those of accuracy")
    corrupted = {(row.name, int(row.setting)): 1 - row.value for row in rows if row.test == "corruption"}
    return 1 - clean[0], {key: value for key, value in corrupted.items() if not math.isnan(value)}
