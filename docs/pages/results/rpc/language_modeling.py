"""RPC-Attention in a small language model: what the tables and numbers of its page are."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np

from docs.pages.errors import check_told
from docs.pages.figures import Figure, curves_of
from docs.pages.numbers import difference, in_turn, mean_std, number, signed
from docs.pages.page import Claim, Page
from docs.pages.raw import Comparison, Raw
from docs.pages.results.rpc.shared import (
    ADDED,
    CLEAN_STAYED,
    NAMES,
    PAIRS,
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
from docs.pages.tables import Table, paired_verdicts, step_costs
from docs.pages.verdicts import verdict

RECIPE = "rpc/compare_language_modeling"
SUPPORT = "val/attention/effective_support/layer_00"
PAGE = Page("rpc_language_modeling", "WikiText-2", summaries={"": RECIPE})


def read(raw: Raw) -> Comparison:
    """The comparison, with what swapping words adds to the perplexity."""
    return raw.once("with what is added", lambda: with_added(raw.comparison("", RECIPE), CLEAN_STAYED, STAYED))


@PAGE.claims
def claims(raw: Raw) -> list[Claim]:
    found = read(raw)
    return [
        Claim(
            "RPC-Attention lowers the perplexity of a language model (Teo and Nguyen, NeurIPS 2024)",
            "WikiText-2, small vocabulary, one learning rate, lam and number of passes, none of them tuned: "
            f"{against_softmax(found)}",
            verdict("lower", found.row(TEST, "rpc", "softmax")),
        ),
        *of_perplexity(found),
    ]


@PAGE.table
def perplexity(raw: Raw) -> Table:
    found = read(raw)
    columns = {
        "validation": "val/perplexity",
        "test": TEST,
        "swapped": SWAPPED,
        "words that stayed, clean": CLEAN_STAYED,
        "words that stayed, swapped": STAYED,
    }
    rows = [
        [
            name,
            *(mean_std(found.values(metric, config), 2) for metric in columns.values()),
            f"{mean_std(found.values(ADDED, config), 2)}%",
        ]
        for config, name in NAMES.items()
    ]
    return Table(["configuration", *columns, "what the swap adds to it"], rows)


@PAGE.table
def paired(raw: Raw) -> Table:
    return paired_verdicts(read(raw), "difference in test perplexity", PAIRS, TEST, 2)


@PAGE.table
def passes(raw: Raw) -> Table:
    return pursuit(read(raw), 4)


@PAGE.table
def support(raw: Raw) -> Table:
    found = read(raw)
    steps = validated_at(found)
    rows = [[name, *(number(found.mean(SUPPORT, config, step)) for step in steps)] for config, name in NAMES.items()]
    return Table(["step", *(str(step + 1) for step in steps)], rows)


@PAGE.table
def cost(raw: Raw) -> Table:
    return step_costs(raw.step_costs(RECIPE), NAMES)


@PAGE.numbers
def prose(raw: Raw) -> dict[str, str]:
    found = read(raw)
    test = {name: found.row(TEST, *pair) for name, pair in PAIRS.items()}
    entropies = {config: by_pass(found, "entropy", config, 4)[-1] for config in ("rpc", "rpc without S")}
    softmax = math.exp(found.mean("val/attention/entropy/layer_00", "softmax"))
    over_steps = {
        config: np.array([found.mean("val/perplexity", config, step) for step in validated_at(found)])
        for config in ("softmax", "symmetric", "rpc")
    }
    grown, of_symmetric = (over_steps[config] - over_steps["softmax"] for config in ("rpc", "symmetric"))
    own = sorted(by_pass(found, "self_probability", config, 4)[-1] for config in entropies)
    more = found.with_metric("more", lambda clean, swapped: swapped - clean, CLEAN_STAYED, STAYED)
    worse = found.values(TEST, "rpc") > found.values(TEST, "softmax")
    at_steps = {config: [found.mean(SUPPORT, config, step) for step in validated_at(found)] for config in NAMES}
    check_told(
        "RPC's first pass sharpens, and that of RPC without S and symmetric attention end wider than they were",
        at_steps["rpc"] == sorted(at_steps["rpc"], reverse=True)
        and all(at_steps[config][-1] > at_steps[config][0] for config in ("rpc without S", "symmetric")),
        at_steps,
    )
    residuals = {config: by_pass(found, "residual", config, 4) for config in ("rpc", "rpc without S")}
    check_told(
        "with S the residual falls, and without it ends higher than it began",
        residuals["rpc"] == sorted(residuals["rpc"], reverse=True)
        and residuals["rpc without S"][-1] > residuals["rpc without S"][0],
        residuals,
    )
    added = {config: found.mean(ADDED, config) for config in NAMES}
    check_told(
        "in percent the swap adds less with symmetric attention and RPC, and in perplexity more to RPC",
        max(added["symmetric"], added["rpc"]) < added["softmax"] and more.row("more", "rpc", "softmax").difference > 0,
        f"{added}; {difference(more.row('more', 'rpc', 'softmax'), 2)}",
    )
    return {
        "runs": str(len(found.seconds())),
        "ran": found.ran_in(),
        "rpc": difference(test["RPC − softmax"], 2),
        "rpc-verdict": test["RPC − softmax"].verdict,
        "rpc-seeds": f"{worse.sum()} of {len(worse)}",
        "means": " against ".join(number(found.mean(TEST, config), 1) for config in ("rpc", "softmax")),
        "symmetric": difference(test["symmetric − softmax"], 2),
        "twin": difference(test["RPC − RPC without S"], 2),
        "twin-verdict": test["RPC − RPC without S"].verdict,
        "iterating": difference(test["RPC without S − symmetric"], 2),
        **{
            name: difference(found.row(metric, "rpc", "softmax"), 2)
            for name, metric in {"stayed": STAYED, "clean-stayed": CLEAN_STAYED}.items()
        },
        "added": added_by_swap(found, NAMES),
        "added-perplexity": difference(more.row("more", "rpc", "softmax"), 2),
        **added_by_part(found),
        "growing": in_turn(signed(each, 2) for each in grown),
        "growing-percent": in_turn(number(each) for each in 100 * grown / over_steps["softmax"]),
        "symmetric-share": in_turn(f"{number(each, 0)}%" for each in 100 * of_symmetric / grown),
        "share": f"{number(100 * by_pass(found, 'sparsity', 'rpc', 4)[-1], 0)}%",
        "residual": f"{number(100 * by_pass(found, 'residual', 'rpc', 4)[-1], 0)}%",
        "self": " to ".join(f"{number(100 * each, 0)}%" for each in own),
        "equal-tokens": f"{number(math.exp(entropies['rpc']))} (RPC) or {number(math.exp(entropies['rpc without S']))}",
        "equal-tokens-softmax": number(softmax),
    }


@PAGE.numbers
def before(raw: Raw) -> dict[str, str]:
    """Test perplexities on the seeds that ran before."""
    earlier, _ = raw.with_earlier(raw.comparison("", RECIPE))
    pairs = {
        "earlier": "RPC − softmax",
        "earlier-symmetric": "symmetric − softmax",
        "earlier-twin": "RPC − RPC without S",
    }
    return {name: difference(earlier.row(TEST, *PAIRS[pair]), 2) for name, pair in pairs.items()}


@PAGE.numbers
def minutes(raw: Raw) -> dict[str, str]:
    """What a run took, with its test, in the mean."""
    found = read(raw)
    taken = {config: fmean(found.seconds(config)) / 60 for config in ("rpc", "rpc without S")}
    check_told("runs of RPC took longer than those of its twin", taken["rpc"] > taken["rpc without S"], taken)
    return {"minutes-of-twins": " and ".join(number(each, 2) for each in taken.values())}


@PAGE.figure("curves.png")
def curves(raw: Raw) -> Figure:
    return curves_of(read(raw))
