"""Some of the cases of :mod:`tests.reliability.fuzz_mechanisms`."""

import pytest
import torch

from attention_modules import AttentionSpec
from attention_modules.mechanism import build_mechanism
from tests.reliability.fuzz_mechanisms import MECHANISMS, fuzz


def test_the_mechanisms_keep_to_their_equations_in_every_precision():
    _, failures = fuzz(150)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 4096])
@pytest.mark.parametrize("name", MECHANISMS)
def test_short_and_long_sequences_are_finite_under_autocast(name, tokens, dtype):
    options = {"scaled": {"variant": "scalar"}, "rpc": {"iterations": 2}}.get(name, {})
    module = build_mechanism(name, AttentionSpec(8, 1, 8, num_tokens=tokens), **options)
    generator = torch.Generator().manual_seed(0)
    padding = torch.zeros(1, 1, 1, tokens)
    padding[..., tokens // 2 + 1 :] = -1e4
    for size in (0.0, 8.0):
        x = [(size * torch.randn(1, 1, tokens, 8, generator=generator)).requires_grad_() for _ in range(3)]
        with torch.autocast("cpu", dtype):
            out = module(*x, attn_mask=padding)
        grads = torch.autograd.grad(out.float().sum(), x, allow_unused=True)
        assert all(y.isfinite().all() for y in (out, *grads) if y is not None)
