"""Attention of one learned prompt: f(X) = ⟨X v, softmax(X W p)⟩, the model of max-margin token selection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

FORMS = ("difference", "plain")


def _check(x: Tensor, keys: Tensor, p: Tensor, v: Tensor, form: str) -> None:
    _check_dtypes(x=x, keys=keys, p=p, v=v)
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    if x.ndim < 2 or x.shape[:-1] != keys.shape[:-1] or x.shape[-2] < 1:
        raise ValueError(
            f"x and keys must be [..., T, dim] with the same T >= 1, got {tuple(x.shape)} and {tuple(keys.shape)}"
        )
    if p.shape != keys.shape[-1:] or v.shape != x.shape[-1:]:
        raise ValueError(
            f"p must be [{keys.shape[-1]}] as the keys and v [{x.shape[-1]}] as x, "
            f"got {tuple(p.shape)} and {tuple(v.shape)}"
        )


def _check_dtypes(**given: Tensor) -> None:
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}: give torch.tensor({name})")
        if not value.is_floating_point():
            raise TypeError(f"{name} must be of real floating-point numbers, got {value.dtype}: give {name}.double()")
    dtypes = {name: value.dtype for name, value in given.items()}
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise TypeError(f"all must be of one dtype, got {listed}: give .double(), as float64 is what this is made for")


def prompt_attention(x: Tensor, keys: Tensor, p: Tensor, v: Tensor, *, form: str = "difference") -> Tensor:
    """f(X) = ⟨X v, softmax(K p)⟩ of every input, without 1/√d (Tarzanagh et al., NeurIPS 2023, arXiv 2306.13596).

    Both forms are the same function. Where the softmax is saturated, the gradient of ``"plain"`` is the difference of
    nearly equal numbers, and its rounding error outgrows it. ``"difference"`` counts logits and scores from the most
    attended token a: f = γ_a + Σ_t s_t (γ_t - γ_a), whose gradient for p is Σ_t s_t (γ_t - f)(k_t - k_a), as exact as
    the s_t are; use it in float64, as small s_t are zero in float32 (the form is our derivation).

    Args:
        x: tokens ``[..., T, d]``.
        keys: K = X W, ``[..., T, m]``.
        p: the prompt ``[m]``.
        v: the head ``[d]``; scores are γ_t = ⟨v, x_t⟩.
        form: ``"difference"`` or ``"plain"``.

    Returns:
        ``[...]``.

    Raises:
        ValueError: if the shapes do not fit or the form is unknown.
        TypeError: if something is no tensor of floating-point numbers, or of another dtype than the others.

    Example:
        >>> import torch
        >>> from attnswap.functional import prompt_attention
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        >>> p, v = torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64)
        >>> prompt_attention(x, x, p, v)
        tensor(0.5000, dtype=torch.float64)
    """
    _check(x, keys, p, v, form)
    if form == "plain":
        return ((keys @ p).softmax(-1) * (x @ v)).sum(-1)
    most = (keys @ p).detach().argmax(-1, keepdim=True).unsqueeze(-1)  # [..., 1, 1]; any token gives the same f
    key, token = keys.take_along_dim(most, -2), x.take_along_dim(most, -2)
    weights = ((keys - key) @ p).softmax(-1)
    return (token @ v).squeeze(-1) + (weights * ((x - token) @ v)).sum(-1)


class PromptAttention(nn.Module):
    """:func:`prompt_attention` with its Parameters, in float64: ``p`` [dim] and ``v`` [dim] (zeros), ``w`` (identity).

    Args:
        dim: width of the tokens.
        form: ``"difference"`` or ``"plain"``, how the gradient is computed.

    Raises:
        ValueError: if ``dim`` is no integer or below 1, or the form is unknown; on a call, if x has another width.
        TypeError: on a call, if x has another dtype than the Parameters.
    """

    def __init__(self, dim: int, form: str = "difference") -> None:
        super().__init__()
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
            raise ValueError(f"dim must be an integer of at least 1, got {dim!r}")
        if form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
        self.form = form
        self.p = nn.Parameter(torch.zeros(dim, dtype=torch.float64))
        self.v = nn.Parameter(torch.zeros(dim, dtype=torch.float64))
        self.w = nn.Parameter(torch.eye(dim, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """f of each input ``[..., T, dim]``, ``[...]``."""
        return prompt_attention(x, self._keys(x), self.p, self.v, form=self.form)

    def probabilities(self, x: Tensor) -> Tensor:
        """What the prompt attends to, softmax(X W p), ``[..., T]``."""
        return (self._keys(x) @ self.p).softmax(-1)

    def _keys(self, x: Tensor) -> Tensor:
        """X W, of an x that fits."""
        _check_dtypes(x=x, w=self.w)
        if x.ndim < 2 or x.shape[-1] != len(self.p):
            raise ValueError(f"x must be [..., T, dim] with dim = {len(self.p)}, got {tuple(x.shape)}")
        return x @ self.w

    def extra_repr(self) -> str:
        return f"dim={len(self.p)}, form={self.form!r}"
