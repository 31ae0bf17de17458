"""What mechanisms with a state share: how one is called, and how its output is normalized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention_modules.base import AttentionMechanism, AttentionSpec, Causality, State
from attention_modules.kernels import check_dropout, without_autocast
from attention_modules.masks import tokens_of
from attention_modules.mechanisms.linear.operator import linear_operator
from attention_modules.mechanisms.shared.acting import ActingMap
from attention_modules.mechanisms.shared.options import check_choice, check_number
from attention_modules.mechanisms.shared.probe import probe

Output = Literal["norm", "gated", "plain"]
S = "S"  # the name of the state's tensor [B, H, d, d']


def mix_by_state(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    state: State | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """:func:`.linear_operator` under the arguments of a mechanism.

    Args:
        name: of the mechanism, for messages.
        q, k, v: ``[B, H, N, d]``, of the new tokens alone where there is a state.
        log_decay, beta: as the operator takes them.
        attn_mask: of padding, alone or with the causal triangle; see :func:`.tokens_of`.
        is_causal: must be True, unless the mask says so or there is one token.
        dropout_p: probability that a token's value is left out of all rows.
        scale: factor on the output, 1/sqrt(d) where None.
        state: what stands for all earlier tokens, empty before the first; what stands for all is written into it.
        starts: before which tokens the state is emptied, ``[B, N]``.

    Raises:
        ValueError: if the future is not hidden, or a mask or shape does not fit.
    """
    tokens, is_causal = tokens_of(name, attn_mask, is_causal, q, k)
    if not is_causal and q.shape[-2] > 1:
        raise ValueError(
            f"{name} attention writes one token after the other into a state, so it must hide the future: pass "
            "is_causal=True, or for a layer that sees the future (ViT, BERT) choose linear, retention, performer, or "
            "hedgehog without a window"
        )
    out, last = linear_operator(
        q,
        k,
        dropped(v, dropout_p),
        log_decay,
        beta,
        initial_state=state_of(name, state, q, v.shape[-1]),
        scale=scale,
        tokens=tokens,
        starts=starts,
    )
    if state is not None:
        state[S] = last
    return out


def mix_by_features(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eps: float,
    log_decay: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    state: State | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """q_i·Σ_j k_j v_jᵀ / (q_i·Σ_j k_j + ε) of features q and k of at least float32: the sum is a column of ones on v.

    Arguments as :func:`mix_by_state` has them; where the future is not hidden, there is no state.

    Raises:
        ValueError: if a mask or shape does not fit, or a call that sees the future has a state.
    """
    tokens, is_causal = tokens_of(name, attn_mask, is_causal, q, k)
    wide = torch.promote_types(q.dtype, v.dtype)
    values = torch.cat([dropped(v, dropout_p).to(wide), torch.ones_like(v[..., :1], dtype=wide)], -1)
    with without_autocast(q.device):
        if is_causal or q.shape[-2] == 1:
            mixed, last = linear_operator(
                q,
                k,
                values,
                log_decay,
                initial_state=state_of(name, state, q, values.shape[-1]),
                scale=1.0,
                tokens=tokens,
                starts=starts,
            )
            if state is not None:
                state[S] = last
        else:
            refuse_state(name, state, starts)
            if tokens is not None:
                zero = torch.zeros((), dtype=wide, device=k.device)
                k, values = (torch.where(tokens.unsqueeze(-1), x, zero) for x in (k, values))
            mixed = q @ (k.mT @ values)
        return (mixed[..., :-1] / (mixed[..., -1:] + eps)).to(v.dtype)


def state_of(name: str, state: State | None, q: Tensor, width: int) -> Tensor | None:
    """The tensor ``[B, H, d, width]`` of a state for queries ``[B, H, N, d]``; None before the first token.

    Raises:
        ValueError: if it is the state of something else.
    """
    if not state:
        return None
    check_state(name, state, {S: (*q.shape[:2], q.shape[-1], width)})
    return state[S]


def check_state(name: str, state: State, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a state has what a mechanism keeps: floating tensors, but for counts, which have one dimension.

    Raises:
        ValueError: if it is the state of something else, as of another batch.
    """
    for of, shape in shapes.items():
        held = state.get(of)
        # Tuples of another length are compared element by element, which would bind free sizes of a program.
        fits = isinstance(held, Tensor) and held.dim() == len(shape) and tuple(held.shape) == shape
        if not fits or held.is_floating_point() == (len(shape) == 1):  # type: ignore[union-attr]
            shown = f"{tuple(held.shape)} of {held.dtype}" if isinstance(held, Tensor) else repr(held)
            raise ValueError(
                f"{name} attention continues from a state whose {of!r} is {shape}, and this one's is {shown}: it is of "
                "another batch or layer; start with an empty state"
            )


