"""What is measured of attention equals the CPU's, and comes from the kernels where the GPU has them."""

from __future__ import annotations

import pytest
import torch

from attention_modules import analysis
from attention_modules.analysis.kernels import lse_and_mean_key

TOKENS = 130


def _given(device):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    q, k = 2 * draw(2, 3, TOKENS, 32), draw(2, 3, TOKENS, 32)
    seen = (torch.rand(2, 1, TOKENS, TOKENS, generator=generator) > 0.4).to(device)
    return q, k, draw(2, 24, 16), draw(2, 32, 64), draw(2, 32, 64), seen


def _masks(seen):
    hidden = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, float("-inf"))
    bias = torch.linspace(-1, 1, TOKENS, device=seen.device).expand(1, 1, TOKENS, TOKENS)
    return {
        "no mask": {},
        "causal": {"is_causal": True},
        "boolean": {"attn_mask": seen},
        "additive": {"attn_mask": hidden},
        "bias": {"attn_mask": bias},
    }


def _attend(x):
    return torch.nn.functional.scaled_dot_product_attention(x, 2 * x, x.tanh())


COMPUTED = {
    **{
        f"statistics, {mask}": lambda q, k, x, w_q, w_k, seen, mask=mask: analysis.attention_statistics(
            q, k, **_masks(seen)[mask]
        )
        for mask in ("no mask", "causal", "boolean", "additive", "bias")
    },
    "sink": lambda q, k, *rest: analysis.attention_sink(q, k),
    "token similarity": lambda q, k, x, *rest: analysis.token_similarity(x),
    "largest logit": lambda q, k, *rest: analysis.largest_logit(q, k),
    "Lipschitz": lambda q, k, x, *rest: analysis.local_lipschitz(_attend, x).value,
    "spectrum": lambda q, k, x, w_q, w_k, seen: analysis.qk_statistics(w_q, w_k),
    "kernel PCA": lambda q, k, *rest: analysis.projection_loss(q, k, k).__dict__,
}
LIMITS = {"Lipschitz": 2e-3, "kernel PCA": 1e-3}  # the first stops at a residual of 1e-3


@pytest.mark.parametrize("name", COMPUTED)
def test_equals_the_cpu(name, device):
    exact = COMPUTED[name](*_given("cpu"))
    found = COMPUTED[name](*(x.to(device) for x in _given("cpu")))
    limit = LIMITS.get(name, 1e-5)
    torch.testing.assert_close(found, exact, rtol=10 * limit, atol=limit, equal_nan=True, check_device=False)


@pytest.mark.parametrize("mask", ["no mask", "causal", "boolean"])
def test_log_sum_exp_comes_from_a_kernel(mask, device):
    q, k, *_, seen = _given(device)
    visible = seen if mask == "boolean" else None
    found = lse_and_mean_key(q, k, visible, mask == "causal", 0.2)
    assert found is not None
    logits = 0.2 * q @ k.mT
    if mask != "no mask":
        hidden = ~seen if visible is not None else torch.ones_like(logits, dtype=torch.bool).triu(1)
        logits = logits.masked_fill(hidden, float("-inf"))
    torch.testing.assert_close(found[0], logits.logsumexp(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], logits.softmax(-1) @ k, rtol=1e-4, atol=1e-4)
