"""NaN, options out of their limits, and keys that float16 holds while their squares it does not."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_modules import AttentionSpec, available_mechanisms, build_mechanism, mechanisms as found
from attention_modules.mechanisms.shared.columns import attend_with_key_bias
from tests.attention_modules.compare import random_heads
from tests.attention_modules.mechanisms.test_equations import each
from tests.rows import each_row


@each
def test_nan_stays_nan(case):
    for poisoned in case.inputs().keys() - {"draws"}:  # which rank keys, and enter no value
        inputs = case.inputs()
        inputs[poisoned].flatten()[0] = torch.nan
        with torch.no_grad():
            assert case.function(**inputs).isnan().any(), poisoned


@pytest.mark.parametrize(
    ("poisoned", "dtype"), [*enumerate((torch.float32, torch.bfloat16, torch.float64)), (0, torch.float16)]
)
def test_nan_without_a_mask_is_as_in_pytorch_and_is_kept_beside_one(poisoned, dtype):
    """Its fused CPU kernel may answer a query of NaN with zeros; NaN in a key or a value it keeps."""
    inputs = [torch.randn(1, 2, 5, 8, dtype=dtype) for _ in range(3)]
    inputs[poisoned][0, 0, 1, 2] = torch.nan
    softmax = build_mechanism("softmax", AttentionSpec(16, 2, 8))
    for causal in (False, True):
        expected = F.scaled_dot_product_attention(*inputs, is_causal=causal)
        assert poisoned == 0 or expected.isnan().any()
        torch.testing.assert_close(softmax(*inputs, is_causal=causal), expected, rtol=0, atol=0, equal_nan=True)
    mask = torch.ones(5, 5, dtype=torch.bool)
    assert softmax(*inputs, attn_mask=mask)[0, 0, 1].isnan().any()
    with sdpa_kernel(SDPBackend.MATH):
        assert softmax(*inputs)[0, 0, 1].isnan().any()


def test_gates_of_nan_are_not_shut():
    mechanism = build_mechanism("dam", AttentionSpec(24, 3, 8, num_tokens=9)).eval()
    with torch.no_grad():
        mechanism.logits.fill_(torch.nan)
        assert mechanism(**random_heads(dtype=torch.float32)).isnan().any()


@each_row(
    ("name", "options", "message"),
    [
        (
            "rpc",
            {"iterations": 10**9},
            "softmax passes, must be an integer of at most 1,000, got 1,000,000,000",
        ),
        ("sinkhorn", {"iterations": 10**9 + 1}, "iterations must be an integer of at most 1,000, got 1,000,000,001"),
        ("mom", {"subsets": 10**9}, "subsets must be an integer of at most 1,000"),
        ("scaled", {"num_tokens": 10**6}, r"num_tokens=1,000,000 needs a table of 3 x .*variant='scalar'"),
        ("position_bias", {"num_tokens": 10**6}, r"= 3,000,000,000,000 numbers.*4,294,967,296 are the most"),
        ("dam", {"num_tokens": 10**12}, "num_tokens=1,000,000,000,000 needs a table"),
    ],
)
def test_what_would_fill_the_memory_or_never_end_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_mechanism(name, AttentionSpec(24, 3, 8), **options)


@each_row(
    ("name", "option", "value", "message"),
    [
        ("entmax", "alpha", 1.3, "alpha must be 1, 1.5 or 2, got 1.3"),
        ("entmax", "alpha", True, "alpha must be 1, 1.5 or 2, got True"),
        ("entmax", "alpha", torch.tensor(1.5), r"alpha must be 1, 1.5 or 2, got tensor\(1.5"),
        ("entmax", "alpha", torch.tensor([1.5, 2.0]), r"alpha must be 1, 1.5 or 2, got tensor\(\["),
        ("sinkhorn", "iterations", 2, "iterations must be odd"),
        ("sinkhorn", "iterations", 0, "iterations"),
        ("differential", "pairs", "feature", "'feature'"),
        ("rkde", "loss", "hampell", "'hampell'"),
        ("rkde", "a", -1.0, "-1.0"),
        ("qk_norm", "eps", -100.0, "-100.0"),
        ("mom", "outliers", 1.5, "1.5"),
    ],
)
def test_a_function_refuses_what_its_class_refuses(name, option, value, message):
    tensors = {
        "differential": {"lam": torch.tensor(0.5)},
        "qk_norm": {"q_gain": torch.ones(8), "k_gain": torch.ones(8)},
        "mom": {"draws": torch.rand(3, 9)},
    }
    inputs = {**random_heads(dtype=torch.float32), **tensors.get(name, {})}
    with pytest.raises(ValueError, match=message):
        getattr(found, f"{name}_attention")(**inputs, **{option: value})
    with pytest.raises(ValueError, match=message):
        build_mechanism(name, AttentionSpec(24, 3, 8), **{option: value})


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("differential", "affine", "false", "affine must be True or False, got 'false'"),
        ("differential", "affine", 3, "affine must be True or False, got 3"),
        pytest.param("dam", "start", 10**400, "start must be a finite number, got 1000", id="dam"),
        ("sink", "start", 1e39, r"start must be a finite number, got 1e\+39, which float32 does not hold"),
        ("neutreno", "alpha", 1e300, r"of at least 0, got 1e\+300, which float32 does not hold"),
        ("rkde", "a", 1e-46, "above 0, got 1e-46, which float32 does not hold"),
        ("qk_norm", "eps", -1e-46, "above 0, got -1e-46$"),
        ("gated", "bias", -math.inf, "bias must be a finite number, got -inf$"),
        pytest.param("rpc", "lam", 10**400, "lam must be a number of at least 0 .*got 1000", id="rpc"),
    ],
)
def test_a_class_refuses_an_option_of_another_type_or_beyond_a_float(name, option, value, message):
    with pytest.raises(ValueError, match=message):
        build_mechanism(name, AttentionSpec(24, 3, 8, num_tokens=9), **{option: value})


@pytest.mark.parametrize(
    ("start", "dtype"), [(7.0, torch.float16), (12.0, torch.bfloat16), (1e4, torch.float32), (1e4, torch.float64)]
)
def test_a_temperature_that_does_not_grow_has_a_gradient(start, dtype):
    mechanism = build_mechanism("ssa", AttentionSpec(24, 3, 8), start=start).to(dtype)
    inputs = random_heads(dtype=dtype)
    out = mechanism(*inputs.values())
    torch.testing.assert_close(out, F.scaled_dot_product_attention(*inputs.values()), rtol=0, atol=0)
    out.square().sum().backward()
    assert not mechanism.beta.grad.any()  # NaN is not 0


@each_row("name", available_mechanisms())
def test_without_keys_rows_see_nothing(name):
    mechanism = build_mechanism(name, AttentionSpec(24, 3, 8, num_tokens=9)).double()
    keys, queries = 0, 0 if mechanism.one_query_per_key or not mechanism.uses_query else 5
    inputs = {n: x[:, :, : queries if n == "q" else keys] for n, x in random_heads(("q", "k", "v")).items()}
    inputs |= {n: torch.randn_like(inputs["v"]) for n in mechanism.needs if n != "x"}
    if "x" in mechanism.needs:
        inputs["x"] = torch.randn(len(inputs["q"]), queries, 24, dtype=torch.float64)
    q = inputs["q"].requires_grad_()
    out = mechanism(**inputs)
    assert out.shape == q.shape
    assert not out.any()
    if out.requires_grad:
        out.sum().backward()
        assert q.grad is None or not q.grad.any()


LARGE = [(name, size) for name in ("kde", "rkde") for size in (1e-6, 30.0, 3e4)] + [("l2", 30.0), ("l2", 100.0)]


@pytest.mark.parametrize(("name", "size"), LARGE)
def test_float16_with_small_and_large_keys(name, size):
    """The length of 64 numbers of 30,000 is beyond float16, and so is the square of 64 numbers of 100."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 64, generator=generator) for _ in range(3))
    q, k = q / size if name == "l2" else q, k.sign() * size
    function = getattr(found, f"{name}_attention")
    half = [x.half() for x in (q, k, v)]
    exact = function(*(x.double() for x in half))
    assert (function(*half).double() - exact).abs().max() <= 0.01 * exact.abs().max()


