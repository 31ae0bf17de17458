"""The map of every mechanism: map · v is what it gives, rows sum to what it promises, and what has none says so."""

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attention_modules import (
    AttentionMechanism,
    AttentionSpec,
    NoMapError,
    available_mechanisms,
    build_mechanism,
    mechanism_class,
)
from attention_modules.analysis.acting import acting_sums
from attention_modules.masks import seen_tokens
from attention_modules.mechanisms.shared.acting import ChunkedMap, DenseMap, FactorMap, LinearMap, SumMap
from attention_modules.mechanisms.shared.probe import acting_map, acting_passes
from attention_modules.testing import Subject
from tests.another_device import AnotherDevice
from tests.attention_modules.compare import as_it_must

TOKENS = 9
SPEC = AttentionSpec(dim=16, num_heads=2, head_dim=8)
BY_POSITION = ("dam", "mom", "position_bias", "scaled")  # the same tokens elsewhere have another map
HIDE_THE_FUTURE = ("delta", "gated_delta", "gla", "kda", "window")
CHUNKED = ("dam", "entmax", "hard", "position_bias", "sigmoid")
NORMED = ("delta", "gated_delta", "gla", "kda", "retention")
LINEAR = ("scaled", "talking_heads", "twicing", "linear", "hedgehog", "performer", *NORMED)
STATED = (
    "differential",
    "neutreno",
    "value_residual",
    *NORMED,
)  # which change values or output beside what the map mixes
OURS = [name for name in available_mechanisms() if mechanism_class(name).__module__.startswith("attention_modules")]
CASES = {
    "nothing": {},
    "causal": {"is_causal": True},
    "padding": {"attn_mask": (torch.arange(TOKENS) < 6).view(1, 1, 1, TOKENS)},
    "tree": {
        "attn_mask": (torch.rand(2, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(3)) > 0.4)
        | torch.eye(TOKENS, dtype=torch.bool)
    },
    "bias": {"attn_mask": torch.randn(2, 2, TOKENS, TOKENS, generator=torch.Generator().manual_seed(4)).double()},
    "scale": {"scale": 0.7},
}
SUMS = {  # of rows, where they are not 1
    "sink": (0.0, 1.0),
    "gated": (0.0, 1.0),
    "sigmoid": (0.0, float(TOKENS)),
    "differential": (-9.0, 9.0),
    "rkde": (0.5, 1.5),
    "scaled": (-9.0, 9.0),
    "talking_heads": (-9.0, 9.0),
    "linear": (1 - 1e-5, 1.0),
    **dict.fromkeys(NORMED, (-99.0, 99.0)),
}


def subject(name, dtype=torch.float64, **options):
    found = Subject(name, SPEC, options)
    module = found.build(TOKENS, dtype)
    return module, {of: value.detach() for of, value in found.inputs(TOKENS, dtype).items()}


def taken(module, case):
    if module.causality == "always":
        return case == "causal"
    without_rows = ("nothing", "padding", "scale", *(("causal",) if module.causality == "any" else ()))
    return module.row_masks or case in without_rows


@torch.no_grad()
@pytest.mark.parametrize("name", OURS)
def test_map_times_values_is_the_output(name, subtests):
    module, inputs = subject(name)
    for case in CASES:
        if not taken(module, case):
            continue
        with subtests.test(case):
            given = CASES[case]
            acting = acting_map(module, **inputs, **given)
            found, out = acting.dense(), module(**inputs, **given)
            kind = SumMap if name == "differential" else ChunkedMap if name in CHUNKED else FactorMap
            kind = LinearMap if name in LINEAR else kind
            assert isinstance(acting, ChunkedMap if (name, case) in FORGETTING_IN_CHUNKS else kind)
            assert found.shape == (2, 2, TOKENS, TOKENS)
            torch.testing.assert_close(expected(name, module, inputs, found), out, atol=1e-6, rtol=0)
            lowest, highest = SUMS.get(name, (1 - 1e-9, 1 + 1e-9))
            assert lowest <= found.sum(-1).min() <= found.sum(-1).max() <= highest
            rows = torch.tensor([7, 0, 8, 3])
            torch.testing.assert_close(acting.dense(rows), found[:, :, rows])
            torch.testing.assert_close(acting.of_heads([1]).dense(), found[:, [1]])


