"""What the pages on RPC-Attention share: configurations, comparisons, and what the iteration does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from docs.pages.cell_tests import Tested
from docs.pages.numbers import difference, in_turn, interval, number, signed, significant
from docs.pages.page import Claim
from docs.pages.raw import Comparison
from docs.pages.tables import Table, differences, means
from docs.pages.verdicts import span, verdict
from lightning_tasks.compare.statistics import percentile_interval, resampled_sums
from lightning_tasks.compare.summary import SummaryRow
from lightning_tasks.runs.robustness import right_from_text

TOP1, CORRUPTED = "test/top1", "robustness/mean_corruption/accuracy"
# Attacks with the model's gradient, and without it.
GRADIENT = {
    "PGD 1/255": "robustness/pgd/1_255/accuracy",
    "released PGD 1/255": "robustness/released_pgd/1_255/accuracy",
}
BLIND = {"SPSA 1/255": "robustness/spsa/1_255/accuracy", "Square 1/255": "robustness/square/1_255/accuracy"}
CORRUPTION = r"robustness/\w+/\d/accuracy"  # a single corruption; the setting of an attack has two numbers
NOISES, OTHERS = "the noises", "the other corruptions"
TEST, SWAPPED = "test/perplexity", "robustness/word_swap/2.5/perplexity"
STAYED = f"{SWAPPED}_of_the_words_that_stayed"
SWAPPED_WORDS = {SWAPPED: "on all words", STAYED: "on the words that stayed"}
CLEAN_STAYED = STAYED.replace("perplexity", "clean_perplexity")  # of these same words
ADDED = "what the swap adds, percent"
NAMES = {"softmax": "softmax", "symmetric": "symmetric", "rpc": "RPC", "rpc without S": "RPC without S"}
PAIRS = {
    "symmetric − softmax": ("symmetric", "softmax"),
    "RPC − softmax": ("rpc", "softmax"),
    "RPC without S − softmax": ("rpc without S", "softmax"),
    "RPC − RPC without S": ("rpc", "rpc without S"),
    "RPC − symmetric": ("rpc", "symmetric"),
    "RPC without S − symmetric": ("rpc without S", "symmetric"),
}
PASSES = {"RPC": "rpc", "without S": "rpc without S"}


def pursuit(comparison: Comparison, passes: int, configs: Mapping[str, str] = PASSES) -> Table:
    """What the iteration of RPC-Attention does in the first layer, by pass: the last of `configs` has no S."""
    *_, without = configs
    rows = []
    for name, config in configs.items():
        shown = [
            ("share of S that is not 0", "sparsity", 2),
            ("residual ‖K − L − S‖ / ‖K‖", "residual", 3),
            ("entropy of a row, nats", "entropy", 3),
            ("what a token gives to itself", "self_probability", 2),
        ]
        if name == without:
            shown[:2] = [("residual ‖K − L‖ / ‖K‖", "residual", 3)]
        for what, quantity, digits in shown:
            found = [significant(each, digits) for each in by_pass(comparison, quantity, config, passes)]
            rows.append([name if what == shown[0][0] else "", what, *found])
    return Table(["", "pass", *(str(1 + place) for place in range(passes))], rows)


def points(rows: Sequence[SummaryRow]) -> str:
    """The least and the largest difference of accuracies, in points; one of them where they are equal."""
    return " to ".join(dict.fromkeys(signed(each * 100) for each in span(rows)))


def under_attack(gradient: tuple[str, Sequence[SummaryRow]], blind: tuple[str, Sequence[SummaryRow]]) -> list[Claim]:
    """The claims on attacks with the model's gradient and without it: the attacks' names and the differences."""
    claimed = {"... also under gradient attacks": gradient, "... also under attacks without its gradient": blind}
    return [
        Claim(claim, f"{names}: {points(rows)} points to softmax", verdict("higher", *rows))
        for claim, (names, rows) in claimed.items()
    ]


def attacked_and_corrupted(comparison: Comparison) -> Table:
    """Accuracy on the images that are attacked and corrupted, the gradient for the image, and the test loss."""
    columns = {"clean": "robustness/clean/accuracy", **GRADIENT, **BLIND, "corrupted": CORRUPTED}
    shown = {head: (metric, 1, 100.0, True) for head, metric in columns.items()}
    shown["input gradient"] = ("robustness/input_gradient/l2", 2, 1.0, False)
    shown["test loss"] = ("test/loss", 3, 1.0, False)
    return means(comparison, {name: name for name in comparison.configs}, shown)


def accuracy_differences(comparison: Comparison, pairs: Mapping[str, tuple[str, str]]) -> Table:
    """Differences of the accuracy, in points: a row for clean images, each attack and the mean of corruptions."""
    rows = {"clean, 2,000 images": TOP1, **GRADIENT, **BLIND, "corrupted": CORRUPTED}
    return differences(comparison, "accuracy, points", pairs, {name: (metric, 1, 100) for name, metric in rows.items()})


def corruptions_of(comparison: Comparison) -> dict[str, str]:
    """Metrics of single corruptions by their name and severity."""
    metrics = sorted({str(row["metric"]) for row in comparison.rows if re.fullmatch(CORRUPTION, str(row["metric"]))})
    return {" ".join(metric.split("/")[1:3]).replace("_", " "): metric for metric in metrics}


def with_noises(comparison: Comparison) -> Comparison:
    """The same with the mean over the corruptions that are noises, and the mean over all others."""
    metrics = corruptions_of(comparison)
    noises = [metric for name, metric in metrics.items() if "noise" in name]
    others = [metric for name, metric in metrics.items() if "noise" not in name]
    for name, of_mean in ((NOISES, noises), (OTHERS, others)):
        comparison = comparison.with_metric(name, lambda *values: sum(values) / len(values), *of_mean)
    return comparison


def against_softmax(comparison: Comparison) -> str:
    """The test perplexity of RPC against that of softmax, and the difference."""
    rpc, softmax = (number(comparison.mean(TEST, config)) for config in ("rpc", "softmax"))
    row = comparison.row(TEST, "rpc", "softmax")
    return f"test perplexity {rpc} against {softmax} of softmax, {difference(row, 2)}"


def with_added(comparison: Comparison, clean: str, swapped: str) -> Comparison:
    """The same with what swapping words adds to the perplexity of clean text, of two metrics."""
    return comparison.with_metric(ADDED, lambda before, after: 100 * (after / before - 1), clean, swapped)


def added_by_swap(comparison: Comparison, names: Mapping[str, str]) -> str:
    """What swapping words adds, for each configuration."""
    return ", ".join(f"{number(comparison.mean(ADDED, config), 2)}% for {name}" for config, name in names.items())


def validated_at(comparison: Comparison) -> list[int]:
    """The steps at which a language model was validated."""
    return sorted({row["step"] for row in comparison.rows if row["metric"] == "val/perplexity"})


def added_by_part(comparison: Comparison) -> dict[str, str]:
    """What swapping words adds, in percentage points: RPC to softmax, and the parts of this difference."""
    parts = {
        "added-rpc": ("rpc", "softmax"),
        "added-symmetric": ("symmetric", "softmax"),
        "added-iterating": ("rpc without S", "symmetric"),
        "added-twin": ("rpc", "rpc without S"),
    }
    return {name: difference(comparison.row(ADDED, *pair), 2) for name, pair in parts.items()}


def of_perplexity(comparison: Comparison) -> list[Claim]:
    """The claims on the part of S and on word-swapped text: differences to RPC without S, and to softmax."""
    twin = comparison.row(TEST, "rpc", "rpc without S")
    named = {metric: what for metric, what in SWAPPED_WORDS.items() if metric in comparison.metrics}
    swapped = {what: comparison.row(metric, "rpc", "softmax") for metric, what in named.items()}
    return [
        Claim(
            "... by its sparse part S",
            f"{difference(twin, 2)} compared with its twin without S",
            verdict("lower", twin),
        ),
        Claim(
            "... also on word-swapped text",
            "2.5% of the words swapped, compared with softmax: "
            f"{in_turn(f'{difference(row, 2)} {what}' for what, row in swapped.items())}",
            verdict("lower", *swapped.values()),
        ),
    ]


def by_pass(comparison: Comparison, quantity: str, config: str, passes: int) -> list[float]:
    """Means over seeds of what `PursuitMonitor` logged of the first layer after training."""
    return [comparison.mean(f"val/pursuit/{quantity}/layer_00/pass_{1 + place}", config) for place in range(passes)]


def over_images(cells: Sequence[Tested], metric: str, config: str, reference: str) -> str:
    """The 95% interval of a difference over the images, which are drawn anew, in points."""
    rows = {(each.variant, each.seed): each.rows[metric] for each in cells}
    right = {cell: right_from_text(row.right, row.samples).astype(float) for cell, row in rows.items()}
    seeds = [seed for variant, seed in right if variant == config and (reference, seed) in right]
    mean = np.mean([right[config, seed] - right[reference, seed] for seed in seeds], axis=0)
    low, high = percentile_interval(resampled_sums(mean[:, None])[:, 0] / len(mean))
    return interval(low, high, 1, 100)
