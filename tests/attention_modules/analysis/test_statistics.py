"""Attention statistics against the equations written out on the whole map."""

import math

import pytest
import torch

from attention_modules.analysis import (
    STATISTICS,
    attention_entropy,
    attention_row_sums,
    attention_sink,
    attention_statistics,
    chunks,
    kernels,
    sink_features,
    token_similarity,
)
from tests.rows import each_row, pairwise


def naive_statistics(q, k, mask, is_causal, scale):
    """Every statistic from the N x M map, ``[B, H]`` each."""
    logits = q @ k.mT * scale
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
    if is_causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -math.inf)
    visible = (logits > -1e30).sum(-1)
    p = torch.softmax(logits, -1)
    entropy = -(p * p.clamp(min=1e-30).log()).sum(-1)

    def mean(rows, keep):
        return torch.where(keep, rows, 0).sum(-1) / keep.sum(-1)

    return {
        "entropy": mean(entropy, visible >= 1),
        "normalised_entropy": mean(entropy / visible.clamp(min=2).log(), visible >= 2),
        "effective_support": mean(1 / p.square().sum(-1), visible >= 1),
        "largest_probability": mean(p.amax(-1), visible >= 1),
    }


def masks(batch, heads, rows, columns):
    torch.manual_seed(1)
    scattered = torch.rand(batch, 1, rows, columns) > 0.6
    return {
        "none": None,
        "padding": torch.rand(batch, 1, 1, columns) > 0.3,
        "matrix": torch.rand(rows, columns) > 0.5,
        "heads": torch.rand(batch, heads, rows, columns) > 0.6,
        "additive_hiding": torch.zeros(batch, 1, rows, columns).masked_fill(~scattered, -math.inf),
        "additive_bias": torch.randn(heads, rows, columns),
        "bias_and_least_number": torch.randn(batch, 1, rows, columns).masked_fill(~scattered, torch.finfo().min),
    }


SHAPES = [(2, 3, 7, 7, 4), (1, 1, 1, 1, 2), (2, 2, 5, 9, 3), (2, 2, 9, 5, 3)]


@pytest.mark.parametrize(
    ("shape", "mask", "is_causal", "differentiable"),
    pairwise(SHAPES, masks(1, 1, 1, 1), (False, True), (False, True)),
)
def test_equals_the_whole_map(shape, mask, is_causal, differentiable):
    batch, heads, rows, columns, dim = shape
    torch.manual_seed(0)
    q, k = 3 * torch.randn(batch, heads, rows, dim), torch.randn(batch, heads, columns, dim)
    attn_mask = masks(batch, heads, rows, columns)[mask]
    expected = naive_statistics(q, k, attn_mask, is_causal, 0.7)
    q.requires_grad_(differentiable)
    found = attention_statistics(q, k, attn_mask=attn_mask, is_causal=is_causal, scale=0.7)
    assert list(found) == list(STATISTICS)
    for name in STATISTICS:
        torch.testing.assert_close(found[name], expected[name], atol=5e-6, rtol=1e-5, equal_nan=True, msg=name)


def test_many_chunks_equal_one(monkeypatch):
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 11, 4), torch.randn(2, 2, 11, 4)
    bias = torch.randn(1, 1, 11, 11)
    whole = attention_statistics(q, k, attn_mask=bias, is_causal=True)
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 1)
    split = attention_statistics(q, k, attn_mask=bias, is_causal=True)
    for name in STATISTICS:
        torch.testing.assert_close(split[name], whole[name], msg=name)


@pytest.mark.parametrize("error", [AttributeError, TypeError, RuntimeError, None])
def test_without_the_private_kernel(error, monkeypatch):
    def gone(*arguments):
        raise error("no such call")

    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 9, 4), torch.randn(2, 2, 9, 4)
    fast = attention_statistics(q, k, is_causal=True)
    assert kernels.lse_and_mean_key(q, k, None, True, 0.5) is not None
    monkeypatch.setattr(kernels, "_KERNELS", {"cpu": gone} if error else {})
    assert kernels.lse_and_mean_key(q, k, None, True, 0.5) is None
    slow = attention_statistics(q, k, is_causal=True)
    for name in STATISTICS:
        torch.testing.assert_close(fast[name], slow[name], atol=1e-6, rtol=1e-5, msg=name)


