"""Whether attention is kernel PCA: the values and the projection that this reading predicts, and how far they are off.

The reading is Teo and Nguyen's (NeurIPS 2024, arXiv 2406.13762); the measures are those of the reproduction study of
Sarıtaş and Yıldız (arXiv 2505.07908), which finds it unsupported. All in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_modules.extras import needed_for
from attention_modules.masks import combine_masks, hide, visible
from attention_modules.mechanism import AttentionMechanism
from attention_modules.mechanisms.scaled import ScaledAttention, scaled_values
from attention_modules.precision import to_float64


@dataclass(frozen=True)
class ProjectionLoss:
    """What is left of the queries' images φ(q_i) outside of the projection h_i; each ``[B, H]``, means over rows.

    Args:
        signed: of ‖φ(q_i)‖² - ‖h_i‖², the loss J of the reading; below 0 a projection would be longer than what it
            projects.
        absolute: of ``|‖φ(q_i)‖² - ‖h_i‖²|``.
        phi: of ‖φ(q_i)‖².
        h: of ‖h_i‖².

    Example:
        >>> import torch
        >>> q, k = torch.randn(2, 1, 3, 5, 8)  # a batch of one, three heads, five tokens of width 8
        >>> from attnswap.analysis import projection_loss
        >>> projection_loss(q, k, torch.zeros(1, 3, 5, 8)).absolute.shape
        torch.Size([1, 3])
    """

    signed: Tensor
    absolute: Tensor
    phi: Tensor
    h: Tensor


def projection_loss(
    q: Tensor,
    k: Tensor,
    h: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> ProjectionLoss:
    """J = mean(‖φ(q_i)‖² - ‖h_i‖²) with ‖φ(q_i)‖² = exp(scale · q_i·q_i - 2 lse_i), as the study corrected its scale.

    lse_i is the log-sum-exp of row i's logits over what it sees. Rows that see nothing are left out.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``; M is N, but where keys are of another sequence or of a reduced image.
        h: what attention gave, before the output projection, ``[B, H, N, d_v]``.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        scale: factor on the logits, 1/sqrt(d) where None.

    Raises:
        ValueError: if shapes do not fit, or a number is not finite.
        TypeError: if a mask is neither boolean nor floating.

    Example:
        >>> import torch
        >>> q, k = torch.randn(2, 1, 3, 5, 8)  # a batch of one, three heads, five tokens of width 8
        >>> from attnswap.analysis import projection_loss
        >>> projection_loss(q, k, torch.zeros(1, 3, 5, 8)).absolute.shape
        torch.Size([1, 3])
    """
    _check(1, q=q, h=h)
    _check(1, k=k)
    if q.shape[:2] != k.shape[:2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must be alike but for their tokens, got {tuple(q.shape)} and {tuple(k.shape)}")
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k)
    q, k, h = (to_float64(x) for x in (q, k, h))
    logits = _scale(q, scale) * q @ k.mT
    if attn_mask is not None:
        if bool(attn_mask.isnan().any()):
            raise ValueError("attn_mask holds NaN")
        mask = attn_mask.to(logits.device)
        logits = logits.masked_fill(~visible(mask), -torch.inf)
        logits = logits if mask.dtype == torch.bool else logits + mask
    if is_causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    lse = logits.logsumexp(-1)
    phi, norm = torch.exp(_scale(q, scale) * q.square().sum(-1) - 2 * lse), h.square().sum(-1)
    seen = lse > -torch.inf

    def mean(values: Tensor) -> Tensor:
        return values.where(seen, 0.0).sum(-1) / seen.sum(-1)

    return ProjectionLoss(mean(phi - norm), mean((phi - norm).abs()), mean(phi), mean(norm))


@dataclass(frozen=True)
class KernelPCA:
    """Kernel PCA of the keys of each head.

    Args:
        eigenvalues: of the centered K_φ, largest first, ``[B, H, components]``.
        vectors: A, its eigenvectors, of unit norm, the largest entry positive, ``[B, H, N, components]``.
        values: V̂ = G A - G 1_N A, ``[B, H, N, components]``.

    Example:
        >>> import torch
        >>> from attnswap.analysis import kernel_pca
        >>> found = kernel_pca(torch.randn(1, 3, 10, 8), components=4)
        >>> found.values.shape
        torch.Size([1, 3, 10, 4])
    """

    eigenvalues: Tensor
    vectors: Tensor
    values: Tensor


def mixed_values(
    mechanism: AttentionMechanism,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The values that softmax mixes: (I - S) v of scaled attention, v of any other mechanism, ``[B, H, N, d_v]``.

    Arguments are those of a call of the mechanism.
    """
    if not isinstance(mechanism, ScaledAttention):
        return v
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    return scaled_values(k, v, mechanism.s_of(k), hide(attn_mask), is_causal, scale)


