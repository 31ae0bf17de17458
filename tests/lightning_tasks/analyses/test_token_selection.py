"""`attnswap analyze token-selection`: where the theory says that p points, and what plain autograd makes of it."""

import csv
import io
import json
import math
import subprocess
import sys

import pytest
import torch
from attnswap.datamodules import TokenSelectionDataModule
from attnswap.datamodules.token_selection import TokenProblem, released_problems
from torch.nn.functional import cosine_similarity

from attention_modules.analysis import NotSeparableError
from lightning_tasks.__main__ import main
from lightning_tasks.analyses import ANALYSES, token_selection
from lightning_tasks.analyses.descent import gradient_path, regularization_path
from lightning_tasks.analyses.token_selection import EXPERIMENTS, find_target, measure, plane


@pytest.mark.parametrize("name", ["single", "multi", "joint"])
def test_descent_and_regularization_path_reach_the_max_margin_direction(name):
    problem, joint = TokenSelectionDataModule(name).problem, name == "joint"
    path = gradient_path(problem, joint=joint, steps=200)
    target = find_target(problem, path, joint)
    assert target.locally_optimal
    best = regularization_path(problem, [1.0, 10.0, 100.0], joint=joint)
    assert not problem.v.requires_grad, "the problem stays as it was"
    torch.testing.assert_close(best.p.norm(dim=-1), torch.tensor([1.0, 10, 100]).double())
    for found in (measure(problem, path, target), measure(problem, best, target)):
        assert found["correlation_p"][-1] > 0.99
        assert not joint or found["correlation_v"][-1] > 0.99
        assert found["probability"][-1] > 0.99


def test_plain_autograd_fails_where_the_softmax_is_saturated():
    x = 3 * TokenSelectionDataModule("single").problem.x
    single = TokenSelectionDataModule("single").problem
    problem = TokenProblem(x, single.labels, single.w, single.v)
    path = gradient_path(problem, steps=200)
    target = find_target(problem, path, False)
    plain = gradient_path(problem, steps=200, form="plain")
    assert measure(problem, path, target)["correlation_p"][-1] > 0.99
    assert measure(problem, plain, target)["correlation_p"][-1] < 0.9


@pytest.mark.parametrize(("name", "count"), [("single", 12), ("multi", 6), ("joint", 2), ("losses", 11)])
def test_the_difference_form_reaches_the_direction_of_the_released_problems(name, count):
    problems, joint = released_problems(name), name == "joint"
    assert len(problems) == count
    for which in ("global 5", "local 4") if name == "single" else list(problems)[:1]:
        problem = problems[which]
        path = gradient_path(problem, joint=joint, steps=200)
        assert torch.equal(path.p[0], problem.start_p)
        assert not joint or torch.equal(path.v[0], problem.start_v)
        target = find_target(problem, path, joint)
        assert target.globally_optimal == (which != "local 4")
        assert target.locally_optimal
        assert measure(problem, path, target)["correlation_p"][-1] > 0.99


# What the released notebook gives when it is run: p after so many steps, its third coordinate is 0.
RELEASED = [
    ("C = 1", "linear", 50, (5.0000, 0.0000)),
    ("C = 10", "linear", 50, (4.6070, 1.2428)),
    ("C = 10", "linear", 100, (9.6054, 1.1526)),
    ("C = 10", "logistic", 50, (4.3822, -2.3643)),
    ("C = 10", "logistic", 100, (9.2951, -3.1544)),
    ("C = 100", "linear", 50, (4.0897, 2.5537)),
    ("C = 100", "logistic", 50, (3.5355, -3.5355)),
]


@pytest.mark.parametrize(("which", "loss", "step", "released"), RELEASED)
def test_losses_lead_where_the_released_code_leads(which, loss, step, released):
    path = gradient_path(released_problems("losses")[which], loss=loss, steps=step)
    assert path.p[-1].tolist() == pytest.approx([*released, 0], abs=1e-3)


def test_a_logistic_loss_and_a_large_score_turn_late_to_the_max_margin_direction():
    problem = released_problems("losses")["C = 100"]
    paths = {loss: gradient_path(problem, loss=loss, steps=200) for loss in ("logistic", "linear")}
    target = find_target(problem, paths["linear"], False)
    torch.testing.assert_close(target.p, torch.tensor([1.0, 0, 0]).double())
    ends = {loss: float(measure(problem, path, target)["correlation_p"][-1]) for loss, path in paths.items()}
    assert ends["linear"] > 0.99
    assert ends["logistic"] < 0.8


