"""AutoAttack on RPC-Attention with its sparse part filled: what the tables and numbers of its page are.

What AutoAttack leaves after each of its attacks, its flags and its time are in the tables (`robustness.csv`) that each
cell writes, in docs/results/rpc_autoattack/tests/VARIANT/seed_N.csv, VARIANT as the folder of the cell is called.
Tests of checkpoints of `rpc/compare_sparse_part`, which ran before, are in earlier/VARIANT/seed_N.csv, and those of two
implementations of Square in square/VARIANT/seed_N.csv.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from docs.pages.cell_tests import (
    CLEAN as CLEAN_ROW,
    Tested,
    check_checkpoints,
    compare_tests,
    environment_of,
    primary_table,
    settings_of,
    tested,
)
from docs.pages.errors import PageError, check_told
from docs.pages.figures import Figure, curves_of
from docs.pages.numbers import difference, in_turn, interval, least_to_most, listed, mean_std, number, signed, told
from docs.pages.page import Claim, Page
from docs.pages.raw import RESULTS, Comparison, Raw, by_machine
from docs.pages.results.rpc.shared import TOP1, over_images, points
from docs.pages.tables import Table, differences
from docs.pages.verdicts import verdict
from lightning_tasks.intervals import mean_interval
from lightning_tasks.runs.robustness import right_from_text

RECIPE, BEFORE = "rpc/compare_autoattack", "rpc/compare_sparse_part"
RPC, TWIN, SOFTMAX = "rpc lam 1", "rpc without S", "softmax"
PAIRS = {
    "lam 1 − softmax": (RPC, SOFTMAX),
    "lam 1 − rpc without S": (RPC, TWIN),
    "rpc without S − softmax": (TWIN, SOFTMAX),
}
EPS = {f"{eps}/255": f"robustness/autoattack/{eps}_255/accuracy" for eps in ("0.25", "0.5", "1", "4")}
ALL_IMAGES, CLEAN = "clean, 2,000 images", "robustness/clean/accuracy"
PRIMARY = EPS["1/255"]
AFTER = {"apgd-ce": "APGD-CE", "apgd-t": "APGD-T", "fab-t": "FAB-T", "square": "Square: worst case"}
TEST_PRIMARY = "autoattack/1/255/accuracy"  # what a cell's table calls it
PLANNED_IMAGES = 500
LAST_PASS = "test/pursuit/sparsity/layer_00/pass_4"

PAGE = Page("rpc_autoattack", "CIFAR-10, AutoAttack")
PAGE.summaries |= {"": RECIPE}


def read(raw: Raw) -> Comparison:
    """The comparison."""
    return raw.comparison("", RECIPE)


def attacks(raw: Raw) -> list[Tested]:
    """What AutoAttack left in each cell.

    Raises:
        PageError: the tables are of other cells than the comparison.
    """
    return raw.once("attacks", lambda: _attacks(raw))


def _attacks(raw: Raw) -> list[Tested]:
    found, clean = (tested(raw.folder / "tests", RECIPE, test) for test in ("attack", "clean"))
    check_checkpoints(clean, CLEAN_ROW, read(raw), CLEAN)
    for eps, metric in EPS.items():
        check_checkpoints(found, f"autoattack/{eps}/accuracy", read(raw), metric)
    return found


def sparse_part(raw: Raw) -> Comparison:
    """The comparison whose checkpoints were tested before."""
    return raw.once("sparse part", lambda: Raw(raw.root, "docs/results/rpc_sparse_part").comparison("", BEFORE))


def attacks_before(raw: Raw) -> list[Tested]:
    """The same of the checkpoints that were tested before."""
    return raw.once("before", lambda: tested(raw.folder / "earlier", BEFORE, "attack"))


def compared_before(raw: Raw) -> Comparison:
    """The same, compared as `rpc/compare_sparse_part` asks.

    Raises:
        PageError: there are none.
    """
    folder = raw.folder / "earlier"
    if (found := compare_tests(folder, BEFORE, "attack", TEST_PRIMARY)) is None:
        raise PageError(f"{folder} has no tables: copy robustness.csv of each test there, as VARIANT/seed_N.csv")
    return found


@PAGE.claims
def claims(raw: Raw) -> list[Claim]:
    found = read(raw)
    to_softmax, to_twin = (found.row(PRIMARY, RPC, reference) for reference in (SOFTMAX, TWIN))
    left = {config: number(found.mean(PRIMARY, config) * 100) for config in (RPC, SOFTMAX)}
    others = [found.row(metric, RPC, SOFTMAX) for metric in EPS.values() if metric != PRIMARY]
    return [
        Claim(
            "RPC-Attention is more robust than softmax attention (Teo and Nguyen, NeurIPS 2024), S filled, under "
            "AutoAttack",
            f"CIFAR-10, lam 1, 1/255, 100 images: {left[RPC]}% against {left[SOFTMAX]}%, "
            f"{difference(to_softmax, 1, 100)} points",
            verdict("higher", to_softmax),
        ),
        Claim(
            "... at other sizes of the attack",
            f"0.25, 0.5 and 4/255: {points(others)} points to softmax",
            verdict("higher", *others),
        ),
        Claim(
            "... and S has a part in it",
            f"1/255: {difference(to_twin, 1, 100)} points to RPC without S",
            verdict("higher", to_twin),
        ),
    ]


@PAGE.table
def primary(raw: Raw) -> Table:
    return primary_table(read(raw), PRIMARY)


@PAGE.table
def paired(raw: Raw) -> Table:
    rows = {ALL_IMAGES: TOP1, "clean, 100 images": CLEAN, **EPS}
    return differences(read(raw), "accuracy, points", PAIRS, {name: (metric, 1, 100) for name, metric in rows.items()})


@PAGE.table
def after_each(raw: Raw) -> Table:
    return after_each_attack(raw, "tests", RECIPE, attacks(raw))


@PAGE.table
def before(raw: Raw) -> Table:
    return after_each_attack(raw, "earlier", BEFORE, attacks_before(raw))


@PAGE.table
def before_primary(raw: Raw) -> Table:
    return primary_table(compared_before(raw), TEST_PRIMARY)


def after_each_attack(raw: Raw, place: str, recipe: str, cells: Sequence[Tested]) -> Table:
    """What stands after each of AutoAttack's attacks: a row for each configuration and eps, in percent."""
    clean = tested(raw.folder / place, recipe, "clean")
    rows = []
    for config in dict.fromkeys(each.variant for each in cells):
        of_clean, of_attacks = ([each for each in found if each.variant == config] for found in (clean, cells))
        for eps in EPS:
            names = [f"autoattack after {name}/{eps}/accuracy" for name in AFTER]
            if names[0] not in of_attacks[0].rows:  # those that ran before have two eps
                continue
            values = [
                [each.rows[CLEAN_ROW].value for each in of_clean],
                *([each.rows[name].value for each in of_attacks] for name in names),
            ]
            rows.append([config, str(len(of_attacks)), eps, *(mean_std(each, 1, 100.0) for each in values)])
    heads = ["configuration", "seeds", "ε", "clean", *(f"after {name}" for name in AFTER.values())]
    return Table(heads, rows)


