"""LocAteR on WikiText-2: what the tables and numbers of its page are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from docs.pages.errors import check_told
from docs.pages.figures import Figure, curves_of
from docs.pages.numbers import difference, in_turn, least_to_most, listed, number, signed, significant, told
from docs.pages.page import Claim, Page
from docs.pages.raw import Comparison, Raw
from docs.pages.tables import Columns, Table, over_steps, p_value, verdicts
from docs.pages.verdicts import verdict
from lightning_tasks.compare.summary import SummaryRow

RECIPE, DECAYS = "locater/compare_small_vocabulary", "locater/compare_weight_decay"
PAGE = Page("locater", "LocAteR", summaries={"": RECIPE, "weight_decay": DECAYS})
WEAK, STRONG, FADING = "weak qk weight decay", "qk weight decay", "fading qk weight decay"
NAMES = {
    "none": "none",
    "locater 1e-3": "LocAteR 1e-3",
    "locater 1e-2": "LocAteR 1e-2",
    "locater 1e-1": "LocAteR 1e-1",
    STRONG: "weight decay 18.5 on W_q, W_k",
    WEAK: "weight decay 2.15 on W_q, W_k",
    FADING: "fading weight decay on W_q, W_k",
    "uniform attention": "uniform attention",
    "frozen qk": "frozen W_q, W_k",
}
PENALTIES = ("locater 1e-3", "locater 1e-2", "locater 1e-1")
PERPLEXITY, LOSS, ENTROPY = "val/perplexity", "val/loss", "val/attention/entropy/mean"
VARIANCE, SCALE = "qk_spectrum/variance/layer_00", "qk_spectrum/scale/layer_00"
MEAN, WIDTH = "qk_spectrum/mean/layer_00", 128  # of the eigenvalues, and how many they are
LARGEST, SIMILARITY = "val/attention/largest_probability/mean", "val/attention/token_similarity/mean"
IN_TRAINING = "attention/entropy/mean"
CONTROLS = (WEAK, STRONG, "frozen qk")
LOGGED = {250: 249, 500: 499, 750: 749, 1000: 999}  # validation is logged with the last step before


def read(raw: Raw) -> Comparison:
    return raw.comparison("", RECIPE)


@PAGE.claims
def claims(raw: Raw) -> list[Claim]:
    found = read(raw)
    weakest, *stronger = (found.row(PERPLEXITY, config, "none") for config in PENALTIES)
    entropies = [found.row(ENTROPY, config, "none") for config in PENALTIES]
    rises = least_to_most((row.difference for row in entropies), 2)
    none = number(found.mean(PERPLEXITY, "none"))
    controls = [found.row(PERPLEXITY, PENALTIES[0], each) for each in (WEAK, FADING)]
    fades = difference(found.row(PERPLEXITY, FADING, "none"), 2)
    raised = [number(found.row(ENTROPY, each, "none").difference, 2) for each in (*CONTROLS, FADING)]
    return [
        Claim(
            "LocAteR, a penalty on the QK eigenspectrum, at the weakest of three weights, which was named before, "
            "lowers perplexity (Bao, Hataya and Karakida, ICML 2024; the exact penalty is our reading, its mean left "
            "free)",
            f"WikiText-2, small vocabulary, validation: of {none} by "
            f"{difference(weakest, 2)} (the stronger two: {listed(signed(row.difference, 2) for row in stronger)}); a "
            f"weight decay on W_q and W_k that fades (added later): {fades}; the penalty compared with it: "
            f"{controls[1].verdict}",
            verdict("lower", weakest),
        ),
        Claim(
            "... at ten and a hundred times that weight",
            listed(difference(row, 2) for row in stronger),
            verdict("lower", *stronger),
        ),
        Claim(
            "... and by more than weight decay on W_q and W_k, at the weakest weight",
            f"{difference(controls[0], 2)} to one that ends near its scale, {difference(controls[1], 2)} to one that "
            "fades (added later)",
            verdict("lower", *controls),
        ),
        Claim(
            "... and raises attention entropy",
            f"by {rises} nats at the end of training; weight decays 2.15 and 18.5 on W_q and W_k by {raised[0]} and "
            f"{raised[1]}, a fading one by {raised[3]}, freezing them by {raised[2]}",
            verdict("higher", *entropies),
        ),
    ]


@PAGE.table
def perplexity(raw: Raw) -> Table:
    return verdicts(read(raw), PERPLEXITY, NAMES, 2)


@PAGE.table
def loss(raw: Raw) -> Table:
    return verdicts(read(raw), LOSS, NAMES, 4)


@PAGE.table
def entropy(raw: Raw) -> Table:
    return verdicts(read(raw), ENTROPY, NAMES, 3)


@PAGE.table
def variance(raw: Raw) -> Table:
    return verdicts(read(raw), VARIANCE, NAMES, 5)


@PAGE.table
def scale(raw: Raw) -> Table:
    return verdicts(read(raw), SCALE, NAMES, 3)


@PAGE.table
def steps(raw: Raw) -> Table:
    columns: Columns = {
        **validated(),
        "QK variance": (VARIANCE, {step: step for step in (50, 250, 500, 950)}, partial(significant, digits=2)),
    }
    return over_steps(read(raw), NAMES, columns)


def validated() -> Columns:
    """The columns of perplexity and entropy over the steps."""
    return {"perplexity": (PERPLEXITY, LOGGED, number), "entropy [nats]": (ENTROPY, LOGGED, partial(number, digits=2))}


def whole_vocabulary(raw: Raw, metric: str) -> dict[int, float]:
    """A metric of the single run at the paper's learning rate, by step."""
    rows = raw.rows("wikitext2/metrics.csv")
    return {int(row["step"]): float(row[metric]) for row in rows if row[metric]}


