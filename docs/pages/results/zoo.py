"""All mechanisms side by side: what the tables of the page are, where the raw files are there.

They are a copy of what `attnswap compare zoo/images` and `attnswap compare zoo/text` wrote (`results.csv` and
`comparison.json`), in docs/results/zoo/images and docs/results/zoo/text; further seeds of some mechanisms are in
images_more and text_more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

import numpy as np

from docs.pages.errors import PageError, check_told
from docs.pages.figures import Figure, differences_of
from docs.pages.numbers import difference, in_turn, least_to_most, listed, mean_std, number, signed, significant
from docs.pages.page import Page
from docs.pages.raw import RESULTS, Comparison, Raw
from docs.pages.tables import Table, nothing_yet, p_value, tried_values, verdicts
from docs.pages.verdicts import OPPOSITE
from lightning_tasks.compare.statistics import minimum_detectable_effect
from lightning_tasks.compare.summary import LEVEL, SummaryRow, corrected_by_family

# By part: digits and scale of the score, and the metrics of the other columns with theirs.
SCORES = {"images": ("test/top1", 1, 100.0), "text": ("test/perplexity", 2, 1.0)}
UNITS = {"images": "Test accuracy in percentage points", "text": "Test perplexity"}
OTHERS = {
    "images": {
        "corrupted, %": ("robustness/mean_corruption/accuracy", 100.0),
        "entropy, nats": ("val/attention/entropy/mean", 1.0),
        "largest logit": ("attention/largest_logit/mean", 1.0),
        "Lipschitz, first layer": ("val/lipschitz/layer_00", 1.0),
        "last layer": ("val/lipschitz/layer_02", 1.0),
    },
    "text": {
        "words swapped": ("robustness/word_swap/2.5/perplexity", 1.0),
        "entropy, nats": ("val/attention/entropy/mean", 1.0),
        "largest logit": ("attention/largest_logit/mean", 1.0),
        "Lipschitz, first layer": ("val/lipschitz/layer_00", 1.0),
        "last layer": ("val/lipschitz/layer_01", 1.0),
    },
}
SOFTMAX, LONGER = "softmax", ("softmax longer", "softmax longest")
BETTER, BETTER_SIGN = {"images": "higher", "text": "lower"}, {"images": 1, "text": -1}
# What the text compares a configuration with, by part, where that is not softmax.
CONTROLS = {("images", "scaled"): "softmax widest", ("text", "scaled"): "softmax wider"}
# The differences that the text names: of the first seeds, of the further ones, and of all.
SAID = {
    "images": {
        "": ("scaled", "qk_norm", "softmax longest", "uniform"),
        "more-": ("scaled", "qk_norm", "entmax", "hard", "l2", "ssmax"),
        "all-": ("softmax longest",),
    },
    "text": {
        "": ("forgetting", "dam", "rpc", "l2", "symmetric", "hard", "entmax", "differential", "softmax longer"),
        "more-": (
            *("forgetting", "dam", "scaled", "kde", "qk_norm", "rpc", "l2", "symmetric", "hard", "entmax"),
            "softmax longer",
        ),
    },
}
SLOW = ("dam", "qk_norm", "kde")  # of the texts' better ones: nearly as slow as others that have a longer softmax
COSTS = {"parameters": "parameters", "time of a step": "to the first", "peak memory of a step": "peak memory of a step"}

PAGE = Page("zoo", summaries={f"{part}{more}": f"zoo/{part}" for part in SCORES for more in ("", "_more")})


def read(raw: Raw, part: str, more: str = "") -> Comparison | None:
    """The comparison, or its further seeds; None before it has run."""
    folder = f"{part}{more}"
    return raw.comparison(folder, f"zoo/{part}") if (raw.folder / folder / RESULTS).is_file() else None


def score(part: str, raw: Raw) -> Table:
    """The primary endpoint, with a row for each reference."""
    found = read(raw, part)
    if found is None:
        return nothing_yet("mechanism", "score")
    metric, digits, scale = SCORES[part]
    return verdicts(found, metric, {name: name for name in found.configs}, digits, scale, seeds=True)


def together(first: Comparison, further: Comparison) -> Comparison:
    """All seeds of the configurations that have further ones."""
    rows = [row for row in first.rows if row["config"] in further.configs]
    return replace(further, rows=[*rows, *further.rows], images=())


def corrected(metric: str, first: Comparison, both: Comparison) -> list[SummaryRow]:
    """The rows of `both` of a metric: their p-values are corrected for all differences of the first seeds.

    The first seeds chose the configurations of `both` among all, so that all differences are one family.
    """
    rows = [row for row in both.summary if row.metric == metric]
    followed = {(row.config, row.reference) for row in rows}
    others = [row for row in first.summary if row.metric == metric and (row.config, row.reference) not in followed]
    return corrected_by_family([*rows, *others])[: len(rows)]


def more_seeds(part: str, raw: Raw) -> Table:
    """The primary endpoint of the mechanisms with further seeds: by these alone, and by all.

    Its p-values are corrected for all differences of the first table.
    """
    first, further = read(raw, part), read(raw, part, "_more")
    heads = ["mechanism", "mean ± std", "compared with", "further seeds [95%]", "all seeds [95%]", "p, corrected"]
    if first is None or further is None:
        return nothing_yet(*heads, "verdict")
    metric, digits, scale = SCORES[part]
    both = together(first, further)
    rows = []
    for row in corrected(metric, first, both):
        if row.pairs:
            alone = further.row(metric, row.config, row.reference)
            intervals = [difference(each, digits, scale) for each in (alone, row)]
            score = mean_std(both.values(metric, row.config), digits, scale)
            rows.append([row.config, score, row.reference, *intervals, p_value(row.corrected), row.verdict])
    return Table([*heads, "verdict"], rows)


def described(part: str, raw: Raw) -> Table:
    """The secondary metrics, means over seeds, and what a training step takes."""
    found = read(raw, part)
    heads = ["mechanism", *OTHERS[part], *COSTS]
    if found is None:
        return nothing_yet(*heads)
    costs = {row["variant"]: row for row in raw.step_costs(f"zoo/{part}", required=False)}

    def mean(config: str, metric: str, scale: float) -> str:
        return significant(found.mean(metric, config) * scale) if found.has(metric, config) else ""

    rows = [
        [
            config,
            *(mean(config, *how) for how in OTHERS[part].values()),
            *(costs.get(config, {}).get(column, "") for column in COSTS.values()),
        ]
        for config in found.configs
    ]
    return Table(heads, rows)


def rates(part: str, raw: Raw) -> Table:
    """What each variant's learning rates scored on the seed of the selection; the chosen one is bold."""
    found = read(raw, part)
    if found is None or not found.choices:
        return nothing_yet("mechanism", "learning rates")
    return tried_values(found.choices, "mechanism", scale=SCORES[part][2])