def queries_at_kernel_scale(q: Tensor, scale: float | None) -> Tensor:
    """Queries whose logits with the same keys are those of ``scale``, at 1/sqrt(d): some layers scale their queries."""
    return q if scale is None else to_float64(q) * (scale * q.shape[-1] ** 0.5)


def kernel_pca(k: Tensor, *, components: int | None = None, scale: float | None = None) -> KernelPCA:
    """The values that the reading predicts from the keys alone, V̂ = G A - G 1_N A.

    K = exp(scale · k kᵀ), g = K 1, K_φ = K/(g gᵀ), centered; A: its leading eigenvectors, of unit norm (our reading of
    the normalization, and that of the study's code); G = diag(1/g), 1_N = ones/N. Every key counts in every row's sum:
    there is no causal or masked form.

    Args:
        k: keys ``[B, H, N, d]``.
        components: how many values; d where None.
        scale: as for :func:`projection_loss`.

    Raises:
        ValueError: if a centered kernel of N tokens has fewer components that are not zero: N - 1; if a head's keys are
            all alike; if one is so long that 1/g is 0 in float64.

    Example:
        >>> import torch
        >>> from attnswap.analysis import kernel_pca
        >>> found = kernel_pca(torch.randn(1, 3, 10, 8), components=4)
        >>> found.eigenvalues.shape
        torch.Size([1, 3, 4])
    """
    _check(2, k=k)
    tokens, components = k.shape[2], k.shape[3] if components is None else components
    if isinstance(components, bool) or not isinstance(components, int) or components < 1:
        raise ValueError(f"components must be an integer of at least 1, got {components!r}")
    if components >= tokens:
        raise ValueError(
            f"{tokens} tokens have at most {tokens - 1} principal components, {components} are needed (the width of a "
            "head): give longer sequences"
        )
    kernel, log_g = _kernel(to_float64(k), scale)
    if bool((k == k[:, :, :1]).flatten(2).all(-1).any()):
        raise ValueError("the keys of a head are all alike: they have no principal component")
    eigenvalues, vectors = torch.linalg.eigh(_centered(kernel))
    eigenvalues, vectors = eigenvalues.flip(-1)[..., :components], vectors.flip(-1)[..., :components]
    largest = vectors.abs().argmax(-2, keepdim=True)
    vectors = vectors * vectors.gather(-2, largest).sign()  # an eigenvector has no sign of its own
    values = (-log_g).exp().unsqueeze(-1) * (vectors - vectors.mean(-2, keepdim=True))
    return KernelPCA(eigenvalues, vectors, values)


