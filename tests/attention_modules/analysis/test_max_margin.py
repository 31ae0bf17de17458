"""ATT-SVM against golden values, another solver, and its optimality conditions."""

import pickle

import pytest
import torch
from scipy import optimize, sparse

from attention_modules.analysis import (
    NotSeparableError,
    locally_optimal,
    margin,
    max_margin_direction,
    max_margin_head,
)
from tests.attention_modules.mechanisms.test_golden import golden
from tests.rows import each_row


def another_solver(rows, right):
    """argmin ‖p‖ subject to rows @ p >= right, by an interior-point method."""
    clarabel = pytest.importorskip("clarabel")
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-12
    square, cone = sparse.identity(rows.shape[1], format="csc"), [clarabel.NonnegativeConeT(len(rows))]
    a = sparse.csc_matrix(-rows.numpy())
    answer = clarabel.DefaultSolver(square, [0.0] * rows.shape[1], a, -right.numpy(), cone, settings).solve()
    return torch.tensor(answer.x, dtype=torch.float64)


def feasible(rows, right):
    """Whether some p satisfies rows @ p >= right, by linear programming."""
    status = optimize.linprog([0] * rows.shape[1], -rows.numpy(), -right.numpy(), bounds=(None, None)).status
    return {0: True, 2: False}[status]


def constraints(keys, selected, relaxed=None):
    rows, right = [], []
    for i, token in enumerate(selected.tolist()):
        for t in range(keys.shape[1]):
            if t != token:
                rows.append(keys[i, token] - keys[i, t])
                right.append(0.0 if relaxed is not None and relaxed[i] else 1.0)
    return torch.stack(rows), torch.tensor(right).double()