def differences(part: str, raw: Raw) -> Figure | None:
    """The primary endpoint of each mechanism less that of softmax."""
    found, (metric, _, scale) = read(raw, part), SCORES[part]
    return None if found is None else differences_of(found, metric, f"{UNITS[part]}, difference to softmax", scale)


@PAGE.numbers
def prose(raw: Raw) -> dict[str, str] | None:
    """The differences that the text names: PART-NAME of the first seeds, PART-more-NAME and PART-all-NAME."""
    if any(read(raw, part, more) is None for part in SCORES for more in ("", "_more")):
        return None
    texts: dict[str, str] = {}
    for part, (metric, _, scale) in SCORES.items():
        first, further = (raw.comparison(f"{part}{more}", f"zoo/{part}") for more in ("", "_more"))
        every = together(first, further)
        for when, names in SAID[part].items():
            found = {"": first, "more-": further, "all-": every}[when]
            for config in names:
                row = found.row(metric, config, CONTROLS.get((part, config), SOFTMAX))
                texts[f"{part}-{when}{config.replace(' ', '-')}"] = signed(row.difference * scale)
        rows = [row for row in first.summary if row.metric == metric and row.pairs]
        longer = [row for row in rows if row.reference in LONGER]
        best = [row for row in corrected(metric, first, every) if row.reference == SOFTMAX]
        best = [row for row in best if row.verdict == BETTER[part] and not row.config.startswith(SOFTMAX)]
        best.sort(key=lambda row: -abs(row.difference))
        texts[f"{part}-better"] = listed(f"`{row.config}`" for row in best)
        texts |= by_verdict(part, metric, first, further)
        texts[f"{part}-pairs"] = str(len(rows))
        texts[f"{part}-longer"] = f"{sum(row.difference * BETTER_SIGN[part] > 0 for row in longer)} of {len(longer)}"
    return texts | _of_images(raw) | _of_text(raw) | _of_all(raw)


