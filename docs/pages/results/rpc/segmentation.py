"""RPC-Attention in a small Segmenter on CamVid: what the tables and numbers of its page are."""

from __future__ import annotations

import math

import numpy as np

from docs.pages.figures import Figure, curves_of
from docs.pages.numbers import difference, mean_std, number, significant
from docs.pages.page import Claim, Page
from docs.pages.raw import Comparison, Raw
from docs.pages.results.rpc.shared import NAMES, PAIRS, by_pass, pursuit
from docs.pages.tables import Table, differences, means, step_costs
from docs.pages.verdicts import verdict

RECIPE = "camvid/compare_segmenter"
PAGE = Page("rpc_segmentation", "CamVid", summaries={"": RECIPE})
MIOU, MEAN = "test/miou", "robustness/mean_corruption/mIoU"
CORRUPTIONS = {"noise": "gaussian_noise", "fog": "fog", "motion blur": "motion_blur"}
CORRUPTED = {
    f"{name} {severity}": f"robustness/{corruption}/{severity}/mIoU"
    for name, corruption in CORRUPTIONS.items()
    for severity in (2, 4)
}
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
        return found.with_metric(TAKEN, lambda clean, left: clean - left, MIOU, MEAN)

    return raw.once("with what is taken", with_taken)


@PAGE.claims
def claims(raw: Raw) -> list[Claim]:
    found = read(raw)
    clean, symmetric = (found.row(MIOU, "rpc", reference) for reference in ("softmax", "symmetric"))
    corrupted = found.row(MEAN, "rpc", "softmax")
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
    ]


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


def iou(raw: Raw) -> dict[tuple[str, str], np.ndarray]:
    """IoU in percent by configuration and class, ``[seeds]``."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in raw.rows("classes.csv"):
        found.setdefault((row["config"], row["class"]), []).append(100 * float(row["iou"]))
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


@PAGE.numbers
def prose(raw: Raw) -> dict[str, str]:
    found = read(raw)
    clean, found_iou = {name: found.row(MIOU, *pair) for name, pair in PAIRS.items()}, iou(raw)
    shares = found.values("val/pursuit/sparsity/layer_00/pass_6", "rpc")
    most = int(shares.argmax())
    entropies = found.values("val/pursuit/entropy/layer_00/pass_6", "rpc")
    pixels = {row["class"]: int(row["pixels"]) for row in raw.rows("classes.csv")}
    twin = found.values(MIOU, "rpc") - found.values(MIOU, "rpc without S")
    return {
        "seen": str(sum(all(found_iou[config, each].mean() > 20 for config in NAMES) for each in CLASSES)),
        "rpc": difference(clean["RPC − softmax"], 2, 100),
        "rpc-verdict": clean["RPC − softmax"].verdict,
        "rpc-symmetric": difference(clean["RPC − symmetric"], 1, 100),
        "symmetric": difference(clean["symmetric − softmax"], 1, 100),
        "taken": " and ".join(number(100 * found.mean(TAKEN, config)) for config in ("rpc", "softmax")),
        "taken-paired": difference(found.row(TAKEN, "rpc", "softmax"), 1, 100),
        "corrupted": difference(found.row(MEAN, "rpc", "softmax"), 2, 100),
        "corrupted-verdict": found.row(MEAN, "rpc", "softmax").verdict,
        "twin": difference(clean["RPC − RPC without S"], 1, 100),
        "twin-detectable": number(clean["RPC − RPC without S"].detectable * 100),
        "empty-twin": number(100 * abs(twin[int(shares.argmin())])),
        "rare": f"{number(100 * sum(pixels[each] for each in others(raw)) / sum(pixels.values()), 0)}%",
        "shares": ", ".join(f"{significant(100 * each, 2)}%" for each in sorted(shares)),
        "share-most": f"{number(100 * shares[most], 0)}%",
        "share-most-miou": f"{number(100 * found.values(MIOU, 'rpc')[most])}%",
        "best-miou": f"{number(100 * found.values(MIOU, 'rpc').max())}%",
        "share-most-twin": f"{number(100 * found.values(MIOU, 'rpc without S')[most])}%",
        "equal-tokens": " to ".join(number(math.exp(pick(entropies)), 0) for pick in (min, max)),
        "self": f"{number(100 * by_pass(found, 'self_probability', 'rpc', 6)[-1], 0)}%",
    }


@PAGE.figure("curves.png")
def curves(raw: Raw) -> Figure:
    return curves_of(read(raw))
