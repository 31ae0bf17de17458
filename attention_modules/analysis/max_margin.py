"""The hard-margin problems that token selection converges to: ATT-SVM for the prompt, an SVM for the head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention_modules.extras import needed_for
from attention_modules.precision import to_float64

_ACTIVE = 1e-6  # how far above its right side a constraint still counts as active
_CERTAIN = 1e8  # infeasible means: no solution has a norm below this, in units of 1 / the least strict difference
_TRIES = 10  # scipy 1.15 (the last for Python 3.10) ends early on 1 problem in 100, unsaid
_EXACT = 1e-6  # by how much, relatively, a solution may miss a constraint


class NotSeparableError(ValueError):
    """No direction satisfies the constraints; ``multipliers`` prove it.

    Args:
        message: what was asked for, and the proof in words.
        multipliers: y >= 0, one a constraint ⟨a_j, p⟩ >= b_j, with Σ y_j b_j = 1 and Σ y_j a_j = 0 (Farkas), to within
            rounding.

    Example:
        >>> import torch
        >>> from attnswap.analysis import NotSeparableError, max_margin_head
        >>> try:
        ...     max_margin_head(torch.tensor([[1.0], [2.0]]), torch.tensor([1, -1]))
        ... except NotSeparableError as error:
        ...     print(len(error.multipliers))
        2
    """

    def __init__(self, message: str, multipliers: Tensor) -> None:
        super().__init__(message)
        self.multipliers = multipliers

    def __reduce__(self) -> tuple[type, tuple[str, Tensor]]:
        return type(self), (str(self), self.multipliers)


def _least_norm(rows: Tensor, right: Tensor, what: str) -> Tensor:
    """argmin ‖p‖ subject to rows @ p >= right, in float64 on the CPU; ``rows`` [m, d], ``right`` [m] of 0 and 1."""
    if not rows.isfinite().all():
        raise ValueError(f"{what}: differences of tokens exceed float64; scale the tokens down")
    strict = right > 0
    if not strict.any():
        return rows.new_zeros(rows.shape[-1])
    largest = rows.abs().amax(-1)
    kept = largest > 0
    equal = to_float64(strict & ~kept)
    if equal.any():
        raise NotSeparableError(f"{what}: tokens to be told apart are equal", equal / equal.sum())
    # Rows of length 1, by the largest entry first, as squares underflow; right sides in units of the largest of them.
    units = rows[kept] / largest[kept].unsqueeze(-1)
    lengths = units.norm(dim=-1)
    units, lengths = units / lengths.unsqueeze(-1), lengths * largest[kept]
    shortest = lengths[strict[kept]].min()
    sides = right[kept] * (shortest / lengths)
    y = _dual(units, sides, what)
    least = 1 / max((y @ units).norm().item(), 1e-300)
    if least > _CERTAIN:
        # For every p that is feasible 1 = Σ y_j b_j <= ⟨Σ y_j a_j, p⟩ <= ‖Σ y_j a_j‖ ‖p‖.
        multipliers = torch.zeros_like(right)
        multipliers[kept] = y * (shortest / lengths)
        raise NotSeparableError(
            f"{what}: no direction keeps every margin, so the problem is infeasible; certified by multipliers "
            f"(error.multipliers) under which a solution's norm would exceed {least / shortest.item():.1e}. "
            "Select other tokens, or relax inputs",
            multipliers,
        )
    if least > 100:  # the dual is as exact as 1 / ‖p‖²: solve again in units in which ‖p‖ is 1
        y = _dual(units, sides / least, what)
    active = y > 0  # these hold with equality, which says where p is more exactly than y does
    p = torch.linalg.lstsq(units[active], sides[active].unsqueeze(-1), driver="gelsd").solution.squeeze(-1)
    missed = ((sides - units @ p) / sides.where(strict[kept], p.norm())).max().item()
    p = p / shortest
    if not missed <= _EXACT or not p.isfinite().all():
        raise RuntimeError(
            f"{what}: float64 does not hold the solution (a margin is missed by {missed:.1e} of it): differences of "
            f"tokens lie between {lengths.min():.1e} and {lengths.max():.1e}; scale the tokens, or leave out the least"
        )
    return p


def _dual(rows: Tensor, right: Tensor, what: str) -> Tensor:
    """y >= 0 with ⟨y, right⟩ = 1 and the least ‖Σ y_j rows_j‖, 1 / ‖p‖ (Lawson and Hanson 1974, chapter 23)."""
    with needed_for("a max-margin direction", "analysis"):
        from scipy.optimize import nnls

    columns = torch.cat([rows.T, right.unsqueeze(0)])
    target = torch.zeros(len(columns), dtype=torch.float64)
    target[-1] = 1
    generator, size = torch.Generator().manual_seed(0), torch.ones_like(right)
    for _ in range(_TRIES):
        try:  # the sizes of the columns change the order in which they enter, not the solution
            y = size * torch.from_numpy(nnls((columns * size).numpy(), target.numpy(), maxiter=30 * len(rows))[0])
        except RuntimeError as error:
            raise RuntimeError(f"{what}: the solver gave up ({error}); leave out tokens or inputs") from error
        rest = target - columns @ y
        gain = columns.T @ rest  # of a y_j that grew; that of a positive y_j is zero
        if max(gain.max(), gain[y > 0].abs().max()) <= 1e-14 + 1e-9 * rest.norm():
            break
        size = torch.rand(len(rows), generator=generator, dtype=torch.float64) + 0.1
    return y / (y @ right)


def _check(keys: Tensor, selected: Tensor) -> None:
    _check_tensors(keys=keys, selected=selected)
    if keys.ndim != 3 or not all(keys.shape[1:]) or selected.shape != keys.shape[:1]:
        raise ValueError(
            f"keys must be [n, T, d] with T and d >= 1 and selected [n], got {tuple(keys.shape)} and "
            f"{tuple(selected.shape)}"
        )
    if selected.dtype.is_floating_point or selected.dtype == torch.bool:
        raise TypeError(f"selected must hold integer indices of tokens, got {selected.dtype}")
    _check_finite(keys=keys)
    if ((selected < 0) | (selected >= keys.shape[1])).any():
        raise ValueError(f"selected must lie in 0..{keys.shape[1] - 1}, got {selected.tolist()}")


def _check_tensors(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}: give torch.tensor({name})")
        if value.is_complex():
            raise TypeError(f"{name} must be real, got {value.dtype}: give {name}.real, or both parts side by side")


def _check_finite(**given: Tensor) -> None:
    for name, value in given.items():
        if not value.isfinite().all():
            raise ValueError(
                f"{name} must be finite, got NaN or infinity at {(~value.isfinite()).nonzero()[0].tolist()}"
            )


def _check_direction(p: Tensor, keys: Tensor) -> Tensor:
    """p in float64 on the CPU."""
    _check_tensors(p=p)
    if p.shape != keys.shape[-1:]:
        raise ValueError(f"p must be [d] = [{keys.shape[-1]}] as the keys, got {tuple(p.shape)}")
    _check_finite(p=p)
    return p.detach().cpu().double()


def _differences(keys: Tensor, selected: Tensor) -> Tensor:
    """k_{i,selected_i} - k_{i,t} for every t, ``[n, T, d]``, in float64 on the CPU; zero at the selected token."""
    keys, selected = keys.detach().cpu().double(), selected.cpu()
    return keys.take_along_dim(selected.view(-1, 1, 1), 1) - keys


def _others(keys: Tensor, selected: Tensor) -> Tensor:
    """Which tokens are not the selected ones, bool ``[n, T]``."""
    return torch.arange(keys.shape[1]) != selected.cpu().unsqueeze(-1)


def _relaxed(relaxed: Tensor | None, selected: Tensor) -> Tensor:
    if relaxed is None:
        return torch.zeros(selected.shape, dtype=torch.bool)
    _check_tensors(relaxed=relaxed)
    if relaxed.shape != selected.shape or relaxed.dtype != torch.bool:
        raise ValueError(
            f"relaxed must be bool {tuple(selected.shape)} as selected, got {relaxed.dtype} {tuple(relaxed.shape)}"
        )
    return relaxed.cpu()


def max_margin_direction(keys: Tensor, selected: Tensor, *, relaxed: Tensor | None = None) -> Tensor:
    """ATT-SVM: argmin ‖p‖ subject to pᵀ(k_{i,selected_i} - k_{i,t}) >= 1 for all t ≠ selected_i.

    Gradient descent on the prompt converges to it in direction (Tarzanagh et al., NeurIPS 2023, arXiv 2306.13596).

    Args:
        keys: ``[n, T, d]``, X W.
        selected: token of each input, integers ``[n]``.
        relaxed: inputs whose right side is 0 instead of 1, bool ``[n]``: those that are no support vectors of the head.

    Returns:
        p ``[d]``, float64; zero where nothing is to be told apart (T = 1).

    Raises:
        NotSeparableError: (a ValueError) if no p satisfies the constraints, with the proof.
        ValueError: if shapes or indices do not fit, or keys are not finite.
        TypeError: if ``selected`` holds no integers, or something is no tensor or complex.
        RuntimeError: if float64 does not hold the solution, or the solver gives up.

    Example:
        >>> import torch
        >>> from attnswap.analysis import max_margin_direction
        >>> keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
        >>> max_margin_direction(keys, torch.tensor([0])).round(decimals=3)
        tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """
    _check(keys, selected)
    others = _others(keys, selected)
    right = to_float64(~_relaxed(relaxed, selected)).unsqueeze(-1).expand(others.shape)
    return _least_norm(_differences(keys, selected)[others], right[others], "max_margin_direction")


def max_margin_head(tokens: Tensor, labels: Tensor) -> Tensor:
    """Hard-margin SVM without intercept: argmin ‖v‖ subject to y_i vᵀx_i >= 1.

    Args:
        tokens: the selected token of each input ``[n, d]``.
        labels: 1 or -1, ``[n]``.

    Returns:
        v ``[d]``, float64. Inputs with y_i vᵀx_i = 1 are its support vectors.

    Raises:
        NotSeparableError: (a ValueError) if no v separates the labels, with the proof.
        ValueError: if shapes do not fit, tokens are not finite, or labels are others than 1 and -1.
        TypeError: if something is no tensor or complex, or labels are bool.
        RuntimeError: as :func:`max_margin_direction`.

    Example:
        >>> import torch
        >>> from attnswap.analysis import max_margin_head
        >>> tokens = torch.tensor([[2.0, 0.0], [-2.0, 0.0]], dtype=torch.float64)
        >>> max_margin_head(tokens, torch.tensor([1, -1])).round(decimals=3) + 0.0
        tensor([0.5000, 0.0000], dtype=torch.float64)
    """
    _check_tensors(tokens=tokens, labels=labels)
    if tokens.ndim != 2 or labels.shape != tokens.shape[:1]:
        raise ValueError(f"tokens must be [n, d] and labels [n], got {tuple(tokens.shape)} and {tuple(labels.shape)}")
    if labels.dtype == torch.bool:
        raise TypeError("labels must be 1 or -1, got torch.bool: give 2 * labels.int() - 1")
    _check_finite(tokens=tokens)
    if labels.abs().ne(1).any():
        raise ValueError(f"labels must be 1 or -1, got {sorted(set(labels.tolist()))}")
    rows = labels.cpu().double().unsqueeze(-1) * tokens.detach().cpu().double()
    return _least_norm(rows, rows.new_ones(len(rows)), "max_margin_head")


def margin(keys: Tensor, selected: Tensor, p: Tensor) -> Tensor:
    """min over t ≠ selected_i of pᵀ(k_{i,selected_i} - k_{i,t}) of each input, ``[n]``; infinite where T = 1.

    Args:
        keys: ``[n, T, d]``.
        selected: token of each input, integers ``[n]``.
        p: ``[d]``; the margin scales with it.

    Raises:
        ValueError: if shapes or indices do not fit, or keys or p are not finite.
        TypeError: if ``selected`` holds no integers, or something is no tensor or complex.

    Example:
        >>> import torch
        >>> from attnswap.analysis import margin
        >>> keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
        >>> margin(keys, torch.tensor([0]), torch.tensor([1.0, -1.0]))
        tensor([2.], dtype=torch.float64)
    """
    _check(keys, selected)
    lead = _differences(keys, selected) @ _check_direction(p, keys)
    return lead.where(_others(keys, selected), torch.inf).amin(-1)


def locally_optimal(
    keys: Tensor, scores: Tensor, selected: Tensor, *, relaxed: Tensor | None = None, p: Tensor | None = None
) -> Tensor:
    """Whether the score of each selected token exceeds that of every token whose constraint is active (our reading).

    Selections for which this holds of all inputs attract gradient descent that starts near them (after Tarzanagh et
    al., NeurIPS 2023). A selection is globally optimal if it is the argmax of the scores.

    Args:
        keys: ``[n, T, d]``.
        scores: γ_it = y_i vᵀx_it, ``[n, T]``.
        selected: token of each input, integers ``[n]``.
        relaxed: see :func:`max_margin_direction`.
        p: its solution, where it is already there, at any length.

    Returns:
        bool ``[n]``.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`max_margin_direction`; ValueError also if scores are
            not finite, or ``p`` separates nothing.

    Example:
        >>> import torch
        >>> from attnswap.analysis import locally_optimal, max_margin_direction
        >>> keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
        >>> locally_optimal(keys, torch.tensor([[2.0, 1.0]], dtype=torch.float64), torch.tensor([0]))
        tensor([True])
    """
    _check(keys, selected)
    _check_tensors(scores=scores)
    if scores.shape != keys.shape[:2]:
        raise ValueError(f"scores must be [n, T] = {tuple(keys.shape[:2])}, got {tuple(scores.shape)}")
    _check_finite(scores=scores)
    strict = ~_relaxed(relaxed, selected).unsqueeze(-1)
    others = _others(keys, selected)
    p = max_margin_direction(keys, selected, relaxed=relaxed) if p is None else _check_direction(p, keys)
    lead = _differences(keys, selected) @ p
    least = lead[strict & others].min().item() if (strict & others).any() else 1.0
    if not least > 0:
        raise ValueError(f"p is no solution: it leaves a margin of {least:.3g} where it must keep one above 0")
    active = (lead / least <= to_float64(strict) + _ACTIVE) & others
    scores = scores.detach().cpu()
    ahead = scores.gather(1, selected.cpu().unsqueeze(-1)) > scores
    return (ahead | ~active).all(-1)
