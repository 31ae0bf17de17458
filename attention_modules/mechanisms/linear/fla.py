"""The operator by the Triton kernels of flash-linear-attention, where ``attnswap[fla]`` is installed."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attention_modules.kernels import once_differentiable, taker, transforms_active

SHORTEST = 64  # tokens: fewer are a step of writing, or a chunk that is not full
WIDEST = 256  # features of a head


@functools.cache
def installed() -> bool:
    """Whether the package is there; it is imported when it is called."""
    return importlib.util.find_spec("fla") is not None


def covers(q: Tensor, v: Tensor, starts: Tensor | None) -> bool:
    """Whether the kernels compute this call.

    They multiply in half precision, so they get what is in half precision. Packed sequences, compiled code, transforms
    and ``sdpa_kernel(SDPBackend.MATH)`` take the plain form.
    """
    return (
        v.device.type == "cuda"
        and v.dtype in (torch.float16, torch.bfloat16)
        and q.dtype != torch.float64
        and starts is None
        and q.shape[2] >= SHORTEST
        and max(q.shape[3], v.shape[3]) <= WIDEST
        and not (torch.compiler.is_compiling() or torch.jit.is_tracing() or transforms_active())
        and taker() is None
        and torch.backends.cuda.flash_sdp_enabled()
        and installed()
    )


def by_kernels(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """:func:`.linear_operator` of tokens that are all seen.

    Args:
        q, k: ``[B, H, N, d]``.
        v: ``[B, H, N, d']`` in half precision, in which all but the decays and the state are multiplied.
        log_decay: None, ``[B, H, N]`` or ``[B, H, N, d]``.
        beta: None or ``[B, H, N]``.
        state: ``[B, H, d, d']`` in float32.
        scale: factor on the output.

    Returns:
        The output in v's dtype, and the last state in float32.
    """
    half = {"q": q, "k": k, "v": v, "beta": beta}
    given = {name: x.transpose(1, 2).to(v.dtype).contiguous() for name, x in half.items() if x is not None}
    if log_decay is not None:
        log_decay = log_decay.expand(*q.shape[:3], *log_decay.shape[3:])
        given["g"] = log_decay.transpose(1, 2).float().contiguous()
    kernel = _kernel(0 if log_decay is None else log_decay.dim(), beta is not None)
    out, last = kernel(**given, scale=scale, initial_state=state.contiguous(), output_final_state=True)
    if out.grad_fn is not None:
        inputs = tuple(x for x in given.values() if x.requires_grad)
        out.grad_fn.register_hook(functools.partial(_mark, inputs))
    return out.transpose(1, 2), last


def _kernel(decays: int, delta: bool) -> Callable[..., Any]:
    """Which of the package's functions takes decays of so many dimensions, with or without the delta rule."""
    if delta:
        from fla.ops.delta_rule import chunk_delta_rule
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda

        return {0: chunk_delta_rule, 3: chunk_gated_delta_rule, 4: chunk_kda}[decays]
    from fla.ops.gla import chunk_gla
    from fla.ops.linear_attn import chunk_linear_attn
    from fla.ops.simple_gla import chunk_simple_gla

    plain = functools.partial(chunk_linear_attn, normalize=False)
    return {0: plain, 3: chunk_simple_gla, 4: chunk_gla}[decays]


def _mark(inputs: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...] | None:
    """Have gradients whose graph is wanted say that they have none."""
    if not torch.is_grad_enabled():
        return None
    return once_differentiable("the kernels of flash-linear-attention have", *grads, of=inputs)
