"""All mechanisms side by side: what the tables of the page are, where the raw files are there.

They are a copy of what `attnswap compare zoo/images` and `attnswap compare zoo/text` wrote (`results.csv` and
`comparison.json`), in docs/results/zoo/images and docs/results/zoo/text; further seeds of some mechanisms are in
images_more and text_more.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from docs.pages.figures import Figure, differences_of
from docs.pages.numbers import difference, mean_std, number, significant
from docs.pages.page import Page
from docs.pages.raw import RESULTS, Comparison, Raw
from docs.pages.tables import Table, p_value, verdicts
from lightning_tasks.compare.choice import Choice
from lightning_tasks.compare.summary import corrected_by_family

NOTHING = "no numbers yet"
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
        return Table(["mechanism", "score"], [[NOTHING, ""]])
    metric, digits, scale = SCORES[part]
    return verdicts(found, metric, {name: name for name in found.configs}, digits, scale, seeds=True)


def more_seeds(part: str, raw: Raw) -> Table:
    """The primary endpoint of the mechanisms with further seeds: by these alone, and by all.

    Its p-values are corrected for all differences of the first table.
    """
    first, further = read(raw, part), read(raw, part, "_more")
    heads = ["mechanism", "mean ± std", "compared with", "further seeds [95%]", "all seeds [95%]", "p, corrected"]
    if first is None or further is None:
        return Table([*heads, "verdict"], [[NOTHING, *[""] * len(heads)]])
    metric, digits, scale = SCORES[part]
    together = replace(
        further, rows=[*(row for row in first.rows if row["config"] in further.configs), *further.rows], images=()
    )
    # The first seeds chose these mechanisms among all, so that all differences are the family of their p-values.
    every = [row for row in together.summary if row.metric == metric]
    followed = {(row.config, row.reference) for row in every}
    every += [row for row in first.summary if row.metric == metric and (row.config, row.reference) not in followed]
    rows = []
    for row in corrected_by_family(every)[: len(followed)]:
        if row.pairs:
            alone = further.row(metric, row.config, row.reference)
            intervals = [difference(each, digits, scale) for each in (alone, row)]
            score = mean_std(together.values(metric, row.config), digits, scale)
            rows.append([row.config, score, row.reference, *intervals, p_value(row.corrected), row.verdict])
    return Table([*heads, "verdict"], rows)


def described(part: str, raw: Raw) -> Table:
    """The secondary metrics, means over seeds, and what a training step takes."""
    found = read(raw, part)
    heads = ["mechanism", *OTHERS[part], *COSTS]
    if found is None:
        return Table(heads, [[NOTHING, *[""] * (len(heads) - 1)]])
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
        return Table(["mechanism", "learning rates"], [[NOTHING, ""]])
    heads = [each.overrides[0].partition("=")[2] for each in found.choices[0].tried]
    return Table(
        ["mechanism", *heads], [[choice.variant, *_scores(choice, SCORES[part][2])] for choice in found.choices]
    )


def _scores(choice: Choice, scale: float) -> list[str]:
    texts = [
        "diverged" if each.diverged or math.isnan(each.score) else number(each.score * scale, 1)
        for each in choice.tried
    ]
    return [f"**{text}**" if place == choice.chosen else text for place, text in enumerate(texts)]


def differences(part: str, raw: Raw) -> Figure | None:
    """The primary endpoint of each mechanism less that of softmax."""
    found, (metric, _, scale) = read(raw, part), SCORES[part]
    return None if found is None else differences_of(found, metric, f"{UNITS[part]}, difference to softmax", scale)


for name in SCORES:
    PAGE.tables |= {
        name: partial(score, name),
        f"{name}_more_seeds": partial(more_seeds, name),
        f"{name}_described": partial(described, name),
        f"{name}_rates": partial(rates, name),
    }
    PAGE.figures[f"{name}/differences.png"] = partial(differences, name)
