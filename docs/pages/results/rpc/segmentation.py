"""RPC-Attention in a small Segmenter on CamVid: what the tables and numbers of its page are.

What attacks leave is in the tables (`robustness.csv`) of a test of the last checkpoint of each cell, in
docs/results/rpc_segmentation/attacked/VARIANT/seed_N.csv, VARIANT as the folder of the cell is called.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from docs.pages.cell_tests import check_checkpoints, compare_tests, primary_table, tested
from docs.pages.errors import PageError, check_told
from docs.pages.figures import Figure, curves_of, masks_of
from docs.pages.numbers import difference, interval, least_to_most, mean_std, number, signed, significant, told
from docs.pages.page import Claim, Page
from docs.pages.raw import RESULTS, Comparison, Raw
from docs.pages.results.rpc.shared import NAMES, PAIRS, by_pass, points, pursuit
from docs.pages.tables import Table, differences, means, p_value, step_costs
from docs.pages.verdicts import verdict
from lightning_tasks.intervals import mean_interval

RECIPE = "camvid/compare_segmenter"
PAGE = Page("rpc_segmentation", "CamVid", summaries={"": RECIPE})
MIOU, MEAN = "test/miou", "robustness/mean_corruption/mIoU"
CORRUPTIONS = {"noise": "gaussian_noise", "fog": "fog", "motion blur": "motion_blur"}
CORRUPTED = {
    f"{name} {severity}": f"robustness/{corruption}/{severity}/mIoU"
    for name, corruption in CORRUPTIONS.items()
    for severity in (2, 4)
}
CLEAN, FGSM, PGD = "//mIoU", "fgsm/1/255/mIoU", "pgd/1/255/mIoU"  # rows of the attacked tests
ATTACKED = {"FGSM 1/255": FGSM, "PGD 1/255": PGD}
TAKEN = "taken by the six"
CLASSES = ("sky", "road", "building", "car", "tree", "pavement")


def read(raw: Raw) -> Comparison:
    """The comparison, with what corruptions take from the clean mIoU."""

    def with_taken() -> Comparison:
        found = raw.comparison("", RECIPE)
        for name, corruption in CORRUPTIONS.items():
            both = [f"robustness/{corruption}/{severity}/mIoU" for severity in (2, 4)]
            found = found.with_metric(
                f"taken by {name}", lambda clean, two, four: clean - (two + four) / 2, MIOU, *both
            )
        return found.with_loss(TAKEN, MIOU, MEAN)

    return raw.once("with what is taken", with_taken)


@dataclass(frozen=True)
class First:
    """The clean mIoU of the test images that are attacked, by what a cell kept of its test."""

    config: str
    seed: int
    miou: float


@dataclass(frozen=True)
class OfClass:
    """What a cell finds of a class in all test images."""

    config: str
    seed: int
    name: str
    pixels: int
    iou: float
    accuracy: float


def read_attacked(raw: Raw) -> Comparison:
    """What attacks leave, with what they take.

    Raises:
        PageError: there are no such tests, or they are of other checkpoints than first_images.csv.
    """

    def attacked_tests() -> Comparison:
        folder, found = raw.folder / "attacked", read(raw)
        first = [
            {"config": each.config, "seed": each.seed, "step": 0, "metric": CLEAN, "value": each.miou}
            for each in raw.records("first_images.csv", First, grid=("config", "seed"))
        ]
        attacked = compare_tests(folder, RECIPE, "attack", PGD)
        if attacked is None:
            raise PageError(f"{folder} has no tables")
        cells = tested(folder, RECIPE, "clean")
        check_checkpoints(cells, CLEAN, replace(found, rows=first), CLEAN, "first_images.csv")
        attacked = replace(attacked, rows=[*attacked.rows, *first])
        for name, metric in ATTACKED.items():
            attacked = attacked.with_loss(f"taken by {name}", CLEAN, metric)
        return attacked

    return raw.once("attacked", attacked_tests)


@PAGE.claims
def claims(raw: Raw) -> list[Claim]:
    found = read(raw)
    clean, symmetric = (found.row(MIOU, "rpc", reference) for reference in ("softmax", "symmetric"))
    corrupted = found.row(MEAN, "rpc", "softmax")
    attacked = [read_attacked(raw).row(metric, "rpc", "softmax") for metric in ATTACKED.values()]
    values = " against ".join(f"{number(found.mean(MIOU, config) * 100)}%" for config in ("rpc", "softmax"))
    return [
        Claim(
            "RPC-Attention segments better than softmax attention (Teo and Nguyen, NeurIPS 2024, on ADE20K)",
            f"CamVid: test mIoU {values}, {difference(clean, 1, 100)} points",
            verdict("higher", clean),
        ),
        Claim(
            "... and than symmetric attention", f"{difference(symmetric, 1, 100)} points", verdict("higher", symmetric)
        ),
        Claim(
            "... and on corrupted images",
            f"mean of three corruptions at two severities: {difference(corrupted, 1, 100)} points to softmax",
            verdict("higher", corrupted),
        ),
        Claim(
            "... and under attack (our question)",
            f"FGSM and PGD at 1/255: {points(attacked)} points to softmax",
            verdict("higher", *attacked),
        ),
    ]


@PAGE.table
def primary(raw: Raw) -> Table:
    return primary_table(read(raw), MIOU)


@PAGE.table
def masks(raw: Raw) -> Table:
    return means(
        read(raw),
        NAMES,
        {
            "mIoU": (MIOU, 1, 100, True),
            "mean accuracy": ("test/mean_accuracy", 1, 100, True),
            "overall accuracy": ("test/overall_accuracy", 1, 100, True),
            "loss": ("test/loss", 3, 1, True),
            "mIoU, validation": ("val/miou", 1, 100, True),
        },
    )


@PAGE.table
def attacked(raw: Raw) -> Table:
    columns = {name: (metric, 1, 100.0, True) for name, metric in {"clean": CLEAN, **ATTACKED}.items()}
    return means(read_attacked(raw), NAMES, columns)


@PAGE.table
def attacked_paired(raw: Raw) -> Table:
    rows = {**ATTACKED, "clean": CLEAN, **{f"taken by {name}": f"taken by {name}" for name in ATTACKED}}
    return differences(read_attacked(raw), "points", PAIRS, {name: (metric, 1, 100.0) for name, metric in rows.items()})


@PAGE.table
def corrupted(raw: Raw) -> Table:
    columns = {name: (metric, 1, 100.0, True) for name, metric in CORRUPTED.items()}
    return means(read(raw), NAMES, {"clean": (MIOU, 1, 100, False), **columns, "mean of the six": (MEAN, 1, 100, True)})


@PAGE.table
def paired(raw: Raw) -> Table:
    rows = {"mIoU": MIOU, "mean accuracy": "test/mean_accuracy", "overall accuracy": "test/overall_accuracy"}
    rows |= {"mIoU, validation": "val/miou", **CORRUPTED, "mean of the six": MEAN}
    metrics = {name: (metric, 1, 100.0) for name, metric in rows.items()} | {"loss, nats": ("test/loss", 3, 1.0)}
    return differences(read(raw), "points", PAIRS, metrics)


@PAGE.table
def taken(raw: Raw) -> Table:
    rows = [*(f"taken by {name}" for name in CORRUPTIONS), TAKEN]
    return differences(read(raw), "points", PAIRS, {name: (name, 1, 100.0) for name in rows})


def of_classes(raw: Raw) -> list[OfClass]:
    """What each cell finds of each class.

    Raises:
        PageError: it is of other cells than the comparison.
    """

    def checked() -> list[OfClass]:
        rows = raw.records("classes.csv", OfClass, grid=("config", "seed", "name"))
        for config in NAMES:
            for seed, miou in read(raw).by_seed(MIOU, config).items():
                found = [each.iou for each in rows if (each.config, each.seed) == (config, seed)]
                if not found or not math.isclose(fmean(found), miou, abs_tol=1e-5):
                    raise PageError(f"classes.csv and {RESULTS} are of other cells: {config} seed {seed}")
        return rows

    return raw.once("classes", checked)


def iou(raw: Raw) -> dict[tuple[str, str], np.ndarray]:
    """IoU in percent by configuration and class, ``[seeds]``."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in of_classes(raw):
        found.setdefault((row.config, row.name), []).append(100 * row.iou)
    return {place: np.array(values) for place, values in found.items()}


