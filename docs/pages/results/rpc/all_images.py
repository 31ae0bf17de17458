"""What FGSM and corruptions leave of all test images, of the models of RPC-Attention on CIFAR-10.

It is in the tables (`robustness.csv`) of a test of the last checkpoint of each cell, in
docs/results/rpc_classification/all_images/VARIANT/seed_N.csv, VARIANT as the folder of the cell is called, and beside
them in seed_N.json where these tests ran (`environment.json`).
"""

from __future__ import annotations

from dataclasses import replace

from docs.pages.cell_tests import (
    CLEAN,
    check_checkpoints,
    compare_tests,
    primary_table,
    settings_of,
    tested,
    tests_ran_in,
)
from docs.pages.numbers import number
from docs.pages.raw import Comparison, Raw
from docs.pages.results.rpc import cifar10
from docs.pages.results.rpc.cifar10 import RECIPE
from docs.pages.results.rpc.shared import PAIRS, TOP1
from docs.pages.tables import Table, differences, nothing_yet

MEAN = CLEAN  # of another test, and as nameless
MARGIN = 0.01
FGSM = {f"FGSM {eps}/255": f"fgsm/{eps}/255/accuracy" for eps in (1, 4)}


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
    check_checkpoints(tested(folder, RECIPE, "clean"), CLEAN, cifar10.read(raw), TOP1)
    return replace(
        corrupted,
        rows=[*corrupted.rows, *attacked.rows],
        metrics=[MEAN, *FGSM.values()],
        endpoints=replace(corrupted.endpoints, margins={MEAN: MARGIN}),
    )


def all_images_primary(raw: Raw) -> Table:
    """The verdicts on the endpoint."""
    return primary_table(read(raw), MEAN)


def all_images(raw: Raw) -> Table:
    """All differences, in points."""
    found, head = read(raw), "accuracy, points"
    if found is None:
        return nothing_yet(head, *PAIRS)
    rows = {"corrupted": MEAN, **FGSM}
    return differences(found, head, PAIRS, {name: (metric, 1, 100) for name, metric in rows.items()})


def all_images_numbers(raw: Raw) -> dict[str, str] | None:
    """On what, and how many comparisons the corrections count."""
    found = read(raw)
    if found is None:
        return None
    cells = tested(raw.folder / "all_images", RECIPE, "mean corruption")
    row = cells[0].rows[MEAN]
    families = [found.row(metric, *PAIRS["RPC − softmax"]).family for metric in (MEAN, *FGSM.values())]
    return {
        "all-images": f"{number(row.samples, 0)} images, {settings_of(row.note)}, {len(found.seeds)} seeds",
        "all-images-families": " and ".join(map(str, dict.fromkeys(families))),
        "all-images-ran": tests_ran_in(cells),
    }