FORGETTING_IN_CHUNKS = {("forgetting", "tree"), ("forgetting", "bias")}


def expected(name, module, inputs, found):
    v = inputs["v"]
    if name == "neutreno":
        return found @ v + module.alpha * (inputs["first_value"] - v)
    if name == "value_residual":
        return found @ v.lerp(inputs["first_value"], module.weight)
    if name == "differential":
        return F.rms_norm(found @ v, v.shape[-1:], module.norm.weight, module.norm.eps) * (1 - module.lambda_init)
    if name in NORMED:
        return F.rms_norm(found @ v, v.shape[-1:], None, module.eps) * module.gain
    return found @ v


def test_every_mechanism_is_tried_and_24_need_no_word():
    assert len(OURS) - len(STATED) >= 24


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_finite(dtype, subtests):
    for name in OURS:
        with subtests.test(name):
            module, inputs = subject(name, dtype)
            must = as_it_must(module)
            found, out = acting_map(module, **inputs, **must).dense(), module(**inputs, **must)
            assert found.dtype == torch.float32
            assert found.isfinite().all()
            if name not in STATED:
                torch.testing.assert_close((found @ inputs["v"].float()).to(dtype), out, atol=5e-2, rtol=5e-2)


@torch.no_grad()
def test_cross_attention():
    for name in ("softmax", "sink", "entmax", "l2", "talking_heads", "sigmoid"):
        module, inputs = subject(name)
        q = inputs.pop("q")[:, :, :4]
        found = acting_map(module, q, **inputs).dense()
        assert found.shape == (2, 2, 4, TOKENS)
        torch.testing.assert_close(found @ inputs["v"], module(q, **inputs), atol=1e-9, rtol=0)


@torch.no_grad()
def test_gates_of_elements_and_pairs_of_heads():
    module, inputs = subject("gated", gate="element")
    found = acting_map(module, **inputs).dense()
    gate = module.tensors(inputs["k"], inputs["x"])[0].sigmoid()
    torch.testing.assert_close(found @ inputs["v"] * gate, module(**inputs))
    module, inputs = subject("differential", pairs="heads")
    found = acting_map(module, **inputs).dense()
    assert found.shape == (2, 1, TOKENS, TOKENS)
    pair = torch.cat(inputs["v"].chunk(2, 1), -1)
    mixed = F.rms_norm(found @ pair, pair.shape[-1:], None, module.norm.eps) * (1 - module.lambda_init)
    torch.testing.assert_close(mixed.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2), module(**inputs))


@torch.no_grad()
def test_every_pass_of_a_pursuit():
    module, inputs = subject("rpc")
    passes = acting_passes(module, **inputs)
    assert len(passes) == module.iterations
    torch.testing.assert_close(passes[-1].dense() @ inputs["v"], module(**inputs))
    torch.testing.assert_close(acting_map(module, **inputs).dense(), passes[-1].dense())
    for name in ("sink", "twicing", "differential"):
        module, inputs = subject(name)
        assert len(acting_passes(module, **inputs)) == 1


def cosine(q, k, v, temperature=0.1, **options):
    q = F.normalize(q, dim=-1) * q.shape[-1] ** 0.5 / temperature
    return F.scaled_dot_product_attention(q, F.normalize(k, dim=-1), v, **options)


def written_out(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


def with_a_learned_value(q, k, v):
    return (q @ k.mT).softmax(-1) @ v + 1.0


def halved(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options) / 2


def squared(q, k, v):
    return F.scaled_dot_product_attention(q, k, v).square()


def normed(q, k, v):
    return F.normalize(F.scaled_dot_product_attention(q, k, v), dim=-1)


def clamped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v).clamp(-0.5, 0.5)


def grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)


@torch.no_grad()
@pytest.mark.parametrize(
    ("function", "kind", "constant"),
    [
        (cosine, FactorMap, 0.0),
        (halved, FactorMap, 0.0),
        (written_out, LinearMap, 0.0),
        (with_a_learned_value, LinearMap, 1.0),
    ],
)
def test_functions_of_ones_own(function, kind, constant):
    module = build_mechanism(function, SPEC)
    q, k, v = torch.randn(3, 2, 2, TOKENS, 8, dtype=torch.float64)
    acting = acting_map(module, q, k, v)
    assert isinstance(acting, kind)
    torch.testing.assert_close(acting.dense() @ v + constant, module(q, k, v))


@torch.no_grad()
@pytest.mark.parametrize("function", [squared, grouped, clamped])
def test_what_is_not_linear_is_refused_by_name(function):
    q, k, v = torch.randn(3, 2, 2, TOKENS, 8)
    acting = acting_map(build_mechanism(function, SPEC), q, k, v)
    with pytest.raises(NoMapError, match=rf"{function.__name__} has no attention map.*not linear.*own_map"):
        acting.dense()


@torch.no_grad()
def test_a_norm_of_the_output_is_a_gain_of_rows():
    """What it was in this call is exact: the norm is one number per row."""
    q, k, v = torch.randn(3, 2, 2, TOKENS, 8, dtype=torch.float64)
    module = build_mechanism(normed, SPEC)
    torch.testing.assert_close(acting_map(module, q, k, v).dense() @ v, module(q, k, v))


def doubling_queries(q, k, v):
    return F.scaled_dot_product_attention(q.mul_(2.0), k, v)


def doubling_values(q, k, v):
    return F.scaled_dot_product_attention(q, k, v.mul_(2.0))


def doubling_values_of_its_own_softmax(q, k, v):
    return (q @ k.mT).softmax(-1) @ v.mul_(2.0)


def halving_the_output(q, k, v):
    return F.scaled_dot_product_attention(q, k, v).mul_(0.5)


def clearing_keys_afterwards(q, k, v):
    k = k * 2.0
    out = F.scaled_dot_product_attention(q, k, v)
    k.zero_()
    return out


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("tokens", [TOKENS, 80])
@pytest.mark.parametrize(
    "function",
    [
        doubling_queries,
        doubling_values,
        doubling_values_of_its_own_softmax,
        halving_the_output,
        clearing_keys_afterwards,
    ],
)
def test_changes_in_place_are_seen_and_reach_nobody(function, tokens, mode):
    given = torch.randn(3, 2, 2, tokens, 8, dtype=torch.float64)
    with mode():
        q, k, v = (each.clone() for each in given)
        rows = torch.tensor([3, 0])
        module = build_mechanism(function, SPEC)
        found = acting_map(module, q, k, v).dense(rows)
        assert torch.equal(torch.stack([q, k, v]), given)
        torch.testing.assert_close(found @ given[2], module(q, k, v)[:, :, rows])


def test_what_hands_on_its_values_is_known_without_looking(monkeypatch):
    monkeypatch.setattr("attention_modules.mechanisms.shared.probe._ratio", None)
    q, k, v = torch.randn(3, 2, 2, TOKENS, 8)
    assert isinstance(acting_map(build_mechanism("softmax", SPEC), q, k, v), FactorMap)
    assert isinstance(acting_map(build_mechanism("entmax", SPEC), q, k, v), ChunkedMap)


class Remembering(AttentionMechanism):
    def __init__(self, spec):
        super().__init__(spec)
        self.register_buffer("calls", torch.zeros(()))
        self.last, self.norm = None, torch.nn.BatchNorm1d(8)

    def forward(self, q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0, scale=None):
        self.calls += 1
        self.last, self.new = q, v
        return (q @ self.norm(k.flatten(0, 2)).view_as(k).mT).softmax(-1) @ v


