"""Scaled Attention on CIFAR-10: what the tables and numbers of its page are.

What S has learned is in `learned.csv`, which the page's command makes of the last checkpoint of each cell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from docs.pages.cell_tests import primary_table
from docs.pages.errors import PageError
from docs.pages.figures import Figure, curves_of
from docs.pages.numbers import difference, interval, mean_std, number
from docs.pages.page import Claim, Page
from docs.pages.raw import RESULTS, Comparison, Raw
from docs.pages.results.rpc.shared import (
    BLIND,
    CORRUPTED,
    GRADIENT,
    TOP1,
    accuracy_differences,
    attacked_and_corrupted,
    points,
    under_attack,
)
from docs.pages.tables import Table
from docs.pages.verdicts import counted, verdict

RECIPE = "rpc/compare_scaled"
SOFTMAX, MATRIX, SCALAR, BIAS = "softmax", "scaled by a matrix", "scaled by a scalar", "position bias"
PAIRS = {
    "matrix − softmax": (MATRIX, SOFTMAX),
    "matrix − position bias": (MATRIX, BIAS),
    "matrix − scalar": (MATRIX, SCALAR),
    "scalar − softmax": (SCALAR, SOFTMAX),
    "position bias − softmax": (BIAS, SOFTMAX),
}
TOKENS = 65
KNOWN = 2  # of softmax and both forms so many seeds had run before the endpoint was fixed
CLEAN = "robustness/clean/accuracy"  # on the images that are attacked and corrupted
PAGE = Page("scaled_attention", "CIFAR-10, Scaled Attention", summaries={"": RECIPE})


@dataclass(frozen=True)
class Learned:
    """What one layer has learned with one seed.

    Args:
        seed, layer: where.
        scalar: s of the layer, scaled by a scalar.
        norm: the Frobenius norm of S, mean over the layer's heads, scaled by a matrix.
        largest: the share of its square that the eight largest singular values have, mean over heads.
    """

    seed: int
    layer: int
    scalar: float
    norm: float
    largest: float


def read(raw: Raw) -> Comparison:
    """The comparison."""
    return raw.comparison("", RECIPE)


@PAGE.claims
def claims(raw: Raw) -> list[Claim]:
    found = read(raw)
    clean, bias = found.row(TOP1, MATRIX, SOFTMAX), found.row(TOP1, MATRIX, BIAS)
    scalar, corrupted = found.row(TOP1, SCALAR, SOFTMAX), found.row(CORRUPTED, MATRIX, SOFTMAX)
    gradient, blind = (
        [found.row(metric, MATRIX, SOFTMAX) for metric in metrics.values()] for metrics in (GRADIENT, BLIND)
    )
    accuracies = " against ".join(f"{number(found.mean(TOP1, config) * 100)}%" for config in (MATRIX, SOFTMAX))
    return [
        Claim(
            "Scaled Attention (Teo and Nguyen, NeurIPS 2024) by a matrix classifies better than softmax attention",
            f"CIFAR-10: test accuracy {accuracies}, {difference(clean, 1, 100)} points",
            verdict("higher", clean),
        ),
        Claim(
            "... by more than its number of parameters",
            f"{difference(bias, 1, 100)} points to a position bias of as many parameters",
            verdict("higher", bias),
        ),
        Claim("... by a scalar for each layer", f"{difference(scalar, 1, 100)} points", verdict("higher", scalar)),
        *under_attack(("by a matrix, PGD, also the released one", gradient), ("by a matrix, SPSA and Square", blind)),
        Claim(
            "... and under corruption",
            f"by a matrix, mean of 15 corruptions: {points([corrupted])} points to softmax",
            verdict("higher", corrupted),
        ),
    ]


@PAGE.table
def primary(raw: Raw) -> Table:
    return primary_table(read(raw), TOP1)


@PAGE.table
def attacked(raw: Raw) -> Table:
    return attacked_and_corrupted(read(raw))


@PAGE.table
def paired(raw: Raw) -> Table:
    return accuracy_differences(read(raw), PAIRS)


@PAGE.table
def learned(raw: Raw) -> Table:
    rows = raw.records("learned.csv", Learned, grid=("seed", "layer"))
    both = {*read(raw).by_seed(TOP1, MATRIX)} & {*read(raw).by_seed(TOP1, SCALAR)}
    if strange := {row.seed for row in rows} ^ both:
        raise PageError(f"learned.csv and {RESULTS} have other seeds: {min(strange)} is in one alone")
    heads = ["layer", "s", "norm of S", "share of the eight largest singular values, %"]
    of_layer = {row.layer: [each for each in rows if each.layer == row.layer] for row in rows}
    shown = [
        [
            str(layer),
            mean_std([each.scalar for each in found], 2),
            mean_std([each.norm for each in found], 2),
            mean_std([each.largest for each in found], 0, 100.0),
        ]
        for layer, found in of_layer.items()
    ]
    return Table(heads, shown)


@PAGE.numbers
def prose(raw: Raw) -> dict[str, str]:
    found = read(raw)
    pairs = {"matrix": PAIRS["matrix − softmax"], "matrix-bias": PAIRS["matrix − position bias"]}
    pairs |= {"bias": PAIRS["position bias − softmax"], "scalar": PAIRS["scalar − softmax"]}
    rows = {name: found.row(TOP1, *pair) for name, pair in pairs.items()}
    images = {name: found.over_images(TOP1, *pairs[name]) for name in ("matrix", "matrix-bias")}
    new = replace(found, rows=[row for row in found.rows if row["seed"] >= KNOWN])
    harms = [*GRADIENT.values(), *BLIND.values(), CORRUPTED]
    harmed = [found.row(metric, MATRIX, other) for metric in harms for other in (SOFTMAX, SCALAR, BIAS)]
    if (least := min(row.difference for row in harmed)) <= 0:
        raise PageError(f"the page says that the matrix is ahead in every row, and one has {least:+.3f}: write it anew")
    taken = {"PGD": GRADIENT["PGD 1/255"], "corruption": CORRUPTED}
    for name, metric in taken.items():
        found = found.with_metric(name, lambda clean, left: clean - left, CLEAN, metric)
    return {
        "harmed": counted(harmed),
        **{f"taken-{name}": difference(found.row(name, MATRIX, SOFTMAX), 1, 100) for name in taken},
        "seeds": str(min(row.pairs for row in rows.values())),
        **{name: difference(row, 1, 100) for name, row in rows.items()},
        **{f"{name}-verdict": row.verdict for name, row in rows.items()},
        "matrix-new": difference(new.row(TOP1, *pairs["matrix"]), 1, 100),
        **{f"{name}-images": interval(each.low, each.high, 1, 100) for name, each in images.items()},
    }


@PAGE.numbers
def to_compare_with(raw: Raw) -> dict[str, str]:
    """What the identity and matrices of independent normal numbers have, of as many tokens."""
    drawn = np.random.default_rng(0).normal(size=(50, TOKENS, TOKENS))
    power = np.linalg.svd(drawn, compute_uv=False) ** 2
    return {
        "identity": number(math.sqrt(TOKENS)),
        "normal": f"{number(float((power[:, :8].sum(1) / power.sum(1)).mean()) * 100, 0)}%",
    }


@PAGE.figure("curves.png")
def curves(raw: Raw) -> Figure:
    return curves_of(read(raw))
