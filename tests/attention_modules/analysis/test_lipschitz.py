"""The local Lipschitz constant against a dense singular value decomposition of the Jacobian."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attention_modules import SelfAttention
from attention_modules.analysis import local_lipschitz
from attention_modules.analysis.lipschitz import _orthogonalized
from tests.rows import each_row

CASES = range(25)


def dense(fn, x):
    """Largest singular value of each sample's whole Jacobian, in float64."""
    values = []
    for sample in x:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            jacobian = torch.autograd.functional.jacobian(lambda one: fn(one[None])[0], sample)
        values.append(torch.linalg.matrix_norm(jacobian.reshape(-1, sample.numel()), 2))
    return torch.stack(values)


def random_case(seed):
    """A layer, a batch and a mask: softmax or RPC, one to four heads, masked by causality, padding, both or not."""
    torch.manual_seed(seed)
    mechanism = ("softmax", "rpc")[seed % 2]
    heads, tokens = 1 + seed // 2 % 4, 2 + seed % 5
    options = {"lam": 0.5, "iterations": 1 + seed % 4} if mechanism == "rpc" else {}
    layer = SelfAttention(4 * heads, heads, mechanism, options, qkv_bias=seed % 3 == 0, is_causal=seed % 4 > 1)
    x = torch.randn(3, tokens, 4 * heads) * (0.5 + seed % 7)
    mask = torch.rand(1, 1, tokens, tokens) > 0.3
    mask |= torch.eye(tokens, dtype=torch.bool)
    return layer.double().eval(), x, mask if seed % 5 > 2 else None


@pytest.mark.parametrize("seed", CASES)
def test_equals_the_dense_norm(seed):
    layer, x, mask = random_case(seed)
    expected = dense(lambda x: layer(x, attn_mask=mask), x.double())
    for dtype in (torch.float64, torch.float32):
        layer.to(dtype)
        found = local_lipschitz(lambda x: layer(x, attn_mask=mask), x.to(dtype))
        assert found.converged.all()
        assert found.value.dtype == dtype
        torch.testing.assert_close(found.value.double(), expected, rtol=1e-3, atol=0)
        assert (found.residual <= 1e-3 * found.value).all()