def others(raw: Raw) -> list[str]:
    """The classes that no model finds, and that no column has."""
    return [name for config, name in iou(raw) if config == "softmax" and name not in CLASSES]


@PAGE.table
def classes(raw: Raw) -> Table:
    found, rest = iou(raw), others(raw)
    rows = [
        [
            name,
            *(mean_std(found[config, each]) for each in CLASSES),
            number(max(found[config, each].max() for each in rest)),
        ]
        for config, name in NAMES.items()
    ]
    return Table(["configuration", *CLASSES, "most of the other five, of any seed"], rows)


@PAGE.table
def passes(raw: Raw) -> Table:
    return pursuit(read(raw), 6)


@PAGE.table
def cost(raw: Raw) -> Table:
    return step_costs(raw.step_costs(RECIPE), NAMES)


def equal_tokens(found: Comparison, each: int) -> str:
    """To how many equal tokens the entropy of a pass of RPC belongs, of the seed with fewest and that with most."""
    return least_to_most(map(math.exp, found.values(f"val/pursuit/entropy/layer_00/pass_{each}", "rpc")), 0)


@PAGE.numbers
def prose(raw: Raw) -> dict[str, str]:
    found = read(raw)
    clean, found_iou = {name: found.row(MIOU, *pair) for name, pair in PAIRS.items()}, iou(raw)
    shares = found.values("val/pursuit/sparsity/layer_00/pass_6", "rpc")
    residuals = {
        name: found.values("val/pursuit/residual/layer_00/pass_6", config)
        for name, config in {"residual": "rpc", "residual-twin": "rpc without S"}.items()
    }
    images = found.over_images(MIOU, "rpc", "softmax")
    if clean["RPC − softmax"].high >= 0 or images.high >= 0 or clean["RPC − softmax"].corrected < 0.05:
        raise PageError("the page says that both intervals of RPC to softmax lie below 0, uncorrected: write it anew")
    if any(found_iou[config, each].max() > 0 for config in NAMES for each in others(raw)):
        raise PageError("the page says that no model finds a pixel of five classes, and one does: write it anew")
    pixels = {row.name: row.pixels for row in of_classes(raw)}
    share_name = "pursuit/sparsity/layer_00/pass_6"
    emptiest_seed = found.seeds[int(shares.argmin())]
    emptiest = max(
        row["value"]
        for row in found.rows
        if (row["config"], row["seed"]) == ("rpc", emptiest_seed) and str(row["metric"]).endswith(share_name)
    )
    twin = found.values(MIOU, "rpc") - found.values(MIOU, "rpc without S")
    at_first = found.values("val/pursuit/sparsity/layer_00/pass_1", "rpc")
    check_told("S is empty in the first pass", not at_first.any(), at_first.tolist())
    spreads = {config: {each: found_iou[config, each].std() for each in CLASSES} for config in NAMES}
    check_told(
        "trees have the largest spread in every configuration",
        all(max(each, key=lambda name: each[name]) == "tree" for each in spreads.values()),
        spreads,
    )
    return {
        "seen": str(sum(all(found_iou[config, each].mean() > 20 for config in NAMES) for each in CLASSES)),
        "rpc": difference(clean["RPC − softmax"], 2, 100),
        "rpc-verdict": clean["RPC − softmax"].verdict,
        "rpc-images": interval(images.low, images.high, 1, 100),
        "rpc-symmetric-verdict": clean["RPC − symmetric"].verdict,
        "symmetric-verdict": clean["symmetric − softmax"].verdict,
        "margin-share": f"{number(1 / found.mean(MIOU, 'softmax'), 0)}%",
        "twin-verdict": clean["RPC − RPC without S"].verdict,
        **{
            name: f"{least_to_most(values, 2)} times that of the keys, "
            f"and smaller than it in {(values < 1).sum()} of {len(values)} seeds"
            for name, values in residuals.items()
        },
        **by_class(found_iou),
        "rpc-symmetric": difference(clean["RPC − symmetric"], 1, 100),
        "symmetric": difference(clean["symmetric − softmax"], 1, 100),
        "rpc-p": p_value(clean["RPC − softmax"].corrected),
        "taken": " and ".join(number(100 * found.mean(TAKEN, config), 2) for config in ("rpc", "softmax")),
        "taken-paired": difference(found.row(TAKEN, "rpc", "softmax"), 2, 100),
        "corrupted": difference(found.row(MEAN, "rpc", "softmax"), 2, 100),
        "corrupted-verdict": found.row(MEAN, "rpc", "softmax").verdict,
        "twin": difference(clean["RPC − RPC without S"], 1, 100),
        "twin-corrupted": told(found.row(MEAN, "rpc", "rpc without S"), 2, 100),
        "empty-share": f"{significant(100 * emptiest, 2)}%",
        "empty-twin": signed(100 * twin[int(shares.argmin())]),
        "rare": f"{number(100 * sum(pixels[each] for each in others(raw)) / sum(pixels.values()), 0)}%",
        "minutes": least_to_most(each / 60 for each in found.seconds()),
        "ran": found.ran_in(),
        "shares": ", ".join(f"{significant(100 * each, 2)}%" for each in sorted(shares)),
        **{f"equal-tokens-{each}": equal_tokens(found, each) for each in (1, 2, 3, 6)},
        "self": f"{number(100 * by_pass(found, 'self_probability', 'rpc', 6)[-1], 0)}%",
    }


