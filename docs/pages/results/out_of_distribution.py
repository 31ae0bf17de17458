"""Images from outside of CIFAR-10's classes: what the tables of the page are, where the raw files are there.

They are the tables (`robustness.csv`) of a test of the last checkpoint of each cell of `rpc/compare_sparse_part`, in
docs/results/out_of_distribution/VARIANT/seed_N.csv, VARIANT as the folder of the cell is called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from docs.pages.cell_tests import compare_tests, primary_table
from docs.pages.errors import PageError, check_told
from docs.pages.numbers import difference, in_turn, least_to_most, listed, mean_std, number, signed
from docs.pages.page import Claim, Page
from docs.pages.raw import Comparison, Raw
from docs.pages.tables import Table, nothing_yet, p_value
from docs.pages.verdicts import verdict
from lightning_tasks.compare.summary import SummaryRow
from lightning_tasks.intervals import mean_interval

RECIPE = "rpc/compare_sparse_part"
OUTSIDE = {"digits": "digits", "camvid": "CamVid", "imagenet": "ImageNet"}
SCORES = {"msp": "MSP", "energy": "energy", "vim": "ViM", "knn": "KNN"}
FIGURES = {"auroc": "AUROC", "aupr": "AUPR", "fpr95": "FPR95"}
FILLED = ("rpc lam 1", "rpc lam 0.75")
OF_SCORES = {
    "energy-digits": ("digits/energy", FILLED),
    "filled-knn": ("camvid/knn", FILLED),
    "without-energy": ("digits/energy", ("rpc without S",)),
    "without-knn": ("digits/knn", ("rpc without S",)),
}
CHANCE_DIGITS = 100 * 360 / (360 + 2000)  # of AUPR: images of digits among these and the test images of CIFAR-10
PRIMARY = "imagenet/msp/aupr"  # the claim of Teo and Nguyen is of ImageNet-O, by MSP, in AUPR

PAGE = Page("out_of_distribution", "Out of distribution")
METRICS = [PRIMARY, *(f"{place}/{score}/{figure}" for figure in FIGURES for place in OUTSIDE for score in SCORES)]
METRICS = list(dict.fromkeys(METRICS))


def read(raw: Raw) -> Comparison | None:
    """What the cells' tables say of images from outside; None before there are any."""
    return raw.once("cells", lambda: compare_tests(raw.folder, RECIPE, "out of distribution", PRIMARY, METRICS))


@PAGE.claims
def claims(raw: Raw) -> list[Claim]:
    found = read(raw)
    filled = [] if found is None else [name for name in FILLED if name in found.configs]
    rows = [] if found is None else [found.row(PRIMARY, name, found.configs[0]) for name in filled]
    if not all(row.pairs for row in rows) or not rows:
        return []
    return [
        Claim(
            "RPC-Attention detects out-of-distribution images better than softmax attention (Teo and Nguyen, NeurIPS "
            "2024)",
            "CIFAR-10 against a sample of ImageNet-1k, by maximum softmax probability: AUPR "
            f"{listed(difference(row, 1, 100) for row in rows)} points to softmax, with S filled",
            verdict("higher", *rows),
        )
    ]


@PAGE.table
def primary(raw: Raw) -> Table:
    return primary_table(read(raw), PRIMARY)


@PAGE.numbers
def prose(raw: Raw) -> dict[str, str] | None:
    found = read(raw)
    if found is None:
        return None
    first = found.configs[0]
    counts = Counter(row.verdict for row in found.summary if row.metric == PRIMARY and row.pairs)
    msp = (number(found.mean(f"{place}/msp/auroc", first) * 100) for place in OUTSIDE)
    fitted = {
        score: [found.mean(f"digits/{score}/auroc", config) * 100 for config in found.configs]
        for score in ("knn", "vim")
    }
    if (best := max(map(max, fitted.values()))) >= 50:
        raise PageError(f"the page says that KNN and ViM are worse than chance on digits, and one has {best}")
    if (best := max(max(found.values("digits/knn/auroc", config)) for config in found.configs)) >= 0.5:
        raise PageError(f"the page says that KNN is worse than chance on digits in every model, and one has {best}")
    below = [mean_interval([*found.values("digits/vim/auroc", config)])[1] < 0.5 for config in found.configs]
    others = [row for row in found.summary if row.metric != PRIMARY and row.pairs]
    excluding = [row for row in others if row.excludes_zero]
    primary_rows = [row for row in found.summary if row.metric == PRIMARY and row.pairs]
    with_s = [config for config in FILLED if config in found.configs]
    fewer = replace(found, endpoints=replace(found.endpoints, comparisons=len(primary_rows)))
    unlike = [
        (row.verdict, other.verdict)
        for row, other in zip(found.summary, fewer.summary, strict=True)
        if row.metric == PRIMARY and row.verdict != other.verdict
    ]
    check_told("with the smaller count no verdict would differ", not unlike, unlike)
    return {
        "seeds": str(min(len(found.values(PRIMARY, config)) for config in found.configs)),
        "verdicts": "; ".join(f"{verdict} {count} of {counts.total()}" for verdict, count in counts.items()),
        "msp": listed(msp),
        **{name: least_to_most(each, 0) for name, each in fitted.items()},
        "upper": signed(100 * max(row.high for row in primary_rows)),
        "others": f"{len(excluding)} of {len(others)}",
        "others-chance": f"about {number(0.05 * len(others), 0)}",
        "others-rpc": better_and_worse(excluding, FILLED, first),
        "others-symmetric": better_and_worse(excluding, ("symmetric",), first),
        "others-twin": better_and_worse(excluding, FILLED, "rpc without S"),
        "others-rest": others_told(excluding, first),
        "filled-figures": filled_figures(excluding, first),
        "knn-symmetric": of_fpr95(found, "symmetric", first),
        "knn-twin": of_fpr95(found, FILLED[0], "rpc without S"),
        "symmetric-which": "; ".join(
            f"{named(row.metric)}, {difference(row, 1, 100)}" for row in excluding if row.config == "symmetric"
        ),
        "energy-fpr95": number(100 * found.mean("digits/energy/fpr95", first))
        + "".join(f", {config} {number(100 * found.mean('digits/energy/fpr95', config))}" for config in with_s),
        "energy-softmax": " and ".join(means_of(found, [first])),
        "energy-filled": "; ".join(means_of(found, FILLED)),
        "digits-chance": number(CHANCE_DIGITS),
        "smallest-p": p_value(min(row.corrected for row in primary_rows)),
        "made": str(len(primary_rows)),
        "planned": str(found.endpoints.comparisons),
        "others-without": better_and_worse(excluding, ("rpc without S",), first),
        **of_scores([row for row in excluding if row.reference == first]),
        "vim-below": f"{sum(below)} of {len(below)}",
    }


