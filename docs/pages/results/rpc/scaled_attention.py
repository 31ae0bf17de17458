"""Scaled Attention on CIFAR-10: what the tables and numbers of its page are.

What S has learned is in `learned.csv`, which the page's command makes of the last checkpoint of each cell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from docs.pages.cell_tests import primary_table
from docs.pages.errors import PageError, check_told
from docs.pages.figures import Figure, curves_of
from docs.pages.numbers import difference, in_turn, interval, least_to_most, listed, mean_std, number, signed
from docs.pages.page import Claim, Page
from docs.pages.raw import RESULTS, Comparison, Raw, asked_of
from docs.pages.results.rpc.shared import (
    BLIND,
    CORRUPTED,
    GRADIENT,
    NOISES,
    OTHERS,
    TOP1,
    accuracy_differences,
    attacked_and_corrupted,
    corruptions_of,
    points,
    under_attack,
    with_noises,
)
from docs.pages.tables import Table, differences, p_value
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
CALLED = {SOFTMAX: "softmax", SCALAR: "the scalar", BIAS: "the position bias"}
TOKENS = 65
KNOWN = 2  # of softmax and both forms so many seeds had run before the endpoint was fixed
CLEAN = "robustness/clean/accuracy"  # on the images that are attacked and corrupted
HARM = {**GRADIENT, **BLIND, "corruption": CORRUPTED}
TAKEN_BY = {"taken by noises": NOISES, "taken by others": OTHERS}
VALIDATED, SUPPORT = "val/top1", "val/attention/effective_support/mean"
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


def with_taken(found: Comparison) -> Comparison:
    """The same with what attacks and corruption take from the accuracy, by their names."""
    for name, metric in HARM.items():
        found = found.with_loss(name, CLEAN, metric)
    return found


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
            "Scaled Attention (Teo and Nguyen, NeurIPS 2024) by a matrix classifies better than softmax attention (our "
            "question)",
            f"CIFAR-10: test accuracy {accuracies}, {difference(clean, 1, 100)} points",
            verdict("higher", clean),
        ),
        Claim(
            "... and than a position bias of as many parameters",
            f"{difference(bias, 1, 100)} points",
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
def taken(raw: Raw) -> Table:
    found = with_taken(read(raw))
    return differences(found, "taken, points", PAIRS, {name: (name, 1, 100.0) for name in HARM})


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
    planned = asked_of("rpc/compare_sparse_part").comparisons  # where these were planned before
    wider = replace(found, endpoints=replace(found.endpoints, comparisons=planned))
    in_wider = {name: wider.row(TOP1, *pair) for name, pair in pairs.items()}
    kept = [in_wider[name].verdict for name in ("matrix", "matrix-bias")]
    if {*kept} != {"higher"}:
        raise PageError(
            f"the page says that the matrix stays higher, and the verdicts are {listed(kept)}: write it anew"
        )
    new = replace(found, rows=[row for row in found.rows if row["seed"] >= KNOWN])
    unseen = {name: new.row(TOP1, *pair) for name, pair in pairs.items()}
    not_equivalent = [in_wider[name].verdict for name in ("scalar", "bias")]
    check_told("the two equivalences would not be shown", "equivalent" not in not_equivalent, not_equivalent)
    harmed_new = {name: new.row(metric, MATRIX, SOFTMAX) for name, metric in HARM.items()}
    return {
        "seeds": str(min(row.pairs for row in rows.values())),
        **{name: difference(row, 1, 100) for name, row in rows.items()},
        **{f"{name}-verdict": row.verdict for name, row in rows.items()},
        **{f"{name}-new": difference(row, 1, 100) for name, row in unseen.items()},
        **{f"{name}-new-verdict": row.verdict for name, row in unseen.items()},
        "harmed-new": in_turn(f"{difference(row, 1, 100)} ({name})" for name, row in harmed_new.items()),
        "bias-new-within": p_value(unseen["bias"].within_corrected),
        "wider": str(planned),
        "wider-matrix": listed(kept),
        "wider-within": listed(p_value(in_wider[name].within_corrected) for name in ("scalar", "bias")),
        **{f"{name}-within": p_value(rows[name].within_corrected) for name in ("scalar", "bias")},
        **{f"{name}-images": interval(each.low, each.high, 1, 100) for name, each in images.items()},
    }


@PAGE.numbers
def harmed(raw: Raw) -> dict[str, str]:
    """Attacked and corrupted images: the matrix beside the others."""
    found = read(raw)
    others = (SOFTMAX, SCALAR, BIAS)
    places = [(metric, MATRIX, other) for metric in HARM.values() for other in others]
    rows = [found.row(*place) for place in places]
    if (least := min(row.difference for row in rows)) <= 0:
        raise PageError(f"the page says that the matrix is ahead in every row, and one has {least:+.3f}: write it anew")
    over_images = [found.over_images(*place) for place in places]
    single = {name.rpartition(" ")[0]: metric for name, metric in corruptions_of(found).items()}  # all of severity 3
    of_rest = {name: found.row(metric, MATRIX, SOFTMAX) for name, metric in single.items() if "noise" not in name}
    first, *_, last = sorted(of_rest, key=lambda name: of_rest[name].difference)
    means = with_noises(found)
    noises, others_of_it = (difference(means.row(name, MATRIX, SOFTMAX), 1, 100) for name in (NOISES, OTHERS))
    losses = with_taken(found)
    lost = {
        f"{name} to {CALLED[other]}": losses.row(name, MATRIX, other)
        for name in (*GRADIENT, *BLIND)
        for other in others
    }
    closed = {name: row for name, row in lost.items() if row.excludes_zero}
    to_corruption = [losses.row("corruption", MATRIX, other) for other in others]
    for name, metric in TAKEN_BY.items():
        means = means.with_loss(name, CLEAN, metric)
    taken = {name: difference(means.row(name, MATRIX, SOFTMAX), 1, 100) for name in TAKEN_BY}
    return {
        "harmed": counted(rows),
        "corruption-taken": in_turn(difference(row, 1, 100) for row in to_corruption),
        **dict(zip(("noises-taken", "rest-taken"), taken.values(), strict=True)),
        "taken-open": f"{len(lost) - len(closed)} of {len(lost)}",
        "taken-closed": in_turn(f"{name}, {difference(row, 1, 100)}" for name, row in closed.items()),
        "corruption-closed": f"{sum(row.excludes_zero for row in to_corruption)} of {len(to_corruption)}",
        **{
            place: f"{difference(of_rest[name], 1, 100)} ({name})" for place, name in (("least", first), ("most", last))
        },
        "open": in_turn(name for name, row in of_rest.items() if row.low <= 0 <= row.high),
        "harmed-over-images": f"{sum(each.low > 0 for each in over_images)} of {len(over_images)}",
        "clean-of-these": difference(found.row(CLEAN, MATRIX, SOFTMAX), 1, 100),
        "noises": f"{noises} points for the {len(single) - len(of_rest)} noises",
        "rest": f"{others_of_it} for the other {len(of_rest)}",
    }


@PAGE.numbers
def training(raw: Raw) -> dict[str, str]:
    """The matrix beside softmax in other measures, over the epochs, and in time."""
    found = read(raw)
    lead = [
        found.mean(VALIDATED, MATRIX, step) - found.mean(VALIDATED, SOFTMAX, step)
        for step in sorted({row["step"] for row in found.rows if row["metric"] == VALIDATED})
    ]
    minutes = [fmean(found.seconds(config)) / 60 for config in found.configs]
    loss, support, validated = (found.row(each, MATRIX, SOFTMAX) for each in ("test/loss", SUPPORT, VALIDATED))
    return {
        "loss": difference(loss, 3),
        "loss-verdict": loss.verdict,
        "support": difference(support),
        "support-verdict": support.verdict,
        "validated": difference(validated, 1, 100),
        "validated-verdict": validated.verdict,
        "lead": f"largest at epoch {1 + lead.index(max(lead))}, {signed(100 * max(lead))} points",
        "lead-end": " to ".join(signed(100 * pick(lead[-6:])) for pick in (min, max)),
        "minutes": least_to_most(minutes, 0),
        "ran": found.ran_in(),
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
