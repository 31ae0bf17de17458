"""Max-margin token selection (Tarzanagh et al., NeurIPS 2023, arXiv 2306.13596): where a trained prompt points."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path as File
from typing import Any

import torch
from attnswap.datamodules import TokenSelectionDataModule
from attnswap.datamodules.token_selection import TokenProblem, released_problems
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from attention_modules.analysis import NotSeparableError, locally_optimal, max_margin_direction, max_margin_head
from lightning_tasks.analyses.descent import Path, gradient_path, regularization_path
from lightning_tasks.analyses.made_by import MADE_BY, Recording, read_made_by
from lightning_tasks.analyses.token_selection_report import (
    COLUMNS,
    PATH_COLUMNS,
    REGULARIZED,
    SUMMARY,
    UNSOLVED,
    line,
    summary,
)
from lightning_tasks.errors import UsageError
from lightning_tasks.figures.selection import draw_selection, draw_together
from lightning_tasks.runs.folder import output_folder
from lightning_tasks.runs.safe_files import write_rows

# Settings of gradient_path by the name that tables and figures give the run; the first one sets the selection.
Settings = dict[str, dict[str, Any]]
FORMS: Settings = {"difference form": {}, "plain autograd": {"form": "plain"}}
LOSS_RUNS: Settings = {
    "logistic": {},
    "exponential": {"loss": "exponential"},
    "linear": {"loss": "linear"},
    "logistic, steps not normalised": {"normalized": False, "lr": 1.0},
}
RELEASED_LOSSES: Settings = {
    f"{loss}{form}": {"loss": loss, **given}
    for form, given in (("", {}), (", plain autograd, float32", {"form": "plain", "dtype": torch.float32}))
    for loss in ("logistic", "linear")
}
RELEASED_FORMS: Settings = {**FORMS, "plain autograd, float32": {"form": "plain", "dtype": torch.float32}}


@dataclass(frozen=True)
class Experiment:
    """Runs on problems of one construction: on ours, drawn by a seed, or on those of the released code.

    Args:
        together: whether the figure has the paths of all problems, and not those of the first one.
    """

    construction: str
    settings: Settings
    released: bool = False
    together: bool = False

    @property
    def joint(self) -> bool:
        """Whether v is learned too."""
        return self.construction == "joint"

    def problems(self, seeds: Sequence[int]) -> dict[str, Callable[[], TokenProblem]]:
        """What makes each problem, by the name that tables give it."""
        if self.released:
            return {name: partial(_same, problem) for name, problem in released_problems(self.construction).items()}
        return {str(seed): partial(_drawn, self.construction, seed) for seed in seeds}


def _same(problem: TokenProblem) -> TokenProblem:
    return problem


def _drawn(construction: str, seed: int) -> TokenProblem:
    return TokenSelectionDataModule(construction, seed=seed).problem


EXPERIMENTS = {
    "single": Experiment("single", FORMS),
    "multi": Experiment("multi", FORMS),
    "joint": Experiment("joint", FORMS),
    "losses": Experiment("multi", LOSS_RUNS),
    "released_single": Experiment("single", RELEASED_FORMS, released=True),
    "released_multi": Experiment("multi", RELEASED_FORMS, released=True),
    "released_joint": Experiment("joint", RELEASED_FORMS, released=True),
    "released_losses": Experiment("losses", RELEASED_LOSSES, released=True, together=True),
}


@dataclass(frozen=True)
class Target:
    """What theory says that descent converges to: selected tokens [n], p and (in a joint run) v in direction."""

    selected: Tensor
    p: Tensor
    v: Tensor | None
    locally_optimal: bool
    globally_optimal: bool


def find_target(problem: TokenProblem, path: Path, joint: bool) -> Target:
    """The max-margin directions of the tokens that the end of `path` attends to.

    Raises:
        NotSeparableError: these tokens cannot be separated, so that theory says nothing.
        RuntimeError: the solver finds no solution within float64.
    """
    keys = problem.x @ problem.w
    selected = (keys @ path.p[-1]).argmax(-1)
    tokens = problem.x[torch.arange(len(selected)), selected]
    v: Tensor | None = None
    relaxed: Tensor | None = None
    if joint:
        v = max_margin_head(tokens, problem.labels)
        relaxed = problem.labels * (tokens @ v) > 1 + 1e-6  # no support vectors of v
    p = max_margin_direction(keys, selected, relaxed=relaxed)
    scores = problem.labels.unsqueeze(-1) * (problem.x @ (problem.v if v is None else v))
    local = bool(locally_optimal(keys, scores, selected, relaxed=relaxed, p=p).all())
    return Target(selected, p, v, local, bool((scores.argmax(-1) == selected).all()))


def measure(problem: TokenProblem, path: Path, target: Target) -> dict[str, Tensor]:
    """Each ``[steps + 1]``: correlations with the target, least probability of a selected token, ‖p‖."""
    probabilities = (path.p @ (problem.x @ problem.w).mT).softmax(-1)  # [n, steps + 1, T]
    chosen = probabilities.gather(-1, target.selected.view(-1, 1, 1).expand(-1, len(path.p), 1)).squeeze(-1)
    return {
        "correlation_p": functional.cosine_similarity(path.p, target.p.unsqueeze(0)),
        "correlation_v": torch.full_like(path.v[:, 0], torch.nan)
        if target.v is None
        else functional.cosine_similarity(path.v, target.v.unsqueeze(0)),
        "probability": chosen.amin(0),
        "norm_p": path.p.norm(dim=-1),
    }


@dataclass(frozen=True)
class Outcome:
    """What one problem gave: rows of the summary, of NAME.csv and of NAME_paths.csv."""

    lines: list[str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    paths: list[dict[str, Any]] = field(default_factory=list)


def run_problem(name: str, which: str, make: Callable[[], TokenProblem], steps: int) -> Outcome:
    """Run an experiment on one problem; a failure is a row of the summary."""
    experiment = EXPERIMENTS[name]
    joint, radii = experiment.joint, torch.logspace(0, 2, 9).tolist()
    try:
        problem = make()
        paths = {
            run: gradient_path(problem, joint=joint, steps=steps, **given) for run, given in experiment.settings.items()
        }
        target = find_target(problem, next(iter(paths.values())), joint)
        if not experiment.released:  # the path knows nothing of starts, which decide what is selected there
            paths[REGULARIZED] = regularization_path(problem, radii, joint=joint)
    except NotSeparableError as error:
        return Outcome([line(name, which, UNSOLVED, f"nothing to converge to: {error}")])
    except (RuntimeError, ValueError) as error:  # the other problems can still be measured
        return Outcome([line(name, which, UNSOLVED, f"failed: {' '.join(str(error).split())}")])
    measures = {run: measure(problem, path, target) for run, path in paths.items()}
    kept = {run: _kept(len(path.p), run) for run, path in paths.items()}
    kind = "global" if target.globally_optimal else "local" if target.locally_optimal else "neither"
    lines, rows = [], []
    for run, found in measures.items():
        lines.append(line(name, which, run, kind, {key: float(value[-1]) for key, value in found.items()}))
        rows += [
            {"seed": which, "run": run, "optimality": kind, "step": radii[step] if run == REGULARIZED else step}
            | {key: float(value[step]) for key, value in found.items()}
            for step in kept[run]
        ]
    return Outcome(lines, rows, [{"seed": which} | row for row in _points(paths, target, kept)])


def _kept(count: int, run: str) -> list[int]:
    """Of so many points, those that are kept: a hundred or two and the last, and all of a regularization path."""
    return sorted({*range(0, count, 1 if run == REGULARIZED else max(1, (count - 1) // 100)), count - 1})


def _points(paths: Mapping[str, Path], target: Target, kept: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """Where p (and v) went, in the plane of the figure."""
    directions = {"p": target.p} if target.v is None else {"p": target.p, "v": target.v}
    return [
        {"parameter": name, "run": run, "along": float(along[step]), "across": float(across[step])}
        for name, direction in directions.items()
        for run, (along, across) in plane({run: getattr(path, name) for run, path in paths.items()}, direction).items()
        for step in kept[run]
    ]


def run_experiment(
    name: str, seeds: Sequence[int], steps: int, output: File, on_problem: Callable[[list[str]], None]
) -> None:
    """Run one experiment; after each problem write NAME.csv, and pass the rows.

    NAME.png and NAME_paths.csv are of the first problem that is solved, or of all where the experiment says so.

    Args:
        on_problem: is given the rows of the summary so far.
    """
    lines: list[str] = []
    rows: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    experiment = EXPERIMENTS[name]
    problems = experiment.problems(seeds)
    for which, make in tqdm(problems.items(), desc=f"token-selection: {name}", unit="problem", disable=None):
        outcome = run_problem(name, which, make, steps)
        lines += outcome.lines
        rows += outcome.rows
        write_rows(output / f"{name}.csv", COLUMNS, rows)
        on_problem(lines)
        if not points:  # of an earlier call, if this one has nothing to draw
            for file in (f"{name}.png", f"{name}_paths.csv"):
                (output / file).unlink(missing_ok=True)
        if outcome.paths and (experiment.together or not points):
            points += outcome.paths
            write_rows(output / f"{name}_paths.csv", PATH_COLUMNS, points)
            figure = draw_together(points) if experiment.together else draw_selection(rows, points, REGULARIZED)
            figure.savefig(output / f"{name}.png", dpi=110)


def earlier_lines(path: File, steps: int, again: Sequence[str]) -> dict[str, list[str]]:
    """Rows of an earlier call's summary by experiment, of any seeds, as each row names its own.

    Raises:
        UsageError: rows of experiments that are not run `again` are of another number of steps.
    """
    if not path.is_file():
        return {}
    text, head = path.read_text(encoding="utf-8").splitlines(), summary([], steps).splitlines()
    found = {name: [each for each in text if each.startswith(f"| {name} |")] for name in EXPERIMENTS}
    if text[: len(head)] == head:
        return {name: lines for name, lines in found.items() if lines}
    stay = [name for name, lines in found.items() if lines and name not in again]
    if stay:
        raise UsageError(
            f"{path} has {', '.join(stay)} of another number of steps than {steps}, or of another version: give "
            "another --output folder, or --experiment all"
        )
    return {}


def main(arguments: Sequence[str]) -> None:
    """Run `attnswap analyze token-selection` with these arguments.

    Raises:
        UsageError: numbers that make no sense, an `--output` that is no folder or that another command holds, or an
            interruption; the problems before it are kept.
        SystemExit: arguments that the parser refuses.
    """
    parser = argparse.ArgumentParser(prog="attnswap analyze token-selection", allow_abbrev=False, description=__doc__)
    parser.add_argument("--experiment", choices=[*EXPERIMENTS, "all"], default="all", help="default: %(default)s")
    parser.add_argument(
        "--output",
        required=True,
        type=File,
        help=f"folder for NAME.csv, NAME_paths.csv, NAME.png, {SUMMARY}, {MADE_BY}",
    )
    parser.add_argument("--seeds", type=int, default=3, help="of our problems, 0 to this, each drawn anew (default: 3)")
    parser.add_argument("--steps", type=int, default=1000, help="default: %(default)s, as in the paper")
    options = parser.parse_args(list(arguments))
    recording = Recording("attnswap analyze token-selection", arguments)
    for option in ("seeds", "steps"):
        if getattr(options, option) < 1:
            raise UsageError(f"--{option} must be at least 1, got {getattr(options, option)}")
    names = list(EXPERIMENTS) if options.experiment == "all" else [options.experiment]
    with output_folder(options.output):
        _run(names, options.seeds, options.steps, options.output, recording)
        print((options.output / SUMMARY).read_text(encoding="utf-8"), end="")


def _run(names: Sequence[str], seeds: int, steps: int, output: File, recording: Recording) -> None:
    """Run experiments, and keep the tables of each problem that is solved."""
    found = earlier_lines(output / SUMMARY, steps, names)
    read_made_by(output)  # a damaged one is refused before anything runs
    done: list[str] = []

    def keep(name: str, lines: list[str]) -> None:
        found[name] = lines
        rows = [row for each in EXPERIMENTS for row in found.get(each, ())]
        (output / SUMMARY).write_text(summary(rows, steps), encoding="utf-8")
        recording.write(output)
        done.append(name)

    try:
        for name in names:
            run_experiment(name, range(seeds), steps, output, partial(keep, name))
    except KeyboardInterrupt:
        count = ", ".join(f"{done.count(name)} of {name}" for name in dict.fromkeys(done)) or "none"
        raise UsageError(
            f"interrupted: of {seeds} problems an experiment, {count} are kept in {output} (NAME.csv, "
            f"NAME_paths.csv, {SUMMARY}); the same command would begin anew"
        ) from None


def plane(paths: Mapping[str, Tensor], direction: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Each path ``[points, d]`` along the direction, and at right angles to it, where the paths go most.

    Of the two ways to go at right angles the one along its largest coordinate is positive.
    """
    along = direction / direction.norm()
    rest = {run: path - (path @ along).unsqueeze(-1) * along for run, path in paths.items()}
    across = torch.linalg.svd(torch.cat(list(rest.values())), full_matrices=False)[2][0]
    across = across * across[across.abs().argmax()].sign()
    return {run: (path @ along, rest[run] @ across) for run, path in paths.items()}
