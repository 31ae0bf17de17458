"""Does a trained prompt point along the max-margin direction? What the tables and numbers of the page are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from docs.pages.errors import PageError, check_told
from docs.pages.figures import Figure
from docs.pages.numbers import at_least, in_turn, least_to_most, number
from docs.pages.page import Claim, Page
from docs.pages.raw import Raw
from docs.pages.tables import Table
from docs.pages.verdicts import by_count
from lightning_tasks.analyses import token_selection_report as report
from lightning_tasks.figures import selection

PAGE = Page("token_selection", "Token selection")
DRAWN, RELEASED = ("single", "multi", "joint"), ("released_single", "released_multi", "released_joint")
EXPERIMENTS = (*DRAWN, "losses", *RELEASED)
DIFFERENCE, PLAIN, FLOAT32 = "difference form", "plain autograd", "plain autograd, float32"
LOSSES = {
    "logistic": "logistic",
    "exponential": "exponential",
    "linear": "linear, -y f",
    "logistic, steps not normalised": "logistic, plain gradient descent, learning rate 1",
}
COSINE = 0.99  # above which a direction counts as that of max-margin
Measures = dict[str, float]


def runs(raw: Raw, experiment: str) -> dict[tuple[str, str], dict[float, Measures]]:
    """By problem and run, and by step (of a regularization path: ‖p‖): what was measured."""

    def read() -> dict[tuple[str, str], dict[float, Measures]]:
        found: dict[tuple[str, str], dict[float, Measures]] = {}
        for row in raw.rows(f"{experiment}.csv"):
            measured = {name: float(row[name]) for name in ("correlation_p", "correlation_v", "probability", "norm_p")}
            found.setdefault((row["seed"], row["run"]), {})[float(row["step"])] = measured
        return found

    return raw.once((experiment, "runs"), read)


def last(raw: Raw, experiment: str, problem: str, run: str) -> Measures:
    """What was measured at the end."""
    steps = runs(raw, experiment)[problem, run]
    return steps[max(steps)]


def problems(raw: Raw, experiment: str) -> list[str]:
    """The problems of an experiment: seeds, or starts of a released one."""
    return list(dict.fromkeys(problem for problem, _ in runs(raw, experiment)))


def optimality(raw: Raw) -> dict[tuple[str, str], str]:
    """What the analysis said of each selection, by experiment and problem."""
    return {(name, row["seed"]): row["optimality"] for name in EXPERIMENTS for row in raw.rows(f"{name}.csv")}


def summary(raw: Raw) -> str:
    """The summary that the analysis writes.

    Raises:
        PageError: the one that is there has a problem that was not solved, of which no table has rows.
    """
    if unsolved := [each for each in raw.text(report.SUMMARY).splitlines() if f" | {report.UNSOLVED} | " in each]:
        raise PageError(
            f"{report.SUMMARY} has a problem that was not solved, which the page does not tell: {unsolved[0]}"
        )
    kinds = optimality(raw)
    lines = [
        report.line(name, problem, run, kinds[name, problem], last(raw, name, problem, run))
        for name in EXPERIMENTS
        for problem, run in runs(raw, name)
    ]
    return report.summary(lines, int(max(runs(raw, DRAWN[0])["0", DIFFERENCE])))


PAGE.texts[report.SUMMARY] = summary


def cosines(raw: Raw, experiments: tuple[str, ...], run: str) -> list[float]:
    """Of p, at the end of each problem."""
    return [
        last(raw, experiment, problem, run)["correlation_p"]
        for experiment in experiments
        for problem in problems(raw, experiment)
    ]


@PAGE.claims
def claims(raw: Raw) -> list[Claim]:
    drawn, released = (cosines(raw, experiments, DIFFERENCE) for experiments in (DRAWN, RELEASED))
    plain = cosines(raw, (*DRAWN, *RELEASED), PLAIN)
    kept, reached = sum(each > COSINE for each in plain), sum(each > COSINE for each in (*drawn, *released))
    heads = [
        last(raw, experiment, problem, DIFFERENCE)["correlation_v"]
        for experiment in ("joint", "released_joint")
        for problem in problems(raw, experiment)
    ]
    return [
        Claim(
            "Gradient descent on a prompt converges to the max-margin direction of the tokens that it selects "
            "(Tarzanagh et al., NeurIPS 2023)",
            f"cosine at least {at_least(min(drawn), 4)} in the {len(drawn)} problems that we drew and "
            f"{at_least(min(released), 4)} from {len(released)} starts in the five released ones, with a gradient that "
            f"survives a saturated softmax; above {COSINE} in {kept} of {len(plain)} runs with plain autograd",
            by_count(reached, len(plain), f"runs of the gradient that survives, with a cosine above {COSINE}"),
        ),
        Claim(
            "... and v to the SVM of the selected tokens, where it is learned too",
            f"cosine of v at least {at_least(min(heads), 4)} in {len(heads)} problems, with the gradient that survives",
            by_count(sum(each > COSINE for each in heads), len(heads), f"problems with a cosine above {COSINE}"),
        ),
    ]


@PAGE.table
def forms(raw: Raw) -> Table:
    rows = []
    for experiment in DRAWN:
        for problem in problems(raw, experiment):
            difference, plain, path = (
                last(raw, experiment, problem, run) for run in (DIFFERENCE, PLAIN, report.REGULARIZED)
            )
            directions = [number(each["correlation_p"], 4) for each in (difference, plain, path)]
            norms = [number(each["norm_p"]) for each in (difference, plain)]
            head = number(difference["correlation_v"], 4) if experiment == "joint" else ""
            rows.append([experiment, problem, *directions, head, *norms])
    heads = ["p, difference form", "p, plain autograd", "p, regularization path", "v, difference form"]
    return Table(["experiment", "seed", *heads, "‖p‖, difference form", "‖p‖, plain autograd"], rows)


def released_groups(raw: Raw) -> dict[str, tuple[str, list[str]]]:
    """Starts of the released problems, by what the page calls them."""
    kinds = optimality(raw)
    single = problems(raw, "released_single")
    second = [name for name in single if name.startswith("local")]
    return {
        "single, first set": ("released_single", [name for name in single if name not in second]),
        "single, second set, to the global optimum": (
            "released_single",
            [name for name in second if kinds["released_single", name] == "global"],
        ),
        "single, second set, to a local optimum": (
            "released_single",
            [name for name in second if kinds["released_single", name] == "local"],
        ),
        "multi": ("released_multi", problems(raw, "released_multi")),
        "joint": ("released_joint", problems(raw, "released_joint")),
    }


@PAGE.table
def released(raw: Raw) -> Table:
    rows = []
    for name, (experiment, starts) in released_groups(raw).items():
        for run in (DIFFERENCE, PLAIN, FLOAT32):
            found = [last(raw, experiment, start, run) for start in starts]
            head = [name, str(len(starts))] if run == DIFFERENCE else ["", ""]
            directions = least_to_most([each["correlation_p"] for each in found], 4 if run == DIFFERENCE else 3)
            rows.append([*head, run, directions, least_to_most([each["norm_p"] for each in found], 0)])
    return Table(["problems", "starts", "run", "cosine of p", "‖p‖"], rows)


@PAGE.table
def losses(raw: Raw) -> Table:
    rows = []
    for run, name in LOSSES.items():
        found = [last(raw, "losses", seed, run) for seed in ("0", "1")]
        cells = [number(each[key], 4) for key in ("correlation_p", "probability") for each in found]
        rows.append([name, *cells])
    heads = ["cosine of p, seed 0", "seed 1", "least probability of a selected token, seed 0", "seed 1"]
    return Table(["loss", *heads], rows)


@PAGE.numbers
def prose(raw: Raw) -> dict[str, str]:
    groups = released_groups(raw)
    single = [
        last(raw, "released_single", start, PLAIN)["correlation_p"]
        for name in ("single, first set", "single, second set, to the global optimum")
        for start in groups[name][1]
    ]
    locals_ = [
        last(raw, "released_single", start, PLAIN) for start in groups["single, second set, to a local optimum"][1]
    ]
    plain = cosines(raw, (*DRAWN, *RELEASED), PLAIN)
    float32 = cosines(raw, RELEASED, FLOAT32)
    float32_early = [
        runs(raw, experiment)[problem, FLOAT32][200]["correlation_p"]
        for experiment in RELEASED
        for problem in problems(raw, experiment)
    ]
    single_32 = [
        last(raw, "released_single", start, FLOAT32)["correlation_p"]
        for name in ("single, first set", "single, second set, to the global optimum")
        for start in groups[name][1]
    ]
    # A problem is a set of tokens: each drawn one, each of the released joint ones, and the others with their starts.
    drawn = [[last(raw, name, seed, PLAIN)["correlation_p"]] for name in DRAWN for seed in problems(raw, name)]
    joint = [[each] for each in cosines(raw, ("released_joint",), PLAIN)]
    by_set = [
        [name for name in groups if name.startswith(start)] for start in ("single, first", "single, second", "multi")
    ]
    with_starts = [
        [last(raw, groups[name][0], start, PLAIN)["correlation_p"] for name in names for start in groups[name][1]]
        for names in by_set
    ]
    of_problems = [*drawn, *joint, *with_starts]
    below = {name: [each <= COSINE for each in cosines(raw, (name,), PLAIN)] for name in (*DRAWN, *RELEASED)}
    check_told(
        "most of the runs below 0.99 are of the released single-input problems",
        2 * sum(below["released_single"]) > sum(map(sum, below.values())),
        {name: sum(each) for name, each in below.items()},
    )
    kinds = optimality(raw)
    odd = [
        f"{experiment} seed {seed}"
        for (experiment, seed), kind in kinds.items()
        if experiment in DRAWN and kind != "global"
    ]

    local = [kinds[name, each] != "global" for name in (*DRAWN, *RELEASED) for each in problems(raw, name)]

    def norm(seed: str, step: int, run: str) -> str:
        return number(runs(raw, "multi")[seed, run][step]["norm_p"], 0)

    def early(start: str) -> str:
        found = runs(raw, "released_single")[start, FLOAT32]
        return " and ".join(number(found[step]["correlation_p"], 3) for step in (100, 200))

    def turns(run: str) -> str:
        """The steps, to the hundred below and above, between which a token other than the selected one takes over."""
        found = []
        for start in groups["single, second set, to a local optimum"][1]:
            steps = runs(raw, "released_single")[start, run]
            found += [
                max(step for step, each in steps.items() if each["probability"] > 0.99),
                min(step for step, each in steps.items() if step > 200 and each["probability"] < 0.01),
            ]
        return f"{number(min(found), 0)} and {number(max(found), 0)}"

    zero = {
        start[:-2]: start
        for start in problems(raw, "released_single")
        if runs(raw, "released_single")[start, DIFFERENCE][0.0]["norm_p"] == 0.0
    }
    slow = [last(raw, "losses", seed, "logistic, steps not normalised")["norm_p"] for seed in ("0", "1")]
    heads = [
        measures[max(measures)]["correlation_v"]
        for (_, run), measures in runs(raw, "released_joint").items()
        if run in (DIFFERENCE, PLAIN, FLOAT32)
    ]
    return {
        "plain-below": f"{sum(each <= COSINE for each in plain)} of the {len(plain)} runs",
        "single-plain": f"{len(single)} of the {len(single) + len(locals_)}",
        "single-cosines": f"{number(min(single), 2)} and {number(max(single), 2)}",
        "single-float32": f"{number(min(single_32), 2)} to {number(max(single_32), 2)}",
        "local-probability": " and ".join(
            f"{each:.0e}".replace("e-", "e−") for each in sorted(each["probability"] for each in locals_)
        ),
        "plain-problems": f"{sum(min(each) <= COSINE for each in of_problems)} of {len(of_problems)}",
        "plain-below-995": f"{sum(each <= 0.995 for each in plain)}",
        "float32-below": f"{sum(each <= COSINE for each in float32)} of {len(float32)}",
        "float32-early": f"{sum(each <= COSINE for each in float32_early)} of {len(float32_early)}",
        "difference-least": at_least(min(cosines(raw, (*DRAWN, *RELEASED), DIFFERENCE)), 4),
        "norms-0": f"{norm('0', 530, PLAIN)} at step 530, {norm('0', 1000, PLAIN)} at the end",
        "norms-1": f"{norm('1', 710, PLAIN)} at step 710, {norm('1', 1000, PLAIN)} at the end",
        "odd": ", ".join(odd),
        "local-runs": f"{sum(local)} of the {len(local)} runs",
        "heads": at_least(min(heads), 4),
        "early-first": early(zero["global"]),
        "early-second": early(zero["local"]),
        "turns": turns(PLAIN),
        "turns-float32": turns(FLOAT32),
        "slow": " and ".join(number(each) for each in slow),
    }


@dataclass(frozen=True)
class Measured:
    """What was measured of one problem and run at a step; `correlation_v` is NaN where v is not learned."""

    seed: str
    run: str
    optimality: str
    step: float
    correlation_p: float
    correlation_v: float
    probability: float
    norm_p: float


@dataclass(frozen=True)
class Point:
    """Where p or v was: along the max-margin direction, and at right angles to it."""

    seed: str
    parameter: str
    run: str
    along: float
    across: float


def figure(experiment: str, raw: Raw) -> Figure:
    """What the analysis draws: the problem whose paths were kept.

    Raises:
        PageError: the paths are of no problem that was measured, or of several.
    """
    paths, measured = raw.records(f"{experiment}_paths.csv", Point), raw.records(f"{experiment}.csv", Measured)
    seeds = {each.seed for each in paths}
    rows = [vars(each) for each in measured if {each.seed} == seeds]
    if not rows:
        raise PageError(
            f"{experiment}_paths.csv has paths of {in_turn(sorted(seeds))}: {experiment}.csv has no such problem"
        )
    points = [vars(each) for each in paths]

    def draw(path: Path) -> None:
        selection.draw_selection(rows, points, report.REGULARIZED).savefig(path, dpi=110, format="png")

    return Figure(draw, [rows, points], selection)


for name in EXPERIMENTS:
    PAGE.figure(f"{name}.png")(partial(figure, name))