def by_verdict(part: str, metric: str, first: Comparison, further: Comparison) -> dict[str, str]:
    """The mechanisms by their verdicts: of all seeds that each has, and of the further seeds alone."""

    def of_mechanisms(rows: Sequence[SummaryRow]) -> dict[str, SummaryRow]:
        controls = (SOFTMAX, "uniform")
        return {
            row.config: row
            for row in rows
            if row.metric == metric and row.reference == SOFTMAX and not row.config.startswith(controls)
        }

    every = of_mechanisms(first.summary) | of_mechanisms(corrected(metric, first, together(first, further)))
    worse = [row for row in every.values() if row.verdict == OPPOSITE[BETTER[part]]]
    worse.sort(key=lambda row: -abs(row.difference))
    undecided = [row for row in every.values() if row.verdict not in ("lower", "higher")]
    confirmed = [row for row in of_mechanisms(further.summary).values() if row.verdict in ("lower", "higher")]
    confirmed.sort(key=lambda row: row.difference * -BETTER_SIGN[part])
    _, digits, scale = SCORES[part]
    return {
        f"{part}-worst": in_turn(f"`{row.config}` ({signed(row.difference * scale, digits)})" for row in worse),
        f"{part}-undecided": f"{len(undecided)} of {len(every)}",
        f"{part}-uncorrected": str(sum(row.excludes_zero for row in undecided)),
        f"{part}-confirmed": in_turn(f"`{row.config}`" for row in confirmed),
    }