def test_a_descent_in_float32_is_one():
    problem = released_problems("single")["global 0"]
    double, single = (gradient_path(problem, steps=20, dtype=dtype) for dtype in (torch.float64, torch.float32))
    assert single.p.dtype == torch.float64
    assert torch.equal(single.p, single.p.float().double())
    assert 0 < (single.p - double.p).abs().max() < 1e-4


def test_plane_keeps_lengths_of_paths_that_lie_in_one():
    direction = torch.tensor([0.0, 2, 0]).double()
    path = torch.tensor([[0.0, 1, 1], [0, 3, -2]]).double()
    along, across = plane({"a": path}, direction)["a"]
    torch.testing.assert_close(along, torch.tensor([1.0, 3]).double())
    torch.testing.assert_close(across.abs(), torch.tensor([1.0, 2]).double())
    assert cosine_similarity(path[:, 1], along, dim=0) == pytest.approx(1)


@pytest.mark.figures
def test_command_writes_tables_and_figures(tmp_path, capsys):
    main(["analyze", "token-selection", "--seeds", "1", "--steps", "5", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "summary.md").read_text()
    assert "| released_joint | tight | all | nothing to converge to: " in printed  # after 5 steps from its far start
    for name, experiment in EXPERIMENTS.items():
        if name == "released_joint":
            continue
        with (tmp_path / f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        path = set() if experiment.released else {"regularisation path"}
        assert {row["run"] for row in rows} == {*experiment.settings, *path}
        for row in rows:
            assert f"| {name} | {row['seed']} | {row['run']} | {row['optimality']} | " in printed
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        with (tmp_path / f"{name}_paths.csv").open() as file:
            points = list(csv.DictReader(file))
        assert {point["parameter"] for point in points} == ({"p", "v"} if experiment.joint else {"p"})
        first = [row for row in rows if row["seed"] == points[0]["seed"]]
        of_p = [point for point in points if point["parameter"] == "p" and point["seed"] == points[0]["seed"]]
        names = [*experiment.problems([0])]
        assert {point["seed"] for point in points} == {*(names if experiment.together else names[:1])}
        assert [point["run"] for point in of_p] == [row["run"] for row in first]  # a point for each row
        cosines = [
            (float(point["along"]), float(row["correlation_p"]) * float(row["norm_p"]))
            for point, row in zip(of_p, first, strict=True)
            if row["correlation_p"] != "nan"
        ]
        assert cosines
        assert all(along == pytest.approx(expected, abs=1e-9) for along, expected in cosines)
        across = [float(point["across"]) for point in of_p]
        assert any(across)
        for point, far, row in zip(of_p, across, first, strict=True):
            assert math.hypot(float(point["along"]), far) <= float(row["norm_p"]) + 1e-9
        for problem in experiment.problems([0]):
            assert f"| {name} | {problem} | {next(iter(experiment.settings))} |" in printed


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_on_a_terminal_alone(tmp_path, monkeypatch):
    given = ["analyze", "token-selection", "--experiment", "single", "--seeds", "2", "--steps", "5", "--output"]
    shown = {}
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        main([*given, str(tmp_path / type(stream).__name__)])
        shown[type(stream)] = stream.getvalue()
    assert "token-selection: single: 100%" in shown[Terminal]
    assert "2/2" in shown[Terminal]
    assert shown[io.StringIO] == ""


@pytest.mark.parametrize(("count", "kept"), [(6, 6), (1001, 101), (1006, 102)])
def test_the_last_step_is_always_kept(count, kept):
    found = token_selection._kept(count, "difference form")
    assert (len(found), found[-1]) == (kept, count - 1)


def test_experiments_one_by_one_share_a_summary(tmp_path, capsys):
    given = ["analyze", "token-selection", "--seeds", "1", "--steps", "5", "--output", str(tmp_path)]
    main([*given, "--experiment", "multi"])
    main([*given, "--experiment", "single"])
    main([*given, "--experiment", "multi"])
    text = (tmp_path / "summary.md").read_text()
    found = [line.split("|")[1].strip() for line in text.splitlines() if "| 0 |" in line]
    assert found == ["single"] * 3 + ["multi"] * 3
    with pytest.raises(SystemExit, match="2"):
        main([*given, "--experiment", "single", "--steps", "4"])
    assert "has multi of another number of steps than 4" in capsys.readouterr().err
    assert (tmp_path / "summary.md").read_text() == text


def test_experiments_of_other_seeds_share_a_summary_whose_rows_name_them(tmp_path):
    given = ["analyze", "token-selection", "--steps", "5", "--output", str(tmp_path), "--experiment"]
    main([*given, "multi", "--seeds", "2"])
    main([*given, "single", "--seeds", "1"])
    rows = [line.split(" | ")[:2] for line in (tmp_path / "summary.md").read_text().splitlines() if " path |" in line]
    assert rows == [["| single", "0"], ["| multi", "0"], ["| multi", "1"]]
    main([*given, "multi", "--seeds", "1"])
    assert "| multi | 1 |" not in (tmp_path / "summary.md").read_text()


def seeds_of(path):
    with path.open() as file:
        return {row["seed"] for row in csv.DictReader(file)}


def test_interruption_keeps_the_finished_problems(tmp_path, capsys, monkeypatch):
    given = ["analyze", "token-selection", "--steps", "5", "--output", str(tmp_path)]
    main([*given, "--experiment", "joint", "--seeds", "1"])
    calls = []

    def interrupted(*arguments, **options):
        calls.append(options)
        if len(calls) == 4:  # the second run of the second seed
            raise KeyboardInterrupt
        return gradient_path(*arguments, **options)

    monkeypatch.setattr(token_selection, "gradient_path", interrupted)
    with pytest.raises(SystemExit, match="2"):
        main([*given, "--seeds", "2"])
    message = f"interrupted: of 2 problems an experiment, 1 of single are kept in {tmp_path} (NAME.csv, "
    message += "NAME_paths.csv, summary.md)"
    assert message in capsys.readouterr().err
    assert seeds_of(tmp_path / "single.csv") == {"0"}
    assert (tmp_path / "single.png").is_file()
    text = (tmp_path / "summary.md").read_text()
    assert "| single | 0 | difference form |" in text
    assert "| joint | 0 | difference form |" in text  # of the call before, of as many steps


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("no\nsolution"), "failed: no solution"),
        (NotSeparableError("between", torch.ones(1)), "nothing to converge to: between"),
    ],
)
def test_a_seed_that_fails_does_not_end_the_others(error, words, tmp_path, capsys, monkeypatch):
    calls = []

    def fails_first(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise error
        return find_target(*arguments)

    monkeypatch.setattr(token_selection, "find_target", fails_first)
    given = ["--experiment", "single", "--seeds", "2", "--steps", "5", "--output", str(tmp_path)]
    main(["analyze", "token-selection", *given])
    lines = capsys.readouterr().out.splitlines()
    assert f"| single | 0 | all | {words} |  |  |  |  |" in lines
    assert sum(line.startswith("| single | 1 |") for line in lines) == 3
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert seeds_of(tmp_path / "single.csv") == seeds_of(tmp_path / "single_paths.csv") == {"1"}
    assert (tmp_path / "single.png").is_file()


def test_plain_autograd_stops_where_its_gradient_is_rounded_to_zero(tmp_path, capsys):
    main(["analyze", "token-selection", "--experiment", "multi", "--seeds", "1", "--output", str(tmp_path)])
    cells = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| multi")]
    norms = {row[2]: float(row[-1].strip(" |")) for row in cells}
    assert norms["difference form"] > 99
    assert norms["plain autograd"] < 60
    assert norms["regularisation path"] == 100


def test_output_that_is_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        main(["analyze", "token-selection", "--output", str(tmp_path / "file")])
    assert "is a file; give a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["analyze", "token-selection", "--output", str(tmp_path / "file" / "sub" / "sub")])
    assert f"{tmp_path / 'file'} is a file; give a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["analyze", "token-selection", "--output", str(tmp_path / ("x" * 300))])
    assert "cannot be made: File name too long; give another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["kernel"], f"unknown analysis 'kernel'; the analyses are {', '.join(ANALYSES)}"),
        (["token-selection", "--output", "x", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["token-selection", "--output", "x", "--experiment", "triple"], "invalid choice"),
    ],
)
def test_refusals(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["analyze", *arguments])
    assert words in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_list_of_analyses_answers_without_torch(capsys):
    code = (
        "import sys, json; from lightning_tasks.__main__ import main; main(['analyze', '--help']);"
        "print(json.dumps([name in sys.modules for name in ('torch', 'lightning', 'scipy')]))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(name in answer.stdout for name in ANALYSES)
    assert json.loads(answer.stdout.splitlines()[-1]) == [False, False, False]