@PAGE.table
def paper_rate(raw: Raw) -> Table:
    shown = {
        "validation loss [nats]": ("val/loss", 3),
        "perplexity": (PERPLEXITY, 0),
        "attention entropy [nats]": (ENTROPY, 2),
    }
    columns = {name: (whole_vocabulary(raw, metric), digits) for name, (metric, digits) in shown.items()}
    logged = list(whole_vocabulary(raw, "val/loss"))
    rows = [[name, *(number(values[step], digits) for step in logged)] for name, (values, digits) in columns.items()]
    return Table(["step", *(str(step + 1) for step in logged)], rows)


@PAGE.table
def decays(raw: Raw) -> Table:
    found = raw.comparison("weight_decay", DECAYS)
    names = {config: NAMES.get(config, config.removeprefix("qk ")) for config in found.configs}
    rows = [
        [name, significant(found.mean(SCALE, config), 3), number(found.mean(PERPLEXITY, config))]
        for config, name in names.items()
    ]
    return Table(["configuration, seed 100", "final ‖W_qᵀ W_k‖_F²", "perplexity"], rows)


@PAGE.numbers
def prose(raw: Raw) -> dict[str, str]:
    found = read(raw)

    def row(metric: str, config: str, reference: str = "none") -> SummaryRow:
        return found.row(metric, config, reference)

    none, weakest = found.mean(PERPLEXITY, "none"), row(PERPLEXITY, "locater 1e-3")
    gains = [
        -found.values(PERPLEXITY, "locater 1e-3", step).mean() + found.mean(PERPLEXITY, "none", step)
        for step in LOGGED.values()
    ]
    stronger = row(PERPLEXITY, "locater 1e-2", STRONG)
    worth = [row(PERPLEXITY, config) for config in ("uniform attention", "frozen qk")]
    tried = raw.comparison("weight_decay", DECAYS)
    last = [math.log(tried.mean(SCALE, f"qk weight decay {decay}")) for decay in (8, 16)]
    line = 8 * 2 ** ((last[0] - math.log(tried.mean(SCALE, "locater 1e-2"))) / (last[0] - last[1]))
    earlier, every = raw.with_earlier(found)
    first = earlier.by_seed(SCALE, "locater 1e-3")
    target = sum(first[seed] for seed in range(4)) / 4
    # The mean of |λ − λ̄|² over the eigenvalues, and λ̄, which is real.
    spectra = found.values(VARIANCE, "none") + found.values(MEAN, "none") ** 2
    squares = WIDTH * float(spectra.mean())
    uniform = float(raw.rows("wikitext2/uniform_metrics.csv")[0]["val/loss"])
    whole = whole_vocabulary(raw, "val/loss")
    spectrum = whole_vocabulary(raw, SCALE)
    return {
        "weakest": difference(weakest, 2),
        "weakest-of": number(none),
        "weakest-share": f"{number(-100 * weakest.difference / none)}%",
        "weakest-verdict": weakest.verdict,
        "weakest-p": p_value(weakest.corrected),
        "earlier": difference(earlier.row(PERPLEXITY, "locater 1e-3", "none"), 2),
        "every": f"{difference(every.row(PERPLEXITY, 'locater 1e-3', 'none'), 2)}, below 0 in "
        + every.below(PERPLEXITY, "locater 1e-3", "none"),
        "every-weak": difference(every.row(PERPLEXITY, WEAK, "none"), 2),
        "gains": ", ".join(number(each) for each in gains),
        "weak-scales": scales(found, WEAK, "locater 1e-3", 1),
        "weak": difference(row(PERPLEXITY, WEAK), 2),
        "weak-verdict": row(PERPLEXITY, WEAK).verdict,
        "better-than-weak": difference(row(PERPLEXITY, "locater 1e-3", WEAK), 2),
        "better-than-weak-verdict": row(PERPLEXITY, "locater 1e-3", WEAK).verdict,
        "ran": found.ran_in(),
        "strong-scales": scales(found, "locater 1e-2", STRONG, 2),
        "better-than-strong": told(stronger, 2),
        **of_means(raw),
        "scales-at-50": scales(found, "locater 1e-3", WEAK, 0, 50),
        "entropy-weak": " and ".join(number(row(ENTROPY, each).difference, 3) for each in (WEAK, "locater 1e-3")),
        "variances": " and ".join(number(found.mean(VARIANCE, each), 3) for each in (WEAK, "locater 1e-3")),
        "variances-strong": " and ".join(
            significant(found.mean(VARIANCE, each), 2) for each in ("locater 1e-2", "locater 1e-1")
        ),
        "variance-none": number(found.mean(VARIANCE, "none"), 3),
        "entropy-lowest": number(float(found.values(IN_TRAINING, "none", 50).min()), 2),
        "bounded": f"{number(found.mean(SCALE, 'none'))}, where Σ|λ|² is {number(squares)}",
        "strong-variances": " against ".join(
            number(found.mean(VARIANCE, config), 4) for config in ("locater 1e-2", STRONG)
        ),
        "weak-early": in_turn(
            difference(found.at(LOGGED[step]).row(PERPLEXITY, WEAK, "none"), 2) for step in (250, 500)
        ),
        "variances-at-50": " and ".join(number(found.mean(VARIANCE, config, 50), 3) for config in (WEAK, PENALTIES[0])),
        "uniform": difference(worth[0], 1),
        "uniform-losses": " against ".join(number(found.mean(LOSS, each), 3) for each in ("uniform attention", "none")),
        "frozen": difference(worth[1], 1),
        **{name: part_of(each, weakest, earlier) for name, each in zip(("part", "part-frozen"), worth, strict=True)},
        "decay-line": number(line),
        "decay-above": " and ".join(
            f"{number(100 * (found.mean(SCALE, config) / aim - 1), 0)}%"
            for config, aim in (
                (STRONG, tried.mean(SCALE, "locater 1e-2")),
                (WEAK, target),
            )
        ),
        "decay-target": number(target, 1),
        "decay-ran": tried.ran_in(),
        "decay-1": number(tried.mean(PERPLEXITY, "qk weight decay 1")),
        "decay-none": number(tried.mean(PERPLEXITY, "none")),
        "decay-penalty": number(tried.mean(PERPLEXITY, PENALTIES[0])),
        "paper-uniform": number(uniform, 3),
        "paper-worth": number(uniform - whole[max(whole)], 3),
        "paper-scale": f"{number(spectrum[0])} to {number(spectrum[1000])}",
    }