@PAGE.numbers
def prose(raw: Raw) -> dict[str, str]:
    found, cells = read(raw), attacks(raw)
    row = cells[0].rows[TEST_PRIMARY]
    to = {reference: found.row(PRIMARY, RPC, reference) for reference in (SOFTMAX, TWIN)}
    made = [each for each in found.summary if each.pairs and each.metric in EPS.values()]
    excluding = [each for each in made if each.excludes_zero]
    kept = [each for each in made if each.verdict in ("lower", "higher")]
    taken = {eps: taken_by(found, metric) for eps, metric in EPS.items()}
    return {
        "seeds": str(to[SOFTMAX].pairs),
        "settings": f"{row.samples} images; {settings_of(row.note)}",
        "softmax": told(to[SOFTMAX], 1, 100),
        "softmax-images": of_images(found, SOFTMAX),
        "softmax-detectable": number(to[SOFTMAX].detectable * 100),
        "twin": told(to[TWIN], 1, 100),
        "twin-images": of_images(found, TWIN),
        "twin-softmax": told(found.row(PRIMARY, TWIN, SOFTMAX), 1, 100),
        "clean-all": told(found.row(TOP1, RPC, SOFTMAX), 1, 100),
        "clean-attacked": told(found.row(CLEAN, RPC, SOFTMAX), 1, 100),
        "taken": listed(f"{text} at {eps}" for eps, text in taken.items()),
        "made": str(len(made)),
        "excluding": str(len(excluding)),
        "kept": str(len(kept)),
        "flags": flags_of(cells),
        "took": in_turn(number(seconds_of(cells, eps) / 60) for eps in EPS),
        "planned": number(planned_hours(sparse_part(raw), row.samples, sum(seconds_of(cells, eps) for eps in EPS)), 0),
        "ran-in": found.ran_in(),
        "hours": number(sum(found.seconds()) / 3600),
    }


