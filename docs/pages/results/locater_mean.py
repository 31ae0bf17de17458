"""LocAteR with the mean of the spectrum held: what the tables and numbers of its page are."""

from __future__ import annotations

from docs.pages.figures import Figure, curves_of
from docs.pages.numbers import difference, listed, number, significant
from docs.pages.page import Claim, Page
from docs.pages.raw import Comparison, Raw
from docs.pages.tables import Table, chosen_values, verdicts
from docs.pages.verdicts import verdict
from lightning_tasks.compare.summary import SummaryRow

RECIPE = "locater/compare_mean"
PAGE = Page("locater_mean", "LocAteR, its mean held", summaries={"": RECIPE})
HELD = ["locater mean 5", "locater mean 20"]
DECAY, FREE = "qk weight decay", "locater free"
NAMES = {
    "none": "none",
    FREE: "LocAteR, mean free",
    "locater mean 5": "LocAteR, tr W held at 5",
    "locater mean 20": "LocAteR, tr W held at 20",
    DECAY: "weight decay on W_q, W_k",
}
PERPLEXITY, ENTROPY = "val/perplexity", "val/attention/entropy/mean"
MEAN, VARIANCE, SCALE = (f"qk_spectrum/{what}/layer_00" for what in ("mean", "variance", "scale"))
WIDTH = 128  # the mean of the eigenvalues is tr W over it


def read(raw: Raw) -> Comparison:
    return raw.comparison("", RECIPE)


def to(found: Comparison, reference: str, metric: str = PERPLEXITY) -> list[SummaryRow]:
    """The differences of the penalty with its mean held, at both targets."""
    return [found.row(metric, config, reference) for config in HELD]


@PAGE.claims
def claims(raw: Raw) -> list[Claim]:
    found = read(raw)
    none, decay, free, entropy = to(found, "none"), to(found, DECAY), to(found, FREE), to(found, "none", ENTROPY)
    return [
        Claim(
            "LocAteR, a penalty on the QK eigenspectrum that holds its mean, lowers perplexity (Bao, Hataya and "
            "Karakida, ICML 2024; the exact penalty is our reading)",
            f"WikiText-2, small vocabulary, validation: of {number(found.mean(PERPLEXITY, 'none'))}, with tr W held "
            f"at 5 and 20, {listed(difference(row, 2) for row in none)}",
            verdict("lower", *none),
        ),
        Claim(
            "... more than weight decay on W_q and W_k that was tuned as much",
            f"{listed(difference(row, 2) for row in decay)} to it",
            verdict("lower", *decay),
        ),
        Claim(
            "... more than the penalty that leaves the mean free",
            f"{listed(difference(row, 2) for row in free)} to it",
            verdict("lower", *free),
        ),
        Claim(
            "... and raises attention entropy",
            f"by {listed(number(row.difference, 2) for row in entropy)} nats; weight decay raises it too",
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
def spectrum(raw: Raw) -> Table:
    found = read(raw)
    rows = [
        [
            name,
            number(found.mean(MEAN, config) * WIDTH, 2),
            significant(found.mean(VARIANCE, config), 2),
            number(found.mean(SCALE, config), 2),
            number(found.mean(ENTROPY, config), 2),
        ]
        for config, name in NAMES.items()
    ]
    return Table(["configuration", "tr W", "variance of the eigenvalues", "‖W‖_F²", "attention entropy, nats"], rows)


@PAGE.numbers
def prose(raw: Raw) -> dict[str, str]:
    found = read(raw)
    free, decay = (found.row(PERPLEXITY, config, "none") for config in (FREE, DECAY))
    held, to_decay, to_free = (to(found, other) for other in ("none", DECAY, FREE))
    start = found.values(MEAN, "none", 0) * WIDTH
    traces = [found.mean(MEAN, config) * WIDTH for config in HELD]
    return {
        "seeds": str(min(row.pairs for row in held)),
        "held-5": f"{difference(held[0], 2)} ({held[0].verdict})",
        "held-20": f"{difference(held[1], 2)} ({held[1].verdict})",
        "held-5-to-decay": f"{difference(to_decay[0], 2)} ({to_decay[0].verdict})",
        "held-5-to-free": f"{difference(to_free[0], 2)} ({to_free[0].verdict})",
        "free-to-decay": difference(found.row(PERPLEXITY, FREE, DECAY), 2),
        "least": at_edge(found),
        "free": difference(free, 2),
        "free-verdict": free.verdict,
        "decay": difference(decay, 2),
        "decay-verdict": decay.verdict,
        "traces": listed(number(each, 2) for each in traces),
        "trace-start": f"{number(min(start), 2)} and {number(max(start), 2)}",
        "trace-none": number(found.mean(MEAN, "none") * WIDTH, 2),
        "trace-free": number(found.mean(MEAN, FREE) * WIDTH, 2),
        "entropies": ", ".join(number(found.mean(ENTROPY, config), 2) for config in ("none", FREE, *HELD, DECAY)),
        "scales": ", ".join(number(found.mean(SCALE, config), 1) for config in (FREE, *HELD, DECAY)),
        "variances": ", ".join(significant(found.mean(VARIANCE, config), 2) for config in (FREE, *HELD, DECAY)),
    }


def at_edge(found: Comparison) -> str:
    """For which targets the smallest weight that was tried is the best one."""
    held = [choice for choice in found.choices if choice.variant in HELD]
    return listed(choice.variant.removeprefix("locater mean ") for choice in held if choice.chosen == 0)


@PAGE.figure("curves.png")
def curves(raw: Raw) -> Figure:
    return curves_of(read(raw))
