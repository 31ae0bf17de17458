"""A mechanism at a precision beside its own float64 result on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_modules.base import AttentionMechanism, AttentionSpec
from attention_modules.testing import Subject
from tests.attention_modules.hosts.cases import MECHANISMS

SPEC = AttentionSpec(dim=64, num_heads=2, head_dim=32)
TOKENS = 130  # more than a tile of any kernel, and no multiple of one


@dataclass(frozen=True)
class Precision:
    """How numbers are held, and how far from float64 they may be.

    Args:
        dtype: of inputs and parameters.
        autocast: the dtype of autocast, where it is on.
        tf32: whether float32 products may be rounded to tf32.
        output, gradient, parameter: limits of the distance to float64 over its norm, of the output, of the gradient of
            each input, and of that of each parameter, which is a sum over all tokens in which most may cancel.
    """

    dtype: torch.dtype
    autocast: torch.dtype | None = None
    tf32: bool = False
    output: float = 1e-5
    gradient: float = 1e-4
    parameter: float = 1e-3

    @contextmanager
    def active(self, device: torch.device) -> Iterator[None]:
        """Inside, the mechanism computes in it."""
        if self.tf32:
            torch.set_float32_matmul_precision("high")
        with torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
            yield
        torch.set_float32_matmul_precision("highest")


PRECISIONS = {
    "fp32": Precision(torch.float32),
    "tf32": Precision(torch.float32, tf32=True, output=5e-3, gradient=3e-2, parameter=0.5),
    "bf16": Precision(torch.bfloat16, output=3e-2, gradient=0.15, parameter=0.5),
    "fp16": Precision(torch.float16, output=5e-3, gradient=3e-2, parameter=0.5),
    "autocast bf16": Precision(torch.float32, autocast=torch.bfloat16, output=3e-2, gradient=0.15, parameter=0.5),
    "autocast fp16": Precision(torch.float32, autocast=torch.float16, output=5e-3, gradient=3e-2, parameter=0.5),
}

# In less than float32 a row whose largest logits are nearly equal takes the other key: a few rows differ wholly.
OWN_LIMIT = {"hard": 0.3}


def limits(case: str, precision: str) -> dict[str, float]:
    """By kind, the limits of a mechanism."""
    at = PRECISIONS[precision]
    least = 0.0 if precision == "fp32" else OWN_LIMIT.get(case, 0.0)
    return {kind: max(getattr(at, kind), least) for kind in ("output", "gradient", "parameter")}


def subject(case: str) -> Subject:
    """The mechanism of a column of the table of hosts, for as many tokens as here."""
    name, options = MECHANISMS[case]
    return Subject(name, SPEC, {**options, **({"num_tokens": TOKENS} if "num_tokens" in options else {})})


def masks(mechanism: AttentionMechanism, device: torch.device, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """No mask, causality where it is defined, padding as a boolean mask, and as an additive one."""
    seen = (torch.arange(TOKENS, device=device) < TOKENS - 9).view(1, 1, 1, -1).expand(2, 1, 1, -1)
    additive = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, float("-inf"))
    causal = {"causal": {"is_causal": True}} if mechanism.row_masks else {}
    return {"no mask": {}, **causal, "boolean": {"attn_mask": seen}, "additive": {"attn_mask": additive}}


def run(
    module: AttentionMechanism, inputs: dict[str, Tensor], given: dict[str, Any], weights: Tensor | None = None
) -> dict[str, Tensor]:
    """The output, the weights, and the gradients of Σ weights · output by name, on the CPU in float64.

    The weights grow with the output where None: with random ones the gradient of a scalar is a sum that cancels.
    """
    out = module(**inputs, **given)
    wide = out if out.dtype == torch.float64 else out.float()
    if weights is None:
        weights = wide.detach() * (1.0 + torch.arange(out.numel(), dtype=torch.float64).sin().view(out.shape).to(wide))
    wanted = {**inputs, **dict(module.named_parameters())}
    slopes = torch.autograd.grad((wide * weights.to(wide)).sum(), list(wanted.values()), allow_unused=True)
    found = {
        "output": out,
        "weights": weights,
        **{name: slope for name, slope in zip(wanted, slopes, strict=True) if slope is not None},
    }
    return {name.removeprefix("_orig_mod."): each.detach().cpu().double() for name, each in found.items()}


def distance(found: Tensor, exact: Tensor) -> float:
    """‖found - exact‖ / ‖exact‖; NaN where anything found is not a number."""
    return float((found - exact).norm() / exact.norm().clamp(min=1e-30))