def test_what_calls_keep_is_as_it_was():
    module, (q, k, v) = Remembering(SPEC), torch.randn(3, 2, 2, 80, 8)
    acting_map(module, q, k, v).dense(torch.tensor([0]))
    assert module.calls == 0
    assert not module.norm.running_mean.any()
    assert module.last is None
    assert not hasattr(module, "new")


def dropping_in_one_of_two(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5) + F.scaled_dot_product_attention(k, q, v)


@torch.no_grad()
def test_few_rows_with_what_a_kernel_drops():
    q, k, v = torch.randn(3, 2, 2, 80, 8, dtype=torch.float64)
    module, rows = build_mechanism(dropping_in_one_of_two, SPEC), torch.tensor([5, 70])
    acting = acting_map(module, q, k, v)
    torch.testing.assert_close(acting.dense(rows) @ v, module(q, k, v)[:, :, rows])


@torch.no_grad()
def test_few_rows_of_a_difference():
    found = Subject("differential", SPEC)
    module, inputs = found.build(80, torch.float64), found.inputs(80, torch.float64)
    acting = acting_map(module, **inputs, is_causal=True)
    sums, _ = acting_sums(acting, is_causal=True, statistics=["entropy"])
    share = acting.dense()[:, :, acting.some_rows()].abs()
    share = share / share.sum(-1, keepdim=True)
    torch.testing.assert_close(sums["entropy"][0].double(), -torch.special.xlogy(share, share).sum((-2, -1)))


class WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        return (q @ k.mT).softmax(-1) @ v


def test_rows_without_a_gradient_come_by_columns():
    q, k, v = torch.randn(3, 2, 2, 80, 8)
    module = build_mechanism(lambda q, k, v: WithoutGradient.apply(q, k, v), SPEC)
    found = acting_map(module, q, k, v).dense(torch.tensor([5]))
    torch.testing.assert_close(found, (q @ k.mT).softmax(-1)[:, :, 5:6])


class Kernels(TorchFunctionMode):
    """Counts the kernels that are computed."""

    number = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.number += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "kernels"), [("softmax", 0), ("sink", 0), ("twicing", 0), ("scaled", 0), ("rpc", 4)])
def test_only_what_the_map_is_made_of_is_computed_to_find_it(name, kernels):
    module, inputs = subject(name, **{"scaled": {"variant": "scalar"}, "rpc": {"iterations": 4}}.get(name, {}))
    if name == "scaled":
        torch.nn.init.constant_(module.s, 0.3)
    with torch.no_grad(), Kernels() as counted:
        found = acting_map(module, **inputs)
    assert counted.number == kernels
    torch.testing.assert_close(found.dense() @ inputs["v"], module(**inputs), atol=1e-9, rtol=0)


def values_that_are_those_given_after_all(q, k, v):
    """A second call for values that depend on the first one's output in form alone."""
    first = F.scaled_dot_product_attention(q, k, v)
    return F.scaled_dot_product_attention(k, q, v + first - F.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v)


def test_a_call_for_other_values_is_no_map_by_mistake():
    q, k, v = torch.randn(3, 2, 2, TOKENS, 8, dtype=torch.float64)
    mechanism = build_mechanism(values_that_are_those_given_after_all, SPEC)
    found = acting_map(mechanism, q, k, v)
    torch.testing.assert_close(found.dense() @ v, mechanism(q, k, v), atol=1e-9, rtol=0)


