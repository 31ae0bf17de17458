import math

import pytest
import torch

from attention_modules import rpc_diagnostics
from attention_modules.naive import soft, visibility
from tests.attention_modules.compare import masks, random_heads


def by_hand(k, v, iterations, lam, attn_mask=None, is_causal=False):
    """The numbers from the whole map, without the short form, of the tokens that some row sees (boolean masks)."""
    heads, tokens, width = k.shape[-3:]
    seen = visibility(tokens, attn_mask, is_causal).expand(*k.shape[:-1], tokens)
    mu = seen.sum(-1, keepdim=True) * width * heads / (4 * (seen * k.abs().sum(-1).unsqueeze(-2)).sum(-1, keepdim=True))
    low_rank = dual = torch.zeros_like(k)
    tokens = seen.any(-2).double()  # [B, H, N]
    passes = []

    def mean(rows):
        return (rows * tokens).sum(-1) / tokens.sum(-1)

    def norm(rows):
        return (rows.square().sum(-1) * tokens).sum(-1).sqrt()

    for _ in range(iterations):
        sparse = soft(k - low_rank + dual / mu, lam * mu)
        keys = k - sparse - dual / mu
        map_ = (keys @ keys.transpose(-2, -1) / math.sqrt(width)).masked_fill(~seen, -torch.inf).softmax(-1)
        low_rank = map_ @ v
        dual = dual + mu * (k - low_rank - sparse)
        entropy = mean(-(map_ * map_.clamp(min=1e-300).log()).sum(-1))
        own = mean(map_.diagonal(dim1=-2, dim2=-1))
        passes.append(
            (mean((sparse.abs() > 1e-12).double().mean(-1)), norm(k - low_rank - sparse) / norm(k), entropy, own)
        )
    names = ("sparsity", "residual", "entropy", "self_probability")
    found = dict(zip(names, map(torch.stack, zip(*passes, strict=True)), strict=True))
    once = {"mean_abs_key": heads / 4 / mu, "threshold": lam * mu}
    return found | {name: mean(each.squeeze(-1)) for name, each in once.items()}


@pytest.mark.parametrize("case", ["nothing", "causal", "padding", "all"])
def test_equal_what_the_equations_give(case, monkeypatch):
    monkeypatch.setattr("attention_modules.diagnostics.ROWS_AT_ONCE", 4)
    inputs, kwargs = random_heads("kv"), masks()[case]
    found = rpc_diagnostics(**inputs, iterations=3, lam=0.3, **kwargs)
    expected = by_hand(**inputs, iterations=3, lam=0.3, **kwargs)
    for name, value in expected.items():
        assert found[name].shape == ((2, 3) if name in ("mean_abs_key", "threshold") else (3, 2, 3))
        if name == "sparsity" and case != "nothing":
            continue  # an entry at the threshold may round to either side
        assert torch.allclose(found[name], value, atol=1e-9), name


def test_rows_that_see_nothing_are_left_out():
    k, v = random_heads("kv").values()
    mask = torch.eye(9, dtype=torch.bool)
    mask[0] = False
    found = rpc_diagnostics(k, v, attn_mask=mask)
    assert torch.allclose(found["self_probability"], torch.ones(4, 2, 3, dtype=torch.float64))
    assert torch.allclose(found["entropy"], torch.zeros(4, 2, 3, dtype=torch.float64))


def test_nan_stays_nan():
    k, v = torch.randn(2, 1, 1, 6, 4, generator=torch.Generator().manual_seed(0))
    k[..., 2, :] = torch.nan
    found = rpc_diagnostics(k, v, iterations=1, is_causal=True)  # the first two rows do not see it
    assert all(found.pop(name).isnan().all() for name in found.keys() - {"sparsity"})


def test_the_iteration_saturates():
    """At n = 6 a token attends to itself, though almost nothing is sparse in pass 1."""
    k, v = torch.randn(2, 1, 3, 197, 64).unbind(0)
    found = rpc_diagnostics(k, v, iterations=6, lam=4.0)
    assert found["sparsity"][0].max() < 1e-3
    assert found["sparsity"][-1].min() > 0.3
    assert found["self_probability"][-1].mean() > 0.9
    assert found["entropy"][-1].mean() < 0.1 * math.log(197)


def test_zero_keys_are_finite():
    k, v = random_heads("kv").values()
    found = rpc_diagnostics(torch.zeros_like(k), v)
    assert (found.pop("threshold") == torch.inf).all()  # S is empty
    assert all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype):
    k, v = random_heads("kv", (2, 3, 40, 16), dtype=torch.float32).values()
    mask = (torch.arange(40) < 33).view(1, 1, 1, 40)
    expected = rpc_diagnostics(k, v, lam=1.0, attn_mask=mask)
    with torch.autocast("cpu", dtype):
        found = rpc_diagnostics(k, v, lam=1.0, attn_mask=mask)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
