"""How mechanisms call scaled dot-product attention."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

_T = TypeVar("_T")


def transforms_active() -> bool:
    """Whether forward-mode differentiation or a ``torch.func`` transform is at work."""
    if getattr(forward_ad, "_current_level", -1) >= 0:
        return True
    # Private: where it is absent, no transform can be seen.
    peek = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
    return peek is not None and peek() is not None


def untransformed(tensor: Tensor) -> Tensor:
    """What a tensor of a ``torch.func`` transform holds: of ``vmap`` all samples, in a dimension of their own."""
    functorch: Any = getattr(torch._C, "_functorch", None)
    while functorch is not None and functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


class _Seam(threading.local):
    take: Callable[..., Tensor] | None = None


_SEAM = _Seam()


def taker() -> Callable[..., Tensor] | None:
    """Who takes calls of :func:`.attend_by` in place of its own sums, to see what its map is; None in compiled code."""
    return None if torch.compiler.is_compiling() else _SEAM.take


@contextmanager
def taken_by(take: Callable[..., Tensor] | None) -> Iterator[None]:
    """Inside, mechanisms take their plain forms, and ``take`` gets the arguments of :func:`.attend_by`."""
    before, _SEAM.take = _SEAM.take, take
    try:
        yield
    finally:
        _SEAM.take = before


def recomputed(function: Callable[..., _T], *given: Any, random: bool = False) -> _T:
    """function(*given), of which nothing but ``given`` is kept for the backward pass, where it is computed again.

    Transforms of ``torch.func`` refuse what that needs: under them all is kept.

    Args:
        function: of tensors and other arguments.
        given: these.
        random: whether it draws at random; it then draws the same again.
    """
    if not torch.is_grad_enabled() or (not torch.compiler.is_compiling() and transforms_active()):
        return function(*given)
    return checkpoint(function, *given, use_reentrant=False, preserve_rng_state=random)


def check_dropout(dropout_p: float) -> None:
    """Refuse what is no probability.

    Raises:
        ValueError: if it is below 0 or above 1.
    """
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be a probability from 0 to 1, got {dropout_p!r}")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """``scaled_dot_product_attention``, in its MATH form where a transform needs more than one derivative.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d]``.
        attn_mask: boolean or additive, broadcastable to ``[B, H, N, M]``; not together with ``is_causal``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``. Where a fused kernel made it, differentiating its gradient raises a RuntimeError that says how
        to have PyTorch take its MATH form.

    Raises:
        ValueError: if ``dropout_p`` is no probability.
    """
    check_dropout(dropout_p)
    compiling = torch.compiler.is_compiling()
    if not compiling and transforms_active():
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)
    out = scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)
    if not compiling and out.requires_grad and not torch.jit.is_tracing():
        _differentiated_once(out)
    return out


def _differentiated_once(out: Tensor) -> None:
    """Have the gradients of a fused kernel name the cure where they are differentiated: PyTorch says no word of it."""
    node: Any = out.grad_fn
    if type(node).__name__ == "SliceBackward0":  # of padded features
        node = node.next_functions[0][0]
    if type(node).__name__.startswith("ScaledDotProduct"):
        node.register_hook(_mark_gradients)


def _mark_gradients(grads: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
    if not torch.is_grad_enabled():  # nobody wants a graph of these gradients
        return None
    missing = "NotImplemented"  # the node that PyTorch puts where it has no derivative
    return tuple(
        once_differentiable("scaled_dot_product_attention's fused kernels have", grad)[0]
        if grad is not None and type(grad.grad_fn).__name__ == missing
        else grad
        for grad in grads
    )


def once_differentiable(what: str, *gradients: Tensor | None, of: Sequence[Tensor] = ()) -> tuple[Tensor | None, ...]:
    """Gradients as they are; differentiating them raises a RuntimeError that says what to do.

    Args:
        what: subject of the error, as "the fused form of ... has".
        gradients: any; None stays None.
        of: tensors that they depend on, where their graph does not say so.
    """
    return _OnceDifferentiable.apply(what, len(gradients), *gradients, *of)


class _OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, what: str, number: int, *tensors: Tensor | None) -> Any:
        ctx.what = what
        return tuple(None if tensor is None else tensor.view_as(tensor) for tensor in tensors[:number])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.what} no second derivative; run the forward pass under "
            "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), which takes the plain form"
        )


# Private operators of PyTorch, by the schema with which they are called here: under another they are not.
FLASH, FLASH_BACKWARD, EFFICIENT, CHOICE = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_efficient_attention",
    "_fused_sdp_choice",
)
SCHEMAS = {
    FLASH: "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
    "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)",
    FLASH_BACKWARD: "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    "float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None) -> "
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    EFFICIENT: "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, "
    "float dropout_p=0., bool is_causal=False, *, float? scale=None) -> "
    "(Tensor output, Tensor log_sumexp, Tensor philox_seed, Tensor philox_offset)",
    CHOICE: "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0., "
    "bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> int",
}


@cache
def private_operator(name: str) -> Callable[..., Any] | None:
    """The private operator ``aten::NAME``, or None where this PyTorch lacks it or gives it another schema."""
    operator = getattr(getattr(torch.ops.aten, name, None), "default", None)
    if operator is None or str(operator._schema) != f"aten::{name}{SCHEMAS[name]}":
        return None
    return operator


def has_flash_kernels() -> bool:
    """Whether :func:`flash` and :func:`flash_backward` exist, and PyTorch can be asked when SDPA takes them."""
    known = all(private_operator(name) is not None for name in (FLASH, FLASH_BACKWARD, CHOICE))
    return known and hasattr(torch, "_fused_sdp_choice")  # the operator, faster to call


def flash_applies(k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None) -> bool:
    """Whether :func:`flash` and :func:`flash_backward` may stand for attention(k, k, v) and its gradient.

    False on devices other than the CPU, where the kernels are missing, under
    ``sdpa_kernel(SDPBackend.MATH)``, in compiled or traced code and under transforms.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not has_flash_kernels() or k.device.type != "cpu":
        return False
    if taker() is not None:
        return False
    if type(k) not in (Tensor, nn.Parameter) or type(v) not in (Tensor, nn.Parameter) or transforms_active():
        return False
    if attn_mask is not None and attn_mask.requires_grad:
        return False
    # What SDPA itself would choose here, requirements on shapes and dtypes and the user's context included.
    return torch._fused_sdp_choice(k, k, v, attn_mask, 0.0, is_causal, scale=scale) == SDPBackend.FLASH_ATTENTION.value