class Diagonal(nn.Module):
    """A linear map with given singular values, a row per sample."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def forward(self, x):
        return x * self.values.view_as(x)


def spread(batch=2, tokens=8, dim=4):
    """Singular values close together, in which iterations converge slowly."""
    values = torch.linspace(0.9, 1.0, tokens * dim, dtype=torch.float64)
    return Diagonal(values.repeat(batch, 1)), torch.randn(batch, tokens, dim).double()


def test_what_has_not_converged_is_said():
    fn, x = spread()
    found = local_lipschitz(fn, x, max_iter=2)
    assert not found.converged.any()
    assert found.iterations == 2
    assert (found.residual > 1e-3 * found.value).all()
    assert (found.value <= 1 + 1e-9).all()


@pytest.mark.parametrize("method", ["golub-kahan", "power"])
def test_the_residual_bounds_the_distance_to_a_singular_value(method):
    fn, x = spread()
    for max_iter in (1, 3, 10):
        found = local_lipschitz(fn, x, max_iter=max_iter, method=method)
        nearest = (found.value.unsqueeze(1) - fn.values).abs().amin(1)
        assert (nearest <= found.residual + 1e-9).all()


def tied_tokens():
    """Attention of a token each to itself, J ≈ 1, but for two that are almost the same: one value above a cluster."""
    generator = torch.Generator().manual_seed(1)
    x = 3 * torch.randn(1, 64, 768, generator=generator)
    apart = torch.randn(768, generator=generator)
    apart -= (apart @ x[0, 0]) / x[0, 0].square().sum() * x[0, 0]
    x[0, 1] = x[0, 0] + 0.3 * apart / apart.norm()
    return (lambda z: F.scaled_dot_product_attention(z, z, z)), x


def outlier(value, low):
    """Singular values from ``low`` to 1, and one above them."""
    values = torch.linspace(low, 1.0, 64 * 768)
    values[700] = value
    return Diagonal(values), torch.randn(1, 64, 768)


CLUSTERED = {"tied": (tied_tokens, 1.1007), "equal": (lambda: outlier(1.05, 1.0), 1.05)}
CLUSTERED |= {"close": (lambda: outlier(1.05, 0.9), 1.05), "near": (lambda: outlier(1.01, 0.9), 1.01)}


@pytest.mark.parametrize(("build", "truth"), CLUSTERED.values(), ids=CLUSTERED)
def test_one_value_above_a_cluster_is_found(build, truth):
    fn, x = build()
    found = local_lipschitz(fn, x)
    assert found.converged.item()
    assert found.value.item() == pytest.approx(truth, rel=1e-3)
    short = local_lipschitz(fn, x, max_iter=2)
    assert not (short.converged.item() and short.value.item() < 0.999 * truth)


@pytest.mark.parametrize(("build", "truth"), CLUSTERED.values(), ids=CLUSTERED)
def test_the_power_method_does_not_say_converged_below_it(build, truth):
    found = local_lipschitz(*build(), method="power", max_iter=40)
    assert not (found.converged.item() and found.value.item() < 0.999 * truth)


@pytest.mark.parametrize("method", ["golub-kahan", "power"])
@pytest.mark.parametrize("size", [1e-35, 1e-24, 1e-22, 1e20, 1e36])
def test_sizes_whose_squares_are_out_of_range(size, method):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 6, 8), torch.randn(8, 8)
    found = local_lipschitz(lambda x: (x @ weight) * size, x, method=method, max_iter=400)
    expected = torch.linalg.matrix_norm(weight.double(), 2) * size
    assert found.converged.all()
    torch.testing.assert_close(found.value.double(), expected.expand(2), rtol=1e-3, atol=0)


@pytest.mark.parametrize("method", ["golub-kahan", "power"])
def test_out_of_range_is_never_converged(method):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 6, 8), torch.randn(8, 8)
    small = local_lipschitz(lambda x: (x @ weight) * 1e-42, x, method=method)
    assert not small.converged.any()
    assert (small.value < 1e-40).all()
    with pytest.raises(ValueError, match=r"too large for torch.float32: give x.double\(\)"):
        local_lipschitz(lambda x: 2.5e38 * x.expand(-1, -1, 2), torch.full((1, 1, 1), 0.1), method=method)
    with pytest.raises(ValueError, match=r"holds NaN or infinite .* torch.float32 cannot hold them, give x.double"):
        local_lipschitz(lambda x: 3e38 * x.expand(-1, -1, 99).sum(2, keepdim=True), 0 * X[:, :, :1], method=method)


def test_the_basis_is_orthogonalized_again_and_twice_where_needed():
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(1, 50, 20))[0].mT
    vector = basis.sum(1) + 1e-5 * torch.randn(1, 50)  # all but in the span: one pass leaves rounding
    left = _orthogonalized(vector, basis)
    assert (basis @ left.unsqueeze(-1)).abs().max() < 1e-6 * left.norm()
    spectrum = torch.cat([torch.tensor([1000.0]), torch.linspace(0.5, 1, 60)])
    left, right = (torch.linalg.qr(torch.randn(61, 61, dtype=torch.float64))[0] for _ in range(2))
    matrix = ((left * spectrum) @ right).float()
    found = local_lipschitz(lambda x: x @ matrix, torch.zeros(1, 1, 61), tol=1e-6)
    assert found.residual.item() < 1e-4  # 7e-4 where rounding brings the first vector back
    assert found.value.item() == pytest.approx(1000, rel=5e-7)  # the last digit of float32


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("method", ["golub-kahan", "power"])
def test_a_part_without_a_second_derivative_is_found(samples, method):
    x = torch.randn(samples, 5, 7)
    for fn in (lambda x: x + OnceOnly.apply(x), lambda x: x + Silent.apply(x), Silent.apply):
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            local_lipschitz(fn, x, method=method)


def test_the_power_method_agrees_and_takes_longer():
    layer, x, _ = random_case(4)
    power = local_lipschitz(layer, x.double(), method="power", max_iter=5000)
    found = local_lipschitz(layer, x.double())
    assert power.converged.all()
    assert power.iterations > found.iterations
    torch.testing.assert_close(power.value, found.value, rtol=1e-3, atol=0)


def test_a_function_may_change_its_input_in_place():
    x = torch.randn(2, 3, 4)
    assert torch.equal(
        local_lipschitz(lambda x: x.mul_(2).sin(), x).value, local_lipschitz(lambda x: (2 * x).sin(), x).value
    )


def test_samples_are_independent():
    layer, x, _ = random_case(2)
    x = x.double()
    together = local_lipschitz(layer, x, tol=1e-9).value
    alone = torch.cat([local_lipschitz(layer, sample[None], tol=1e-9).value for sample in x])
    torch.testing.assert_close(together, alone)


def test_an_exhausted_space_and_a_sample_of_zero_slope():
    values = torch.tensor([[3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]).double()
    found = local_lipschitz(Diagonal(values), torch.randn(2, 2, 2).double())
    assert found.converged.all()
    torch.testing.assert_close(found.value, torch.tensor([3.0, 0.0]).double())


def test_other_widths_and_the_one_call_of_fn():
    weight, calls = torch.randn(4, 7).double(), []

    def fn(x):
        calls.append(1)
        return x @ weight

    found = local_lipschitz(fn, torch.randn(2, 3, 4).double(), tol=1e-8)
    torch.testing.assert_close(found.value, torch.linalg.matrix_norm(weight, 2).expand(2))
    assert len(calls) == 1


def test_the_random_state_and_the_gradients_stay():
    layer, x, _ = random_case(0)
    state = torch.random.get_rng_state()
    first, second = (local_lipschitz(layer, x.double()).value for _ in range(2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(first, second)
    other = local_lipschitz(layer, x.double(), generator=torch.Generator().manual_seed(7)).value
    assert not torch.equal(first, other)
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_it_works_where_gradients_are_off(context):
    layer, x, _ = random_case(1)
    expected = local_lipschitz(layer, x.double()).value
    with context():
        assert torch.equal(local_lipschitz(layer, x.double() * 1).value, expected)


class OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * 2


class Silent(torch.autograd.Function):
    """As a kernel's backward that autograd does not see, beside a part that it does."""

    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad.detach() * 3 + 0 * grad


