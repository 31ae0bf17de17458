"""What FGSM and corruptions leave of all test images, of the models of RPC-Attention on CIFAR-10.

It is in the tables (`robustness.csv`) of a test of the last checkpoint of each cell, in
docs/results/rpc_classification/all_images/VARIANT/seed_N.csv, VARIANT as the folder of the cell is called, and beside
them in seed_N.json where these tests ran (`environment.json`).
"""

from __future__ import annotations

from dataclasses import replace

from docs.pages.cell_tests import check_checkpoints, compare_tests, primary_table, tested, tests_ran_in
from docs.pages.numbers import number
from docs.pages.raw import Comparison, Raw
from docs.pages.results.rpc import cifar10
from docs.pages.results.rpc.cifar10 import RECIPE
from docs.pages.results.rpc.shared import PAIRS, TOP1
from docs.pages.tables import Table, differences, nothing_yet

MEAN = "//accuracy"  # what a table calls the accuracy on clean images, and the mean over corruptions
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
    check_checkpoints(tested(folder, RECIPE, "clean"), MEAN, cifar10.read(raw), TOP1)
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
    """On how many images and seeds, and how many comparisons the correction counts."""
    found = read(raw)
    if found is None:
        return None
    cells = tested(raw.folder / "all_images", RECIPE, "mean corruption")
    return {
        "all-images": number(cells[0].rows[MEAN].samples, 0),
        "all-images-seeds": str(len(found.seeds)),
        "all-images-family": str(found.endpoints.comparisons),
        "all-images-ran": tests_ran_in(cells),
    }
