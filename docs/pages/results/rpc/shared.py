"""What the pages on RPC-Attention share: configurations, comparisons, and what the iteration does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from docs.pages.numbers import difference, number, signed, significant
from docs.pages.page import Claim
from docs.pages.raw import Comparison
from docs.pages.tables import Table
from docs.pages.verdicts import span, verdict
from lightning_tasks.compare.summary import SummaryRow

TEST, SWAPPED = "test/perplexity", "robustness/word_swap/2.5/perplexity"
STAYED = f"{SWAPPED}_of_the_words_that_stayed"
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


def against_softmax(comparison: Comparison) -> str:
    """The test perplexity of RPC against that of softmax, and the difference."""
    rpc, softmax = (number(comparison.mean(TEST, config)) for config in ("rpc", "softmax"))
    row = comparison.row(TEST, "rpc", "softmax")
    return f"test perplexity {rpc} against {softmax} of softmax, {difference(row, 2)}"


def with_added(comparison: Comparison) -> Comparison:
    """The same with what swapping words adds to the perplexity of those that stayed."""
    return comparison.with_metric(ADDED, lambda clean, swapped: 100 * (swapped / clean - 1), TEST, STAYED)


def added_by_swap(comparison: Comparison, names: Mapping[str, str]) -> str:
    """What swapping words adds, for each configuration."""
    return ", ".join(f"{number(comparison.mean(ADDED, config), 2)}% for {name}" for config, name in names.items())


def validated_at(comparison: Comparison) -> list[int]:
    """The steps at which a language model was validated."""
    return sorted({row["step"] for row in comparison.rows if row["metric"] == "val/perplexity"})


def of_perplexity(twin: SummaryRow, swapped: SummaryRow) -> list[Claim]:
    """The claims on the part of S and on word-swapped text: differences to RPC without S, and to softmax."""
    return [
        Claim("... by its sparse part S", f"{difference(twin, 2)} to its twin without S", verdict("lower", twin)),
        Claim(
            "... also on word-swapped text",
            f"{difference(swapped, 2)} to softmax with 2.5% of the words swapped",
            verdict("lower", swapped),
        ),
    ]


def by_pass(comparison: Comparison, quantity: str, config: str, passes: int) -> list[float]:
    """Means over seeds of what `PursuitMonitor` logged of the first layer after training."""
    return [comparison.mean(f"val/pursuit/{quantity}/layer_00/pass_{1 + place}", config) for place in range(passes)]
