"""The local Lipschitz constant of a function of token sequences: the largest singular value of its Jacobian."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Method = Literal["golub-kahan", "power"]
_DTYPES = (torch.float32, torch.float64)
LEAST_STEPS = 8  # before a sample is said to have converged


@dataclass(frozen=True)
class LipschitzEstimate:
    """Local Lipschitz constants of a batch, and how far they can be trusted.

    Args:
        value: the estimate ``[B]``, from below up to rounding.
        iterations: products with J and with Jᵀ, as many of each.
        residual: ‖Jᵀu - value·v‖ for the estimate's unit vectors u = Jv/‖Jv‖ and v, ``[B]``: some singular value of J
            lies within it of ``value``.
        converged: whether ``residual`` came to ``tol * value``, ``[B]``, after 8 iterations at least or all that there
            are: at the first ones a singular value that lies above a cluster of others does not show in it.

    Example:
        >>> import torch
        >>> from attnswap.analysis import local_lipschitz
        >>> estimate = local_lipschitz(lambda x: 3 * x, torch.randn(2, 5, 4))
        >>> estimate.value.round(decimals=2), estimate.converged.all()
        (tensor([3., 3.]), tensor(True))
    """

    value: Tensor
    iterations: int
    residual: Tensor
    converged: Tensor


class NotFiniteError(ValueError):
    """An input, an output or a Jacobian holds NaN or infinite numbers: what the data did, not an argument.

    Example:
        >>> import torch
        >>> from attnswap.analysis import NotFiniteError, local_lipschitz
        >>> try:
        ...     local_lipschitz(lambda x: x / 0, torch.randn(1, 5, 4))
        ... except NotFiniteError:
        ...     print("not finite")
        not finite
    """


def local_lipschitz(
    fn: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    tol: float = 1e-3,
    max_iter: int = 50,
    generator: torch.Generator | None = None,
    method: Method = "golub-kahan",
) -> LipschitzEstimate:
    """The spectral norm ‖D_x fn‖₂ of the Jacobian at each sample, all samples of the batch at once.

    ``fn`` is called once and its linearization kept: products with J and Jᵀ repeat neither the function nor its
    first derivative. ``"golub-kahan"`` bidiagonalizes J with full reorthogonalization of the right vectors, of which
    it holds max_iter + 1 of the batch's size; ``"power"`` is the power method on JᵀJ of Castin, Ablin and Peyré (ICML
    2024), here with the same stopping rule (ours). Attention runs in PyTorch's MATH form, outside autocast.

    Args:
        fn: ``[B, n, d] -> [B, n, d']``, twice differentiable near ``x``, without randomness (dropout off), each sample
            by itself. Mixed samples are looked for with one product: what even samples take from odd ones is seen,
            other mixing is not.
        x: ``[B, n, d]``, float32 or float64.
        tol: relative residual at which a sample has converged, between 0 and 1.
        max_iter: the most iterations, each a product with J and one with Jᵀ; below 8, a sample has converged only
            where its space is exhausted before.
        generator: draws the starting vectors; None for fixed ones. The global random state is not touched.
        method: ``"golub-kahan"`` or ``"power"``.

    Raises:
        TypeError: if ``x`` or the output is no floating tensor of 32 or 64 bits, or an option of another type.
        NotFiniteError: (a ValueError) if a number of the input, the output or the Jacobian is NaN or infinite.
        ValueError: if an option is out of its limits, a shape does not fit, samples are mixed, or the output does not
            depend on ``x``.
        RuntimeError: if ``fn``, or a part of it, cannot be differentiated twice.

    Example:
        >>> import torch
        >>> from attnswap.analysis import local_lipschitz
        >>> local_lipschitz(lambda x: 3 * x, torch.randn(2, 5, 4)).value.round(decimals=2)
        tensor([3., 3.])
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function of x, got {fn!r}")
    _check_options(tol, max_iter, method)
    check_generator(generator)
    check_input(x)
    with twice_differentiable(x.device):
        jacobian = Jacobian(fn, x)
        start = start_vectors(x, generator)
        first = jacobian.times(start)
        jacobian.check(start, first)
        run = _golub_kahan if method == "golub-kahan" else _power
        return run(jacobian, start, first, tol, max_iter)


@contextmanager
def twice_differentiable(device: torch.device) -> Iterator[None]:
    """Gradients of gradients: attention in PyTorch's MATH form, outside autocast and inference mode."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        sdpa_kernel(SDPBackend.MATH),  # fused kernels have no double backward
    ):
        yield


def start_vectors(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """A random unit vector for each sample, ``[B, n * d]``; the same ones where ``generator`` is None."""
    if generator is None:
        generator = torch.Generator(x.device).manual_seed(0)
    start = torch.randn(x.shape, generator=generator, device=generator.device, dtype=x.dtype)
    start = start.to(x.device).flatten(1)
    return start / start.norm(dim=1, keepdim=True)


class Jacobian:
    """The Jacobian of ``fn`` at ``x`` as a linear map of each sample, between flat vectors ``[B, n * d]``."""

    def __init__(self, fn: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.x = x.detach().clone().requires_grad_()
        self.y = fn(self.x.clone())  # a copy may be changed in place
        _check_output(self.y, self.x)
        # Jᵀu is linear in u, so that its derivative for u, at any u, is J: a product with J in reverse mode alone.
        self.u = torch.zeros_like(self.y, requires_grad=True)
        (pulled,) = torch.autograd.grad(self.y, self.x, self.u, create_graph=True, allow_unused=True)
        if pulled is None:
            raise ValueError(_NO_DEPENDENCE)
        if not pulled.requires_grad:
            raise RuntimeError(_NOT_TWICE)
        self.pulled = pulled

    def times(self, v: Tensor) -> Tensor:
        """J v."""
        try:
            (out,) = torch.autograd.grad(self.pulled, self.u, v.view_as(self.x), retain_graph=True)
        except RuntimeError as error:
            raise RuntimeError(f"{_NOT_TWICE} PyTorch says: {error}") from error
        return _finite(out.flatten(1))

    def transposed_times(self, u: Tensor) -> Tensor:
        """Jᵀ u."""
        (out,) = torch.autograd.grad(self.y, self.x, u.view_as(self.y), retain_graph=True)
        return _finite(out.flatten(1))

    def check(self, v: Tensor, out: Tensor) -> None:
        """Raise where samples are mixed, or products with J, of which ``out`` is that with ``v``, miss a part of it.

        Where a part of ``fn`` has no second derivative, ``times`` lacks it and ``transposed_times`` has it: the two are
        no transposes of each other. One product tells both, with a random vector for the even samples alone.
        """
        # Drawn on the CPU: once, and small.
        u = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype).to(out.device)
        u /= u.norm(dim=1, keepdim=True)
        u[1::2] = 0
        w = self.transposed_times(u)
        if bool((w[1::2] != 0).any()):
            raise ValueError(
                "fn mixes the samples of a batch, which must be independent (batch normalization in training, say): "
                "put it in eval mode, or give one sample at a time; a layer that takes [tokens, batch, features] "
                "needs an attribute batch_first = False"
            )
        u, w, v, out = (each[::2].cpu().double() for each in (u, w, v, out))  # not every device has float64
        apart = ((u * out).sum(1) - (w * v).sum(1)).abs()
        size = out.norm(dim=1) / out.shape[1] ** 0.5 + w.norm(dim=1) / w.shape[1] ** 0.5  # of such sums
        if bool((apart > 10 * torch.finfo(self.x.dtype).eps ** 0.5 * size).any()):
            raise RuntimeError(f"{_NOT_TWICE} A part of fn has none: what it gives is missing in products with J.")


def _golub_kahan(jacobian: Jacobian, v: Tensor, first: Tensor, tol: float, max_iter: int) -> LipschitzEstimate:
    """J V = U B, Jᵀ U = V Bᵀ + β v eᵀ, with B upper bidiagonal; its largest singular value is the estimate.

    Only V is kept and orthogonalized again, which keeps U orthogonal as well (Simon and Zha, 2000).
    """
    batch, size = v.shape
    right = v.new_empty(batch, max_iter + 1, size)
    small = torch.zeros(batch, max_iter, max_iter, dtype=torch.float64)  # B, on the CPU
    u, beta = v.new_zeros(batch, 1), v.new_zeros(batch)
    largest = v.new_zeros(batch)  # size of B's entries so far, below which rounding is
    right[:, 0] = v
    for step in range(max_iter):
        if step:
            small[:, step - 1, step] = beta.cpu().double()
        out = jacobian.times(right[:, step]) if step else first
        alpha, u = _normalized(out - beta.unsqueeze(1) * u, largest)
        largest = largest.maximum(alpha)
        v = jacobian.transposed_times(u) - alpha.unsqueeze(1) * right[:, step]
        beta, right[:, step + 1] = _normalized(_orthogonalized(v, right[:, : step + 1]), largest)
        largest = largest.maximum(beta)
        small[:, step, step] = alpha.cpu().double()
        u_small, singular, _ = torch.linalg.svd(small[:, : step + 1, : step + 1])
        value = singular[:, 0].to(beta)
        residual = beta * u_small[:, step, 0].abs().to(beta)
        settled = (beta == 0) | (step + 1 >= min(LEAST_STEPS, size))
        converged = settled & _within(residual, value, tol)
        if bool(converged.all()):
            break
    return LipschitzEstimate(value, step + 1, residual, converged)


def _power(jacobian: Jacobian, v: Tensor, first: Tensor, tol: float, max_iter: int) -> LipschitzEstimate:
    """Power iteration on JᵀJ."""
    zero, before = v.new_zeros(len(v)), v.new_full((len(v),), math.inf)
    rounding = 10 * torch.finfo(v.dtype).eps
    iterations = 0
    while iterations < max_iter:
        value, u = _normalized(jacobian.times(v) if iterations else first, zero)
        iterations += 1
        w = jacobian.transposed_times(u)
        residual = norms(w - value.unsqueeze(1) * v)
        # A residual that grows is a larger singular value that comes up.
        settled = (residual <= rounding * value) | ((residual <= before) & (iterations >= LEAST_STEPS))
        converged = settled & _within(residual, value, tol)
        if bool(converged.all()):
            break
        before = residual
        _, unit = _normalized(w, zero)
        v = torch.where((unit == 0).all(1, keepdim=True), v, unit)
    return LipschitzEstimate(value, iterations, residual, converged)


def _within(residual: Tensor, value: Tensor, tol: float) -> Tensor:
    """Whether the residual is small; not where the value is so small that its digits are lost."""
    exact = (value == 0) | (value >= torch.finfo(value.dtype).tiny / tol)
    return exact & value.isfinite() & (residual <= tol * value)


def norms(vectors: Tensor) -> Tensor:
    """Norms of ``[B, m]``; no square overflows, or is lost because it is small."""
    largest = vectors.detach().abs().amax(1)
    return largest * (vectors / largest.masked_fill(largest == 0, 1.0).unsqueeze(1)).norm(dim=1)


def _orthogonalized(vector: Tensor, basis: Tensor) -> Tensor:
    """``[B, m]`` without its part in the orthonormal ``[B, k, m]``."""
    before = norms(vector)
    vector = _without(vector, basis)
    if bool((norms(vector) < 0.7 * before).any()):  # much was taken, so that rounding is left: once more
        vector = _without(vector, basis)
    return vector


def _without(vector: Tensor, basis: Tensor) -> Tensor:
    overlap = (basis @ vector.unsqueeze(-1)).mT  # [B, 1, k]; the other way round would read basis across its rows
    return torch.baddbmm(vector.unsqueeze(1), overlap, basis, alpha=-1).squeeze(1)


def _normalized(vector: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Norms ``[B]`` and unit vectors; zero both where nothing but rounding is left, as the space is exhausted."""
    norm = norms(vector)
    if not bool(norm.isfinite().all()):
        raise ValueError(f"the Jacobian of fn at x is too large for {norm.dtype}: give x.double(), or scale fn down")
    limits = torch.finfo(norm.dtype)
    norm = norm.masked_fill(norm <= 10 * limits.eps * largest, 0.0)
    gone = norm < limits.tiny  # of smaller numbers few digits are left, and no direction
    return norm, torch.where(gone.unsqueeze(1), 0.0, vector / norm.masked_fill(gone, 1.0).unsqueeze(1))


_NO_DEPENDENCE = (
    "the output of fn does not depend on its input through differentiable operations: is something detached, rounded, "
    "or under torch.no_grad()?"
)
_NOT_TWICE = (
    "fn cannot be differentiated twice, as the linearization needs: leave out torch.compile, and use operations with "
    "a second derivative (attention through scaled_dot_product_attention has one here)."
)


def _check_options(tol: float, max_iter: int, method: str) -> None:
    if isinstance(tol, bool) or not isinstance(tol, Real):
        raise TypeError(f"tol must be a number, got {tol!r}")
    if not 0 < tol < 1:
        raise ValueError(f"tol must be above 0 and below 1, got {tol!r}")
    if isinstance(max_iter, bool) or not isinstance(max_iter, int) or max_iter < 1:
        raise ValueError(f"max_iter must be an integer of at least 1, got {max_iter!r}")
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(map(repr, get_args(Method)))}, got {method!r}")


