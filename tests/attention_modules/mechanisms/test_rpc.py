import copy
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._inductor import config as inductor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_modules import (
    AttentionSpec,
    RPCAttention,
    SelfAttention,
    kernels,
    rpc_attention,
    rpc_diagnostics,
    symmetric_attention,
)
from attention_modules.mechanisms.pursuit import FusedPursuit
from attention_modules.mechanisms.rpc import pursuit_threshold
from attention_modules.naive import naive_attention, naive_rpc, soft
from tests.attention_modules.compare import assert_same, masks, random_heads, values_and_gradients
from tests.rows import each_row, pairwise

SETTINGS = {
    "default": {},
    "fires": {"lam": 0.3},
    "fires always": {"lam": 0.02, "iterations": 3},
    "one pass": {"iterations": 1, "lam": 0.2},
    "two passes": {"iterations": 2, "lam": 3.0},
    "ratio": {"threshold": "ratio"},
    "head": {"threshold": "head"},
    "ratio, lam 3": {"threshold": "ratio", "lam": 3.0, "iterations": 2},
}
# Four passes amplify what rounding leaves: gradients reach 1e3 and agree to 1e-12 of that.
TOLERANCE = 1e-10


@pytest.fixture
def fused_calls(monkeypatch):
    """How often the fused form ran."""
    calls = []
    apply = FusedPursuit.apply
    monkeypatch.setattr(FusedPursuit, "apply", lambda *args: calls.append(1) or apply(*args))
    return calls


@pytest.mark.parametrize(("setting", "case", "form"), pairwise(SETTINGS, masks(), ("fused", "plain", "math")))
def test_equals_its_equations(setting, case, form, monkeypatch, fused_calls):
    kwargs = {**SETTINGS[setting], **masks()[case]}
    inputs = random_heads("kv", seed=3)
    expected = values_and_gradients(lambda k, v: naive_rpc(k, v, **kwargs), inputs)
    monkeypatch.setattr(kernels, "has_flash_kernels", lambda: form == "fused")
    with sdpa_kernel(list(SDPBackend.__members__.values())[1:] if form != "math" else SDPBackend.MATH):
        actual = values_and_gradients(lambda k, v: rpc_attention(k, v, **kwargs), inputs)
    assert_same(actual, expected, TOLERANCE)
    assert len(fused_calls) == (form == "fused")


def test_the_threshold_fires_and_matters():
    k, v = random_heads("kv").values()
    limit = pursuit_threshold(k, 0.3)
    clipped = (soft(k, limit) != 0).double().mean()
    assert 0.2 < clipped < 0.95
    assert (rpc_attention(k, v, lam=0.3) - rpc_attention(k, v, lam=math.inf)).abs().max() > 1e-2


@each_row("case", masks())
def test_without_a_limit_one_pass_is_symmetric_attention_exactly(case):
    k, v = random_heads("kv").values()
    kwargs = masks()[case]
    assert torch.equal(rpc_attention(k, v, iterations=1, lam=math.inf, **kwargs), symmetric_attention(k, v, **kwargs))


def test_with_an_empty_sparse_part_the_second_pass_attends_from_the_first():
    k, v = random_heads("kv").values()
    first = symmetric_attention(k, v)
    assert torch.allclose(
        rpc_attention(k, v, iterations=2, lam=1e9), torch.nn.functional.scaled_dot_product_attention(first, first, v)
    )


def test_default_lam_is_that_of_the_threshold():
    k, v = random_heads("kv").values()
    assert torch.equal(rpc_attention(k, v), rpc_attention(k, v, lam=4.0))
    ratio = rpc_attention(k, v, threshold="ratio")
    assert torch.allclose(ratio, rpc_attention(k, v, threshold="ratio", lam=1 / math.sqrt(9)))
    assert not torch.allclose(ratio, rpc_attention(k, v, threshold="released"))