@PAGE.numbers
def of_fading(raw: Raw) -> dict[str, str]:
    """The weight decay that fades, on these seeds."""
    found = read(raw)
    to_none, penalty = (found.row(PERPLEXITY, *pair) for pair in ((FADING, "none"), (PENALTIES[0], FADING)))
    check_told(
        "the decay that fades lowers perplexity, as the penalty does",
        (to_none.verdict, penalty.verdict) == ("lower", "equivalent"),
        in_turn(told(row, 2) for row in (to_none, penalty)),
    )
    early = found.at(LOGGED[250])
    entropy = [found.row(ENTROPY, *pair) for pair in ((FADING, "none"), (PENALTIES[0], FADING))]
    return {
        "fades": told(to_none, 2),
        "fades-penalty": difference(penalty, 2),
        "fades-p": f"corrected p {p_value(penalty.within_corrected)}; corrected p of the difference "
        f"{p_value(penalty.corrected)}",
        "fades-family": str(penalty.family),
        "fades-below": found.below(PERPLEXITY, PENALTIES[0], FADING),
        "fades-scales": scales(found, FADING, PENALTIES[0], 1),
        "fades-scales-at-50": scales(found, FADING, PENALTIES[0], 0, 50),
        "fades-variances": " against ".join(number(found.mean(VARIANCE, each), 3) for each in (FADING, PENALTIES[0])),
        "fades-variances-at-50": " against ".join(
            significant(found.mean(VARIANCE, each, 50), 2) for each in (FADING, PENALTIES[0])
        ),
        "fades-entropy": difference(entropy[0], 3),
        "fades-entropy-penalty": told(entropy[1], 3),
        "fades-early": difference(early.row(PERPLEXITY, FADING, "none"), 1),
        "fades-early-penalty": difference(early.row(PERPLEXITY, PENALTIES[0], FADING), 2),
    }


