"""RPC-Attention on CIFAR-10: what the tables and numbers of its page are."""

from __future__ import annotations

import math

import numpy as np

from docs.pages.errors import PageError
from docs.pages.figures import Figure, curves_of
from docs.pages.numbers import difference, in_turn, number, signed, significant
from docs.pages.page import Claim, Page
from docs.pages.raw import Comparison, Raw
from docs.pages.results.rpc.shared import CORRUPTED, NAMES, PAIRS, by_pass, pursuit, under_attack
from docs.pages.tables import Table, differences, means, step_costs
from docs.pages.verdicts import counted, verdict
from lightning_tasks.compare.summary import SummaryRow

PAGE = Page("rpc_classification", "CIFAR-10")
PAGE.summaries |= {"": "rpc/compare_classification", "exploratory": "rpc/compare_classification_exploratory"}
GRADIENT = [f"robustness/{attack}/{eps}_255/accuracy" for attack in ("fgsm", "pgd") for eps in (1, 4)]
BLIND = [f"robustness/{attack}/{eps}_255/accuracy" for attack in ("square", "transfer_of_pgd") for eps in (1, 4)]
ATTACKED = {
    **dict(zip(("FGSM 1/255", "FGSM 4/255", "PGD 1/255", "PGD 4/255"), GRADIENT, strict=True)),
    **dict(zip(("Square 1/255", "Square 4/255", "transfer 1/255", "transfer 4/255"), BLIND, strict=True)),
}
ON_500 = {"clean": "robustness/clean/accuracy", **ATTACKED, "corrupted": CORRUPTED}
INPUT_GRADIENT = "robustness/input_gradient/l2"
TAKEN = "taken by corruption"
SHARE = "val/pursuit/sparsity/layer_00/pass_4"


def read(raw: Raw) -> Comparison:
    """The comparison, with what corruptions take from the accuracy on the same images."""
    return raw.comparison("", "rpc/compare_classification")


@PAGE.claims
def claims(raw: Raw) -> list[Claim]:
    found = read(raw)
    top1 = found.row("test/top1", "rpc", "softmax")
    symmetric = found.row("test/top1", "rpc", "symmetric")
    gradient = [found.row(metric, "rpc", "softmax") for metric in GRADIENT]
    blind = [found.row(metric, "rpc", "softmax") for metric in BLIND]
    corrupted = found.row(CORRUPTED, "rpc", "softmax")
    accuracies = " against ".join(f"{number(found.mean('test/top1', config) * 100)}%" for config in ("rpc", "softmax"))

    return [
        Claim(
            "RPC-Attention classifies better than softmax attention (Teo and Nguyen, NeurIPS 2024)",
            f"CIFAR-10, S inactive: test accuracy {accuracies}, {difference(top1, 1, 100)} points",
            verdict("higher", top1),
        ),
        Claim(
            "... and than symmetric attention",
            f"{difference(symmetric, 1, 100)} points",
            verdict("higher", symmetric),
        ),
        *under_attack(("FGSM and PGD", gradient), ("Square and transfer", blind)),
        Claim(
            "... and under corruption",
            f"mean of 15 corruptions: {difference(corrupted, 1, 100)} points to softmax",
            verdict("higher", corrupted),
        ),
    ]


@PAGE.table
def clean(raw: Raw) -> Table:
    return means(
        read(raw),
        NAMES,
        {
            "clean": ("test/top1", 1, 100, True),
            "top-5": ("test/top5", 1, 100, True),
            "loss": ("test/loss", 3, 1, True),
            "calibration error": ("test/calibration_error", 1, 100, True),
        },
    )


@PAGE.table
def attacked(raw: Raw) -> Table:
    columns = {name: (metric, 1, 100.0, metric == CORRUPTED) for name, metric in ON_500.items()}
    return means(read(raw), NAMES, columns | {"input gradient": (INPUT_GRADIENT, 2, 1, False)})


@PAGE.table
def paired(raw: Raw) -> Table:
    rows = {"clean, 2,000 images": "test/top1", **ATTACKED, "corrupted": CORRUPTED}
    return differences(read(raw), "accuracy, points", PAIRS, {name: (metric, 1, 100) for name, metric in rows.items()})


@PAGE.table
def passes(raw: Raw) -> Table:
    return pursuit(read(raw), 4)


def steps(raw: Raw) -> list[int]:
    """The steps at which validation was logged, one per epoch."""
    return sorted({row["step"] for row in read(raw).rows if row["metric"] == "val/top1"})


