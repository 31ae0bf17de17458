"""Kernels of flash-linear-attention: which calls they get, how, and that they give what the recurrence gives."""

import pytest
import torch

from attention_modules.mechanisms.linear import fla
from attention_modules.mechanisms.linear.operator import linear_operator
from attention_modules.naive import naive_recurrence
from tests.attention_modules.compare import assert_same
from tests.attention_modules.mechanisms.linear.test_operator import GATES, both, sample
from tests.lightning_tasks.programs import run_program


class Plain(torch.autograd.Function):
    """The recurrence with the arguments, layout and lack of second derivatives of the package's functions."""

    @staticmethod
    def forward(ctx, names, scale, state, *given):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (state, *given)]
            named = dict(zip(names, (x.transpose(1, 2) for x in leaves[1:]), strict=True))
            if "g" in named:
                named["log_decay"] = named.pop("g")
            ctx.out, ctx.leaves = naive_recurrence(**named, initial_state=leaves[0], scale=scale), leaves
        return ctx.out[0].transpose(1, 2).detach(), ctx.out[1].detach()

    @staticmethod
    def backward(ctx, grad, grad_state):
        grads = torch.autograd.grad(ctx.out, ctx.leaves, (grad.transpose(1, 2), grad_state))
        return None, None, *(x.detach() for x in grads)


@pytest.fixture
def plain(monkeypatch):
    def kernel(*, scale, initial_state, output_final_state, **given):
        assert output_final_state
        assert all(x.is_contiguous() for x in given.values())
        return Plain.apply([*given], scale, initial_state, *given.values())

    monkeypatch.setattr(fla, "covers", lambda *_: True)
    monkeypatch.setattr(fla, "_kernel", lambda decays, delta: kernel)


@pytest.mark.parametrize("kind", GATES)
def test_they_get_what_the_operator_would_take(kind, plain):
    given = sample(kind, 70, dtype=torch.float32)
    tokens = torch.rand(2, 1, 70, generator=torch.Generator().manual_seed(3)) > 0.3
    for options in ({}, {"tokens": tokens}):
        found = both(linear_operator, given, **options)
        assert found["state"].dtype == torch.float32
        exact = both(naive_recurrence, {name: x.double() for name, x in given.items()}, **options)
        assert_same({name: x.double() for name, x in found.items()}, exact, 1e-5)


def test_a_second_derivative_is_refused(plain):
    given = {name: x.requires_grad_() for name, x in sample("gated delta", 70, dtype=torch.float32).items()}
    out, _ = linear_operator(**given)
    (grad,) = torch.autograd.grad(out.square().sum(), given["k"], create_graph=True)
    with pytest.raises(RuntimeError, match="flash-linear-attention have no second derivative"):
        grad.sum().backward()


def test_half_precision_on_a_gpu_alone_is_theirs(monkeypatch):
    monkeypatch.setattr(fla, "installed", lambda: True)

    class OnGpu:
        def __init__(self, dtype=torch.bfloat16, tokens=64, width=64):
            self.device, self.dtype, self.shape = torch.device("cuda"), dtype, (1, 2, tokens, width)

    assert fla.covers(OnGpu(), OnGpu(), None)
    for other in (OnGpu(torch.float32), OnGpu(tokens=63), OnGpu(width=257), torch.zeros(1, 2, 64, 8).half()):
        assert not fla.covers(other, other, None)
    assert not fla.covers(OnGpu(torch.float64), OnGpu(), None)
    assert not fla.covers(OnGpu(), OnGpu(), torch.zeros(1, 64, dtype=torch.bool))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert not fla.covers(OnGpu(), OnGpu(), None)
    monkeypatch.setattr(fla, "installed", lambda: False)
    assert not fla.covers(OnGpu(), OnGpu(), None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", GATES)
def test_they_give_what_the_recurrence_gives(kind):
    """On this CPU, by Triton's interpreter, in float16."""
    pytest.importorskip("fla", reason="needs the extra [fla]")
    printed = run_program("-m", "tests.attention_modules.mechanisms.linear.interpreted", kind, timeout=600)
    rows = [line.split(",") for line in printed.splitlines() if line.startswith(f"{kind},")]
    assert len(rows) == 2 + 4 + len(GATES[kind])
    assert all(float(kernels) < 2e-3 for _, _, kernels, _ in rows)