def compare_values(v: Tensor, predicted: Tensor) -> dict[str, Tensor]:
    """How alike the values of a layer and those predicted are, by the study's measures.

    ``direct_cosine``: mean over tokens of the cosine of their rows. ``signed_cosine`` (ours): the same with those signs
    of the predicted columns that make it largest. ``matched_cosine``: that of the one-to-one matching of tokens that
    makes it largest (Hungarian method). ``linear_cka``, ``rbf_cka``: centered kernel alignment over tokens; the
    Gaussian's σ² is the median of the squared distances that are not 0. ``relative_error``: ‖v - predicted‖_F /
    ‖v‖_F. A predicted column has no sign of its own, on which the direct and the matched cosine and the error depend,
    as in the study; alignment does not.

    Args:
        v: values ``[B, H, N, d]``.
        predicted: as ``v``.

    Returns:
        By name, float64 ``[B, H]``.

    Raises:
        ValueError: if shapes do not fit.

    Example:
        >>> import torch
        >>> from attnswap.analysis import compare_values
        >>> v = torch.randn(1, 3, 5, 8)
        >>> compare_values(v, v)["direct_cosine"].round(decimals=3)
        tensor([[1., 1., 1.]], dtype=torch.float64)
    """
    _check(2, v=v, predicted=predicted)
    if v.shape != predicted.shape:
        raise ValueError(f"v and predicted must be alike, got {tuple(v.shape)} and {tuple(predicted.shape)}")
    v, predicted = to_float64(v), to_float64(predicted)
    cosines = _unit(v) @ _unit(predicted).mT  # [B, H, N, N]
    by_column = (_unit(v) * _unit(predicted)).mean(-2)  # [B, H, d]: a sign changes no other column, and no norm
    grams = [each @ each.mT for each in (v, predicted)]
    return {
        "direct_cosine": cosines.diagonal(dim1=-2, dim2=-1).mean(-1),
        "signed_cosine": by_column.abs().sum(-1),
        "matched_cosine": _matched(cosines),
        "linear_cka": _alignment(*grams),
        "rbf_cka": _alignment(*(_gaussian(gram) for gram in grams)),
        "relative_error": (v - predicted).flatten(2).norm(dim=-1) / v.flatten(2).norm(dim=-1),
    }


def gamma_constancy(k: Tensor, v: Tensor, *, scale: float | None = None) -> dict[str, Tensor]:
    """Whether the coefficients that the values stand for, Â = centered(G⁻¹ v), are eigenvectors of the centered K_φ.

    If they are, γ_i = (K_φ Â)_i / (N Â_i) is one number for all tokens i. ``gamma_absolute``: mean ``|γ_i - γ_j|``, the
    measure that was offered for the reading: small for any Â, as γ itself is (compare random values).
    ``gamma_relative``: mean ``|γ_i - γ_j| / max(|γ_i|, |γ_j|)``, the study's: 0 if γ is constant, at most 2.
    ``eigen_residual``: ‖K_φ Â - ρ Â‖ / ‖K_φ Â‖ with ρ the Rayleigh quotient, in [0, 1], where nothing is divided by a
    small Â_i (ours). Means over pairs of tokens, and over columns. That Â is taken from the values is our reading; the
    study's code perturbs the eigenvectors themselves.

    Args:
        k: keys ``[B, H, N, d]``.
        v: values ``[B, H, N, d_v]``.
        scale: as for :func:`projection_loss`.

    Returns:
        By name, float64 ``[B, H]``.

    Raises:
        ValueError: if shapes do not fit, or a key is so long that 1/g is 0 in float64.

    Example:
        >>> import torch
        >>> from attnswap.analysis import gamma_constancy
        >>> k, v = torch.randn(2, 1, 3, 10, 8)
        >>> gamma_constancy(k, v)["eigen_residual"].shape
        torch.Size([1, 3])
    """
    a, image = _coefficients(k, v, scale)
    gamma = image / (a.shape[-2] * a)
    absolute, relative = zip(*(_pairwise(column) for column in gamma.unbind(-1)), strict=True)
    return {
        "gamma_absolute": torch.stack(absolute, -1).mean(-1),
        "gamma_relative": torch.stack(relative, -1).mean(-1),
        "eigen_residual": _residual(a, image),
    }