def refuse_state(name: str, state: State | None, starts: Tensor | None) -> None:
    """Refuse what a call that sees the future does not have.

    Raises:
        ValueError: if there is a state, or packed sequences.
    """
    if state is not None or starts is not None:
        given = "a state" if starts is None else "packed sequences (starts)"
        raise ValueError(f"{name} attention takes {given} only where it hides the future: pass is_causal=True")


def dropped(v: Tensor, dropout_p: float) -> Tensor:
    """Values of which some tokens' are left out, and the others the larger: a map loses whole columns.

    Raises:
        ValueError: if ``dropout_p`` is no probability.
    """
    check_dropout(dropout_p)
    return v * F.dropout(torch.ones_like(v[..., :1]), dropout_p) if dropout_p else v


def unit(x: Tensor) -> Tensor:
    """x · rsqrt(Σ x² + 1e-6) over the last dimension, in at least float32, as released delta rules have it."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def of_each_head(x: Tensor, heads: int) -> Tensor:
    """Numbers of each token, ``[B, N, H * w]``, as those of each head, ``[B, H, N, w]``, in at least float32.

    A copy: compiled code takes the strides of a view's gradient for others than they are.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (heads, -1)).transpose(1, 2).contiguous()


class StatefulMechanism(AttentionMechanism):
    """A mechanism whose state stands for all earlier tokens: a subclass gives :meth:`tensors`, and names its function.

    Args:
        spec: the layer that it serves.
    """

    function: ClassVar[Callable[..., Tensor]]
    """Of what `tensors` gives, and the further arguments of `forward`; a static method."""
    own_logits: ClassVar[str | None] = "it has no softmax of them"
    one_query_per_key = True
    row_masks = False
    cache = "state"
    causality: Causality = "always"

    def tensors(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None) -> tuple[Any, ...]:
        """What the function takes: queries, keys, values, gates."""
        return q, k, v

    def finished(self, out: Tensor, x: Tensor | None) -> Tensor:
        """What becomes of the output."""
        return out

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        scale: float | None = None,
        *,
        x: Tensor | None = None,
        state: State | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Mix the values.

        Args:
            x: the layer's input ``[B, N, C]``.
            state: what stands for all earlier tokens, empty before the first; it is filled.
            starts: before which tokens the state is emptied, boolean ``[B, N]``.
        """
        given: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal, "dropout_p": dropout_p, "scale": scale}
        return self.finished(self.mixed(q, k, v, x=x, state=state, starts=starts, **given), x).to(v.dtype)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None = None, **given: Any) -> Tensor:
        """The same before what becomes of the output."""
        return self.function(*self.tensors(q, k, v, x), **given)


class NormedMechanism(StatefulMechanism):
    """One whose heads are normalized, as published layers have it, since a sum over tokens has no size of its own.

    Args:
        spec: the layer that it serves.
        output: ``"norm"``, RMSNorm of each head with a gain of its own; ``"gated"``, that times an activation of W_g x;
            ``"plain"``, what the recurrence gives.
        eps: of the norm.

    Raises:
        ValueError: if ``output`` is unknown, or ``eps`` out of its limits.
    """

    of_heads: ClassVar[tuple[str, ...]] = ()
    """As ``per_head``, without what the output has."""

    def __init__(self, spec: AttentionSpec, output: Output = "norm", eps: float = 1e-5) -> None:
        super().__init__(spec)
        self.output = check_choice("output", output, get_args(Output))
        self.eps = check_number("eps", eps, above=0.0)
        width = spec.value_dim or spec.head_dim
        self.per_head = self.of_heads
        if output != "plain":
            self.gain = nn.Parameter(torch.ones(spec.num_heads, 1, width))
            self.per_head += ("gain",)
        if output == "gated":
            self.needs = ("x",)
            self.gate = nn.Linear(spec.dim, spec.num_heads * width, bias=False)
            self.per_head += ("gate.weight",)

    def extra_repr(self) -> str:
        return f"output={self.output!r}"

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None = None, **given: Any) -> Tensor:
        if self.output != "plain":  # a sum over tokens may be more than float16 holds before it is normalized
            v = v.to(torch.promote_types(v.dtype, torch.float32))
        return super().mixed(q, k, v, x=x, **given)

    def finished(self, out: Tensor, x: Tensor | None) -> Tensor:
        if self.output == "plain":
            return out
        normed = F.rms_norm(out, out.shape[-1:], None, self.eps) * self.gain.to(out.dtype)
        if self.output == "gated":
            normed = normed * self.activation(of_each_head(self.gate(self.needed("x", x)), out.shape[1]))
        return normed

    def activation(self, gate: Tensor) -> Tensor:
        """Of the output's gate."""
        return F.silu(gate)

    def own_map(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> ActingMap | None:
        """The weights of the recurrence, before the norm."""
        if self.output == "plain":
            return None
        return probe(lambda values: self.mixed(q, k, values, **given), v, type(self).__name__, self)