def test_uniform_and_one_hot_attention():
    rows = 8
    uniform = attention_statistics(torch.zeros(1, 1, rows, 4), torch.randn(1, 1, rows, 4))
    assert uniform["entropy"].item() == pytest.approx(math.log(rows), abs=1e-6)
    assert uniform["normalised_entropy"].item() == pytest.approx(1, abs=1e-6)
    assert uniform["effective_support"].item() == pytest.approx(rows, abs=1e-4)
    assert uniform["largest_probability"].item() == pytest.approx(1 / rows, abs=1e-6)
    eye = 100 * torch.eye(rows).view(1, 1, rows, rows)
    hot = attention_statistics(eye, eye)
    assert hot["entropy"].item() == pytest.approx(0, abs=1e-3)
    assert hot["entropy"].item() >= 0
    assert hot["effective_support"].item() == pytest.approx(1, abs=1e-5)


def test_a_sharp_row_has_no_probability_above_one():
    """Logits of some ten thousand are rounded in the row's sum and in its largest entry apart."""
    k = 100 * torch.randn(1, 2, 64, 8)
    total, count = attention_row_sums(k, k, statistics=["largest_probability"])["largest_probability"]
    assert (total <= count).all()


def test_one_token_has_no_normalised_entropy():
    found = attention_statistics(torch.randn(2, 3, 1, 4), torch.randn(2, 3, 1, 4))
    assert found["entropy"].abs().max() < 1e-6
    assert found["normalised_entropy"].isnan().all()


def test_rows_that_see_nothing_do_not_count():
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 4, 3), torch.randn(1, 2, 4, 3)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    rest = [0, 1, 3]
    for name, value in attention_statistics(q, k, attn_mask=mask).items():
        torch.testing.assert_close(value, attention_statistics(q[:, :, rest], k)[name], msg=name)


def test_entropy_has_the_gradient_of_the_whole_map():
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 5, 3, requires_grad=True), torch.randn(1, 2, 5, 3, requires_grad=True)
    found = torch.autograd.grad(attention_entropy(q, k, is_causal=True).sum(), (q, k))
    expected = torch.autograd.grad(naive_statistics(q, k, None, True, 3**-0.5)["entropy"].sum(), (q, k))
    for name, a, b in zip("qk", found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_is_fp32_under_autocast(dtype):
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 6, 4, dtype=dtype), torch.randn(1, 2, 6, 4, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention_entropy(q, k)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, attention_entropy(q.float(), k.float()))


