"""The spectrum of W = W_qᵀ W_k, the matrix that scores one token against another in a head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class QKSpectrum:
    """Eigenvalues of W of every head that may differ from zero.

    Args:
        eigenvalues: complex ``[H, d]``, the eigenvalues of the d x d product G = W_k W_qᵀ.
        dim: width of W, d_model; the other ``dim - d`` eigenvalues of W are exactly zero.

    Example:
        >>> import torch
        >>> from attnswap.analysis import qk_spectrum
        >>> w_q, w_k = torch.randn(2, 3, 4, 12)  # three heads of width 4, of 12 features
        >>> spectrum = qk_spectrum(w_q, w_k)
        >>> spectrum.eigenvalues.shape, spectrum.dim
        (torch.Size([3, 4]), 12)
    """

    eigenvalues: Tensor
    dim: int

    @property
    def mean(self) -> Tensor:
        """Mean of all ``dim`` eigenvalues, tr W / dim, ``[H]``."""
        return self.eigenvalues.real.sum(-1) / self.dim

    @property
    def variance(self) -> Tensor:
        """Mean of ``|eigenvalue - mean|²`` over all ``dim`` eigenvalues, ``[H]``."""
        return self._spread(self.eigenvalues - self.mean.unsqueeze(-1))

    @property
    def variance_real(self) -> Tensor:
        """Variance of the real parts of all ``dim`` eigenvalues, ``[H]``."""
        return self._spread(self.eigenvalues.real - self.mean.unsqueeze(-1))

    @property
    def max_abs(self) -> Tensor:
        """Spectral radius, ``[H]``."""
        return self.eigenvalues.abs().amax(-1)

    @property
    def max_real(self) -> Tensor:
        """Largest real part of all ``dim`` eigenvalues, ``[H]``."""
        largest = self.eigenvalues.real.amax(-1)
        return largest.clamp(min=0) if self._zeros else largest

    @property
    def min_real(self) -> Tensor:
        """Smallest real part of all ``dim`` eigenvalues, ``[H]``."""
        smallest = self.eigenvalues.real.amin(-1)
        return smallest.clamp(max=0) if self._zeros else smallest

    @property
    def _zeros(self) -> int:
        return self.dim - self.eigenvalues.shape[-1]

    def _spread(self, deviations: Tensor) -> Tensor:
        # The zeros beyond the head's own d eigenvalues each lie |mean| away from the mean.
        return (deviations.abs().square().sum(-1) + self._zeros * self.mean.square()) / self.dim


def _check(w_q: Tensor, w_k: Tensor) -> None:
    if w_q.ndim != 3 or w_q.shape != w_k.shape:
        raise ValueError(
            f"w_q and w_k must both be [heads, head_dim, dim], got {tuple(w_q.shape)} and {tuple(w_k.shape)}"
        )
    if w_q.shape[1] > w_q.shape[2]:
        raise ValueError(f"head_dim must not exceed dim, got head_dim={w_q.shape[1]} and dim={w_q.shape[2]}")


def frobenius_squared(w_q: Tensor, w_k: Tensor) -> Tensor:
    """‖W‖_F² = tr(W_q W_qᵀ W_k W_kᵀ) of every head, the scale of the spectrum; differentiable.

    Args:
        w_q: query weights ``[H, d, dim]``.
        w_k: key weights ``[H, d, dim]``.

    Returns:
        ``[H]``.

    Example:
        >>> import torch
        >>> from attnswap.analysis import frobenius_squared
        >>> w_q, w_k = torch.randn(2, 3, 4, 12, dtype=torch.float64)  # three heads of width 4, of 12 features
        >>> torch.allclose(frobenius_squared(w_q, w_k), (w_q.mT @ w_k).square().sum((-2, -1)))
        True
    """
    return ((w_q @ w_q.mT) * (w_k @ w_k.mT)).sum((-2, -1))


def trace(w_q: Tensor, w_k: Tensor) -> Tensor:
    """tr W, the sum of the eigenvalues, of every head, ``[H]``; arguments as :func:`frobenius_squared`.

    Example:
        >>> import torch
        >>> from attnswap.analysis import trace
        >>> w_q, w_k = torch.randn(2, 3, 4, 12, dtype=torch.float64)  # three heads of width 4, of 12 features
        >>> torch.allclose(trace(w_q, w_k), (w_q * w_k).sum((-2, -1)))
        True
    """
    return (w_q * w_k).sum((-2, -1))


def trace_squared(w_q: Tensor, w_k: Tensor) -> Tensor:
    """tr W² of every head, ``[H]``; arguments as :func:`frobenius_squared`; differentiable.

    It is the sum of the squared eigenvalues, negative for many W that are not symmetric.

    Example:
        >>> import torch
        >>> from attnswap.analysis import trace_squared
        >>> w_q, w_k = torch.randn(2, 3, 4, 12)  # three heads of width 4, of 12 features
        >>> trace_squared(w_q, w_k).shape
        torch.Size([3])
    """
    product = w_k @ w_q.mT  # [H, d, d]
    return (product * product.mT).sum((-2, -1))


def qk_spectrum(w_q: Tensor, w_k: Tensor) -> QKSpectrum:
    """Eigenvalues of W = W_qᵀ W_k of every head, through the d x d product; NaN of heads that are not finite.

    Args:
        w_q: query weights ``[H, d, dim]``; biases are no part of W.
        w_k: key weights ``[H, d, dim]``.

    Raises:
        ValueError: if the shapes differ or d exceeds dim.

    Example:
        >>> import torch
        >>> from attnswap.analysis import qk_spectrum
        >>> w_q, w_k = torch.randn(2, 3, 4, 12)  # three heads of width 4, of 12 features
        >>> qk_spectrum(w_q, w_k).eigenvalues.shape
        torch.Size([3, 4])
    """
    _check(w_q, w_k)
    product = w_k @ w_q.mT
    bad = ~product.isfinite().flatten(1).all(1)  # libraries refuse these, or compute numbers without a meaning
    eigenvalues = torch.linalg.eigvals(product.masked_fill(bad[:, None, None], 0.0))
    return QKSpectrum(eigenvalues.masked_fill(bad[:, None], torch.nan), w_q.shape[-1])


def qk_statistics(w_q: Tensor, w_k: Tensor, spectrum: QKSpectrum | None = None) -> dict[str, Tensor]:
    """Statistics of the QK eigenspectrum of every head, each ``[H]``.

    ``mean``, ``variance`` (mean ``|eigenvalue - mean|²``), ``variance_real``, ``max``, ``min`` (of the real parts) and
    ``max_abs`` are over all dim eigenvalues, the zeros included (after Bao, Hataya and Karakida, ICML 2024; the
    definition of the variance for complex eigenvalues is our reading). ``scale`` is ‖W‖_F², ``trace`` is tr W, and
    ``trace_variance`` is tr W² / dim - mean², which is no variance, and may be negative, where W is not symmetric.

    Args:
        w_q: query weights ``[H, d, dim]``.
        w_k: key weights ``[H, d, dim]``.
        spectrum: :func:`qk_spectrum` of these, where it is known already.

    Raises:
        ValueError: if the shapes differ or d exceeds dim.

    Example:
        >>> import torch
        >>> from attnswap.analysis import qk_statistics
        >>> w_q, w_k = torch.randn(2, 3, 4, 12)  # three heads of width 4, of 12 features
        >>> {name: tuple(value.shape) for name, value in qk_statistics(w_q, w_k).items()}["mean"]
        (3,)
    """
    spectrum = qk_spectrum(w_q, w_k) if spectrum is None else spectrum
    total = trace(w_q, w_k)
    return {
        "mean": spectrum.mean,
        "variance": spectrum.variance,
        "variance_real": spectrum.variance_real,
        "scale": frobenius_squared(w_q, w_k),
        "max": spectrum.max_real,
        "min": spectrum.min_real,
        "max_abs": spectrum.max_abs,
        "trace": total,
        "trace_variance": trace_squared(w_q, w_k) / spectrum.dim - (total / spectrum.dim).square(),
    }
