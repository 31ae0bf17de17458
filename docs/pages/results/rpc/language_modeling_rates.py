"""RPC-Attention in a language model that trains longer, each variant at its best learning rate: tables and numbers."""

from __future__ import annotations

from docs.pages.errors import PageError
from docs.pages.figures import Figure, curves_of
from docs.pages.numbers import difference, mean_std, number
from docs.pages.page import Claim, Page
from docs.pages.raw import Comparison, Raw
from docs.pages.results.rpc.shared import of_perplexity, pursuit
from docs.pages.tables import Table, tried_values, verdicts
from docs.pages.verdicts import verdict

RECIPE = "rpc/compare_language_modeling_rates"
PAGE = Page("rpc_language_modeling_rates", "WikiText-2, tuned rates", summaries={"": RECIPE})
NAMES = {
    "softmax": "softmax",
    "narrow softmax": "softmax, a quarter fewer attention parameters",
    "symmetric": "symmetric",
    "rpc": "RPC",
    "rpc without S": "RPC without S",
}
TEST, SWAPPED = "test/perplexity", "robustness/word_swap/2.5/perplexity"


def read(raw: Raw) -> Comparison:
    found = raw.comparison("", RECIPE)
    if any(choice.chosen < len(choice.tried) - 1 for choice in found.choices):
        raise PageError("the largest rate is not the best one for all, as the page says: write it anew")
    return found


@PAGE.claims
def claims(raw: Raw) -> list[Claim]:
    found = read(raw)
    test, narrow, twin = (found.row(TEST, "rpc", other) for other in ("softmax", "narrow softmax", "rpc without S"))
    swapped = found.row(SWAPPED, "rpc", "softmax")
    values = " against ".join(number(found.mean(TEST, config)) for config in ("rpc", "softmax"))
    return [
        Claim(
            "RPC-Attention lowers the perplexity of a language model (Teo and Nguyen, NeurIPS 2024), each at its best "
            "of three learning rates",
            f"WikiText-2, small vocabulary, 3,200 steps: test perplexity {values} of softmax, {difference(test, 2)}",
            verdict("lower", test),
        ),
        Claim(
            "... against a softmax with as few parameters in its attention",
            f"{difference(narrow, 2)} to it",
            verdict("lower", narrow),
        ),
        *of_perplexity(twin, swapped),
    ]


@PAGE.table
def chosen(raw: Raw) -> Table:
    return tried_values(read(raw).choices, "configuration", NAMES, 2)


@PAGE.table
def perplexity(raw: Raw) -> Table:
    return verdicts(read(raw), TEST, NAMES, 2, seeds=True)


@PAGE.table
def swapped(raw: Raw) -> Table:
    return verdicts(read(raw), SWAPPED, NAMES, 2, seeds=True)


@PAGE.table
def by_step(raw: Raw) -> Table:
    found = read(raw)
    steps = sorted({row["step"] for row in found.rows if row["metric"] == "val/perplexity"})
    rows = [
        [name, *(mean_std(found.values("val/perplexity", config, step), 2) for step in steps)]
        for config, name in NAMES.items()
        if config in found.configs
    ]
    return Table(["configuration", *(f"step {step + 1:,}" for step in steps)], rows)


@PAGE.table
def passes(raw: Raw) -> Table:
    return pursuit(read(raw), 4)


@PAGE.numbers
def prose(raw: Raw) -> dict[str, str]:
    found = read(raw)
    runs = {(row["config"], row["seed"]) for row in found.rows}
    return {"runs": str(len(runs)), "seeds": str(found.row(TEST, "rpc", "softmax").pairs)}


@PAGE.figure("curves.png")
def curves(raw: Raw) -> Figure:
    return curves_of(read(raw))
