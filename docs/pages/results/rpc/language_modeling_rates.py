"""RPC-Attention in a language model that trains longer, each variant at its best learning rate: tables and numbers."""

from __future__ import annotations

from dataclasses import replace

from docs.pages.errors import PageError
from docs.pages.figures import Figure, curves_of
from docs.pages.numbers import difference, mean_std, number, signed
from docs.pages.page import Claim, Page
from docs.pages.raw import Comparison, Raw
from docs.pages.results.rpc.shared import (
    ADDED,
    STAYED,
    SWAPPED,
    TEST,
    added_by_swap,
    against_softmax,
    of_perplexity,
    pursuit,
    validated_at,
    with_added,
)
from docs.pages.tables import Table, p_value, tried_values, verdicts
from docs.pages.verdicts import verdict
from lightning_tasks.compare.choice import Choice

RECIPE = "rpc/compare_language_modeling_rates"
PAGE = Page("rpc_language_modeling_rates", "WikiText-2, tuned rates", summaries={"": RECIPE})
NAMES = {
    "softmax": "softmax",
    "narrow softmax": "softmax, a quarter fewer attention parameters",
    "symmetric": "symmetric",
    "rpc": "RPC",
    "rpc without S": "RPC without S",
}
SHORT = {**NAMES, "narrow softmax": "narrow softmax"}  # in a sentence
BEST = "lr=0.002"  # the largest of the grid, which the page says was the best one of it for all


def read(raw: Raw) -> Comparison:
    found = raw.once("with what is added", lambda: with_added(raw.comparison("", RECIPE)))
    for config in NAMES:
        if (rate := found.chosen(config)) != BEST:
            raise PageError(f"{rate} was chosen for {config}, and the page says that {BEST} was for all: write it anew")
    return found


@PAGE.claims
def claims(raw: Raw) -> list[Claim]:
    found = read(raw)
    test, narrow, twin = (found.row(TEST, "rpc", other) for other in ("softmax", "narrow softmax", "rpc without S"))
    swapped = found.row(SWAPPED, "rpc", "softmax")
    return [
        Claim(
            "RPC-Attention lowers the perplexity of a language model (Teo and Nguyen, NeurIPS 2024), each at its best "
            "of three learning rates, lam and the number of passes not tuned",
            f"WikiText-2, small vocabulary, 3,200 steps: {against_softmax(found)}",
            verdict("lower", test),
        ),
        Claim(
            "... against a softmax with as few parameters in its attention",
            f"{difference(narrow, 2)} to it",
            verdict("lower", narrow),
        ),
        *of_perplexity(twin, swapped),
    ]


def with_larger(raw: Raw) -> list[Choice]:
    """What was tried, with the rate that was tried after the runs; what is chosen is what these had.

    `edge/comparison.json` is of the recipe with that rate added to its grid.
    """
    more = {choice.variant: choice.tried for choice in raw.choices("edge")}
    found = []
    for choice in read(raw).choices:
        *same, _ = tried = more.get(choice.variant, choice.tried)
        if same != choice.tried:
            raise PageError(f"edge/comparison.json does not have what was tried for {choice.variant} and one rate more")
        found.append(replace(choice, tried=tried))
    return found


@PAGE.table
def chosen(raw: Raw) -> Table:
    return tried_values(with_larger(raw), "configuration", NAMES, 2)


@PAGE.table
def perplexity(raw: Raw) -> Table:
    return verdicts(read(raw), TEST, NAMES, 2, seeds=True)


@PAGE.table
def swapped(raw: Raw) -> Table:
    return verdicts(read(raw), SWAPPED, NAMES, 2, seeds=True)


@PAGE.table
def by_step(raw: Raw) -> Table:
    found = read(raw)
    steps = validated_at(found)
    rows = [
        [name, *(mean_std(found.values("val/perplexity", config, step), 2) for step in steps)]
        for config, name in NAMES.items()
    ]
    return Table(["configuration", *(f"step {step + 1:,}" for step in steps)], rows)


@PAGE.table
def passes(raw: Raw) -> Table:
    return pursuit(read(raw), 4)


@PAGE.numbers
def prose(raw: Raw) -> dict[str, str]:
    found = read(raw)
    test = {config: found.row(TEST, config, "softmax") for config in NAMES if config != "softmax"}
    twin, narrow = (found.row(TEST, "rpc", other) for other in ("rpc without S", "narrow softmax"))
    runs = {(row["config"], row["seed"]) for row in found.rows}
    perplexities = [
        [found.mean("val/perplexity", config, step) for config in ("rpc", "softmax")] for step in validated_at(found)
    ]
    changed = {config: found.values(SWAPPED, config) - found.values(TEST, config) for config in NAMES}
    cost = test["rpc"].difference / (-found.row(ADDED, "rpc", "softmax").difference / 100 * found.mean(TEST, "softmax"))
    return {
        "runs": str(len(runs)),
        "larger": ", ".join(
            f"{signed(each.tried[-1].score - each.tried[each.chosen].score, 2)} for {SHORT[each.variant]}"
            for each in with_larger(raw)
        ),
        "seeds": str(test["rpc"].pairs),
        "rpc": difference(test["rpc"], 2),
        "rpc-verdict": test["rpc"].verdict,
        "symmetric": difference(test["symmetric"], 2),
        "symmetric-verdict": test["symmetric"].verdict,
        "narrow": difference(test["narrow softmax"], 2),
        "narrow-verdict": test["narrow softmax"].verdict,
        "rpc-narrow": difference(narrow, 2),
        "rpc-narrow-verdict": narrow.verdict,
        "without": difference(test["rpc without S"], 2),
        "without-verdict": test["rpc without S"].verdict,
        "twin": difference(twin, 2),
        "twin-verdict": twin.verdict,
        "stayed": difference(found.row(STAYED, "rpc", "softmax"), 2),
        "growing": ", ".join(signed(rpc - softmax, 2) for rpc, softmax in perplexities),
        "growing-relative": ", ".join(number(100 * (rpc / softmax - 1)) for rpc, softmax in perplexities),
        "narrow-within": p_value(test["narrow softmax"].within_corrected),
        "swapped-change": ", ".join(
            f"{signed(each.mean(), 2)} for {SHORT[config]}" for config, each in changed.items()
        ),
        "added": added_by_swap(found, SHORT),
        "added-rpc": difference(found.row(ADDED, "rpc", "softmax"), 2),
        "added-twin": difference(found.row(ADDED, "rpc", "rpc without S"), 2),
        "added-part": number(cost, 0),
    }


@PAGE.figure("curves.png")
def curves(raw: Raw) -> Figure:
    return curves_of(read(raw))