@PAGE.numbers
def of_before(raw: Raw) -> dict[str, str]:
    """The tests of seeds that ran before, and what both say together."""
    cells, clean = attacks_before(raw), sparse_part(raw)
    before, now = paired_values(compared_before(raw), TEST_PRIMARY), paired_values(read(raw), PRIMARY)
    if twice := before.keys() & now.keys():
        raise PageError(
            f"seed {min(twice)} is in {raw.folder / 'earlier'}, and one of {RESULTS}: leave it out of one of the two"
        )
    together = [100 * each for each in (*before.values(), *now.values())]
    apart = paired_values(clean, TOP1)
    attacked, others = (
        [100 * value for seed, value in apart.items() if (seed in before) == is_attacked]
        for is_attacked in (True, False)
    )
    return {
        "before-seeds": str(len(before)),
        "before-family": str(compared_before(raw).endpoints.comparisons),
        "before-made": str(sum(row.metric == TOP1 and row.pairs > 0 for row in clean.summary)),
        "before-clean": f"{signed(fmean(attacked))} points, and by {signed(fmean(others))} on the other {len(others)}",
        "before-images": over_images(cells, TEST_PRIMARY, RPC, SOFTMAX),
        "before-flags": flags_of(cells),
        "together": f"{signed(fmean(together))} {interval(*mean_interval(together))}",
        "together-seeds": str(len(together)),
    }


@PAGE.numbers
def known_before(raw: Raw) -> dict[str, str]:
    """How many runs repeat, to the last digit, those of the page where S is all but empty."""
    found, metrics = read(raw), (TOP1, "test/loss")
    known = Raw(raw.root, "docs/results/rpc_classification").comparison("", "rpc/compare_classification")

    def of(comparison: Comparison, config: str) -> dict[int, tuple[float, ...]]:
        values = [comparison.by_seed(metric, config) for metric in metrics]
        return {seed: tuple(each[seed] for each in values) for seed in values[0]}

    runs = {config: of(found, config) for config in found.configs}
    before = {config: of(known, config) for config in found.configs if config in known.configs}
    repeated = sum(
        before.get(config, {}).get(seed) == values
        for config, of_seed in runs.items()
        for seed, values in of_seed.items()
    )
    there = sum(len(runs[config].keys() & of_seed.keys()) for config, of_seed in before.items())
    check_told("some runs repeat those of the other page", repeated > 0, f"{repeated} of {there}")
    return {"repeated": f"{repeated} of the {there}"}


def paired_values(found: Comparison, metric: str) -> dict[int, float]:
    """The differences of RPC to softmax by seed."""
    rpc, softmax = (found.by_seed(metric, config) for config in (RPC, SOFTMAX))
    return {seed: rpc[seed] - softmax[seed] for seed in rpc if seed in softmax}


@PAGE.numbers
def filled(raw: Raw) -> dict[str, str]:
    """The share of S that is not 0 in the last pass, as `PursuitMonitor` logged it in tests of the checkpoints.

    What such a test logged is in filled/seed_N.csv, and where it ran in filled/seed_N.json.

    Raises:
        PageError: a test is of another checkpoint.
    """
    shares, environments = [], []
    for seed, top1 in read(raw).by_seed(TOP1, RPC).items():
        name = f"filled/seed_{seed}"
        logged, *others = raw.rows(f"{name}.csv")
        environment = environment_of(raw.folder / f"{name}.json")
        if others or environment is None:
            raise PageError(f"{raw.folder / name} needs one row in .csv, and a .json: copy both of one test there")
        if not math.isclose(float(logged[TOP1]), top1, rel_tol=1e-5):
            raise PageError(f"{name}.csv has {logged[TOP1]} where {RESULTS} has {top1} for {TOP1}: test last.ckpt anew")
        shares.append(100 * float(logged[LAST_PASS]))
        environments.append(environment)
    return {"filled": f"{least_to_most(shares, 0)}%", "filled-ran": by_machine(environments)}


@PAGE.numbers
def idle(raw: Raw) -> dict[str, str]:
    """How often an attack of AutoAttack that comes after APGD took an image that APGD had left."""
    counts = []
    for each in attacks(raw):
        for eps in EPS:
            left = [each.rows[f"autoattack after {name}/{eps}/accuracy"].value for name in ("apgd-t", "square")]
            counts.append(left[1] < left[0])
    check_told("APGD alone decides what AutoAttack leaves", not any(counts), f"{sum(counts)} of {len(counts)}")
    return {"after-apgd": f"{sum(counts)} of the {len(counts)}"}


