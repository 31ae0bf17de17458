"""RPC-Attention with its sparse part filled: what the tables and numbers of its page are.

What AutoAttack leaves is in the tables (`robustness.csv`) of a test of the last checkpoint of each cell, in
docs/results/rpc_sparse_part/autoattack/VARIANT/seed_N.csv, VARIANT as the folder of the cell is called.
"""

from __future__ import annotations

from docs.pages.cell_tests import NOTHING, compare_tests, primary_table, tables
from docs.pages.figures import Figure, curves_of
from docs.pages.numbers import difference, listed, mean_std, number
from docs.pages.page import Claim, Page
from docs.pages.raw import Comparison, Raw
from docs.pages.results.rpc import by_pass, points, pursuit, under_attack
from docs.pages.tables import Table, differences, means
from docs.pages.verdicts import verdict
from lightning_tasks.compare.summary import SummaryRow
from lightning_tasks.runs.robustness import right_from_text

RECIPE = "rpc/compare_sparse_part"
FILLED = ["rpc lam 1", "rpc lam 0.75"]
TOP1 = "test/top1"
GRADIENT = {
    "PGD 1/255": "robustness/pgd/1_255/accuracy",
    "released PGD 1/255": "robustness/released_pgd/1_255/accuracy",
}
BLIND = {"SPSA 1/255": "robustness/spsa/1_255/accuracy", "Square 1/255": "robustness/square/1_255/accuracy"}
CORRUPTED = "robustness/mean_corruption/accuracy"
AUTOATTACK = {f"{eps}/255": f"autoattack/{eps}/255/accuracy" for eps in ("0.25", "0.5", "1", "4")}
AUTOATTACK_PRIMARY = AUTOATTACK["1/255"]

PAGE = Page("rpc_sparse_part", "CIFAR-10, S filled")
PAGE.summaries |= {"": RECIPE, "lam": "rpc/compare_lam"}


def read(raw: Raw) -> Comparison:
    """The comparison."""
    return raw.comparison("", RECIPE)


def autoattack_of(raw: Raw) -> Comparison | None:
    """What AutoAttack leaves; None before it has run."""
    folder, metrics = raw.folder / "autoattack", [*AUTOATTACK.values()]
    return raw.once("autoattack", lambda: compare_tests(folder, RECIPE, "attack", metrics, AUTOATTACK_PRIMARY))


def to(reference: str, found: Comparison, *metrics: str) -> list[SummaryRow]:
    """The differences of RPC at both lam."""
    return [found.row(metric, config, reference) for metric in metrics for config in FILLED if config in found.configs]