@PAGE.table
def support(raw: Raw) -> Table:
    found, logged = read(raw), steps(raw)
    shown = [logged[epoch - 1] for epoch in (1, 3, 6, 9, 18)]

    def cell(config: str, layer: int) -> str:
        metric = f"val/attention/effective_support/layer_{layer:02}"
        return " → ".join(number(found.mean(metric, config, step), 0) for step in shown)

    rows = [[name, *(cell(config, layer) for layer in range(4))] for config, name in NAMES.items()]
    return Table(["", *(f"layer {layer}" for layer in range(4))], rows)


@PAGE.table
def cost(raw: Raw) -> Table:
    return step_costs(raw.step_costs("rpc/compare_classification"), NAMES)


def seed_0(raw: Raw) -> dict[str, tuple[Comparison, str]]:
    """The runs of seed 0: those of the comparison, and the exploratory ones."""
    first, others = read(raw), raw.comparison("exploratory", "rpc/compare_classification_exploratory")
    return {
        "softmax, the same seed": (first, "softmax"),
        "symmetric, the same seed": (first, "symmetric"),
        "RPC, the same seed": (first, "rpc"),
        "RPC in all layers (n = 2, lam = 3)": (others, "rpc in all layers"),
        "RPC, `ratio` threshold, its own lam": (others, "rpc with threshold ratio"),
        "Scaled, matrix, all layers": (others, "scaled by a matrix"),
        "Scaled, scalar, all layers": (others, "scaled by a scalar"),
    }


@PAGE.table
def exploratory(raw: Raw) -> Table:
    metrics = {"clean": ("test/top1", 1, 100.0), **{name: (metric, 1, 100.0) for name, metric in ATTACKED.items()}}
    metrics |= {"corrupted": (CORRUPTED, 1, 100.0), "loss": ("test/loss", 3, 1.0)}
    metrics |= {"input gradient": (INPUT_GRADIENT, 2, 1.0)}
    rows = [
        [name, *(number(found.values(metric, config)[0] * scale, digits) for metric, digits, scale in metrics.values())]
        for name, (found, config) in seed_0(raw).items()
    ]
    return Table(["configuration, seed 0", *metrics], rows)