def with_nan(x):
    x = x.clone()
    x[1, 0, 0] = float("nan")
    return x


X = torch.ones(4, 3, 2)
BAD = {
    "no function": (lambda: local_lipschitz("sin", X), TypeError, "fn must be a function of x, got 'sin'"),
    "tol": (lambda: local_lipschitz(torch.sin, X, tol=0), ValueError, "tol must be above 0 and below 1, got 0"),
    "infinite tol": (lambda: local_lipschitz(torch.sin, X, tol=torch.inf), ValueError, "below 1, got inf"),
    "NaN tol": (lambda: local_lipschitz(torch.sin, X, tol=torch.nan), ValueError, "below 1, got nan"),
    "text tol": (lambda: local_lipschitz(torch.sin, X, tol="1e-3"), TypeError, "tol must be a number, got '1e-3'"),
    "generator": (lambda: local_lipschitz(torch.sin, X, generator=3), TypeError, "torch.Generator or None, got 3"),
    "max_iter": (lambda: local_lipschitz(torch.sin, X, max_iter=0), ValueError, "at least 1, got 0"),
    "method": (lambda: local_lipschitz(torch.sin, X, method="qr"), ValueError, "'power', got 'qr'"),
    "integers": (lambda: local_lipschitz(torch.sin, X.long()), TypeError, "got torch.int64"),
    "half": (lambda: local_lipschitz(torch.sin, X.half()), TypeError, r"float16.*x\.float"),
    "two dimensions": (lambda: local_lipschitz(torch.sin, X[0]), ValueError, r"got \(3, 2\)"),
    "empty": (lambda: local_lipschitz(torch.sin, X[:0]), ValueError, r"got \(0, 3, 2\)"),
    "NaN": (lambda: local_lipschitz(torch.sin, with_nan(X)), ValueError, r"x holds NaN .* samples \[1\]"),
    "NaN out": (lambda: local_lipschitz(lambda x: with_nan(x), X), ValueError, r"fn\(x\) holds NaN .*\[1\]"),
    "infinite slope": (lambda: local_lipschitz(torch.sqrt, 0 * X), ValueError, "the Jacobian of fn at x holds NaN"),
    "tuple": (lambda: local_lipschitz(lambda x: (x, None), X), TypeError, r"a tuple; .* lambda x: layer\(x\)\[0\]"),
    "tokens lost": (lambda: local_lipschitz(lambda x: x[:, :1], X), ValueError, r"got \(4, 1, 2\) for \(4, 3, 2\)"),
    "detached": (lambda: local_lipschitz(lambda x: x.detach(), X), ValueError, "does not depend on its input"),
    "constant": (
        lambda: local_lipschitz(lambda x: torch.ones_like(x, requires_grad=True) * 2, X),
        ValueError,
        "does not depend on its input",
    ),
    "once": (lambda: local_lipschitz(OnceOnly.apply, X), RuntimeError, "cannot be differentiated twice"),
    "mixed": (lambda: local_lipschitz(lambda x: x - x.mean(0), X), ValueError, "mixes the samples"),
}


@each_row(("call", "error", "message"), BAD.values())
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
