"""The inputs by which PyTorch tests its attention modules, run on plain modules and on swapped ones."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_modules.swap import AttentionSwapError, swap_attention

KINDS = (
    "MultiheadAttention",
    "TransformerEncoderLayer",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "Transformer",
)
pytestmark = pytest.mark.filterwarnings("ignore")


def _results(module: nn.Module, inputs: Any) -> list[Tensor]:
    """Outputs, and gradients of Parameters by them, of one call."""
    module.zero_grad()
    torch.manual_seed(0)
    out = module(*inputs.args, **inputs.kwargs)
    outs = [each for each in (out if isinstance(out, tuple) else (out,)) if each is not None]
    outs[0].sum().backward()
    return [*outs, *(each.grad for each in module.parameters() if each.grad is not None)]


@pytest.mark.parametrize(("dtype", "training"), [(torch.float32, False), (torch.float64, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_swapped_modules_give_what_plain_ones_give(kind: str, dtype: torch.dtype, training: bool) -> None:
    pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
    common = importlib.import_module("torch.testing._internal.common_modules")
    (info,) = [each for each in common.module_db if each.module_cls is getattr(nn, kind)]
    compared, refused = 0, set()
    for each in info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=False, training=training):
        torch.manual_seed(0)
        arguments = each.constructor_input
        plain = info.module_cls(*arguments.args, **arguments.kwargs).to(dtype).train(training)
        swapped = copy.deepcopy(plain)
        try:
            swap_attention(swapped, "softmax")
        except AttentionSwapError as error:
            refused.add(str(error))
            continue
        given = copy.deepcopy(each.forward_input)
        expected, found = _results(plain, each.forward_input), _results(swapped, given)
        assert len(expected) == len(found)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
        compared += 1
    assert compared >= 4
    assert all("add_bias_kv or add_zero_attn" in text for text in refused), refused