@PAGE.claims
def claims(raw: Raw) -> list[Claim]:
    found, attacked = read(raw), autoattack_of(raw)
    clean, twin = to("softmax", found, TOP1), to("rpc without S", found, TOP1)
    gradient, blind = (to("softmax", found, *metrics.values()) for metrics in (GRADIENT, BLIND))
    corrupted = to("softmax", found, CORRUPTED)
    top1 = {config: number(found.mean(TOP1, config) * 100) for config in found.configs}
    accuracies = listed(top1[config] for config in FILLED if config in top1)

    made = [
        Claim(
            "RPC-Attention classifies better than softmax attention (Teo and Nguyen, NeurIPS 2024), S filled",
            f"CIFAR-10, lam 1 and 0.75: test accuracy {accuracies}% against {top1['softmax']}%",
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
    if worst := [] if attacked is None else [row for row in to("softmax", attacked, AUTOATTACK_PRIMARY) if row.pairs]:
        made.append(
            Claim("... and under AutoAttack", f"1/255: {points(worst)} points to softmax", verdict("higher", *worst))
        )
    return made


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
    found = read(raw)
    columns = {"clean": "robustness/clean/accuracy", **GRADIENT, **BLIND, "corrupted": CORRUPTED}
    shown = {head: (metric, 1, 100.0, True) for head, metric in columns.items()}
    shown |= {"input gradient": ("robustness/input_gradient/l2", 2, 1.0, False), "loss": ("test/loss", 3, 1.0, False)}
    return means(found, {name: name for name in found.configs}, shown)


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
    rows = {"clean, 2,000 images": TOP1, **GRADIENT, **BLIND, "corrupted": CORRUPTED}
    return differences(found, "accuracy, points", pairs, {name: (metric, 1, 100) for name, metric in rows.items()})


@PAGE.table
def passes(raw: Raw) -> Table:
    found = read(raw)
    configs = {name.removeprefix("rpc "): name for name in [*FILLED, "rpc without S"] if name in found.configs}
    return pursuit(found, 4, configs)


@PAGE.table
def autoattack(raw: Raw) -> Table:
    found = autoattack_of(raw)
    heads = ["configuration", "seeds", *AUTOATTACK]
    if found is None:
        return Table(heads, [[NOTHING, *[""] * (len(heads) - 1)]])
    rows = [
        [
            config,
            str(len(found.values(AUTOATTACK_PRIMARY, config))),
            *(mean_std(found.values(metric, config), 1, 100.0) for metric in AUTOATTACK.values()),
        ]
        for config in found.configs
    ]
    return Table(heads, rows)


@PAGE.table
def autoattack_primary(raw: Raw) -> Table:
    return primary_table(autoattack_of(raw), AUTOATTACK_PRIMARY)


@PAGE.numbers
def prose(raw: Raw) -> dict[str, str]:
    found = read(raw)
    notes = [
        row.note.partition("flags: ")[2]
        for _, _, rows in tables(raw.folder / "autoattack", RECIPE)
        for row in rows
        if row.test == "attack" and row.name == "autoattack"
    ]
    raised = {text: notes.count(text) for text in sorted({*notes} - {"none"})}
    flags = "; ".join(f"{text}: {count} of {len(notes)}" for text, count in raised.items())
    cells = {(row["config"], row["seed"]) for row in found.rows}
    shares, residuals = ([by_pass(found, what, name, 4)[-1] for name in FILLED] for what in ("sparsity", "residual"))
    gradients = [found.mean("robustness/input_gradient/l2", name) for name in [*FILLED, "softmax"]]
    softmax, twin = to("softmax", found, TOP1), to("rpc without S", found, TOP1)
    return {
        "cells": str(len(cells)),
        "seeds": str(min(row.pairs for row in softmax)),
        "square": square(raw),
        "flags": flags or ("none" if notes else NOTHING),
        "top1": listed(difference(row, 1, 100) for row in softmax),
        "top1-verdict": listed(row.verdict for row in softmax),
        "twin": listed(difference(row, 1, 100) for row in twin),
        "twin-verdict": listed(row.verdict for row in twin),
        "share": listed(f"{number(100 * each, 0)}%" for each in shares),
        "residual": listed(number(each, 2) for each in residuals),
        "gradients": f"{listed(number(each, 2) for each in gradients[:-1])}, softmax {number(gradients[-1], 2)}",
    }


def square(raw: Raw) -> str:
    """What our Square and the library's leave of the same images, of each model that both attacked."""
    texts = []
    for variant, seed, rows in tables(raw.folder / "square", RECIPE):
        ours, theirs = (next(row for row in rows if row.name == name) for name in ("square", "autoattack"))
        left = [right_from_text(row.right, row.samples) for row in (ours, theirs)]
        texts.append(
            f"{variant}, seed {seed}, {ours.samples} images: {number(ours.value * 100)}% and "
            f"{number(theirs.value * 100)}%; {(left[1] & ~left[0]).sum()} images stand against the library's alone, "
            f"{(left[0] & ~left[1]).sum()} against ours alone"
        )
    return "; ".join(texts) or NOTHING


@PAGE.figure("curves.png")
def curves(raw: Raw) -> Figure:
    return curves_of(read(raw))
