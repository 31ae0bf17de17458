"""What FGSM and corruptions leave of all test images, of the models of RPC-Attention on CIFAR-10.

It is in the tables (`robustness.csv`) of a test of the last checkpoint of each cell, in
docs/results/rpc_classification/all_images/VARIANT/seed_N.csv, VARIANT as the folder of the cell is called, and beside
them in seed_N.json where these tests ran (`environment.json`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import fmean

from docs.pages.cell_tests import (
    CLEAN,
    check_checkpoints,
    compare_tests,
    primary_table,
    settings_of,
    tested,
    tests_ran_in,
)
from docs.pages.errors import check_told
from docs.pages.numbers import difference, in_turn, interval, number, signed, told
from docs.pages.page import Claim
from docs.pages.raw import Comparison, Raw
from docs.pages.results.rpc import cifar10
from docs.pages.results.rpc.cifar10 import RECIPE
from docs.pages.results.rpc.shared import CORRUPTED, PAIRS, TOP1
from docs.pages.tables import Table, differences, nothing_yet, p_value
from docs.pages.verdicts import verdict
from lightning_tasks.compare.summary import Endpoints, SummaryRow
from lightning_tasks.intervals import mean_interval
from lightning_tasks.runs.robustness import right_from_text

MEAN = CLEAN  # of another test, and as nameless
WITHOUT, HEAD = "on clean images", "RPC − softmax"
ATTACKED_IN_RUNS = 500  # the first test images
MARGIN = 0.01
FGSM = {f"FGSM {eps}/255": f"fgsm/{eps}/255/accuracy" for eps in (1, 4)}
LEFT = {"corruption": MEAN, **FGSM}


def read(raw: Raw) -> Comparison | None:
    """The mean accuracy under corruption, the endpoint, and that under FGSM; None before the tests ran.

    Raises:
        PageError: they are tests of other checkpoints than the comparison.
    """
    return raw.once("all images", lambda: _compared(raw))


def _compared(raw: Raw) -> Comparison | None:
    folder = raw.folder / "all_images"
    corrupted, attacked = (compare_tests(folder, RECIPE, test, MEAN) for test in ("mean corruption", "attack"))
    if corrupted is None or attacked is None:
        return None
    clean = tested(folder, RECIPE, "clean")
    check_checkpoints(clean, CLEAN, cifar10.read(raw), TOP1)
    logged = [
        {"config": each.variant, "seed": each.seed, "step": 0, "metric": WITHOUT, "value": each.rows[CLEAN].value}
        for each in clean
    ]
    found = replace(
        corrupted,
        rows=[*corrupted.rows, *attacked.rows, *logged],
        metrics=[MEAN, *FGSM.values()],
        endpoints=replace(corrupted.endpoints, margins={MEAN: MARGIN}),
    )
    for name, metric in LEFT.items():
        found = found.with_loss(f"taken by {name}", WITHOUT, metric)
    return found


def on_all_images(raw: Raw) -> list[Claim]:
    """The claim on the endpoint; none before the tests ran."""
    if (found := read(raw)) is None:
        return []
    row = found.row(MEAN, "rpc", "softmax")
    said = f"all 2,000, margin named after the first 500: {difference(row, 1, 100)} points to softmax"
    return [Claim("... and under corruption, on all test images", said, verdict("higher", row))]


def on_the_first(raw: Raw) -> SummaryRow:
    """RPC to softmax under corruption on the images of the runs, with the margin that was named later."""
    found = cifar10.read(raw)
    endpoints = Endpoints(CORRUPTED, {CORRUPTED: MARGIN}, len(PAIRS))
    return replace(found, metrics=[CORRUPTED], endpoints=endpoints).row(CORRUPTED, *PAIRS[HEAD])


def of_further_images(raw: Raw, metric: str, reference: str) -> str:
    """The difference of RPC under an attack on the images that the runs did not attack, in points."""
    right: dict[tuple[str, int], float] = {}
    for each in tested(raw.folder / "all_images", RECIPE, "attack"):
        row = each.rows[metric]
        right[each.variant, each.seed] = float(right_from_text(row.right, row.samples)[ATTACKED_IN_RUNS:].mean())
    apart = [100 * (value - right[reference, seed]) for (config, seed), value in right.items() if config == "rpc"]
    return f"{signed(fmean(apart))} {interval(*mean_interval(apart))}"


def all_images_primary(raw: Raw) -> Table:
    """The verdicts on the endpoint."""
    return primary_table(read(raw), MEAN)


def all_images(raw: Raw) -> Table:
    """All differences, in points."""
    found, head = read(raw), "accuracy, points"
    if found is None:
        return nothing_yet(head, *PAIRS)
    rows = {"corrupted": MEAN, **FGSM, "clean": WITHOUT, **{f"taken by {name}": f"taken by {name}" for name in LEFT}}
    return differences(found, head, PAIRS, {name: (metric, 1, 100) for name, metric in rows.items()})


def all_images_numbers(raw: Raw) -> dict[str, str] | None:
    """On what, and how many comparisons the corrections count."""
    found = read(raw)
    if found is None:
        return None
    cells = tested(raw.folder / "all_images", RECIPE, "mean corruption")
    row = cells[0].rows[MEAN]
    families = [found.row(metric, *PAIRS[HEAD]).family for metric in (MEAN, *FGSM.values())]
    of = partial(found.row, config="rpc")
    pairs = [found.row(MEAN, *pair) for pair in PAIRS.values()]
    within = [row.within_corrected for row in pairs if row.verdict == "equivalent"]
    said = of(MEAN, reference="softmax").verdict
    check_told("under corruption RPC is equivalent to softmax", said == "equivalent", said)
    strong = FGSM["FGSM 4/255"]
    return {
        "all-equivalent": str(len(within)),
        "all-within": f"{p_value(min(within))} to {p_value(max(within))}",
        "first-within": p_value(on_the_first(raw).within_corrected),
        "all-fgsm-twin": in_turn(
            told(found.row(metric, "rpc without S", "softmax"), 1, 100) for metric in FGSM.values()
        ),
        "further-fgsm": of_further_images(raw, strong, "softmax"),
        "further-fgsm-symmetric": of_further_images(raw, strong, "symmetric"),
        "all-clean": difference(of(WITHOUT, reference="softmax"), 1, 100),
        "all-taken-symmetric": in_turn(
            difference(of(f"taken by {name}", reference="symmetric"), 1, 100) for name in LEFT
        ),
        "all-corrupted": told(of(MEAN, reference="softmax"), 1, 100),
        "all-corrupted-symmetric": told(of(MEAN, reference="symmetric"), 1, 100),
        "all-fgsm": in_turn(told(of(metric, reference="softmax"), 1, 100) for metric in FGSM.values()),
        "all-fgsm-symmetric": in_turn(told(of(metric, reference="symmetric"), 1, 100) for metric in FGSM.values()),
        "all-taken": in_turn(difference(of(f"taken by {name}", reference="softmax"), 1, 100) for name in LEFT),
        "all-images": f"{number(row.samples, 0)} images, {settings_of(row.note)}, {len(found.seeds)} seeds",
        "all-images-families": " and ".join(map(str, dict.fromkeys(families))),
        "all-images-ran": tests_ran_in(cells),
    }
