"""The operator of linear-time mechanisms: the recurrence, at any length, in any split, with any decay."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from attention_modules.mechanisms import linear_attention
from attention_modules.mechanisms.linear import operator
from attention_modules.mechanisms.linear.operator import linear_operator
from attention_modules.naive import naive_recurrence
from tests.attention_modules.compare import assert_same
from tests.rows import each_row, pairwise

GATES = {
    "linear": (),
    "head": ("head",),
    "token": ("token",),
    "channel": ("channel",),
    "delta": ("beta",),
    "gated delta": ("token", "beta"),
    "kda": ("channel", "beta"),
}


def sample(kind, tokens, *, batch=2, heads=2, width=8, values=5, strength=1.0, dtype=torch.float64, seed=0):
    """q, k, v and the gates of a kind; the decays' logarithms are about -0.05 · strength."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    every = (batch, heads, tokens)
    given = {"q": normal(*every, width), "k": F.normalize(normal(*every, width), dim=-1), "v": normal(*every, values)}
    shapes = {"head": (heads,), "token": every, "channel": (*every, width)}
    for gate in GATES[kind]:
        if gate == "beta":
            given["beta"] = normal(*every).sigmoid()
        else:
            given["log_decay"] = strength * F.logsigmoid(normal(*shapes[gate]) + 3)
    return {name: x.to(dtype) for name, x in given.items()}


def both(function, given, **options):
    """Output, state and every gradient, that of the first state included."""
    shape = (*given["q"].shape[:2], given["q"].shape[-1], given["v"].shape[-1])
    start = torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(given["q"].device)
    leaves = {name: x.clone().requires_grad_() for name, x in (given | {"initial_state": start}).items()}
    out, state = function(**leaves, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).sin().view(out.shape)
    gradients = torch.autograd.grad((out * weights).sum() + state.sin().sum(), list(leaves.values()))
    found = {f"grad_{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {"out": out.detach(), "state": state.detach(), **found}


LENGTHS = (1, 2, 63, 64, 65, 200)


@each_row(("kind", "tokens", "strength"), [*itertools.product(GATES, LENGTHS, (1.0, 200.0))])
def test_is_the_recurrence(kind, tokens, strength):
    given = sample(kind, tokens, strength=strength)
    assert_same(both(linear_operator, given), both(naive_recurrence, given), 1e-11)


@pytest.mark.parametrize("kind", GATES)
def test_groups_of_chunks_are_one_sequence(kind, monkeypatch):
    """More than one group, so that they are computed again in the backward pass."""
    monkeypatch.setattr(operator, "GROUP", 2 * operator.CHUNK)
    given = sample(kind, 5 * operator.CHUNK - 3, batch=1)
    assert_same(both(linear_operator, given), both(naive_recurrence, given), 1e-11)


@pytest.mark.parametrize("kind", GATES)
def test_hidden_tokens_and_packed_sequences(kind):
    given, generator = sample(kind, 150), torch.Generator().manual_seed(3)
    tokens = torch.rand(2, 1, 150, generator=generator) > 0.3
    starts = torch.rand(2, 150, generator=generator) > 0.95
    for options in ({"tokens": tokens}, {"starts": starts}, {"tokens": tokens, "starts": starts}):
        assert_same(both(linear_operator, given, **options), both(naive_recurrence, given, **options), 1e-10)
    poisoned = {name: x.clone() for name, x in given.items()}
    for name in {"k", "v", "beta"} & poisoned.keys():
        poisoned[name].transpose(0, 1)[:, ~tokens[:, 0]] = torch.nan
    assert torch.equal(linear_operator(**poisoned, tokens=tokens)[0], linear_operator(**given, tokens=tokens)[0])


def test_packed_sequences_are_sequences_of_their_own():
    given = sample("kda", 130)
    starts = torch.zeros(1, 130, dtype=torch.bool).index_fill(1, torch.tensor([0, 50, 51]), True)
    packed, last = linear_operator(**given, starts=starts)
    alone = [linear_operator(**{n: x[:, :, a:b] for n, x in given.items()}) for a, b in ((0, 50), (50, 51), (51, 130))]
    torch.testing.assert_close(packed, torch.cat([out for out, _ in alone], 2), atol=1e-10, rtol=0)
    torch.testing.assert_close(last, alone[-1][1], atol=1e-10, rtol=0)


def test_without_tokens_the_state_stays():
    given, state = sample("gated delta", 0), torch.randn(2, 2, 8, 5, dtype=torch.float64)
    out, last = linear_operator(**given, initial_state=state)
    assert out.shape == (2, 2, 0, 5)
    assert torch.equal(last, state)


LONG = 16384
# Relative to the norm; the recurrence in float64 on the same rounded inputs is right.
STABLE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


@each_row(
    ("kind", "dtype", "strength"),
    pairwise(("token", "channel", "gated delta", "kda"), STABLE, (1e-6, 1.0, 2000.0)),
)
def test_is_stable_over_long_sequences(kind, dtype, strength):
    """Decays near 1, usual ones, and decays near 0: -0.05 · 2,000 is far below the logarithm of any float32."""
    rounded = sample(kind, LONG, batch=1, heads=1, width=4, values=4, strength=strength, dtype=torch.float32)
    rounded |= {name: rounded[name].to(dtype) for name in ("q", "k", "v")}
    exact, state = linear_operator(**{name: x.double() for name, x in rounded.items()})
    leaves = {name: x.requires_grad_() for name, x in rounded.items()}
    out, last = linear_operator(**leaves)
    assert out.dtype == dtype
    assert last.dtype == torch.float32
    assert (out.double() - exact).norm() <= STABLE[dtype] * exact.norm()
    assert (last.double() - state).norm() <= 2e-6 * state.norm()
    (out.float().square().mean() + last.sum()).backward()
    assert all(x.grad.isfinite().all() for x in leaves.values())


def test_a_large_decay_spoils_no_later_pair():
    """Where running sums of -1,000 are subtracted, float32 is left with 4 digits."""
    given = sample("token", 64, strength=0.1, dtype=torch.float32)
    given["log_decay"][..., ::8] = -1000.0
    exact, _ = naive_recurrence(**{name: x.double() for name, x in given.items()})
    assert (linear_operator(**given)[0].double() - exact).norm() <= 1e-6 * exact.norm()


def test_keys_longer_than_1_would_break_the_delta_rule():
    """|k| = 1.5 and β = 1: the state's factor 1 - 2.25 grows, in the recurrence, too."""
    given = sample("delta", 400, batch=1)
    given |= {"k": 1.5 * given["k"], "beta": torch.ones_like(given["beta"])}
    assert linear_operator(**given)[1].abs().max() > 1e5


WRONG = {
    "k": torch.zeros(2, 2, 9, 7),
    "v": torch.zeros(2, 2, 8, 5),
    "log_decay": torch.zeros(2, 9),
    "beta": torch.zeros(2, 9),
    "initial_state": torch.zeros(2, 2, 5, 8),
    "tokens": torch.zeros(2, 9, dtype=torch.bool),
    "starts": torch.zeros(2, 2, 9, dtype=torch.bool),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_shape_is_refused_by_name(name):
    given = sample("token", 9, dtype=torch.float32) | {name: WRONG[name]}
    with pytest.raises(ValueError, match=rf"{name} must be of shape \("):
        linear_operator(**given)


def test_a_decay_above_1_is_refused():
    given = sample("token", 9)
    given["log_decay"][0, 0, 3] = 0.1
    with pytest.raises(ValueError, match="log_decay must be 0 or less"):
        linear_operator(**given)


RELEASED = {
    "linear_identity": {},
    "retention": {"log_decay": "gamma"},
    "simple_gla": {"log_decay": "g"},
    "gla": {"log_decay": "gk"},
    "delta_rule": {"beta": "beta"},
    "gated_delta_rule": {"log_decay": "g", "beta": "beta"},
    "kda": {"log_decay": "gk", "beta": "beta"},
}


def released():
    path = Path(os.environ.get("ATTNSWAP_DATA", "")) / ".." / "golden" / "linear_released.npz"
    if "ATTNSWAP_DATA" not in os.environ or not path.is_file():
        pytest.skip("ATTNSWAP_DATA/../golden/linear_released.npz is not there")
    with np.load(path) as file:
        return {name: torch.from_numpy(file[name]).double() for name in file.files}


def of_released(arrays, tag, name, given, function):
    """Outputs and states, and for the tag with them every gradient, beside the stored ones."""
    leaves = {of: arrays[f"{tag}.{of}"].requires_grad_() for of in given if f"{tag}.{of}" in arrays}
    found = function(leaves)
    wanted = {of: arrays[f"{tag}.{name}.{of}"] for of in ("o", "state", "zstate") if f"{tag}.{name}.{of}" in arrays}
    assert_same({of: x.detach() for of, x in found.items()}, wanted, 1e-9)
    if tag != "a":
        return
    loss = (found["o"] * arrays["a.wo"]).sum() + (found["state"] * arrays["a.ws"]).sum()
    slopes = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True), strict=True))
    stored = {of: arrays[f"a.{name}.grad.{of}"] for of in leaves if f"a.{name}.grad.{of}" in arrays}
    assert len(stored) >= 3
    assert_same({of: slopes[of] for of in stored}, stored, 1e-9)