def taken_by(found: Comparison, metric: str) -> str:
    """What an attack takes from the accuracy on the same images, for RPC less softmax, in points."""
    return difference(found.with_loss("lost", CLEAN, metric).row("lost", RPC, SOFTMAX), 1, 100)


def of_images(found: Comparison, reference: str) -> str:
    """The interval over images of RPC's difference at the primary endpoint, in points."""
    each = found.over_images(PRIMARY, RPC, reference)
    return interval(each.low, each.high, 1, 100)


def flags_of(cells: Sequence[Tested]) -> str:
    """The flags that AutoAttack's checks raised, by configuration and eps."""
    counts = Counter(each.variant for each in cells)
    raised: Counter[tuple[str, str, str]] = Counter()
    for each in cells:
        flags = dict.fromkeys(  # a cell counts once
            (each.variant, row.setting, flag)
            for row in each.rows.values()
            for flag in row.note.partition("; flags: ")[2].split("; ")
            if flag not in ("", "none")
        )
        raised.update([*flags])
    texts = (
        f"{variant} at {eps}: {flag} ({count} of {counts[variant]} seeds)"
        for (variant, eps, flag), count in raised.items()
    )
    return "; ".join(texts) or "none"


def seconds_of(cells: Sequence[Tested], eps: str) -> float:
    """What AutoAttack took at an eps, the mean over the cells.

    Raises:
        PageError: a cell has no such eps, or its time was not kept.
    """
    rows = [each.rows.get(f"autoattack/{eps}/accuracy") for each in cells]
    taken = [math.nan if row is None else row.seconds for row in rows]
    if not np.isfinite(taken).all():
        path = cells[int(np.argmin(np.isfinite(taken)))].path
        raise PageError(f"{path} has no seconds of autoattack at {eps}: test that checkpoint anew")
    return float(np.mean(taken))


def planned_hours(planned: Comparison, images: int, seconds: float) -> float:
    """What AutoAttack on `PLANNED_IMAGES` of each model takes, where so many images of one take so many seconds."""
    return len(planned.configs) * len(planned.seeds) * PLANNED_IMAGES / images * seconds / 3600


@PAGE.numbers
def square(raw: Raw) -> dict[str, str]:
    """What our Square and the library's leave of the same images, of each model that both attacked."""
    texts = []
    for each in tested(raw.folder / "square", BEFORE, "attack"):
        ours, theirs = (each.rows[f"{name}/1/255/accuracy"] for name in ("square", "autoattack"))
        left = [right_from_text(row.right, row.samples) for row in (ours, theirs)]
        check_told("our Square leaves less than the library's", ours.value < theirs.value, (ours.value, theirs.value))
        texts.append(
            f"{each.variant}, seed {each.seed}, {ours.samples} images: {number(ours.value * 100)}% and "
            f"{number(theirs.value * 100)}%; {(left[1] & ~left[0]).sum()} images stand against the library's alone, "
            f"{(left[0] & ~left[1]).sum()} against ours alone"
        )
    if not texts:
        raise PageError(f"{raw.folder / 'square'} has no tables")
    return {"square": "; ".join(texts)}


@PAGE.numbers
def square_by_rules(raw: Raw) -> dict[str, str]:
    """What both leave at 5,000 queries, and ours by rules of the library, of a model that was trained anew."""
    found = {row["Square"]: row for row in raw.rows("square_5000.csv", raw.root / "benchmarks" / "results")}
    named = {
        "ours": "ours",
        "with the library's schedule": "ours, schedule of the library",
        "with its places": "ours, places of the library",
        "with its draws": "ours, draws of the library",
        "with all three": "ours, all three",
        "the library's": "pyautoattack",
    }
    return {"square-rules": ", ".join(f"{name} {found[row]['mean']}%" for name, row in named.items())}


@PAGE.numbers
def square_of_another_model(raw: Raw) -> dict[str, str]:
    """How far ours is from the library's on the model of benchmarks/results/square.md, by its rules."""
    rows = raw.rows("square.csv", raw.root / "benchmarks" / "results")
    apart = {row["Square"]: float(row["to pyautoattack, points"]) for row in rows}
    own, schedule, every = (apart[name] for name in ("ours", "ours, schedule of the library", "ours, all three"))
    check_told("the schedule makes most of the difference", own < schedule and schedule - own > -own / 2, apart)
    how = {"as it is": own, "with its schedule": schedule, "with all three": every}
    return {"square-other": in_turn(f"{signed(each)} points {name}" for name, each in how.items())}


@PAGE.figure("curves.png")
def curves(raw: Raw) -> Figure:
    return curves_of(read(raw))