def eigen_residual(k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """That of :func:`gamma_constancy` alone, ``[B, H]``, without pairs of tokens; arguments and errors are the same.

    Example:
        >>> import torch
        >>> from attnswap.analysis import eigen_residual
        >>> k, v = torch.randn(2, 1, 3, 10, 8)
        >>> eigen_residual(k, v).shape
        torch.Size([1, 3])
    """
    return _residual(*_coefficients(k, v, scale))


def _coefficients(k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Â, its columns of unit norm, and its image under the centered K_φ."""
    _check(2, k=k, v=v)
    kernel, log_g = _kernel(to_float64(k), scale)
    # A factor on a column changes nothing: g is taken relative to its largest, which cannot overflow.
    a = (log_g - log_g.amax(-1, keepdim=True)).exp().unsqueeze(-1) * to_float64(v)
    a = _unit(a - a.mean(-2, keepdim=True), dim=-2)
    return a, _centered(kernel) @ a


def _residual(a: Tensor, image: Tensor) -> Tensor:
    rayleigh = (a * image).sum(-2, keepdim=True)
    return ((image - rayleigh * a).norm(dim=-2) / image.norm(dim=-2).clamp(min=_tiny(image))).mean(-1)


def _scale(k: Tensor, scale: float | None) -> float:
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale}")
    return k.shape[-1] ** -0.5 if scale is None else scale


def _kernel(k: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """K_φ ``[B, H, N, N]`` and log g ``[B, H, N]``; from the logarithms, as exp(k·k) alone overflows."""
    logits = _scale(k, scale) * k @ k.mT
    log_g = logits.logsumexp(-1)
    if bool((log_g > -math.log(torch.finfo(log_g.dtype).tiny)).any()):
        raise ValueError(
            f"1/g is as small as exp(-{log_g.max().item():.4g}), below what float64 holds: a key is too long for V̂ and "
            "γ; scale the keys, or give a smaller scale"
        )
    return torch.exp(logits - log_g.unsqueeze(-1) - log_g.unsqueeze(-2)), log_g


def _centered(kernel: Tensor) -> Tensor:
    rows, columns = kernel.mean(-1, keepdim=True), kernel.mean(-2, keepdim=True)
    return kernel - rows - columns + rows.mean(-2, keepdim=True)


def _alignment(one: Tensor, other: Tensor) -> Tensor:
    one, other = (_centered(gram).flatten(2) for gram in (one, other))
    return (one * other).sum(-1) / (one.norm(dim=-1) * other.norm(dim=-1)).clamp(min=_tiny(one))


def _gaussian(gram: Tensor) -> Tensor:
    squares = gram.diagonal(dim1=-2, dim2=-1)
    distances = (squares.unsqueeze(-1) + squares.unsqueeze(-2) - 2 * gram).clamp(min=0)
    apart = distances.flatten(2).masked_fill(distances.flatten(2) == 0, torch.nan)
    # torch's median of an even count is the lower of the middle two: the upper one is that of the negated numbers.
    median = (apart.nanmedian(-1).values - (-apart).nanmedian(-1).values) / 2
    median = median.nan_to_num(nan=1.0)  # all tokens alike: any width will do
    return torch.exp(-distances / (2 * median[..., None, None]))


def _matched(cosines: Tensor) -> Tensor:
    with needed_for("compare_values", "analysis"):
        from scipy.optimize import linear_sum_assignment

    flat = cosines.flatten(0, 1).cpu().numpy()
    means = [matrix[linear_sum_assignment(matrix, maximize=True)].mean() for matrix in flat]
    return torch.tensor(means, dtype=cosines.dtype, device=cosines.device).view(cosines.shape[:2])


def _pairwise(gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Mean absolute and relative difference of the pairs of ``[B, H, N]``."""
    tokens = gamma.shape[-1]
    apart = (gamma.unsqueeze(-1) - gamma.unsqueeze(-2)).abs()
    largest = torch.maximum(gamma.abs().unsqueeze(-1), gamma.abs().unsqueeze(-2)).clamp(min=_tiny(gamma))
    pairs = tokens * (tokens - 1)
    return apart.sum((-2, -1)) / pairs, (apart / largest).sum((-2, -1)) / pairs


def _unit(vectors: Tensor, dim: int = -1) -> Tensor:
    return vectors / vectors.norm(dim=dim, keepdim=True).clamp(min=_tiny(vectors))


def _tiny(values: Tensor) -> float:
    return torch.finfo(values.dtype).tiny


def _check(least: int, **tensors: Tensor) -> None:
    """Raise a ValueError where tensors are not ``[B, H, N, d]`` of the same B, H and N >= least, finite."""
    (first, like), *_ = tensors.items()
    for name, tensor in tensors.items():
        if tensor.dim() != 4 or tensor.shape[:3] != like.shape[:3] or tensor.shape[2] < least:
            raise ValueError(
                f"{name} must be [B, H, N, d] with the B, H and N of {first}, at least {least} tokens, "
                f"got {tuple(tensor.shape)} for {tuple(like.shape)}"
            )
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} holds NaN or infinite numbers")