def check_generator(generator: object) -> None:
    """Raise a TypeError where it is neither a generator nor None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {generator!r}")


def check_input(x: Tensor) -> None:
    """Raise a TypeError or ValueError where ``x`` is no finite ``[B, n, d]`` of 32 or 64 bits."""
    if not isinstance(x, Tensor) or x.dtype not in _DTYPES:
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a tensor of float32 or float64, got {kind}; half precision: use x.float()")
    if x.dim() != 3 or x.numel() == 0:
        raise ValueError(f"x must be [batch, tokens, features], none of them 0, got {tuple(x.shape)}")
    _check_finite("x", x)


def _check_output(y: object, x: Tensor) -> None:
    if not isinstance(y, Tensor) or y.dtype not in _DTYPES:
        kind = f"a tensor of {y.dtype}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise TypeError(
            f"fn must return a tensor of float32 or float64, got {kind}; of a layer that returns more, take the first: "
            "lambda x: layer(x)[0]"
        )
    if y.dim() != 3 or y.shape[:2] != x.shape[:2] or y.shape[2] == 0:
        raise ValueError(
            f"fn must return [batch, tokens, features] with the batch and tokens of x, "
            f"got {tuple(y.shape)} for {tuple(x.shape)}"
        )
    _check_finite("fn(x)", y)
    if not y.requires_grad:
        raise ValueError(_NO_DEPENDENCE)


def _check_finite(what: str, values: Tensor, or_else: str = "") -> None:
    bad = values.detach().flatten(1).isfinite().all(1).logical_not().nonzero().flatten().tolist()
    if bad:
        cure = f"leave them out, or mend them{or_else}"
        raise NotFiniteError(f"{what} holds NaN or infinite numbers in the samples {bad}: {cure}")


def _finite(product: Tensor) -> Tensor:
    _check_finite("the Jacobian of fn at x", product, f"; if only {product.dtype} cannot hold them, give x.double()")
    return product