def pursued(k, v, order="S first", sign=-1.0, heads=3):
    """Two passes of the released form, or of one that differs in one thing."""
    mu = k[0, 0].numel() * heads / (4 * k.abs().sum((-2, -1), keepdim=True))
    low = dual = sparse = torch.zeros_like(k)
    for _ in range(2):
        if order == "S first":
            sparse = soft(k - low + dual / mu, 4 * mu)
        keys = k - sparse + sign * dual / mu
        low = naive_attention(keys, keys, v)
        if order == "L first":
            sparse = soft(k - low + dual / mu, 4 * mu)
        dual = dual + mu * (k - low - sparse)
    return low


def test_other_readings_lie_as_far_apart_as_its_page_says():
    far = {}
    for seed in range(5):
        k, v = torch.randn(2, 1, 3, 197, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        released = rpc_attention(k, v, iterations=2)
        assert torch.allclose(pursued(k, v), released)
        head = rpc_attention(k, v, iterations=2, threshold="head")
        assert torch.allclose(pursued(k, v, heads=1), head)
        others = {"order": pursued(k, v, order="L first"), "sign": pursued(k, v, sign=1.0), "head": head}
        others["ratio"] = rpc_attention(k, v, iterations=2, threshold="ratio")
        for name, other in others.items():
            far.setdefault(name, []).append(float((other - released).abs().max()))
    told = {name: f"{min(each):.1f} to {max(each):.1f}" for name, each in far.items()}
    assert told == {"order": "2.3 to 2.9", "sign": "2.8 to 3.6", "head": "2.2 to 2.7", "ratio": "3.8 to 4.9"}


@pytest.mark.parametrize("threshold", ["released", "ratio"])
def test_causal_in_three_spellings_is_one_answer(threshold):
    k, v = random_heads("kv").values()
    past = torch.ones(9, 9, dtype=torch.bool).tril()
    additive = torch.zeros(9, 9, dtype=k.dtype).masked_fill(~past, torch.finfo(k.dtype).min)
    expected = rpc_attention(k, v, is_causal=True, lam=0.3, threshold=threshold)
    for mask in (past, additive, past[None, None].expand(2, 3, 9, 9)):
        assert torch.allclose(rpc_attention(k, v, attn_mask=mask, lam=0.3, threshold=threshold), expected, atol=1e-12)


def test_a_sliding_window_widens_with_every_pass():
    k, v = random_heads("kv", shape=(1, 1, 24, 8)).values()
    places = torch.arange(24)
    mask = (places <= places[:, None]) & (places > places[:, None] - 4)
    for iterations, reach in ((1, 3), (2, 6), (4, 12)):
        inputs = {"k": k.clone().requires_grad_(), "v": v.clone().requires_grad_()}
        out = rpc_attention(**inputs, iterations=iterations, attn_mask=mask)[0, 0, 20].sum()
        touched = torch.autograd.grad(out, inputs["v"])[0][0, 0].abs().sum(-1).nonzero()
        assert 20 - touched.min() == reach


def test_rows_that_see_nothing_give_zeros_and_finite_gradients():
    inputs = random_heads("kv")
    mask = torch.ones(9, 9, dtype=torch.bool)
    mask[4] = False
    found = values_and_gradients(lambda k, v: rpc_attention(k, v, attn_mask=mask), inputs)
    assert found["output"][..., 4, :].abs().max() == 0
    assert all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-20, 1e-13])
@pytest.mark.parametrize("threshold", ["released", "ratio"])
def test_tiny_keys_give_finite_gradients(threshold, scale):
    inputs = random_heads("kv", dtype=torch.float32)
    inputs["k"] *= scale
    for is_causal in (False, True):
        found = values_and_gradients(lambda k, v: rpc_attention(k, v, threshold=threshold, is_causal=is_causal), inputs)  # noqa: B023
        assert all(x.isfinite().all() for x in found.values())