@torch.no_grad()
def test_padding_where_few_rows_are_looked_at():
    spec, keys = AttentionSpec(dim=16, num_heads=2, head_dim=8), torch.arange(80)
    module, (q, k, v) = build_mechanism("twicing", spec), torch.randn(3, 2, 2, 80, 8)
    mask = torch.stack([keys < 80, keys < 40]).view(2, 1, 1, 80)
    sums, _ = acting_sums(acting_map(module, q, k, v, attn_mask=mask), attn_mask=mask, sink_rows=0)
    assert (sums["normalised_entropy"][1] == 8).all()
    total, rows = sums["normalised_entropy"]
    torch.testing.assert_close(
        total / rows * torch.tensor([80.0, 40.0]).log().view(2, 1), sums["entropy"][0] / sums["entropy"][1]
    )


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in OURS if name not in BY_POSITION])
def test_rows_of_padding_do_not_count(name):
    (q, k, v), keys = torch.randn(3, 2, 2, TOKENS, 8, dtype=torch.float64), torch.arange(TOKENS)
    mask = torch.stack([keys < TOKENS, (keys > 1) & (keys < 6)]).view(2, 1, 1, TOKENS)
    module, x = build_mechanism(name, SPEC).double(), torch.randn(2, TOKENS, 16, dtype=torch.float64)
    more = ({"x": x}, {"x": x[1:, 2:6]}) if "x" in module.needs else ({}, {})
    causal = {"is_causal": name in HIDE_THE_FUTURE}
    acting = acting_map(module, q, k, v, attn_mask=mask, **causal, **more[0])
    alone = acting_map(module, *(each[1:, :, 2:6] for each in (q, k, v)), **causal, **more[1])
    counting = seen_tokens(mask, q, k)
    assert counting.tolist() == mask[:, 0, 0].tolist()
    sums, sink = acting_sums(acting, attn_mask=mask, **causal, sink_rows=0, counting=counting)
    expected, shares = acting_sums(alone, **causal, sink_rows=0)
    for of, (total, rows) in expected.items():
        torch.testing.assert_close(sums[of][1][1:].expand_as(rows), rows)
        torch.testing.assert_close(sums[of][0][1:], total, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sink[1:, :, 2:6], shares, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["softmax", "sigmoid", "twicing"])
def test_rows_that_stand_for_others_are_of_those_that_count(name):
    (q, k, v), seen = torch.randn(3, 1, 2, 80, 8), torch.arange(80) < 4
    acting = acting_map(build_mechanism(name, SPEC), q, k, v, attn_mask=seen[None])
    few, all_rows = (
        acting_sums(acting, attn_mask=seen[None], sink_rows=rows, every_row=not rows, counting=seen[None])
        for rows in (2, 0)
    )
    for of, (total, rows) in few[0].items():
        torch.testing.assert_close(total / rows, all_rows[0][of][0] / all_rows[0][of][1])
    assert few[1].sum(-1).allclose(torch.ones(1, 2))


@torch.no_grad()
@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_short_samples_have_rows_of_their_own_beside_long_ones_without_a_wait(name):
    (q, k, v), keys = torch.randn(3, 2, 2, 80, 8), torch.arange(80)
    mask = torch.stack([keys < 80, keys < 4]).view(2, 1, 1, 80)
    module = build_mechanism(name, SPEC)

    def found(mask, *given):
        counting = seen_tokens(mask, *given[:2])
        return acting_sums(acting_map(module, *given, attn_mask=mask), attn_mask=mask, sink_rows=8, counting=counting)

    sums, sink = found(mask, q, k, v)
    alone, shares = found(mask[1:, ..., :4], *(each[1:, :, :4] for each in (q, k, v)))
    few = {of: (total / rows)[1:] for of, (total, rows) in sums.items()}
    torch.testing.assert_close(few, {of: total / rows for of, (total, rows) in alone.items()})
    torch.testing.assert_close(sink[1:, :, :4], shares)
    with AnotherDevice("cuda", float64=True, may_wait=False):
        found(mask, q, k, v)


class Stated(AttentionMechanism):
    def forward(self, q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0, scale=None):
        return squared(q, k, v)

    def own_map(self, q, k, v, **given):
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)


def test_a_class_says_what_its_map_is():
    q, k, v = torch.randn(3, 2, 2, TOKENS, 8)
    acting = acting_map(Stated(SPEC), q, k, v)
    assert isinstance(acting, DenseMap)
    torch.testing.assert_close(acting.dense(), (q @ k.mT * 8**-0.5).softmax(-1))


