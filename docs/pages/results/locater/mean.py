"""LocAteR with the mean of the spectrum held: what the tables and numbers of its page are."""

from __future__ import annotations

from functools import partial

from docs.pages.errors import PageError, check_told
from docs.pages.figures import Figure, curves_of
from docs.pages.numbers import difference, interval, listed, number, significant, told
from docs.pages.page import Claim, Page
from docs.pages.raw import Comparison, Raw
from docs.pages.results.locater.penalty import ENTROPY, LOGGED, MEAN, PERPLEXITY, SCALE, VARIANCE, WIDTH, validated
from docs.pages.tables import Columns, Table, chosen_values, over_steps, verdicts
from docs.pages.verdicts import verdict
from lightning_tasks.compare.summary import SummaryRow
from lightning_tasks.intervals import mean_interval

RECIPE = "locater/compare_mean"
PAGE = Page("locater_mean", "LocAteR, its mean held", summaries={"": RECIPE})
HELD = ["locater mean 5", "locater mean 20"]
DECAY, FREE = "qk weight decay", "locater free"
FADES = "QKWeightDecay(weight_decay=16.0, fade_steps=250)"  # what the page calls a fading weight decay
NAMES = {
    "none": "none",
    FREE: "LocAteR, mean free",
    "locater mean 5": "LocAteR, tr W held at 5",
    "locater mean 20": "LocAteR, tr W held at 20",
    DECAY: "fading weight decay on W_q, W_k",
}
SPECTRUM = (0, 50, 300, 500, 950)


def read(raw: Raw) -> Comparison:
    found = raw.comparison("", RECIPE)
    if (decay := found.chosen(DECAY)) != FADES:
        raise PageError(f"the decay that was chosen is {decay}, and the page speaks of {FADES}: write it anew")
    return found


def to(found: Comparison, reference: str, metric: str = PERPLEXITY) -> list[SummaryRow]:
    """The differences of the penalty with its mean held, at both targets."""
    return [found.row(metric, config, reference) for config in HELD]


@PAGE.claims
def claims(raw: Raw) -> list[Claim]:
    found = read(raw)
    none, decay, free, entropy = to(found, "none"), to(found, DECAY), to(found, FREE), to(found, "none", ENTROPY)
    of_decay = found.row(ENTROPY, DECAY, "none")
    return [
        Claim(
            "LocAteR, a penalty on the QK eigenspectrum that holds its mean, lowers perplexity (Bao, Hataya and "
            "Karakida, ICML 2024; the exact penalty is our reading)",
            f"WikiText-2, small vocabulary, validation: of {number(found.mean(PERPLEXITY, 'none'))}, with tr W held "
            f"at 5 and 20, {listed(difference(row, 2) for row in none)}",
            verdict("lower", *none),
        ),
        Claim(
            "... more than weight decay on W_q and W_k, each at the best of four settings",
            f"{listed(difference(row, 2) for row in decay)} to a weight decay that fades",
            verdict("lower", *decay),
        ),
        Claim(
            "... more than the penalty that leaves the mean free",
            f"{listed(difference(row, 2) for row in free)} to it",
            verdict("lower", *free),
        ),
        Claim(
            "... and raises attention entropy",
            f"at the end of training by {listed(difference(row, 3) for row in entropy)} nats; the weight decay "
            f"alone by {told(of_decay, 3)}",
            verdict("higher", *entropy),
        ),
    ]


@PAGE.table
def chosen(raw: Raw) -> Table:
    return chosen_values(read(raw).choices, NAMES, 2)


@PAGE.table
def perplexity(raw: Raw) -> Table:
    return verdicts(read(raw), PERPLEXITY, NAMES, 2)


@PAGE.table
def entropy(raw: Raw) -> Table:
    return verdicts(read(raw), ENTROPY, NAMES, 3)


@PAGE.table
def variance(raw: Raw) -> Table:
    return verdicts(read(raw), VARIANCE, NAMES, 5)


@PAGE.table
def steps(raw: Raw) -> Table:
    return over_steps(read(raw), NAMES, validated())