@PAGE.numbers
def prose(raw: Raw) -> dict[str, str]:
    found = read(raw)
    taken = found.with_metric(TAKEN, lambda clean, left: clean - left, "robustness/clean/accuracy", CORRUPTED)
    sizes = {config: found.mean(INPUT_GRADIENT, config) for config in NAMES}
    blind, gradient = ([found.row(metric, "rpc", "softmax") for metric in metrics] for metrics in (BLIND, GRADIENT))
    twins = [found.row(metric, "rpc", "rpc without S") for metric in ("test/top1", *ATTACKED.values(), CORRUPTED)]
    share = by_pass(found, "sparsity", "rpc", 4)
    entropy = by_pass(found, "entropy", "rpc", 4)
    first, extra = seed_0(raw), raw.comparison("exploratory", "rpc/compare_classification_exploratory")

    def of_seed_0(name: str, metric: str) -> float:
        comparison, config = first[name]
        return float(comparison.values(metric, config)[0] * 100)

    def more(name: str, metric: str) -> float:
        return of_seed_0(name, metric) - of_seed_0("softmax, the same seed", metric)

    everywhere, matrix = "RPC in all layers (n = 2, lam = 3)", "Scaled, matrix, all layers"
    in_layers = [extra.mean(f"val/pursuit/sparsity/layer_{layer:02}/pass_2", "rpc in all layers") for layer in range(4)]
    with_ratio = by_pass(extra, "sparsity", "rpc with threshold ratio", 4)
    accuracies = [
        {name: of_seed_0(name, metric) for name in first} for metric in ("test/top1", *ATTACKED.values(), CORRUPTED)
    ]
    best = sum(max(column, key=column.__getitem__) == matrix for column in accuracies)
    of_twin = 100 * float(found.values("test/top1", "rpc without S")[0])
    gained = [more(everywhere, ATTACKED[name]) for name in ("FGSM 4/255", "PGD 4/255")]
    clean_500 = more(everywhere, ON_500["clean"])
    elsewhere = [more(everywhere, metric) for metric in (*ATTACKED.values(), CORRUPTED)]
    to_symmetric = [found.row(metric, "rpc", "symmetric") for metric in GRADIENT]
    symmetric = [found.row(metric, "symmetric", "softmax") for metric in GRADIENT]
    if strange := [row for row in (*gradient, *to_symmetric, *symmetric) if row.low > 0]:
        raise PageError(f"the page says that none is above 0, and {strange[0].metric} is: write it anew")
    if out := [row for row in blind if row.low > 0 or row.high < 0]:
        raise PageError(f"the page says that no interval excludes 0, and that of {out[0].metric} does: write it anew")
    called = {metric: name for name, metric in ON_500.items()}
    remaining = [
        f"{NAMES[row.config]} to {row.reference} under {called[row.metric]}, {difference(row, 1, 100)}"
        for row in attacks(found)
        if row.verdict in ("lower", "higher")
    ]
    return {
        "top1": difference(found.row("test/top1", "rpc", "softmax"), 2, 100),
        "top1-verdict": found.row("test/top1", "rpc", "softmax").verdict,
        "loss": difference(found.row("test/loss", "rpc", "softmax"), 3),
        "loss-verdict": found.row("test/loss", "rpc", "softmax").verdict,
        "symmetric": difference(found.row("test/top1", "symmetric", "softmax"), 2, 100),
        "symmetric-verdict": found.row("test/top1", "symmetric", "softmax").verdict,
        "rpc-symmetric": difference(found.row("test/top1", "rpc", "symmetric"), 1, 100),
        "blind-detectable": " to ".join(number(pick(row.detectable for row in blind) * 100) for pick in (min, max)),
        "taken": difference(taken.row(TAKEN, "rpc", "softmax"), 1, 100),
        "share": significant(share[-1], 1),
        "share-largest": significant(
            max(row["value"] for row in found.rows if (row["config"], row["metric"]) == ("rpc", SHARE)), 2
        ),
        "twin": difference(found.row("test/top1", "rpc", "rpc without S"), 1, 100),
        "gradient-intervals": counted(gradient),
        "gradient-to-symmetric": counted(to_symmetric),
        "gradient-symmetric-only": counted(symmetric),
        "blind": f"{signed(100 * min(row.difference for row in blind))} to "
        f"{signed(100 * max(row.difference for row in blind))}",
        "corrected-which": in_turn(remaining),
        "everywhere-500": number(-clean_500),
        "everywhere-takes": f"{sum(each > clean_500 for each in elsewhere)} of {len(elsewhere)}",
        "everywhere-above": f"{sum(each > 0 for each in elsewhere)} of {len(elsewhere)}",
        "matrix-square": signed(more(matrix, ATTACKED["Square 4/255"])),
        "twin-intervals": counted(twins),
        "corrected-lower": str(sum(row.verdict in ("lower", "higher") for row in attacks(found))),
        "corrected-all": str(len(attacks(found))),
        "gradients": f"{number(sizes['rpc'], 2)} against {number(sizes['softmax'], 2)}",
        "gradient-symmetric": difference(found.row(INPUT_GRADIENT, "symmetric", "softmax"), 2),
        "self": f"{number(by_pass(found, 'self_probability', 'rpc', 4)[-1] * 100, 0)}%",
        "equal-tokens": number(math.exp(entropy[-1]), 0),
        "everywhere-share": " and ".join(f"{number(100 * each, 0)}%" for each in in_layers[:2]),
        "everywhere-share-rest": " and ".join(f"{number(100 * each, 1)}%" for each in in_layers[2:]),
        "everywhere-clean": number(-more(everywhere, "test/top1")),
        "everywhere-gain": " to ".join(number(each) for each in sorted(gained)),
        "ratio-share": f"{number(100 * with_ratio[-1], 0)}%",
        "ratio-residual": f"{number(100 * by_pass(extra, 'residual', 'rpc with threshold ratio', 4)[-1], 0)}%",
        "ratio-twin": signed(of_seed_0("RPC, `ratio` threshold, its own lam", "test/top1") - of_twin),
        "scalar-clean": signed(more("Scaled, scalar, all layers", "test/top1")),
        "matrix-best": f"{best} of the {len(accuracies)}",
        "matrix-clean": number(more(matrix, "test/top1")),
        "matrix-corrupted": number(more(matrix, CORRUPTED)),
        "matrix-transfer": number(more(matrix, ATTACKED["transfer 4/255"])),
        "corrupted-spread": number(float(np.std(found.values(CORRUPTED, "softmax"), ddof=1)) * 100),
    }


def attacks(found: Comparison) -> list[SummaryRow]:
    """The rows of the summary on attacks and corruption."""
    return [row for row in found.summary if row.metric.startswith("robustness/") and row.pairs]


@PAGE.figure("curves.png")
def curves(raw: Raw) -> Figure:
    return curves_of(read(raw))