def test_thresholds_are_summed_in_float32_under_autocast():
    k = torch.full((1, 8, 4096, 16), 0.11, dtype=torch.float16)
    limit = pursuit_threshold(k, 1.0, "ratio")
    assert limit.dtype == torch.float32
    assert limit.item() if limit.numel() == 1 else torch.allclose(limit, torch.tensor(0.44), rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_runs_attention_in_half_and_keeps_gradients_in_the_inputs_dtype(dtype):
    k, v = (x.requires_grad_() for x in random_heads("kv", dtype=torch.float32).values())
    with torch.autocast("cpu", dtype):
        out = rpc_attention(k, v, lam=0.5)
    assert out.dtype == dtype
    grads = torch.autograd.grad(out.float().square().sum(), (k, v))
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)


def test_long_sequences_are_finite_and_never_hold_a_map():
    k, v = (torch.randn(1, 1, 4096, 16, requires_grad=True) for _ in range(2))
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = out if isinstance(out, (tuple, list)) else (out,)
            largest.extend(x.numel() for x in tensors if isinstance(x, torch.Tensor))
            return out

    with Watch():
        out = rpc_attention(k, v, is_causal=True)
        out.square().sum().backward()
    assert out.isfinite().all()
    assert k.grad.isfinite().all()
    assert v.grad.isfinite().all()
    assert max(largest) == k.numel()


def test_dropout_acts_in_the_last_pass_only(monkeypatch):
    from attention_modules.mechanisms import pursuit

    seen = []
    attend = pursuit.attend
    monkeypatch.setattr(pursuit, "attend", lambda *args: seen.append(args[5]) or attend(*args))
    k, v = random_heads("kv").values()
    rpc_attention(k, v, iterations=3, dropout_p=0.25)
    assert seen == [0.0, 0.0, 0.25]


def test_second_derivatives_exist_under_the_math_backend_and_raise_with_that_cure_elsewhere():
    k, v = (x.requires_grad_() for x in random_heads("kv", shape=(1, 2, 4, 8)).values())
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(lambda k, v: rpc_attention(k, v, iterations=2, lam=0.3), (k, v))
    (grad,) = torch.autograd.grad(rpc_attention(k, v).square().sum(), k, create_graph=True)
    with pytest.raises(RuntimeError, match=r"SDPBackend\.MATH"):
        grad.sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
def test_transforms_take_the_plain_form():
    k, v = random_heads("kv", shape=(1, 2, 4, 8)).values()
    expected = values_and_gradients(lambda k, v: rpc_attention(k, v, lam=0.3), {"k": k, "v": v})["grad_k"]
    weights = torch.linspace(-1, 1, k.numel(), dtype=k.dtype).sin().view(k.shape)
    actual = torch.func.grad(lambda k: (rpc_attention(k, v, lam=0.3) * weights).sum())(k)
    assert torch.allclose(actual, expected)
    _, tangent = torch.func.jvp(lambda k: (rpc_attention(k, v, lam=0.3) * weights).sum(), (k,), (k,))
    assert torch.allclose(tangent, (expected * k).sum())


def test_a_learned_bias_gets_its_gradient(fused_calls):
    inputs = {**random_heads("kv"), "bias": torch.randn(3, 9, 9, dtype=torch.float64)}
    actual = values_and_gradients(lambda k, v, bias: rpc_attention(k, v, attn_mask=bias, lam=0.3), inputs)
    expected = values_and_gradients(lambda k, v, bias: naive_rpc(k, v, attn_mask=bias, lam=0.3), inputs)
    assert_same(actual, expected, TOLERANCE)
    assert not fused_calls