@PAGE.table
def both_sets(raw: Raw) -> Table:
    """Differences beside those of the seeds that ran before, and of these and the others together."""
    sets = read(raw), *raw.with_earlier(read(raw))
    rows = []
    for pair in PAIRS:
        for name, metric in {"mIoU": MIOU, **CORRUPTED, "mean of the six": MEAN}.items():
            apart = [difference(each.row(metric, *PAIRS[pair]), 1, 100) for each in sets]
            rows.append([pair if metric == MIOU else "", name, *apart, sets[-1].below(metric, *PAIRS[pair])])
    return Table(["", "mIoU, points", "these seeds", "seeds 0 to 7", "all", "below 0"], rows)


@PAGE.numbers
def with_earlier(raw: Raw) -> dict[str, str]:
    """The seeds that ran before, and these and the others together."""
    earlier, every = raw.with_earlier(read(raw))
    apart = {name: read(raw).row(metric, "rpc", "softmax").difference * 100 for name, metric in CORRUPTED.items()}
    check_told(
        "noise and motion blur lie below 0 and fog above",
        all(each > 0 if name.startswith("fog") else each < 0 for name, each in apart.items()),
        apart,
    )
    single = [row.verdict for row in read(raw).summary if row.metric in CORRUPTED.values() and row.pairs]
    check_told(
        "under single corruptions none differs after the correction", not {*single} & {"lower", "higher"}, single
    )
    before = replace(earlier, endpoints=replace(earlier.endpoints, margins={})).row(MIOU, "rpc", "softmax").verdict
    check_told("the verdict of seeds 0 to 7 was budget too small", before == "budget too small", before)
    row, count = earlier.row(MIOU, "rpc", "softmax"), len({name for _, name in iou(raw)})
    trees = difference(earlier.row("iou/tree", "rpc", "softmax"), 2, 100 / count)
    return {
        "earlier": difference(row, 2, 100),
        "every": f"{difference(every.row(MIOU, 'rpc', 'softmax'), 2, 100)}, below 0 in "
        + every.below(MIOU, "rpc", "softmax"),
        "earlier-trees": f"{trees} of the {signed(100 * row.difference, 2)}",
        "lower-now": least_to_most(
            100 * (earlier.mean(MIOU, config) - read(raw).mean(MIOU, config)) for config in NAMES
        ),
        "every-corrupted": difference(every.row(MEAN, "rpc", "softmax"), 2, 100),
        "every-rpc-symmetric": difference(every.row(MIOU, "rpc", "symmetric"), 1, 100),
        "every-symmetric": difference(every.row(MIOU, "symmetric", "softmax"), 1, 100),
        "every-twin": difference(every.row(MIOU, "rpc", "rpc without S"), 2, 100),
        "every-twin-corrupted": difference(every.row(MEAN, "rpc", "rpc without S"), 2, 100),
    }