@pytest.mark.parametrize("size", [1.0, 4e4, 2e6, 4e7])
def test_float16_with_biases_that_are_beyond_it(size):
    """To float32, which rounds such logits too; without queries, as nothing of what they add would be left."""
    inputs = random_heads(dtype=torch.float16)
    inputs["q"].zero_()
    bias = (size * torch.tensor([1.0, 1.0, 0.5, 1.0, -1.0, 1.0, 1.0, -2.0, 1.0])).expand(*inputs["k"].shape[:-1])

    def found_with(dtype):
        given = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
        given["bias"] = bias.clone().requires_grad_()
        out = attend_with_key_bias(**given)
        out.square().sum().backward()
        return [each.float() for each in (out, *(x.grad for x in given.values()))]

    for half, single in zip(found_with(torch.float16), found_with(torch.float32), strict=True):
        assert (half - single).abs().max() <= 0.01 * single.abs().max()


def test_float16_with_a_sink_beyond_all_logits():
    inputs = random_heads(dtype=torch.float16)
    assert not found.sink_attention(**inputs, sink=torch.full((3,), 1e30)).any()
    closed = torch.full((1, 1, 1), -1e5).expand(inputs["k"].shape[:-1])
    alone = found.forgetting_attention(**inputs, gate=closed, is_causal=True)
    torch.testing.assert_close(alone, inputs["v"])