@PAGE.numbers
def on_the_way(raw: Raw) -> dict[str, str]:
    """Entropy in training, and what was looked at after the runs."""
    found = read(raw)
    early = found.at(LOGGED[250])
    raised = [found.row(PERPLEXITY, config, "none") for config in (*PENALTIES[1:], STRONG)]
    check_told(
        "the two stronger penalties and the strong weight decay raise perplexity",
        all(row.verdict == "higher" for row in raised),
        in_turn(told(row, 2) for row in raised),
    )
    at_each = [
        [found.at(step).row(ENTROPY, config, "none").difference for config in (*PENALTIES, *CONTROLS, FADING)]
        for step in LOGGED.values()
    ]
    check_told(
        "entropy is higher at all validations, the more the stronger the penalty, and in the controls too",
        all(0 < each[0] < each[1] < each[2] and min(each) > 0 for each in at_each),
        at_each,
    )

    def means(metric: str, digits: int, configs: Sequence[str], step: int | None = None) -> str:
        return in_turn(number(found.mean(metric, config, step), digits) for config in configs)

    return {
        "entropy-first": in_turn(number(found.mean(IN_TRAINING, "none", step), 2) for step in (0, 50, 950)),
        "entropy-early": means(IN_TRAINING, 2, PENALTIES, 50),
        "entropy-early-controls": means(IN_TRAINING, 2, CONTROLS, 50),
        "largest": means(LARGEST, 3, ("none", *PENALTIES)),
        "largest-controls": means(LARGEST, 3, CONTROLS),
        "similarity": " and ".join(number(found.mean(SIMILARITY, "none", step), 3) for step in (LOGGED[250], None)),
        "similarity-penalties": in_turn(difference(found.row(SIMILARITY, config, "none"), 4) for config in PENALTIES),
        "similarity-controls": in_turn(difference(found.row(SIMILARITY, config, "none"), 4) for config in CONTROLS),
        "early-penalties": in_turn(difference(early.row(PERPLEXITY, config, "none"), 1) for config in PENALTIES),
        "early-decays": in_turn(difference(early.row(PERPLEXITY, config, "none"), 1) for config in (WEAK, STRONG)),
    }


def part_of(worth: SummaryRow, gain: SummaryRow, earlier: Comparison) -> str:
    """Which part of a difference a gain is, with what its interval and the earlier seeds say."""
    before = [earlier.row(PERPLEXITY, config, "none").difference for config in (worth.config, gain.config)]
    ends = " to ".join(number(-worth.difference / each, 0) for each in (gain.low, gain.high))
    return f"{number(-worth.difference / gain.difference, 0)} ({ends}; {number(-before[0] / before[1], 0)})"


def of_means(raw: Raw) -> dict[str, str]:
    """What a weight decay that fades, and the weakest penalty, have on the seeds of the other page."""
    other = Raw(raw.root, "docs/results/locater_mean").comparison("", "locater/compare_mean")
    pairs = {"": ("qk weight decay", "none"), "-penalty": ("locater free", "none")}
    pairs["-between"] = ("locater free", "qk weight decay")
    return {f"fading{name}": difference(other.row(PERPLEXITY, *pair), 2) for name, pair in pairs.items()}


def scales(found: Comparison, one: str, other: str, digits: int, step: int | None = None) -> str:
    """The scales of two configurations, the final ones or those of a step, to so many digits."""
    return " against ".join(number(found.mean(SCALE, config, step), digits) for config in (one, other))


@PAGE.figure("curves.png")
def curves(raw: Raw) -> Figure:
    return curves_of(read(raw))