def by_class(found: dict[tuple[str, str], np.ndarray]) -> dict[str, str]:
    """Which classes the difference of RPC to softmax is of, in points."""
    apart = {each: found["rpc", each] - found["softmax", each] for each in CLASSES}
    count = len({name for _, name in found})
    named = {"tree": apart["tree"], "found": np.mean([*apart.values()], axis=0)}
    named["rest"] = sum(each for name, each in apart.items() if name != "tree") / count
    check_told(
        "most of the difference is of trees",
        apart["tree"].mean() / count < named["rest"].mean() < 0,
        {name: float(each.mean()) for name, each in named.items()},
    )
    return {
        **{name: f"{signed(float(each.mean()))} {interval(*mean_interval(each))}" for name, each in named.items()},
        "tree-part": signed(float(apart["tree"].mean()) / count, 2),
        "margin-found": number(count / len(CLASSES)),
    }


@PAGE.numbers
def under_attack(raw: Raw) -> dict[str, str]:
    """What attacks leave and take."""
    found = read_attacked(raw)
    rows = {name: found.row(metric, "rpc", "softmax") for name, metric in {"pgd": PGD, "fgsm": FGSM}.items()}
    symmetric = {
        f"{name}-symmetric": found.row(metric, "symmetric", "softmax")
        for name, metric in {"pgd": PGD, "fgsm": FGSM}.items()
    }
    check_told(
        "symmetric attention is higher than softmax under attack",
        all(row.verdict == "higher" for row in symmetric.values()),
        {name: told(row, 1, 100) for name, row in symmetric.items()},
    )
    highest = {name: max(NAMES, key=lambda config: found.mean(metric, config)) for name, metric in ATTACKED.items()}
    check_told("RPC without S is the highest under both", {*highest.values()} == {"rpc without S"}, highest)
    seeds = 100 * (found.values(PGD, "rpc") - found.values(PGD, "softmax"))
    check_told(
        "what RPC has under PGD comes from three seeds, and symmetric attention has as much",
        sum(each > 1 for each in seeds) == 3
        and max(each for each in seeds if each <= 1) < 0.5
        and found.mean(PGD, "symmetric") >= found.mean(PGD, "rpc"),
        seeds.tolist(),
    )
    left = (f"{number(100 * found.mean(PGD, config))}%" for config in ("rpc", "softmax"))
    return {
        **{name: difference(row, 1, 100) for name, row in rows.items()},
        **{f"{name}-verdict": row.verdict for name, row in rows.items()},
        "pgd-left": " and ".join(left),
        **{name: told(row, 1, 100) for name, row in symmetric.items()},
        "pgd-rpc-symmetric": difference(found.row(PGD, "rpc", "symmetric"), 1, 100),
        "pgd-seeds": ", ".join(signed(each) for each in sorted(seeds)),
        "clean-symmetric": difference(found.row(CLEAN, "symmetric", "softmax"), 1, 100),
        "pgd-taken-symmetric": difference(found.row("taken by PGD 1/255", "symmetric", "softmax"), 1, 100),
        "clean-attacked": difference(found.row(CLEAN, "rpc", "softmax"), 1, 100),
        "pgd-without": told(found.row(PGD, "rpc without S", "softmax"), 1, 100),
        "pgd-twin-verdict": found.row(PGD, "rpc", "rpc without S").verdict,
        "pgd-taken": difference(found.row("taken by PGD 1/255", "rpc", "softmax"), 1, 100),
        "pgd-twin": difference(found.row(PGD, "rpc", "rpc without S"), 1, 100),
    }


@PAGE.figure("curves.png")
def curves(raw: Raw) -> Figure:
    return curves_of(read(raw))


@PAGE.figure("overlays.png")
def overlays(raw: Raw) -> Figure:
    names = list(dict.fromkeys(row.name for row in of_classes(raw)))
    arrays = {NAMES.get(title, title): each for title, each in raw.arrays("masks.npz").items()}
    return masks_of(arrays, names)