@torch.no_grad()
def test_nobody_notices():
    """Random states stay, hooks see nothing, and what is drawn is what the call itself draws."""
    module, inputs = subject("dam", start=0.0)
    seen = []
    module.drawn.register_forward_hook(lambda *_: seen.append(1))
    module.register_forward_hook(lambda *_: seen.append(2))
    module.train()
    before = torch.get_rng_state()
    found = acting_map(module, **inputs).dense()
    assert torch.equal(torch.get_rng_state(), before)
    assert not seen
    torch.testing.assert_close(found @ inputs["v"], module(**inputs))
    assert seen == [1, 2]


@torch.no_grad()
@pytest.mark.parametrize("name", OURS)
def test_statistics_are_those_of_the_dense_map(name, subtests):
    module, inputs = subject(name)
    for case in CASES:
        if not taken(module, case):
            continue
        with subtests.test(case):
            acting, given = acting_map(module, **inputs, **CASES[case]), CASES[case]
            mask = {of: given[of] for of in ("attn_mask", "is_causal") if of in given}
            sums, sink = acting_sums(acting, **mask, sink_rows=0)
            size = acting.dense().abs()
            share = size / size.sum(-1, keepdim=True)
            entropy = -torch.special.xlogy(share, share).sum(-1)
            expected = {
                "entropy": entropy.sum(-1),
                "effective_support": (1 / share.square().sum(-1)).sum(-1),
                "largest_probability": size.amax(-1).sum(-1),
            }
            for of, wanted in expected.items():
                assert (sums[of][1] == TOKENS).all()
                torch.testing.assert_close(sums[of][0].double(), wanted, rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(sink.double(), share.mean(-2), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_rows_without_weights_do_not_count():
    q, k, v = torch.randn(3, 1, 2, TOKENS, 8)
    v[:] = 1.0

    def some_rows(q, k, v):
        keep = (torch.arange(TOKENS) > 3).view(-1, 1)
        return (q @ k.mT).softmax(-1) @ v * keep

    sums, sink = acting_sums(acting_map(build_mechanism(some_rows, SPEC), q, k, v), sink_rows=0)
    assert (sums["entropy"][1] == TOKENS - 4).all()
    share = (q @ k.mT).softmax(-1)[:, :, 4:]
    torch.testing.assert_close(sink, share.mean(-2))
    torch.testing.assert_close(sums["entropy"][0], -(share * share.log()).sum((-2, -1)))


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_few_rows_come_from_a_gradient(name, mode):
    spec = AttentionSpec(dim=16, num_heads=2, head_dim=8)
    found = Subject(name, spec)
    module = found.build(80, torch.float64)
    with mode():
        inputs = {of: value.clone() for of, value in found.inputs(80, torch.float64).items()}
        acting = acting_map(module, **inputs, is_causal=True)
        rows = torch.tensor([0, 79, 5])
        whole = acting.dense()
        torch.testing.assert_close(acting.dense(rows), whole[:, :, rows])
        sums, sink = acting_sums(acting, is_causal=True, sink_rows=0)
        chosen = acting.some_rows()
        assert chosen.tolist() == [5, 15, 25, 35, 45, 55, 65, 75], "no row stands for more of them than others"
        every, _ = acting_sums(acting, is_causal=True, statistics=["entropy"], every_row=True)
        share = whole.abs() / whole.abs().sum(-1, keepdim=True)
        entropy = -torch.special.xlogy(share, share).sum(-1)
        torch.testing.assert_close(every["entropy"][0].double(), entropy.sum(-1), rtol=1e-4, atol=1e-4)
        assert (every["entropy"][1] == 80).all()
        share = whole[:, :, chosen].abs()
        share = share / share.sum(-1, keepdim=True)
        assert len(chosen) == 8
        assert (sums["entropy"][1] == 8).all()
        entropy = -torch.special.xlogy(share, share).sum(-1)
        torch.testing.assert_close(sums["entropy"][0].double(), entropy.sum(-1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sink.double(), share.mean(-2), rtol=1e-4, atol=1e-5)
    assert all(parameter.grad is None for parameter in module.parameters())
