"""RPC-Attention with its sparse part filled: what the tables and numbers of its page are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from docs.pages.cell_tests import CLEAN, Tested, check_checkpoints, primary_table, tested
from docs.pages.errors import PageError, check_told
from docs.pages.figures import Figure, curves_of
from docs.pages.numbers import difference, listed, number, told
from docs.pages.page import Claim, Page
from docs.pages.raw import Comparison, Raw, read_results
from docs.pages.results.rpc.shared import (
    BLIND,
    CORRUPTED,
    GRADIENT,
    NOISES,
    OTHERS,
    TOP1,
    accuracy_differences,
    attacked_and_corrupted,
    by_pass,
    over_images,
    points,
    pursuit,
    under_attack,
    with_noises,
)
from docs.pages.tables import Table, p_value
from docs.pages.verdicts import verdict
from lightning_tasks.compare.summary import SummaryRow

RECIPE = "rpc/compare_sparse_part"
FILLED = ["rpc lam 1", "rpc lam 0.75"]

LAST_SHARE = "val/pursuit/sparsity/layer_00/pass_4"
SUPPORT = "val/attention/effective_support/mean"

PAGE = Page("rpc_sparse_part", "CIFAR-10, S filled")
PAGE.summaries |= {"": RECIPE, "lam": "rpc/compare_lam"}


def read(raw: Raw) -> Comparison:
    """The comparison."""
    return raw.comparison("", RECIPE)


def to(reference: str, found: Comparison, *metrics: str) -> list[SummaryRow]:
    """The differences of RPC at both lam."""
    return [found.row(metric, config, reference) for metric in metrics for config in FILLED if config in found.configs]


@PAGE.claims
def claims(raw: Raw) -> list[Claim]:
    found = read(raw)
    clean, twin = to("softmax", found, TOP1), to("rpc without S", found, TOP1)
    gradient, blind = (to("softmax", found, *metrics.values()) for metrics in (GRADIENT, BLIND))
    corrupted = to("softmax", found, CORRUPTED)
    top1 = {config: number(found.mean(TOP1, config) * 100) for config in found.configs}
    accuracies = listed(top1[config] for config in FILLED if config in top1)

    return [
        Claim(
            "RPC-Attention classifies better than softmax attention (Teo and Nguyen, NeurIPS 2024), S filled",
            f"CIFAR-10, lam 1 and 0.75: test accuracy {accuracies}% against {top1['softmax']}%, "
            f"{listed(difference(row, 1, 100) for row in clean)} points",
            verdict("higher", *clean),
        ),
        Claim("... and S has a part in it", f"{points(twin)} points to RPC without S", verdict("higher", *twin)),
        *under_attack(("PGD, also the released one", gradient), ("SPSA and Square", blind)),
        Claim(
            "... and under corruption",
            f"mean of 15 corruptions: {points(corrupted)} points to softmax",
            verdict("higher", *corrupted),
        ),
    ]


@PAGE.table
def filled(raw: Raw) -> Table:
    found = raw.comparison("lam", "rpc/compare_lam")
    shares = [f"val/pursuit/sparsity/layer_00/pass_{n}" for n in range(1, 5)]
    rows = [
        [
            config.removeprefix("lam "),
            number(found.mean("val/pursuit/mean_abs_key/layer_00", config), 2),
            number(found.mean("val/pursuit/threshold/layer_00", config), 2),
            *(f"{number(found.mean(share, config) * 100)}%" for share in shares),
            number(found.mean("val/top1", config) * 100),
        ]
        for config in found.configs
    ]
    return Table(["lam", "mean absolute key", "threshold", *(f"pass {n}" for n in range(1, 5)), "val. accuracy"], rows)


@PAGE.table
def primary(raw: Raw) -> Table:
    return primary_table(read(raw), TOP1)


@PAGE.table
def attacked(raw: Raw) -> Table:
    return attacked_and_corrupted(read(raw))


@PAGE.table
def paired(raw: Raw) -> Table:
    found = read(raw)
    references = ["softmax", "rpc without S", "symmetric"]
    pairs = {
        f"{config.removeprefix('rpc ')} − {reference}": (config, reference)
        for config in FILLED
        for reference in references
        if config in found.configs
    }
    return accuracy_differences(found, pairs)


@PAGE.table
def passes(raw: Raw) -> Table:
    found = read(raw)
    configs = {name.removeprefix("rpc "): name for name in [*FILLED, "rpc without S"] if name in found.configs}
    return pursuit(found, 4, configs)


@PAGE.numbers
def prose(raw: Raw) -> dict[str, str]:
    found = read(raw)
    cells = {(row["config"], row["seed"]) for row in found.rows}
    shares, residuals = ([by_pass(found, what, name, 4)[-1] for name in FILLED] for what in ("sparsity", "residual"))
    gradients = [found.mean("robustness/input_gradient/l2", name) for name in [*FILLED, "softmax"]]
    softmax, twin = to("softmax", found, TOP1), to("rpc without S", found, TOP1)
    images = clean_images(raw)
    to_symmetric = to("symmetric", found, TOP1)
    check_told(
        "to tell RPC from symmetric attention the budget is too small",
        all(row.verdict == "budget too small" for row in to_symmetric),
        by_lam(to_symmetric),
    )
    return {
        "cells": str(len(cells)),
        "pgd": listed(told(row, 1, 100) for row in to("softmax", found, GRADIENT["PGD 1/255"])),
        "pgd-symmetric": listed(told(row, 1, 100) for row in to("symmetric", found, GRADIENT["PGD 1/255"])),
        **of_rules(found),
        **by_corruption(found),
        "symmetric": difference(found.row(TOP1, "symmetric", "softmax"), 1, 100),
        "to-symmetric": listed(difference(row, 1, 100) for row in to_symmetric),
        "shares": listed(
            " to ".join(f"{number(pick(found.values(LAST_SHARE, name)) * 100, 0)}%" for pick in (min, max))
            for name in FILLED
        ),
        "seeds": str(min(row.pairs for row in softmax)),
        "top1": listed(difference(row, 1, 100) for row in softmax),
        "top1-verdict": by_lam(softmax),
        "top1-images": listed(over_images(images, CLEAN, name, "softmax") for name in FILLED),
        "twin": listed(difference(row, 1, 100) for row in twin),
        "twin-verdict": by_lam(twin),
        "twin-images": listed(over_images(images, CLEAN, name, "rpc without S") for name in FILLED),
        "share": listed(f"{number(100 * each, 0)}%" for each in shares),
        "residual-empty": number(by_pass(found, "residual", "rpc without S", 4)[-1], 2),
        "residual": listed(number(each, 2) for each in residuals),
        "gradients": f"{listed(number(each, 2) for each in gradients[:-1])}, softmax {number(gradients[-1], 2)}",
    }


@PAGE.numbers
def known_before(raw: Raw) -> dict[str, str]:
    """How many runs repeat, to the last digit, losses and accuracies of those where S is empty."""
    found = read(raw)
    before = read_results(raw.root / "docs" / "results" / "rpc_classification" / "earlier.csv")
    known = {(row["config"], row["seed"], row["metric"]): row["value"] for row in before}
    metrics = ["test/loss", TOP1, "robustness/clean/accuracy", GRADIENT["PGD 1/255"], BLIND["Square 1/255"]]
    now = {
        (config, seed, metric): value
        for metric in metrics
        for config in found.configs
        for seed, value in found.by_seed(metric, config).items()
    }
    cells = {place[:2] for place in now}
    repeated = sum(all(now[(*cell, each)] == known.get((*cell, each)) for each in metrics) for cell in cells)
    return {"repeated": f"{repeated} of the {len(cells)}"}


def of_rules(found: Comparison) -> dict[str, str]:
    """What the rules of verdict count, what they would say by the count of an earlier version, and what holds."""
    made = [row for row in found.summary if row.pairs]
    earlier = replace(found, endpoints=replace(found.endpoints, comparisons=0))
    kept = [row for row in made if row.verdict in ("lower", "higher")]
    said = {(SUPPORT, "symmetric", "softmax"), (SUPPORT, FILLED[0], "symmetric")}
    if strange := {(row.metric, row.config, row.reference) for row in kept} ^ said:
        raise PageError(f"the page and the raw files say otherwise whether {min(strange)} holds: write it anew")
    return {
        "planned": str(found.endpoints.comparisons),
        "made": str(sum(row.metric == TOP1 for row in made)),
        "earlier": listed(p_value(row.corrected) for row in to("softmax", earlier, TOP1)),
        "earlier-verdicts": listed(row.verdict for row in to("softmax", earlier, TOP1)),
        "kept": f"{len(kept)} of the {len(made)}",
    }


def by_corruption(found: Comparison) -> dict[str, str]:
    """Corrupted images: what S and the noises have to do with the differences."""
    means = with_noises(found)
    at_most = [found.row(CORRUPTED, FILLED[1], reference) for reference in ("rpc without S", "symmetric")]
    if strange := [row for row in at_most if row.verdict != "lower, not after correction"]:
        raise PageError(f"the page says 'not after correction', and {strange[0].reference} is {strange[0].verdict}")
    return {
        "corrupted-twin": difference(at_most[0], 1, 100),
        "corrupted-symmetric": difference(at_most[1], 1, 100),
        "noises": listed(difference(row, 1, 100) for row in to("softmax", means, NOISES)),
        "others": listed(difference(row, 1, 100) for row in to("softmax", means, OTHERS)),
        "noises-without": difference(means.row(NOISES, "rpc without S", "softmax"), 1, 100),
        "noises-twin": difference(means.row(NOISES, FILLED[1], "rpc without S"), 1, 100),
        "others-twin": difference(means.row(OTHERS, FILLED[1], "rpc without S"), 1, 100),
    }


def by_lam(rows: Sequence[SummaryRow]) -> str:
    """The verdict at each lam; one where they are equal."""
    each = dict.fromkeys(row.verdict for row in rows)
    return "; ".join(each if len(each) == 1 else (f"{row.config.removeprefix('rpc ')}: {row.verdict}" for row in rows))


def clean_images(raw: Raw) -> list[Tested]:
    """What the last checkpoints say of each clean image: the tests of images from outside measured it too.

    Raises:
        PageError: they are of other checkpoints than the comparison.
    """
    cells = tested(raw.root / "docs" / "results" / "out_of_distribution", RECIPE, "clean")
    check_checkpoints(cells, CLEAN, read(raw), TOP1)
    return cells


@PAGE.figure("curves.png")
def curves(raw: Raw) -> Figure:
    return curves_of(read(raw))
