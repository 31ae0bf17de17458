"""All mechanisms side by side: what the tables of the page are, where the raw files are there.

They are a copy of what `attnswap compare zoo/images` and `attnswap compare zoo/text` wrote (`results.csv` and
`comparison.json`), in docs/results/zoo/images and docs/results/zoo/text; further seeds of some mechanisms are in
images_more and text_more.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from statistics import fmean

import numpy as np

from docs.pages.errors import PageError
from docs.pages.figures import Figure, differences_of
from docs.pages.numbers import difference, in_turn, least_to_most, listed, mean_std, number, signed, significant, told
from docs.pages.page import Page
from docs.pages.raw import Comparison, Raw
from docs.pages.results.zoo_seeds import (
    BETTER,
    BETTER_SIGN,
    DECIDED,
    LONGER,
    LONGEST,
    SCORES,
    SOFTMAX,
    TIME,
    WIDER,
    Seeds,
    best_and_worst,
    control_row,
    corrected,
    is_mechanism,
    over_all,
    over_eight,
    read,
    seeds_of,
    step_times,
    to_softmax,
    together,
)
from docs.pages.results.zoo_told import check_sentences
from docs.pages.tables import Table, nothing_yet, p_value, tried_values, verdicts
from docs.pages.verdicts import OPPOSITE
from lightning_tasks.compare.statistics import minimum_detectable_effect
from lightning_tasks.compare.summary import LEVEL, SummaryRow

UNITS = {"images": "Test accuracy in percentage points", "text": "Test perplexity"}
# By part: the metrics of the other columns, with their scales.
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
# What the text compares a configuration with, by part, where that is not softmax.
CONTROLS = {("images", "scaled"): "softmax widest", ("text", "scaled"): "softmax wider"}
# The differences that the text names: of the first seeds, and of the further ones.
SAID = {
    "images": {
        "": ("scaled", "qk_norm", "uniform"),
        "more-": ("scaled", "qk_norm", "entmax", "hard", "l2", "ssmax"),
    },
    "text": {
        "": ("forgetting", "dam"),
        "more-": ("forgetting", "dam", "scaled", "kde", "qk_norm", "rpc", "l2", "symmetric", "hard", "entmax"),
    },
}
SLOW = ("dam", "qk_norm", "kde")  # of the texts' better ones: nearly as slow as others that have a longer softmax
COSTS = {"parameters": "parameters", "time of a step": TIME, "peak memory of a step": "peak memory of a step"}

PAGE = Page("zoo", summaries={f"{part}{more}": f"zoo/{part}" for part in SCORES for more in ("", "_more")})


def score(part: str, raw: Raw) -> Table:
    """The primary endpoint, with a row for each reference."""
    found = read(raw, part)
    if found is None:
        return nothing_yet("mechanism", "score")
    metric, digits, scale = SCORES[part]
    return verdicts(found, metric, {name: name for name in found.configs}, digits, scale, seeds=True)


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
    """All that the text names; None before all parts have run."""
    if any(read(raw, part, more) is None for part in SCORES for more in ("", "_more")):
        return None
    check_sentences(raw)
    texts: dict[str, str] = {}
    for part in SCORES:
        seeds = seeds_of(raw, part)
        texts |= _said(part, seeds) | _of_part(part, seeds) | by_verdict(part, seeds)
    return texts | _of_images(raw) | _of_text(raw) | _of_all(raw)


def _said(part: str, seeds: Seeds) -> dict[str, str]:
    """The differences that the text names: PART-NAME of the first seeds, and PART-more-NAME of the further ones."""
    metric, _, scale = SCORES[part]
    found = {"": seeds.first, "more-": seeds.further}
    rows = {
        f"{part}-{when}{config}": found[when].row(metric, config, CONTROLS.get((part, config), SOFTMAX))
        for when, names in SAID[part].items()
        for config in names
    }
    return {name: signed(row.difference * scale) for name, row in rows.items()}


def _of_part(part: str, seeds: Seeds) -> dict[str, str]:
    """What the text says of both parts."""
    metric, digits, scale = SCORES[part]
    rows = [row for row in seeds.first.summary if row.metric == metric and row.pairs]
    longer = [row for row in rows if row.reference in LONGER]
    better = [row for row in over_eight(part, seeds).values() if row.verdict == BETTER[part]]
    better.sort(key=lambda row: -abs(row.difference))
    best, worst = best_and_worst(part, seeds.first)
    return {
        f"{part}-better": listed(f"`{row.config}`" for row in better),
        f"{part}-five-best": in_turn(f"`{name}`" for name in best),
        f"{part}-five-worst": in_turn(f"`{name}`" for name in worst),
        f"{part}-pairs": str(len(rows)),
        f"{part}-longest": told(seeds.first.row(metric, LONGEST[part], SOFTMAX), digits, scale),
        f"{part}-longest-all": told(control_row(part, seeds), digits, scale),
        f"{part}-longer": f"{sum(row.difference * BETTER_SIGN[part] > 0 for row in longer)} of {len(longer)}",
    }


def by_verdict(part: str, seeds: Seeds) -> dict[str, str]:
    """The mechanisms by their verdicts: of all seeds that each has, and of the further seeds alone."""
    metric, digits, scale = SCORES[part]
    every = over_all(part, seeds)
    worse = [row for row in every.values() if row.verdict == OPPOSITE[BETTER[part]]]
    worse.sort(key=lambda row: -abs(row.difference))
    undecided = [row for row in every.values() if row.verdict not in DECIDED]
    confirmed = [row for row in to_softmax(seeds.further.summary, metric).values() if row.verdict in DECIDED]
    confirmed.sort(key=lambda row: row.difference * -BETTER_SIGN[part])
    return {
        f"{part}-worst": in_turn(f"`{row.config}` ({signed(row.difference * scale, digits)})" for row in worse),
        f"{part}-undecided": f"{len(undecided)} of {len(every)}",
        f"{part}-uncorrected": str(sum(row.excludes_zero for row in undecided)),
        f"{part}-confirmed": in_turn(f"`{row.config}`" for row in confirmed),
    }


def _of_images(raw: Raw) -> dict[str, str]:
    """What the text says of images alone."""
    (found, further, both), (metric, _, scale) = seeds_of(raw, "images"), SCORES["images"]
    rows = [row for row in found.summary if row.metric == metric and row.pairs]
    over = found.over_images(metric, "qk_norm", SOFTMAX)
    apart = [each.values(metric, "qk_norm") - each.values(metric, SOFTMAX) for each in (found, further)]
    chosen = [name for name in further.configs if is_mechanism(name)]
    signs = [each.row(metric, name, SOFTMAX).difference > 0 for name in chosen for each in (found, further)]
    corrupted, by = OTHERS["images"]["corrupted, %"]
    rest = [found.mean(corrupted, name) * by for name in found.configs if name != "scaled"]
    detectable = float(np.median([row.detectable for row in rows]))
    single = minimum_detectable_effect(1.0, 4)
    best = [sorted((each.score for each in choice.tried), reverse=True)[:2] for choice in found.choices]
    at_high_end = [choice.variant for choice in found.choices if choice.chosen == len(choice.tried) - 1]
    times = step_times(raw, "images")
    return {
        "images-below": str(sum(row.high < 0 for row in rows if row.reference in LONGER)),
        "images-detectable": number(detectable * scale),
        "images-detectable-corrected": number(
            detectable * scale * minimum_detectable_effect(1.0, 4, alpha=LEVEL / len(rows)) / single
        ),
        "images-qk_norm-apart": number(float(np.ptp(apart[0])) * scale),
        "images-qk_norm-more-apart": number(float(np.ptp(apart[1])) * scale),
        "images-qk_norm-over-images": f"{number(over.low * scale)} to {number(over.high * scale)}",
        "images-corrupted-scaled": number(found.mean(corrupted, "scaled") * by),
        "images-corrupted-rest": least_to_most(rest, 0),
        "images-corrupted-qk_norm": signed(found.row(corrupted, "qk_norm", SOFTMAX).difference * by),
        "images-same-sign": f"{sum(a == b for a, b in zip(signs[::2], signs[1::2], strict=True))} of the {len(chosen)}",
        "images-all-gated": difference(both.row(metric, "gated, element-wise", SOFTMAX), 1, scale),
        "images-at-high-end": str(sum(map(is_mechanism, at_high_end))),
        "images-times": " and ".join(number(times[name]) for name in ("differential", "entmax")),
        "images-time-entmax": number(times["entmax"]),
        "images-time-dam": number(times["dam"]),
        "images-hours": hours(found),
        "images-close": f"{sum(one - other < 0.01 for one, other in best)} of {len(best)}",
    }


def _of_text(raw: Raw) -> dict[str, str]:
    """What it says of the text alone."""
    (found, _, both), (metric, _, _) = seeds_of(raw, "text"), SCORES["text"]
    rows = [row for row in found.summary if row.metric == metric and row.pairs]
    against = sorted(to_softmax(rows, metric).values(), key=lambda row: -row.difference)
    worse = [row for row in against if row.verdict == "higher"]
    after = [row.difference for row in rows if row.reference in LONGER]
    entropy, _ = OTHERS["text"]["entropy, nats"]
    equal = fmean(math.log(n) for n in range(1, 65))  # rows of a causal window of 64 tokens
    times = step_times(raw, "text")
    longer = [100 * (times[row.config] - 1) for row in rows if row.reference in LONGER]
    return {
        "text-ahead": number(against[-1].difference / against[-2].difference),
        "text-uniform": difference(found.row(metric, "uniform", SOFTMAX)),
        "text-worse": str(len(worse)),
        "text-worse-each": in_turn(f"`{row.config}` ({signed(row.difference)})" for row in worse),
        "text-above-longer": least_to_most(after),
        "text-costs": in_turn(number(times[name], 2) for name in SLOW),
        "text-costs-longer": in_turn(difference(both.row(metric, name, "softmax longer")) for name in SLOW),
        "text-entropies": f"{number(found.mean(entropy, SOFTMAX), 2)} nats, that of equal weights {number(equal, 2)}",
        "text-times": least_to_most(longer, 0),
        "times-of-one-model": number(100 * (most_apart(raw) - 1), 0),
        "text-hours": hours(found),
    }


def most_apart(raw: Raw) -> float:
    """How far the times of a step of softmax and of its controls that train longer, which are one model, lie apart."""
    of_parts = [step_times(raw, part) for part in SCORES]
    of_softmax = [[times[name] for name in (SOFTMAX, *LONGER) if name in times] for times in of_parts]
    return max(max(times) / min(times) for times in of_softmax)


def _of_all(raw: Raw) -> dict[str, str]:
    """What it says of all seeds, by other controls and by another correction than the tables have."""
    (images, _, every), text = (seeds_of(raw, part) for part in SCORES)
    metric, digits, scale = SCORES["images"]
    gains = [row.difference > 0 for row in to_softmax(images.summary, metric).values()]
    against = dict.fromkeys(WIDER, (SOFTMAX,)) | {"entmax": (*WIDER, *LONGER), "qk_norm": LONGER, "scaled": LONGER[1:]}
    rows = {(each, other): every.row(metric, each, other) for each, others in against.items() for other in others}
    apart = {place: difference(row, digits, scale) for place, row in rows.items()}
    after = to_softmax(text.further.summary, SCORES["text"][0])
    better = [row.config for row in over_eight("text", text).values() if row.verdict == BETTER["text"]]
    unconfirmed = [after[config] for config in better if after[config].verdict != BETTER["text"]]
    if wide := [row.config for row in unconfirmed if row.high >= 0]:
        raise PageError(f"the page says that the intervals of these exclude 0, and that of {wide[0]} does not")
    own = [own_family(part, seeds_of(raw, part)) for part in SCORES]
    changed = [f"`{row.config}` {row.verdict} than {row.reference}" for _, rows in own for row in rows]
    return {
        "images-above": f"{sum(gains)} of {len(gains)}",
        "images-wider": in_turn(apart[each, SOFTMAX] for each in WIDER),
        "images-entmax-wider": in_turn(apart["entmax", each] for each in WIDER),
        "images-scaled-longest": apart["scaled", "softmax longest"],
        "images-qk_norm-longer": apart["qk_norm", "softmax longer"],
        "images-qk_norm-longest": apart["qk_norm", "softmax longest"],
        "images-entmax-longer": apart["entmax", "softmax longer"],
        "images-entmax-longest": apart["entmax", "softmax longest"],
        "text-unconfirmed": in_turn(f"`{row.config}`" for row in unconfirmed),
        "own": " and ".join(str(count) for count, _ in own),
        "narrower": in_turn(changed),
    }


def own_family(part: str, seeds: Seeds) -> tuple[int, list[SummaryRow]]:
    """How many differences those with further seeds have, and which of them hold corrected for these alone."""
    (metric, _, _), both = SCORES[part], seeds.both
    count = sum(row.metric == metric and row.pairs > 0 for row in both.summary)
    narrow = replace(both, endpoints=replace(both.endpoints, comparisons=count))
    wide = {(row.config, row.reference): row.verdict for row in corrected(metric, seeds.first, both)}
    rows = [row for row in narrow.summary if row.metric == metric and row.verdict in DECIDED]
    return count, [row for row in rows if row.verdict != wide[row.config, row.reference]]


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