@each_row(
    ("arguments", "message"),
    [
        ({"statistics": ("entropie",)}, "entropie"),
        ({"statistics": ()}, "choose some of"),
        ({"attn_mask": torch.ones(3, 3, dtype=torch.bool)}, r"\(1, 2, 6, 6\), got \(3, 3\)"),
        ({"attn_mask": torch.ones(6, 6, dtype=torch.int64)}, "boolean or floating"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        attention_statistics(torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4), **arguments)


@pytest.mark.parametrize("function", [attention_statistics, attention_sink])
@pytest.mark.parametrize("shape", [(2, 0, 5, 4), (2, 2, 0, 4), (2, 2, 5, 0)])
def test_nothing_to_attend_to_is_refused(function, shape):
    """Of no rows the kernel divides by zero, which ends the process."""
    with pytest.raises(ValueError, match="must be at least 1, got q"):
        function(torch.zeros(shape), torch.zeros(shape))
    with pytest.raises(ValueError, match="must be at least 1, got q"):
        function(torch.zeros(2, 2, 5, 4), torch.zeros(2, 2, 0, 4))


@pytest.mark.parametrize("differentiable", [False, True])
def test_an_empty_batch_has_no_statistics(differentiable):
    q = torch.zeros(0, 2, 5, 4, requires_grad=differentiable)
    found = attention_statistics(q, q.detach())
    assert {values.shape for values in found.values()} == {(0, 2)}
    assert attention_sink(q, q.detach()).shape == (0, 2)


def test_heads_must_agree():
    with pytest.raises(ValueError, match=r"\(1, 4, 6, 4\) and \(1, 2, 6, 4\)"):
        attention_statistics(torch.randn(1, 4, 6, 4), torch.randn(1, 2, 6, 4))


@pytest.mark.parametrize("masked", [None, "boolean", "additive"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sink_is_the_largest_mean_column_of_the_map(masked, is_causal, monkeypatch):
    monkeypatch.setattr("attention_modules.analysis.chunks.CHUNK_ELEMENTS", 60)  # several chunks
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 9, 4), torch.randn(2, 3, 9, 4)
    mask = torch.rand(2, 1, 9, 9) > 0.4
    mask[0, :, 0] = False  # a row that sees nothing
    given = {None: None, "boolean": mask, "additive": torch.randn(9, 9)}[masked]
    logits = q @ k.mT / 2
    if given is not None:
        logits = logits.masked_fill(~given, -torch.inf) if masked == "boolean" else logits + given
    if is_causal:
        logits = logits.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    some = (logits > -torch.inf).any(-1)
    maps = logits.softmax(-1).nan_to_num(0.0)
    expected = maps.sum(-2).amax(-1) / some.sum(-1)
    torch.testing.assert_close(attention_sink(q, k, attn_mask=given, is_causal=is_causal), expected)
    kept = [1, 4, 7]
    expected = maps[:, :, kept].sum(-2).amax(-1) / some[:, :, kept].sum(-1)
    found = attention_sink(q, k, attn_mask=given, is_causal=is_causal, max_rows=3)
    torch.testing.assert_close(found, expected)


def test_sink_from_uniform_to_one_key():
    k = torch.zeros(1, 1, 10, 4)
    assert attention_sink(torch.randn(1, 1, 10, 4), k).item() == pytest.approx(0.1)
    k[..., 3, :] = 100.0
    assert attention_sink(torch.ones(1, 1, 10, 4), k).item() == pytest.approx(1.0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_nan_stays_nan(is_causal):
    q, k = torch.randn(2, 1, 2, 10, 4, generator=torch.Generator().manual_seed(0))
    q[:, 0, 5:] = torch.nan
    for name, values in attention_statistics(q, k, is_causal=is_causal).items():
        assert values.isnan().tolist() == [[True, False]], name


def test_nan_in_some_rows_is_no_sink():
    q, k = torch.randn(2, 1, 2, 10, 4, generator=torch.Generator().manual_seed(0))
    q[:, 0, 5:] = torch.nan
    seen = torch.ones(10, 10, dtype=torch.bool)
    seen[5:] = False  # rows that see nothing stay out, whatever they hold
    assert attention_sink(q, k).isnan().tolist() == [[True, False]]
    torch.testing.assert_close(attention_sink(q, k, attn_mask=seen), attention_sink(q[:, :, :5], k))


def test_sink_features_of_a_padded_sequence_are_those_of_the_sequence():
    x, shares = torch.randn(2, 9, 4), torch.rand(2, 3, 9)
    valid = torch.arange(9) < torch.tensor([[9], [5]])
    found = sink_features(x, shares.masked_fill(~valid[:, None], 0.0), valid)
    for name, values in sink_features(x[1:, :5], shares[1:, :, :5]).items():
        torch.testing.assert_close(found[name][1:], values)
        torch.testing.assert_close(found[name][:1], sink_features(x[:1], shares[:1])[name])


def test_token_similarity_is_the_mean_of_all_pairs():
    torch.manual_seed(0)
    x, valid = torch.randn(3, 6, 5), torch.rand(3, 6) > 0.3
    for found, one, kept in zip(token_similarity(x, valid), x, valid, strict=True):
        tokens = one[kept]
        cosines = torch.nn.functional.cosine_similarity(tokens[:, None], tokens[None], dim=-1)
        pairs = cosines[~torch.eye(len(tokens), dtype=torch.bool)]
        torch.testing.assert_close(found, pairs.mean())
    same = torch.randn(1, 1, 5).expand(1, 6, 5) * torch.arange(1, 7).view(1, 6, 1)
    assert token_similarity(same).item() == pytest.approx(1.0, abs=1e-6)
    assert token_similarity(torch.randn(1, 1, 5)).isnan().all()
    with pytest.raises(ValueError, match=r"got \(6, 5\)"):
        token_similarity(torch.randn(6, 5))


@pytest.mark.parametrize("shape", [(2, 3, 5, 13), (1, 1, 1, 13), (2, 1, 5, 1), (1, 1, 5, 16)])
def test_the_kernel_of_cuda_gets_masks_as_it_takes_them(shape, monkeypatch):
    """It refuses rows that are not aligned, or not contiguous; without one statistics are computed in chunks."""
    keys = max(shape[-1], 13)
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, keys, 8)
    visible = torch.rand(shape) > 0.5
    given = []
    monkeypatch.setattr(
        kernels, "private_operator", lambda name: lambda q, k, v, bias, *rest, **more: given.append(bias)
    )
    with pytest.raises(TypeError):  # nothing comes back
        kernels._cuda(q, k, visible, False, 1.0)
    (bias,) = given
    assert bias.stride(-1) == 1
    assert all(stride % 16 == 0 for stride in bias.stride()[:-1])
    assert torch.equal(bias == 0, visible.expand(2, 3, 5, keys))
    assert bias.masked_fill(visible, -math.inf).eq(-math.inf).all()


def test_a_token_that_does_not_count_may_be_nan():
    x, valid = torch.randn(1, 4, 5), torch.tensor([[True, True, True, False]])
    x[:, 3] = torch.nan
    torch.testing.assert_close(token_similarity(x, valid), token_similarity(x[:, :3]))
