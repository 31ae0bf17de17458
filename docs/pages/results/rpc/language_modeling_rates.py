"""RPC-Attention in a language model that trains longer, each variant at its best learning rate: tables and numbers.

The perplexity of the words that stay, in swapped and in clean text, is in the tables (`robustness.csv`) of a test of
the last checkpoint of each cell, in docs/results/rpc_language_modeling_rates/swapped/VARIANT/seed_N.csv, VARIANT as the
folder of the cell is called.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from docs.pages.cell_tests import check_checkpoints, compare_tests, tested
from docs.pages.errors import PageError, check_told
from docs.pages.figures import Figure, curves_of
from docs.pages.numbers import difference, in_turn, mean_std, number, signed
from docs.pages.page import Claim, Page
from docs.pages.raw import Comparison, Raw
from docs.pages.results.rpc.shared import (
    ADDED,
    STAYED,
    SWAPPED,
    TEST,
    added_by_part,
    added_by_swap,
    against_softmax,
    by_pass,
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
SWAPPED_WORDS = "token 0/2.5%/{}perplexity"
STAYED_WORDS, CLEAN_WORDS = (f"{SWAPPED_WORDS.format(text)} of the words that stayed" for text in ("", "clean "))
BEST = "lr=0.002"  # the largest of the grid, which the page says was the best one of it for all


def read(raw: Raw) -> Comparison:
    """The comparison.

    Raises:
        PageError: another rate was chosen than the page says.
    """
    found = raw.comparison("", RECIPE)
    for config in NAMES:
        if (rate := found.chosen(config)) != BEST:
            raise PageError(f"{rate} was chosen for {config}, and the page says that {BEST} was for all: write it anew")
    return found


def read_swapped(raw: Raw) -> Comparison:
    """The perplexity of the words that stay, in swapped and in clean text, and what the swap adds to it.

    Raises:
        PageError: there are no tables, they are of other checkpoints than the comparison, or the page says something
            else of what the swap adds.
    """
    folder = raw.folder / "swapped"
    check_checkpoints(tested(folder, RECIPE, "word swap"), STAYED_WORDS, read(raw), STAYED)
    found = compare_tests(folder, RECIPE, "word swap", SWAPPED_WORDS.format(""))
    if found is None:
        raise PageError(f"{folder} has no tables")
    found = with_added(found, CLEAN_WORDS, STAYED_WORDS)
    softmax, narrow, *others = (
        (found.mean(CLEAN_WORDS, config), number(found.mean(ADDED, config), 2)) for config in NAMES
    )
    falling = [float(added) for _, added in sorted((narrow, *others))]
    if softmax[1] != narrow[1] or falling != sorted(falling, reverse=True):
        raise PageError(
            "the page says that the swap adds as much to both forms of softmax, and less to the others the higher "
            "their clean perplexity is: write it anew"
        )
    return found


@PAGE.claims
def claims(raw: Raw) -> list[Claim]:
    found = read(raw)
    test, narrow = (found.row(TEST, "rpc", other) for other in ("softmax", "narrow softmax"))
    return [
        Claim(
            "RPC-Attention lowers the perplexity of a language model (Teo and Nguyen, NeurIPS 2024), each at the best "
            "of three learning rates (for both the largest); lam and the number of passes are not tuned",
            f"WikiText-2, small vocabulary, 3,200 steps: {against_softmax(found)}",
            verdict("lower", test),
        ),
        Claim(
            "... against a softmax with as few parameters in its attention",
            f"{difference(narrow, 2)} compared with it",
            verdict("lower", narrow),
        ),
        *of_perplexity(found),
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
    return {
        "runs": str(len({(row["config"], row["seed"]) for row in found.rows})),
        "seeds": str(test["rpc"].pairs),
        "ran": found.ran_in(),
        "rpc": difference(test["rpc"], 2),
        "rpc-verdict": test["rpc"].verdict,
        "symmetric": difference(test["symmetric"], 2),
        "symmetric-verdict": test["symmetric"].verdict,
        "iterating": difference(found.row(TEST, "rpc without S", "symmetric"), 2),
        "twin": difference(twin, 2),
        "twin-verdict": twin.verdict,
        "narrow": difference(test["narrow softmax"], 2),
        "narrow-verdict": test["narrow softmax"].verdict,
        "narrow-within": p_value(test["narrow softmax"].within_corrected),
        "rpc-narrow": difference(narrow, 2),
        "rpc-narrow-verdict": narrow.verdict,
        "residual": share_of(by_pass(found, "residual", "rpc", 4)[-1]),
        **{
            name: share_of(by_pass(found, "self_probability", config, 4)[-1])
            for name, config in {"self": "rpc", "self-twin": "rpc without S"}.items()
        },
    }


@PAGE.numbers
def by_rate(raw: Raw) -> dict[str, str]:
    scores = {each.variant: [tried.score for tried in each.tried] for each in with_larger(raw)}
    changed = [f"{signed(scores[config][-1] - scores[config][-2], 2)} for {name}" for config, name in SHORT.items()]
    best = [[min(scores[config][:count]) for config in ("rpc", "softmax")] for count in (4, 3)]
    val = "val/perplexity"
    spread = np.std(read(raw).values(val, "rpc") - read(raw).values(val, "softmax"), ddof=1)
    apart = [rpc - softmax for rpc, softmax in best]
    check_told("a fourth rate changes less than the deviation", abs(apart[0] - apart[1]) < spread, [*apart, spread])
    twin = read(raw).values(val, "rpc") - read(raw).values(val, "rpc without S")
    of_twins = [rpc - without for rpc, without in zip(scores["rpc"], scores["rpc without S"], strict=True)]
    check_told("what S costs rises with the rate", of_twins == sorted(of_twins), of_twins)
    check_told("seed 100 is not typical at the third rate", of_twins[2] > max(twin), [of_twins[2], *twin])
    low, high = (signed(float(pick(twin)), 2) for pick in (min, max))
    return {
        "twin-of-seeds": f"{signed(float(twin.mean()), 2)} in the mean, by seed {low} to {high}",
        "larger": ", ".join(changed),
        "best-of-four": " in place of ".join(signed(each, 2) for each in apart),
        "rpc-spread": number(float(spread), 2),
        "twin-by-rate": in_turn(signed(each, 2) for each in of_twins),
    }


@PAGE.numbers
def over_training(raw: Raw) -> dict[str, str]:
    found = read(raw)
    rpc, softmax, without = (
        [found.mean("val/perplexity", config, step) for step in validated_at(found)]
        for config in ("rpc", "softmax", "rpc without S")
    )
    ends = {
        config: [found.values("val/perplexity", config, step) for step in validated_at(found)[-2:]] for config in NAMES
    }
    check_told(
        "the validation perplexity of every run was still falling",
        all((last < before).all() for before, last in ends.values()),
        {config: [each.tolist() for each in pair] for config, pair in ends.items()},
    )
    return {
        "growing": in_turn(signed(a - b, 2) for a, b in zip(rpc, softmax, strict=True)),
        "growing-relative": in_turn(number(100 * (a / b - 1)) for a, b in zip(rpc, softmax, strict=True)),
        "growing-twin": in_turn(signed(a - b, 2) for a, b in zip(rpc, without, strict=True)),
    }


@PAGE.numbers
def on_swapped_text(raw: Raw) -> dict[str, str]:
    found, swapped_text = read(raw), read_swapped(raw)
    more = swapped_text.with_metric("more", lambda clean, after: after - clean, CLEAN_WORDS, STAYED_WORDS)
    added_more = more.row("more", "rpc", "softmax")
    check_told("in perplexity, too, the swap adds less to RPC", added_more.difference < 0, difference(added_more, 2))
    changed = {config: found.mean(SWAPPED, config) - found.mean(TEST, config) for config in NAMES}
    return {
        "stayed": difference(found.row(STAYED, "rpc", "softmax"), 2),
        "clean-stayed": difference(swapped_text.row(CLEAN_WORDS, "rpc", "softmax"), 2),
        "added": added_by_swap(swapped_text, SHORT),
        "added-perplexity": difference(added_more, 2),
        **added_by_part(swapped_text),
        "swapped-change": ", ".join(f"{signed(each, 2)} for {SHORT[config]}" for config, each in changed.items()),
    }


def share_of(value: float) -> str:
    """In percent."""
    return f"{number(100 * value, 0)}%"


@PAGE.figure("curves.png")
def curves(raw: Raw) -> Figure:
    return curves_of(read(raw))
