"""The fused entropy and its gradients against the whole map."""

import math

import pytest
import torch

from attention_modules.stabilizers import entropy as module
from attention_modules.stabilizers.entropy import entropy_penalty, row_entropy
from attention_modules.stabilizers.naive import naive_row_entropy
from tests.attention_modules.compare import largest_saved
from tests.rows import each_row, pairwise

B, H, N, M, D = 2, 3, 7, 9, 4


def mask(name, rows, columns):
    torch.manual_seed(1)
    scattered = torch.rand(B, 1, rows, columns) > 0.6
    scattered[0, 0, 2] = True  # a row that sees nothing
    return {
        "none": None,
        "padding": ~scattered[:, :, :1],
        "matrix": ~scattered[0, 0],
        "hiding": torch.zeros(B, 1, rows, columns, dtype=torch.float64).masked_fill(scattered, -math.inf),
        "bias": torch.randn(H, rows, columns, dtype=torch.float64),
        "bias and hiding": torch.randn(B, 1, rows, columns, dtype=torch.float64).masked_fill(scattered, -1e9),
    }[name]


MASKS = ["none", "padding", "matrix", "hiding", "bias", "bias and hiding"]


def inputs(rows=N, columns=M, size=2.0):
    torch.manual_seed(0)
    q = size * torch.randn(B, H, rows, D, dtype=torch.float64)
    k = torch.randn(B, H, columns, D, dtype=torch.float64)
    return q.requires_grad_(), k.requires_grad_()


@pytest.mark.parametrize(
    ("name", "kernel", "is_causal"), pairwise(MASKS, ("kernel", "no kernel", "few rows"), (False, True))
)
def test_equals_the_whole_map_with_its_gradients(name, is_causal, kernel, monkeypatch):
    rows, columns = (N, N) if is_causal else (N, M)
    q, k = inputs(rows, columns)
    given = mask(name, rows, columns)
    if kernel == "no kernel":
        monkeypatch.setattr(module, "lse_and_mean_key", lambda *_: None)
    monkeypatch.setattr(module, "CHUNK", 2 * N if kernel == "few rows" else 3)
    found = row_entropy(q, k, attn_mask=given, is_causal=is_causal, scale=0.7)
    expected = naive_row_entropy(q, k, given, is_causal, 0.7)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    upstream = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, (q, k), upstream), torch.autograd.grad(expected, (q, k), upstream), strict=True
    ):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("chunk", [128, 4], ids=["few rows", "fused"])
@pytest.mark.parametrize("size", [0.0, 1.0, 30.0, 300.0])
def test_stays_finite_where_attention_is_uniform_or_saturated(size, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    q, k = inputs(size=size)
    q, k = q.detach().float().requires_grad_(), k.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = row_entropy(q.bfloat16(), k.bfloat16(), is_causal=False)
    assert found.dtype == torch.float32
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(found.sum(), (q, k)))
    expected = naive_row_entropy(q.bfloat16().double(), k.bfloat16().double())
    torch.testing.assert_close(found.double(), expected, atol=1e-3 * max(1.0, size / 10), rtol=1e-4)


def test_hidden_keys_leave_gradients_of_a_scaled_loss_finite():
    q, k = inputs(N, N)
    q, k = q.detach().float().requires_grad_(), k.detach().float().requires_grad_()
    found = row_entropy(q, k, is_causal=True)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(found.sum() * 2.0**24, (q, k)))


def naive_penalty(q, k, floor, target, given, is_causal, kept):
    """The penalty in one loop a sample and head."""
    total = 0.0
    entropy = naive_row_entropy(q, k, given, is_causal)
    for head in range(H):
        of_samples = []
        for sample in range(B):
            rows = []
            for row in kept:
                seen = given.expand(B, H, q.shape[2], k.shape[2])[sample, head, row] if given is not None else None
                count = k.shape[2] if seen is None else int(seen.sum())
                count = min(count, row + 1) if is_causal and seen is None else count
                count = int(seen[: row + 1].sum()) if is_causal and seen is not None else count
                if count >= 2:
                    rows.append(entropy[sample, head, row] / math.log(count))
            if rows:
                h = torch.stack(rows).mean()
                of_samples.append((h - target) ** 2 if target is not None else (floor - h).clamp(min=0) ** 2)
        total = total + torch.stack(of_samples).mean()
    return total


PENALTIES = [(0.8, None, None), (None, 0.4, None), (0.8, None, 3), (0.99, None, 1)]


@each_row(("name", "penalty", "is_causal"), pairwise(("none", "padding", "matrix"), PENALTIES, (False, True)))
def test_penalty_equals_its_definition_with_gradients(name, penalty, is_causal):
    floor, target, max_rows = penalty
    q, k = inputs(N, N)
    given = mask(name, N, N)
    kept = {None: range(N), 3: (0, 3, 6), 1: (6,)}[max_rows]
    options = {"attn_mask": given, "is_causal": is_causal, "floor": floor, "target": target, "max_rows": max_rows}
    found, expected = entropy_penalty(q, k, **options), naive_penalty(q, k, floor, target, given, is_causal, kept)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    assert found > 0
    for one, other in zip(torch.autograd.grad(found, (q, k)), torch.autograd.grad(expected, (q, k)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-9)


def test_nothing_to_look_at_is_no_penalty():
    q, k = inputs(1, 1)
    found = entropy_penalty(q, k, floor=0.9)
    assert found == 0
    assert all((grad == 0).all() for grad in torch.autograd.grad(found, (q, k)))
    with pytest.raises(ValueError, match="one of floor and target, got floor=None and target=None"):
        entropy_penalty(q, k)
    with pytest.raises(ValueError, match="max_rows must be an integer of at least 1, got 0"):
        entropy_penalty(q, k, floor=0.9, max_rows=0)


def test_no_map_is_held():
    """Nothing that is saved for the backward pass has as many numbers as a map of all heads."""
    q, k = torch.randn(2, 1, 2, 512, 8).requires_grad_().unbind()
    assert largest_saved(lambda: row_entropy(q, k).sum()) < 512 * 512
    mask = torch.randn(1, 1, 512, 512)  # of one head
    assert largest_saved(lambda: row_entropy(q, k, attn_mask=mask).sum()) <= mask.numel()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{"floor": 0.1}, {"target": 0.5, "max_rows": 3}], ids=["floor", "target"])
def test_what_is_not_finite_shows(bad, options):
    q, k = (part.detach().clone() for part in inputs(N, N))
    q[0, 0, 2:] = bad
    assert entropy_penalty(q, k, **options).isnan()
    assert entropy_penalty(q, k, is_causal=True, **options).isnan()