def named(metric: str) -> str:
    """What the page calls a metric."""
    place, score, figure = metric.split("/")
    return f"{FIGURES[figure]} of {SCORES[score]} on {OUTSIDE[place]}"


def others_told(rows: Sequence[SummaryRow], first: str) -> str:
    """All differences that are none to the first configuration, one by one.

    Raises:
        PageError: those to it are not all counted on the page.
    """
    counted = [row for row in rows if row.reference == first and row.config in ("symmetric", *FILLED, "rpc without S")]
    rest = [row for row in rows if row.reference != first]
    if len(counted) + len(rest) != len(rows):
        raise PageError(f"the page counts {len(counted) + len(rest)} differences, and there are {len(rows)}")
    return "; ".join(
        f"{named(row.metric)}, {row.config} to {row.reference}, {difference(row, 1, 100)} "
        f"(for the {'better' if (row.difference > 0) != row.metric.endswith('fpr95') else 'worse'})"
        for row in rest
    )


def filled_figures(rows: Sequence[SummaryRow], first: str) -> str:
    """Of which configuration and figures the gains of KNN on CamVid are."""
    found = [row for row in rows if row.reference == first and row.metric.startswith("camvid/knn/")]
    return in_turn(
        f"{FIGURES[row.metric.rpartition('/')[2]]} ({row.config}, {difference(row, 1, 100)})"
        for row in found
        if row.config in FILLED
    )


def of_fpr95(found: Comparison, config: str, reference: str) -> str:
    """The difference in FPR95 of KNN on CamVid, in points; "" of what was not tested."""
    if not {config, reference} <= {*found.configs}:
        return ""
    row = found.row("camvid/knn/fpr95", config, reference)
    check_told("the FPR95 of KNN on CamVid is lower", row.high < 0, difference(row, 1, 100))
    return difference(row, 1, 100)


def means_of(found: Comparison, configs: Sequence[str]) -> list[str]:
    """AUROC and AUPR of the energy score on digits, in percent."""
    return [
        " and ".join(number(100 * found.mean(f"digits/energy/{figure}", config)) for figure in ("auroc", "aupr"))
        for config in configs
        if config in found.configs
    ]


def of_scores(rows: Sequence[SummaryRow]) -> dict[str, str]:
    """How many of the differences to softmax are of a score in a place, which is for the better.

    Raises:
        PageError: a difference of RPC is of another one, which the page does not tell.
    """
    found = {
        name: [row for row in rows if row.metric.startswith(score) and row.config in configs]
        for name, (score, configs) in OF_SCORES.items()
    }
    told = [row for each in found.values() for row in each]
    if strange := [row for row in rows if row.config.startswith("rpc") and row not in told]:
        raise PageError(f"the page tells all differences of RPC to softmax but {strange[0].metric}: write it anew")
    return {name: str(len(each)) for name, each in found.items()}


def better_and_worse(rows: Sequence[SummaryRow], configs: Sequence[str], reference: str) -> str:
    """How many of the differences of these configurations to a reference are for the better, and for the worse."""
    found = [row for row in rows if row.config in configs and row.reference == reference]
    better = sum((row.difference > 0) != row.metric.endswith("fpr95") for row in found)
    return f"{better} for the better and {len(found) - better} for the worse"


def figures(figure: str, raw: Raw) -> Table:
    """The means over seeds: a row for each variant and place outside, a column for each score."""
    found = read(raw)
    heads = ["configuration", "outside", *SCORES.values()]
    if found is None:
        return nothing_yet(*heads)
    rows = [
        [
            config if place == next(iter(OUTSIDE)) else "",
            called,
            *(mean_std(found.values(f"{place}/{score}/{figure}", config), 1, 100.0) for score in SCORES),
        ]
        for config in found.configs
        for place, called in OUTSIDE.items()
    ]
    return Table(heads, rows)


for name in FIGURES:
    PAGE.tables[name] = partial(figures, name)