def flash_mask(attn_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as the flash kernels take it: additive, of the queries' dtype."""
    if attn_mask is None:
        return None
    if attn_mask.dtype == torch.bool:
        return torch.zeros_like(attn_mask, dtype=dtype).masked_fill(~attn_mask, float("-inf"))
    return attn_mask.to(dtype)


def flash(
    q: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """attention(q, q, v) and the logarithm of each row's sum of exponentials, ``[B, H, N, d]`` and ``[B, H, N]``."""
    return _operator(FLASH)(q, q, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale)


def flash_backward(
    grad: Tensor,
    q: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`flash` for q (as query and as key together) and v.

    The gradient of row i's logits, P_ij (g_i·v_j - g_i·o_i), sums to 0. Where the row attends to itself only, its entry
    j = i is the difference of nearly equal numbers, and the rounding of o outgrows the whole gradient. There that entry
    is made minus the sum of the others: a column of ones beside the keys, which the logits do not see, brings the sum
    out of the same kernel.
    """
    operator = _operator(FLASH_BACKWARD)
    if not _saturated(q, logsumexp, scale):
        grad_query, grad_key, grad_value = operator(
            grad, q, q, v, out, logsumexp, 0.0, is_causal, attn_mask=attn_mask, scale=scale
        )
        return grad_query.add_(grad_key), grad_value
    width = q.shape[-1]
    ones = nn.functional.pad(q, (0, 1), value=1.0)
    grad, query, v, out = (nn.functional.pad(x, (0, 1)) for x in (grad, q, v, out))
    scale = width**-0.5 if scale is None else scale
    grad_query, grad_key, grad_value = operator(
        grad, query, ones, v, out, logsumexp, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    excess = grad_query[..., width:]
    both = grad_query[..., :width] + grad_key[..., :width]
    return both.addcmul_(excess, q, value=-2), grad_value[..., :width]


def _operator(name: str) -> Callable[..., Any]:
    operator = private_operator(name)
    if operator is None:
        raise RuntimeError(f"aten::{name} is not what it was; use attend")
    return operator


def _saturated(q: Tensor, logsumexp: Tensor, scale: float | None) -> bool:
    """Whether in some head a quarter of the rows give others so little that the rounding of the rest may drown it.

    Reads a number, which waits for no device: the kernels are the CPU's.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    # -ln of what each row gives to itself, about the share of the others where that is small; any number where a mask
    # hides the row from itself.
    others = logsumexp.sub(q.to(logsumexp.dtype).square().sum(-1), alpha=scale)  # [B, H, N]
    full = others.abs_() < torch.finfo(q.dtype).eps ** 0.5
    return bool((4 * full.sum(-1) >= q.shape[-2]).any())


@torch.compiler.assume_constant_result  # torch.compile of torch 2.6 cannot look into it
def has_autocast(device: str) -> bool:
    """Whether autocast knows a type of device."""
    return torch.amp.is_autocast_available(device)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast, for sums that half precision does not hold."""
    return torch.autocast(device.type, enabled=False) if has_autocast(device.type) else nullcontext()


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which autocast would run attention; its own outside autocast."""
    device = x.device.type
    if not has_autocast(device) or not torch.is_autocast_enabled(device):
        return x.dtype
    if not x.is_floating_point() or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(device)


def autocast(x: Tensor) -> Tensor:
    """The tensor in the dtype in which autocast would run attention; itself outside autocast."""
    return x.to(autocast_dtype(x))