@each_row(("name", "tag"), itertools.product(RELEASED, "ab"))
def test_is_as_released(name, tag):
    arrays, gates = released(), RELEASED[name]
    heads = arrays[f"{tag}.q"].shape[1]
    gamma = torch.log1p(-torch.exp2(-5.0 - torch.arange(heads, dtype=torch.float64)))
    unit = "n" if "beta" in gates else ""
    inputs = ["q" + unit, "k" + unit, "v", *(of for of in gates.values() if of != "gamma")]

    def ours(x):
        q, k, v = (x[of] for of in inputs[:3])
        given = {of: gamma if source == "gamma" else x[source] for of, source in gates.items()}
        out, state = linear_operator(q, k, v, **given, initial_state=x.get("s0"))
        return {"o": out, "state": state}

    of_released(arrays, tag, name, [*inputs, *([] if name == "retention" else ["s0"])], ours)


@pytest.mark.parametrize("tag", ["a", "b"])
def test_linear_is_as_released(tag):
    def ours(x):
        state = {"S": torch.cat([x["s0"], x["z0"][..., None]], -1)} if "s0" in x else {}
        eps = 1e-10 * x["q"].shape[-1] ** 0.5  # it adds 1e-10 to the sum times 1/sqrt(d)
        out = linear_attention(x["q"], x["k"], x["v"], eps, is_causal=True, state=state)
        return {"o": out, "state": state["S"][..., :-1], "zstate": state["S"][..., -1]}

    of_released(released(), tag, "linear_elu1", ["q", "k", "v", "s0", "z0"], ours)
