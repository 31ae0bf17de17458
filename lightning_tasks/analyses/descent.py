"""Paths of a prompt (and a head): under gradient descent, and of the best on growing spheres."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from attnswap.datamodules.token_selection import TokenProblem
from torch import Tensor

from attention_modules import prompt_attention
from attention_modules.precision import to_float64
from lightning_tasks.token_selection import LOSSES, NormalizedGradientDescent, unit


@dataclass(frozen=True)
class Path:
    """Where p and v have been, float64 ``[steps + 1, d]`` each; a v that is not learned stays."""

    p: Tensor
    v: Tensor


def _loss(problem: TokenProblem, p: Tensor, v: Tensor, loss: str, form: str) -> Tensor:
    f = prompt_attention(problem.x, problem.x @ problem.w, p, v, form=form)
    return LOSSES[loss](problem.labels * f).mean()


def gradient_path(
    problem: TokenProblem,
    *,
    joint: bool = False,
    loss: str = "logistic",
    form: str = "difference",
    normalized: bool = True,
    lr: float = 0.1,
    steps: int = 1000,
    dtype: torch.dtype = torch.float64,
) -> Path:
    """Gradient descent on p with the head of the problem, or, where ``joint``, on p and v, from the problem's start.

    Raises:
        ValueError: if ``steps`` is below 1.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    start_p, start_v = (
        torch.zeros_like(problem.v) if start is None else start for start in (problem.start_p, problem.start_v)
    )
    p = start_p.to(dtype, copy=True).requires_grad_()
    v = (start_v if joint else problem.v).to(dtype, copy=True).requires_grad_(joint)
    problem = TokenProblem(*(part.to(dtype) for part in (problem.x, problem.labels, problem.w, problem.v)))
    optimizer = (NormalizedGradientDescent if normalized else torch.optim.SGD)([p, v] if joint else [p], lr=lr)
    path_p, path_v = [p.detach().clone()], [v.detach().clone()]
    for _ in range(steps):
        optimizer.zero_grad()
        _loss(problem, p, v, loss, form).backward()
        optimizer.step()
        path_p.append(p.detach().clone())
        path_v.append(v.detach().clone())
    return Path(to_float64(torch.stack(path_p)), to_float64(torch.stack(path_v)))


def regularization_path(
    problem: TokenProblem, radii: Sequence[float], *, joint: bool = False, loss: str = "logistic", steps: int = 60
) -> Path:
    """argmin of the loss over ‖p‖ = R (and ‖v‖ = R where ``joint``) for each R, ``[radii, d]``.

    Each is sought from the one before by steps along the sphere whose length decays from 0.3 R by a tenth per step: the
    branch that starts at the best of a small sphere, no search over all of the sphere.
    """
    v = unit((problem.labels.unsqueeze(-1) * problem.x.mean(1)).sum(0)) if joint else problem.v.detach()
    start = torch.zeros_like(problem.v).requires_grad_()
    p = -unit(torch.autograd.grad(_loss(problem, start, v, loss, "difference"), start)[0])
    path_p, path_v = [], []
    for radius in radii:
        p, v = radius * unit(p), radius * unit(v) if joint else v
        for step in range(steps):
            leaves = [p.requires_grad_(), v.requires_grad_()]
            gradients = torch.autograd.grad(_loss(problem, p, v, loss, "difference"), leaves)
            length = 0.3 * 0.9**step
            p, other = (
                radius * unit(unit(x.detach()) - length * unit(g)) for x, g in zip(leaves, gradients, strict=True)
            )
            v = other if joint else v.detach()
        path_p.append(p)
        path_v.append(v)
    return Path(torch.stack(path_p), torch.stack(path_v))