def _of_images(raw: Raw) -> dict[str, str]:
    """What the text says of images alone."""
    found, (metric, _, scale) = raw.comparison("images", "zoo/images"), SCORES["images"]
    rows = [row for row in found.summary if row.metric == metric and row.pairs]
    over = found.over_images(metric, "qk_norm", SOFTMAX)
    apart = found.values(metric, "qk_norm") - found.values(metric, SOFTMAX)
    further = raw.comparison("images_more", "zoo/images")
    chosen = [name for name in further.configs if not name.startswith(SOFTMAX)]
    signs = [each.row(metric, name, SOFTMAX).difference > 0 for name in chosen for each in (found, further)]
    corrupted, by = OTHERS["images"]["corrupted, %"]
    rest = [found.mean(corrupted, name) * by for name in found.configs if name != "scaled"]
    detectable = float(np.median([row.detectable for row in rows]))
    single = minimum_detectable_effect(1.0, 4)
    best = [sorted((each.score for each in choice.tried), reverse=True)[:2] for choice in found.choices]
    at_high_end = [choice.variant for choice in found.choices if choice.chosen == len(choice.tried) - 1]
    costs = step_times(raw, "images")
    higher = [(row.config, row.reference) for row in rows if row.verdict == "higher"]
    both = together(found, further)
    to_longest = {row.config: row for row in corrected(metric, found, both) if row.reference == LONGER[-1]}
    check_told(
        "scaled to softmax widest and qk_norm to softmax alone are higher on the images, over four seeds",
        higher == [("scaled", "softmax widest"), ("qk_norm", SOFTMAX)],
        higher,
    )
    lower = [to_longest[name].verdict for name in ("differential", "entmax")]
    check_told(
        "differential is lower than softmax longest over eight seeds, and entmax lower before the correction alone",
        lower == ["lower", "lower, not after correction"],
        lower,
    )
    check_told(
        "softmax and its two controls that train longer have their best rate at the high end on the images",
        {SOFTMAX, *LONGER} <= {*at_high_end},
        at_high_end,
    )
    return {
        "images-below": str(sum(row.high < 0 for row in rows if row.reference in LONGER)),
        "images-detectable": number(detectable * scale),
        "images-detectable-corrected": number(
            detectable * scale * minimum_detectable_effect(1.0, 4, alpha=LEVEL / len(rows)) / single
        ),
        "images-qk_norm-apart": number(float(np.ptp(apart)) * scale),
        "images-qk_norm-over-images": f"{number(over.low * scale)} to {number(over.high * scale)}",
        "images-corrupted-scaled": number(found.mean(corrupted, "scaled") * by),
        "images-corrupted-rest": least_to_most(rest, 0),
        "images-corrupted-qk_norm": signed(found.row(corrupted, "qk_norm", SOFTMAX).difference * by),
        "images-same-sign": f"{sum(a == b for a, b in zip(signs[::2], signs[1::2], strict=True))} of the {len(chosen)}",
        "images-all-gated": difference(both.row(metric, "gated, element-wise", SOFTMAX), 1, scale),
        "images-at-high-end": str(sum(not name.startswith((SOFTMAX, "uniform")) for name in at_high_end)),
        "images-times": " and ".join(number(costs[name]) for name in ("differential", "entmax")),
        "images-times-after": " and ".join(number(costs[name]) for name in ("entmax", "dam")),
        "images-hours": hours(found),
        "images-close": f"{sum(one - other < 0.01 for one, other in best)} of {len(best)}",
    }


def _of_text(raw: Raw) -> dict[str, str]:
    """What it says of the text alone."""
    found, (metric, _, _) = raw.comparison("text", "zoo/text"), SCORES["text"]
    rows = [row for row in found.summary if row.metric == metric and row.pairs]
    against = [row for row in rows if row.reference == SOFTMAX and not row.config.startswith((SOFTMAX, "uniform"))]
    after = [row.difference for row in rows if row.reference in LONGER]
    ahead = sorted(row.difference for row in against)
    entropy, _ = OTHERS["text"]["entropy, nats"]
    equal = fmean(math.log(n) for n in range(1, 65))  # rows of a causal window of 64 tokens
    costs = step_times(raw, "text")
    further = raw.comparison("text_more", "zoo/text")
    both = together(found, further)
    chosen = [row for row in corrected(metric, found, both) if row.reference == SOFTMAX]
    chosen = [row for row in chosen if not row.config.startswith(SOFTMAX)]
    check_told(
        "all ten mechanisms with further seeds differ from softmax on the texts",
        len(chosen) == 10 and all(row.verdict in ("lower", "higher") for row in chosen),
        {row.config: row.verdict for row in chosen},
    )
    times = [100 * (costs[row.config] - 1) for row in rows if row.reference in LONGER]
    return {
        "text-ahead": number(ahead[0] / ahead[1]),
        "text-uniform": difference(found.row(metric, "uniform", SOFTMAX)),
        "text-worse": str(sum(row.verdict == "higher" for row in against)),
        "text-above-longer": least_to_most(after),
        "text-costs": in_turn(number(costs[name], 2) for name in SLOW),
        "text-costs-longer": in_turn(difference(both.row(metric, name, "softmax longer")) for name in SLOW),
        "text-entropies": f"{number(found.mean(entropy, SOFTMAX), 2)} nats, that of equal weights {number(equal, 2)}",
        "text-times": least_to_most(times, 0),
        "text-hours": hours(found),
    }