@PAGE.table
def spectrum(raw: Raw) -> Table:
    at = {step: step for step in SPECTRUM}
    columns: Columns = {
        "tr W": (MEAN, at, lambda mean: number(mean * WIDTH)),
        "variance of the eigenvalues": (VARIANCE, at, partial(significant, digits=2)),
        "‖W‖_F²": (SCALE, at, number),
    }
    return over_steps(read(raw), NAMES, columns)


@PAGE.numbers
def prose(raw: Raw) -> dict[str, str]:
    found = read(raw)
    free, decay = (found.row(PERPLEXITY, config, "none") for config in (FREE, DECAY))
    held, to_decay, to_free = (to(found, other) for other in ("none", DECAY, FREE))
    entropies = {other: to(found, other, ENTROPY) for other in ("none", DECAY, FREE)}
    check_told(
        "entropy is higher than that of none, held at 5 and 20",
        all(row.verdict == "higher" for row in entropies["none"]),
        listed(told(row, 3) for row in entropies["none"]),
    )
    held_to_decay = found.values(PERPLEXITY, HELD[0]) - found.values(PERPLEXITY, DECAY)
    start = found.values(MEAN, "none", 0) * WIDTH
    further = Raw(raw.root, "docs/results/locater").comparison("", "locater/compare_small_vocabulary")
    return {
        "ran": found.ran_in(),
        "held-5": told(held[0], 2),
        "held-20": told(held[1], 2),
        "held-5-to-decay": told(to_decay[0], 2),
        "held-5-to-free": told(to_free[0], 2),
        "within-90": interval(*mean_interval(held_to_decay, 0.9), 2),  # equivalence needs it within the margin
        "free": difference(free, 2),
        "free-further": difference(further.row(PERPLEXITY, "locater 1e-3", "none"), 2),
        "between-further": told(further.row(PERPLEXITY, "locater 1e-3", "fading qk weight decay"), 2),
        "decay-further": difference(further.row(PERPLEXITY, "fading qk weight decay", "none"), 2),
        "decay": told(decay, 2),
        "free-to-decay": difference(found.row(PERPLEXITY, FREE, DECAY), 2),
        "leads": listed(number(lead, 2) for lead in leads(found)),
        "least": at_edge(found),
        "traces": listed(number(found.mean(MEAN, config, SPECTRUM[-1]) * WIDTH) for config in HELD),
        "trace-start": f"{number(min(start), 2)} and {number(max(start), 2)}",
        "trace-course": " to ".join(number(found.mean(MEAN, "none", step) * WIDTH) for step in (0, 300, 950)),
        "entropy-held": listed(told(row, 3) for row in entropies["none"]),
        "entropy-to-decay": listed(told(row, 3) for row in entropies[DECAY]),
        "entropy-to-free": listed(told(row, 3) for row in entropies[FREE]),
        "entropy-early": " and ".join(
            difference(found.at(LOGGED[step]).row(ENTROPY, HELD[1], "none"), 3) for step in (250, 500)
        ),
        "early": " and ".join(difference(found.at(LOGGED[250]).row(PERPLEXITY, config, "none"), 2) for config in HELD),
        "variance-to-decay": told(found.row(VARIANCE, HELD[0], DECAY), 4),
        "variance-to-free": told(found.row(VARIANCE, HELD[0], FREE), 4),
    }


def leads(found: Comparison) -> list[float]:
    """By how much the value that was chosen is ahead of the next one, for the targets and for weight decay."""
    scores = [sorted(each.score for each in choice.tried) for choice in found.choices]
    return [second - first for first, second, *_ in scores]


def at_edge(found: Comparison) -> str:
    """For which targets the smallest weight that was tried is the best one."""
    least = [choice.variant for choice in found.choices if choice.variant in HELD and choice.chosen == 0]
    if not least:
        raise PageError("no smallest weight is the best one, as the page says: write it anew")
    return listed(name.removeprefix("locater mean ") for name in least)


@PAGE.figure("curves.png")
def curves(raw: Raw) -> Figure:
    return curves_of(read(raw))