def test_backward_may_run_twice():
    k, v = (x.requires_grad_() for x in random_heads("kv").values())
    out = rpc_attention(k, v, lam=0.3).sum()
    first, second = (torch.autograd.grad(out, (k, v), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_eager(backend):
    inputs = random_heads("kv", dtype=torch.float32)

    def attention(k, v):
        return rpc_attention(k, v, iterations=2, lam=0.3, is_causal=True)

    torch.compiler.reset()
    compiled = torch.compile(attention, backend=backend, fullgraph=True)
    # To try which vector instructions the compiler has takes half of the time.
    with inductor.patch({"cpp.vec_isa_ok": False, "compile_threads": 1}):
        assert_same(values_and_gradients(compiled, inputs), values_and_gradients(attention, inputs), 1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
def test_export_and_trace_keep_the_answer():
    layer, x = SelfAttention(24, 3, "rpc", {"lam": 0.3}).eval(), torch.randn(2, 7, 24)
    expected = layer(x)
    assert torch.allclose(torch.export.export(layer, (x,)).module()(x), expected, atol=1e-5)
    assert torch.allclose(torch.jit.trace(layer, x)(x), expected, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    lead=st.sampled_from([(), (1,), (3,), (1, 1), (2, 1), (1, 3), (2, 3)]),
    one_row=st.booleans(),
    additive=st.booleans(),
    is_causal=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_broadcastable_mask_equals_the_naive_form(lead, one_row, additive, is_causal, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(*lead, 1 if one_row else 5, 5, generator=generator) > 0.5
    mask[..., 0] = True  # the naive form has no guard for rows that see nothing
    if additive:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    kwargs = {"iterations": 2, "lam": 0.3, "attn_mask": mask, "is_causal": is_causal}
    inputs = random_heads("kv", shape=(2, 3, 5, 8), seed=seed)
    actual = values_and_gradients(lambda k, v: rpc_attention(k, v, **kwargs), inputs)
    assert_same(actual, values_and_gradients(lambda k, v: naive_rpc(k, v, **kwargs), inputs), TOLERANCE)


def test_a_layer_whose_values_are_not_as_wide_as_its_keys_is_refused():
    with pytest.raises(ValueError, match=r"different widths \(8 and 16\)"):
        RPCAttention(AttentionSpec(24, 3, 8, value_dim=16))
    RPCAttention(AttentionSpec(24, 3, 8, value_dim=8))


@each_row(
    ("options", "message"),
    [
        ({"iterations": 0}, "iterations.*at least 1, got 0"),
        ({"iterations": 2.5}, "iterations.*got 2.5"),
        ({"iterations": True}, "iterations.*got True"),
        ({"lam": -1.0}, "lam.*at least 0.*got -1.0"),
        ({"lam": "4"}, "lam.*got '4'"),
        ({"lam": math.nan}, "lam.*got nan"),
        ({"threshold": "median"}, "'released', 'head', 'ratio', got 'median'"),
    ],
)
def test_options_out_of_their_limits_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        RPCAttention(AttentionSpec(24, 3, 8), **options)
    with pytest.raises(ValueError, match=message):
        rpc_attention(*random_heads("kv").values(), **options)


def test_values_of_another_width_and_a_cache_are_refused():
    q, k, v = random_heads().values()
    with pytest.raises(ValueError, match="one shape"):
        rpc_attention(k, v[..., :4])
    with pytest.raises(ValueError, match=r"RPC.*1 queries and 9 keys"):
        RPCAttention(AttentionSpec(24, 3, 8))(q[..., :1, :], k, v)


def test_the_module_is_the_function_and_copies():
    mechanism = RPCAttention(AttentionSpec(24, 3, 8), iterations=2, lam=0.3, threshold="ratio")
    q, k, v = random_heads().values()
    expected = rpc_attention(k, v, iterations=2, lam=0.3, threshold="ratio", scale=0.5, is_causal=True)
    assert torch.equal(copy.deepcopy(mechanism)(q, k, v, scale=0.5, is_causal=True), expected)
    assert repr(mechanism) == "RPCAttention(iterations=2, lam=0.3, threshold='ratio')"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask", ["padding", "a sample", "a head", "additive"])
def test_sums_behind_the_threshold_exceed_half_precision(mask, dtype):
    """Σ|k| is about 1e5 here; autocast took it to half precision as a product, in which it is inf."""
    tokens = 2048
    k, v = random_heads("kv", (1, 2, tokens, 64), dtype=torch.float32).values()
    seen = torch.rand(1, 2, tokens, tokens, generator=torch.Generator().manual_seed(1)) > 0.1
    form = {"padding": seen[:, :1, :1], "a sample": seen[:, :1], "a head": seen[0], "additive": seen[:, :1, :1]}[mask]
    if mask == "additive":
        form = torch.zeros(form.shape).masked_fill(~form, -1e4)
    exact = pursuit_threshold(k.double(), attn_mask=form.view(1, -1, *form.shape[-2:]))
    with torch.autocast("cpu", dtype):
        found = pursuit_threshold(k, attn_mask=form.view(1, -1, *form.shape[-2:]))
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0.0)
    if mask == "padding":
        with torch.no_grad():
            expected = rpc_attention(k.double(), v.double(), iterations=2, lam=2.0, attn_mask=form)
            with torch.autocast("cpu", dtype):
                out = rpc_attention(k, v, iterations=2, lam=2.0, attn_mask=form)
        assert (out.double() - expected).norm() < 0.05 * expected.norm()


def test_the_width_is_the_whole_layers_where_heads_are_split():
    """Under tensor parallelism a process holds some of the heads, and C is still that of all of them."""
    k, v = random_heads("kv", (2, 4, 9, 8)).values()
    mechanism = RPCAttention(AttentionSpec(32, 4, 8), lam=0.1)
    whole = mechanism(k, k, v)
    assert torch.equal(mechanism(k[:, 1:3], k[:, 1:3], v[:, 1:3]), whole[:, 1:3])
    assert (rpc_attention(k[:, 1:3], v[:, 1:3], lam=0.1) - whole[:, 1:3]).abs().max() > 1e-2
    diagnosed = rpc_diagnostics(k[:, 1:3], v[:, 1:3], lam=0.1, num_heads=4)
    assert torch.equal(diagnosed["sparsity"], rpc_diagnostics(k, v, lam=0.1)["sparsity"][..., 1:3])


def key_gradients(std, dtype, **kwargs):
    """The gradient for k of the fused form, and in float64, ``[B, H, N * d]`` each."""
    k, v, w = (x.to(dtype) for x in random_heads("kvw", (2, 3, 197, 64), dtype=torch.float32).values())
    k = k * std
    found = []
    for kind, backend in ((dtype, SDPBackend.FLASH_ATTENTION), (torch.float64, SDPBackend.MATH)):
        leaves = [x.to(kind).requires_grad_() for x in (k, v)]
        with sdpa_kernel(backend):
            out = rpc_attention(*leaves, **kwargs)
        found.append(torch.autograd.grad(out, leaves, w.to(kind))[0].double().flatten(2))
    return found


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("dtype", "std"), [(torch.bfloat16, 0.9), (torch.bfloat16, 1.0), (torch.float32, 0.95)])
def test_saturated_keys_have_a_gradient_and_no_noise(dtype, std, is_causal, fused_calls):
    """A row that attends to itself only: what is left of the gradient is a millionth of its terms."""
    found, exact = key_gradients(std, dtype, is_causal=is_causal)
    assert fused_calls
    whole = torch.nn.functional.cosine_similarity(found.flatten(), exact.flatten(), 0)
    assert whole > 0.95
    if std < 1:  # each head's own, which has its own rows of W_k
        assert torch.nn.functional.cosine_similarity(found, exact, -1).min() > 0.8


def test_meta_tensors_pass():
    k = torch.empty(2, 3, 5, 8, device="meta")
    mask = torch.ones(5, 5, dtype=torch.bool, device="meta")
    assert rpc_attention(k, k, attn_mask=mask).shape == k.shape


def test_an_empty_batch_has_gradients():
    k = torch.zeros(0, 2, 5, 8, requires_grad=True)
    assert torch.autograd.grad(rpc_attention(k, k).sum(), k)[0].shape == k.shape