def _of_all(raw: Raw) -> dict[str, str]:
    """What it says of all seeds, by other controls and by another correction than the tables have."""
    found = {
        part: (raw.comparison(part, f"zoo/{part}"), raw.comparison(f"{part}_more", f"zoo/{part}")) for part in SCORES
    }
    metric, digits, scale = SCORES["images"]
    images, every = found["images"][0], together(*found["images"])
    mechanisms = [each for each in images.configs if not each.startswith((SOFTMAX, "uniform"))]
    above = sum(images.row(metric, each, SOFTMAX).difference > 0 for each in mechanisms)
    wider = ("softmax wider", "softmax widest")
    against = {each: [SOFTMAX] for each in wider} | {"entmax": [*wider, "softmax longer"]}
    against |= {"scaled": ["softmax longest"], "qk_norm": ["softmax longer"]}
    rows = {(each, other): every.row(metric, each, other) for each, others in against.items() for other in others}
    told = {place: difference(row, digits, scale) for place, row in rows.items()}
    first, further = found["text"]
    score = SCORES["text"][0]
    after = {row.config: row for row in further.summary if (row.metric, row.reference) == (score, SOFTMAX)}
    better = [row for row in corrected(score, first, together(first, further)) if row.reference == SOFTMAX]
    better = [row for row in better if row.verdict == "lower" and not row.config.startswith(SOFTMAX)]
    unconfirmed = [after[row.config] for row in better if after[row.config].verdict != "lower"]
    if wide := [row.config for row in unconfirmed if row.high >= 0]:
        raise PageError(f"the page says that the intervals of these exclude 0, and that of {wide[0]} does not")
    own = {part: own_family(part, *each) for part, each in found.items()}
    changed = [f"`{row.config}` {row.verdict} than {row.reference}" for rows in own.values() for row in rows[1]]
    return {
        "images-above": f"{above} of {len(mechanisms)}",
        "images-wider": in_turn(told[each, SOFTMAX] for each in wider),
        "images-entmax-wider": in_turn(told["entmax", each] for each in wider),
        "images-scaled-longest": told["scaled", "softmax longest"],
        "images-qk_norm-longer": told["qk_norm", "softmax longer"],
        "images-entmax-longer": told["entmax", "softmax longer"],
        "text-unconfirmed": in_turn(f"`{row.config}`" for row in unconfirmed),
        "own": " and ".join(str(count) for count, _ in own.values()),
        "narrower": in_turn(changed),
    }


def own_family(part: str, first: Comparison, further: Comparison) -> tuple[int, list[SummaryRow]]:
    """How many differences those with further seeds have, and which of them hold corrected for these alone."""
    metric, both = SCORES[part][0], together(first, further)
    count = sum(row.metric == metric and row.pairs > 0 for row in both.summary)
    narrow = replace(both, endpoints=replace(both.endpoints, comparisons=count))
    wide = {(row.config, row.reference): row.verdict for row in corrected(metric, first, both)}
    rows = [row for row in narrow.summary if row.metric == metric and row.verdict in ("lower", "higher")]
    return count, [row for row in rows if row.verdict != wide[row.config, row.reference]]


def step_times(raw: Raw, part: str) -> dict[str, float]:
    """The time of a training step to that of softmax, as it was measured afterwards."""
    return {row["variant"]: float(row[COSTS["time of a step"]]) for row in raw.step_costs(f"zoo/{part}")}


def hours(found: Comparison) -> str:
    """How long the cells of a table took together."""
    return number(sum(found.seconds()) / 3600)


for name in SCORES:
    PAGE.tables |= {
        name: partial(score, name),
        f"{name}_more_seeds": partial(more_seeds, name),
        f"{name}_described": partial(described, name),
        f"{name}_rates": partial(rates, name),
    }
    PAGE.figures[f"{name}/differences.png"] = partial(differences, name)