def problem(n=3, tokens=4, dim=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(n, tokens, dim, generator=generator, dtype=torch.float64)
    return keys, torch.randint(tokens, (n,), generator=generator)


def test_golden_values():
    for meta, arrays in golden("att_svm"):
        keys = arrays["X"] @ arrays["W"]
        p = max_margin_direction(keys, arrays["selected"])
        torch.testing.assert_close(p, arrays["p"], rtol=0, atol=1e-6)
        assert margin(keys, arrays["selected"], p).min().item() == pytest.approx(meta["margin"], abs=1e-9)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("seed", range(3))
def test_equals_another_solver_at_every_scale(seed, scale):
    keys, selected = problem(seed=seed)
    expected = another_solver(*constraints(keys, selected)) / scale
    found = max_margin_direction(scale * keys, selected)
    assert (found - expected).norm() <= 1e-6 * expected.norm()


def test_relaxed_inputs_have_the_right_side_zero():
    keys, selected = problem(seed=4)
    relaxed = torch.tensor([False, True, False])
    p = max_margin_direction(keys, selected, relaxed=relaxed)
    expected = another_solver(*constraints(keys, selected, relaxed))
    assert (p - expected).norm() <= 1e-6 * expected.norm()
    assert p.norm() < max_margin_direction(keys, selected).norm()
    assert margin(keys, selected, p)[~relaxed].min().item() == pytest.approx(1, abs=1e-9)


def test_a_narrow_margin():
    keys = torch.tensor([[[1.0, 0], [1 - 1e-4, 0]], [[0.0, 1], [0, -1]]], dtype=torch.float64)
    p = max_margin_direction(keys, torch.tensor([0, 0]))
    torch.testing.assert_close(p, torch.tensor([1e4, 0.5]).double(), rtol=1e-6, atol=1e-6)


def test_nothing_to_tell_apart():
    keys, _ = problem(tokens=1)
    assert max_margin_direction(keys, torch.zeros(3, dtype=torch.long)).eq(0).all()
    assert margin(keys, torch.zeros(3, dtype=torch.long), torch.ones(12)).isinf().all()
    keys, selected = problem()
    assert max_margin_direction(keys, selected, relaxed=torch.ones(3, dtype=torch.bool)).eq(0).all()


def infeasible():
    """A token between two others, and the same tokens with opposite selections."""
    line = torch.tensor([[[-1.0, 0.3], [0.0, 0.0], [1.0, -0.3]]]).double()
    yield "between", line, torch.tensor([1])
    keys, _ = problem(n=1, tokens=2, dim=3)
    yield "opposite", keys.repeat(2, 1, 1), torch.tensor([0, 1])
    yield "equal", torch.ones(1, 2, 3).double(), torch.tensor([0])
    keys, _ = problem(n=1, tokens=3, dim=3)
    yield "one equal", torch.cat([keys, keys[:, :1]], 1), torch.tensor([0])
    yield "many", *problem(n=6, tokens=5, dim=3)


@pytest.mark.parametrize("case", list(infeasible()), ids=lambda case: case[0])
def test_infeasibility_is_certified(case):
    _, keys, selected = case
    with pytest.raises(NotSeparableError, match=r"infeasible; certified|are equal") as caught:
        max_margin_direction(keys, selected)
    rows, right = constraints(keys, selected)
    multipliers = caught.value.multipliers
    assert multipliers.ge(0).all()
    assert (multipliers * right).sum().item() == pytest.approx(1)
    assert (multipliers @ rows).norm() < 1e-7
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert torch.equal(again.multipliers, multipliers)


def random_sizes(seed):
    """A problem of 1 to 5 inputs, tokens and dimensions, with and without relaxed inputs, as constraints too."""
    generator = torch.Generator().manual_seed(seed)
    n, tokens, dim = torch.randint(1, 6, (3,), generator=generator).tolist()
    keys = torch.randn(n, tokens + 1, dim, generator=generator, dtype=torch.float64)
    selected = torch.randint(tokens + 1, (n,), generator=generator)
    relaxed = torch.rand(n, generator=generator) < 0.2 * (seed % 2)
    relaxed[0] = False
    return (keys, selected, relaxed), constraints(keys, selected, relaxed)


def test_solves_what_is_feasible_and_certifies_what_is_not():
    found = []
    for seed in range(400):
        (keys, selected, relaxed), (rows, right) = random_sizes(seed)
        try:
            p = max_margin_direction(keys, selected, relaxed=relaxed)
        except NotSeparableError as error:
            y = error.multipliers
            assert y.ge(0).all()
            assert (y @ right).item() == pytest.approx(1)
            assert (y @ rows).norm() <= 1e-8 * rows.norm()
            found.append(False)
        else:
            assert (rows @ p - right).min() >= -1e-9
            # p is a sum of active rows with positive weights: with feasibility, what makes it the least.
            weights, residual = optimize.nnls(rows[(rows @ p - right).abs() < 1e-7].T.numpy(), p.numpy())
            assert residual <= 1e-9 * p.norm()
            assert (weights >= 0).all()
            found.append(True)
        assert found[-1] == feasible(rows, right), seed
    assert 150 < sum(found) < 350


@each_row("scale", [1e-200, 1e-6, 1e6, 1e200])
def test_scale_changes_the_length_alone(scale):
    for seed in range(60):
        (keys, selected, relaxed), _ = random_sizes(seed)
        try:
            expected = max_margin_direction(keys, selected, relaxed=relaxed)
        except NotSeparableError:
            with pytest.raises(NotSeparableError):
                max_margin_direction(scale * keys, selected, relaxed=relaxed)
        else:
            found = max_margin_direction(scale * keys, selected, relaxed=relaxed) * scale
            assert (found - expected).norm() <= 1e-9 * expected.norm()


@pytest.mark.parametrize("gap", [1e-2, 1e-4, 1e-6, 1e-8])
def test_differences_of_unlike_sizes(gap):
    keys = torch.tensor([[[1, 0], [0, gap]], [[0, gap], [0, 0]]], dtype=torch.float64)
    p = max_margin_direction(keys, torch.tensor([0, 0]))
    torch.testing.assert_close(p, torch.tensor([2, 1 / gap], dtype=torch.float64), rtol=1e-6, atol=0)


@each_row("gap", [1e-3, 1e-5, 1e-7])
def test_nearly_opposite_differences(gap):
    keys = torch.tensor([[[0, 0], [-1, -gap], [1, -gap]]], dtype=torch.float64)
    p = max_margin_direction(keys, torch.tensor([0]))
    torch.testing.assert_close(p, torch.tensor([0, 1 / gap], dtype=torch.float64), rtol=1e-6, atol=1e-6)
    keys[0, 1:, 1] = 0
    with pytest.raises(NotSeparableError, match="certified"):
        max_margin_direction(keys, torch.tensor([0]))


def test_what_float64_does_not_hold_is_said():
    keys = torch.tensor([[[1, 0], [0, 1e-200]], [[0, 1e-200], [0, 0]]], dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"float64 does not hold the solution .* 1\.0e-200 and 1\.0e\+00; scale"):
        max_margin_direction(keys, torch.tensor([0, 0]))
    with pytest.raises(RuntimeError, match="float64 does not hold"):
        max_margin_direction(torch.tensor([[[1e-310], [0]]], dtype=torch.float64), torch.tensor([0]))
    with pytest.raises(ValueError, match="exceed float64; scale the tokens down"):
        max_margin_direction(torch.tensor([[[1e308], [-1e308]]], dtype=torch.float64), torch.tensor([0]))


def test_a_solver_that_stops_early_is_asked_again(monkeypatch):
    expected, solve, calls = max_margin_direction(*problem()), optimize.nnls, []

    def stops_early(columns, target, maxiter):
        calls.append(columns)
        found = solve(columns, target, maxiter=maxiter)
        return found if len(calls) == 3 else (found[0] * ([1] + [0] * (len(found[0]) - 1)) + 1e-3, found[1])

    monkeypatch.setattr(optimize, "nnls", stops_early)
    torch.testing.assert_close(max_margin_direction(*problem()), expected)
    assert len(calls) == 3


def test_a_solver_that_gives_up_is_named(monkeypatch):
    def gives_up(*_, **__):
        raise RuntimeError("Maximum number of iterations reached.")

    monkeypatch.setattr(optimize, "nnls", gives_up)
    with pytest.raises(RuntimeError, match=r"max_margin_direction: the solver gave up \(Maximum"):
        max_margin_direction(*problem())


def test_a_right_side_of_zero_makes_equal_tokens_feasible():
    keys = torch.stack([torch.ones(2, 3), torch.tensor([[1.0, 0, 0], [0, 0, 0]])]).double()
    p = max_margin_direction(keys, torch.tensor([0, 0]), relaxed=torch.tensor([True, False]))
    torch.testing.assert_close(p, torch.tensor([1.0, 0, 0]).double(), atol=1e-9, rtol=0)


def test_head_is_the_hard_margin_svm():
    keys, _ = problem(n=5, tokens=1, dim=3, seed=2)
    labels = (keys[:, 0] @ torch.tensor([1.0, 2, 3]).double()).sign()
    v = max_margin_head(keys[:, 0], labels)
    torch.testing.assert_close(
        v, another_solver(labels[:, None] * keys[:, 0], torch.ones(5).double()), rtol=1e-6, atol=0
    )
    with pytest.raises(NotSeparableError):
        max_margin_head(torch.ones(2, 3), torch.tensor([1, -1]))
    with pytest.raises(ValueError, match=r"labels must be 1 or -1, got \[0, 1\]"):
        max_margin_head(torch.ones(2, 3), torch.tensor([1, 0]))
    with pytest.raises(TypeError, match=r"got torch.bool: give 2 \* labels"):
        max_margin_head(torch.ones(2, 3), torch.tensor([True, False]))
    with pytest.raises(ValueError, match="tokens must be finite"):
        max_margin_head(torch.full((2, 3), torch.inf), torch.tensor([1, -1]))


def test_locally_optimal_looks_at_active_constraints_only():
    # p = (1, 0); token 1 is on the margin, token 2 far behind it.
    keys = torch.tensor([[[1.0, 0], [0, 0], [-5, 0]]]).double()
    selected = torch.tensor([0])
    assert locally_optimal(keys, torch.tensor([[1.0, 0.5, 9.0]]), selected).tolist() == [True]
    assert locally_optimal(keys, torch.tensor([[1.0, 1.5, 0.0]]), selected).tolist() == [False]
    assert locally_optimal(keys, torch.tensor([[1.0, 1.0, 0.0]]), selected).tolist() == [False]
    for length in (0.1, 1.0, 10.0):  # of the given p it is the direction that counts
        p = torch.tensor([length, 0]).double()
        assert locally_optimal(keys, torch.tensor([[1.0, 0.5, 9.0]]), selected, p=p).tolist() == [True]
        assert locally_optimal(keys, torch.tensor([[1.0, 1.5, 0.0]]), selected, p=p).tolist() == [False]
    nearly = torch.tensor([[[1.0, 0], [0, 0], [-1e-3, 0]]]).double()  # token 2 is a thousandth behind the margin
    assert locally_optimal(nearly, torch.tensor([[1.0, 0.5, 9.0]]), selected).tolist() == [True]
    with pytest.raises(ValueError, match="p is no solution: it leaves a margin of -5"):
        locally_optimal(keys, torch.zeros(1, 3), selected, p=torch.tensor([-1.0, 0]) * 5 / 6)


@each_row(
    ("arguments", "error", "words"),
    [
        ((torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)), ValueError, r"keys must be \[n, T, d\]"),
        ((torch.zeros(2, 3, 0), torch.zeros(2, dtype=torch.long)), ValueError, r"T and d >= 1"),
        ((torch.zeros(2, 3, 4), torch.zeros(3, dtype=torch.long)), ValueError, r"selected \[n\]"),
        ((torch.zeros(2, 3, 4), torch.zeros(2)), TypeError, "integer indices"),
        ((torch.zeros(2, 3, 4), torch.tensor([0, 3])), ValueError, r"0\.\.2, got \[0, 3\]"),
        ((torch.full((2, 3, 4), torch.nan), torch.tensor([0, 1])), ValueError, "keys must be finite"),
        ((torch.full((2, 1, 4), torch.nan), torch.tensor([0, 0])), ValueError, r"NaN or infinity at \[0, 0, 0\]"),
        ((torch.zeros(2, 3, 4, dtype=torch.cfloat), torch.tensor([0, 1])), TypeError, "keys must be real"),
        ((torch.zeros(2, 3, 4), [0, 1]), TypeError, "selected must be a tensor, got list"),
    ],
)
def test_bad_input(arguments, error, words):
    with pytest.raises(error, match=words):
        max_margin_direction(*arguments)


def test_bad_relaxed_and_scores():
    keys, selected = problem()
    with pytest.raises(ValueError, match=r"relaxed must be bool \(3,\)"):
        max_margin_direction(keys, selected, relaxed=torch.zeros(3))
    with pytest.raises(TypeError, match="relaxed must be a tensor, got list"):
        max_margin_direction(keys, selected, relaxed=[True] * 3)
    with pytest.raises(ValueError, match="scores must be"):
        locally_optimal(keys, torch.zeros(3, 3), selected)
    with pytest.raises(ValueError, match=r"p must be \[d\] = \[12\] as the keys, got \(3,\)"):
        margin(keys, selected, torch.zeros(3))
    with pytest.raises(ValueError, match="scores must be finite"):
        locally_optimal(keys, torch.full((3, 4), torch.nan), selected)
    with pytest.raises(ValueError, match="p must be finite"):
        margin(keys, selected, torch.full((12,), torch.nan))
    with pytest.raises(ValueError, match="keys must be finite"):
        margin(keys * torch.nan, selected, torch.zeros(12))
