"""The prompt's attention against the paper's sums, and its gradient where the softmax is saturated."""

import math
from fractions import Fraction

import mpmath
import pytest
import torch

from attention_modules import PromptAttention, prompt_attention
from tests.attention_modules.compare import assert_same, random_heads, values_and_gradients
from tests.rows import each_row

FORMS = pytest.mark.parametrize("form", ["difference", "plain"])


def naive(x, keys, p, v):
    """One input and token at a time."""
    outputs = []
    for tokens, key in zip(x, keys, strict=True):
        weights = [math.e ** (k @ p) for k in key]
        outputs.append(sum(w * (t @ v) for w, t in zip(weights, tokens, strict=True)) / sum(weights))
    return torch.stack(outputs)


def inputs(n=3, tokens=5, dim=4, width=6):
    x = random_heads("x", (n, tokens, dim))["x"]
    keys = random_heads("k", (n, tokens, width), seed=1)["k"]
    return {"x": x, "keys": keys, "p": random_heads("p", (width,), 2)["p"], "v": random_heads("v", (dim,), 3)["v"]}


@FORMS
def test_equals_the_sum_over_tokens(form):
    found = values_and_gradients(lambda **a: prompt_attention(**a, form=form), inputs())
    assert_same(found, values_and_gradients(naive, inputs()), 1e-12)


@FORMS
def test_twice_differentiable(form):
    leaves = [value.requires_grad_() for value in inputs(n=2, tokens=3, dim=2, width=2).values()]
    assert torch.autograd.gradgradcheck(lambda *a: prompt_attention(*a, form=form), leaves)


def exact_gradient(x, p, v):
    """d f / d p of one input with W = 1, in 400 digits."""
    with mpmath.workdps(400):
        rows = [[mpmath.mpf(Fraction(a).numerator) / Fraction(a).denominator for a in row] for row in x.tolist()]
        p, v = [mpmath.mpf(a) for a in p.tolist()], [mpmath.mpf(a) for a in v.tolist()]
        weights = [mpmath.exp(mpmath.fdot(row, p)) for row in rows]
        s = [w / mpmath.fsum(weights) for w in weights]
        scores = [mpmath.fdot(row, v) for row in rows]
        f = mpmath.fdot(s, scores)
        gradient = [mpmath.fsum(s[t] * (scores[t] - f) * rows[t][i] for t in range(len(rows))) for i in range(len(p))]
        return torch.tensor([float(g) for g in gradient], dtype=torch.float64)


def gradient(x, p, v, form):
    p = p.clone().requires_grad_()
    return torch.autograd.grad(prompt_attention(x, x, p, v, form=form), p)[0]


@pytest.mark.parametrize("size", [1.0, 30.0, 100.0, 300.0])
def test_gradient_is_exact_however_saturated(size):
    torch.manual_seed(0)
    x, p, v = torch.randn(5, 4).double() + 10, torch.randn(4).double(), torch.randn(4).double()
    found, expected = gradient(x, size * p, v, "difference"), exact_gradient(x, size * p, v)
    assert (found - expected).norm() <= 1e-10 * expected.norm()


def test_plain_autograd_loses_the_gradient_of_a_saturated_softmax():
    torch.manual_seed(0)
    x, p, v = torch.randn(5, 4).double() + 10, torch.randn(4).double(), torch.randn(4).double()
    expected = exact_gradient(x, 100 * p, v)
    assert (gradient(x, 100 * p, v, "plain") - expected).norm() > 0.5 * expected.norm()


def test_gradient_is_the_closed_form_of_the_logistic_loss():
    x, keys, p, v = (
        inputs(n=1, dim=6)[name][0] if name in ("x", "keys") else inputs(dim=6)[name]
        for name in ("x", "keys", "p", "v")
    )
    p = p.requires_grad_()
    loss = -torch.nn.functional.logsigmoid(prompt_attention(x, keys, p, v))
    s, scores, a = (keys @ p).softmax(-1).detach(), x @ v, 2  # the identity holds for every token a
    f = scores[a] + (s * (scores - scores[a])).sum()
    closed = -torch.sigmoid(-f) * ((s * (scores - f)).unsqueeze(-1) * (keys - keys[a])).sum(0)
    torch.testing.assert_close(torch.autograd.grad(loss, p)[0], closed, rtol=1e-12, atol=1e-14)


@FORMS
def test_one_token_is_its_score(form):
    case = inputs(tokens=1)
    torch.testing.assert_close(prompt_attention(**case, form=form), (case["x"] @ case["v"]).squeeze(-1))


def test_module_has_the_parameters_in_float64():
    module = PromptAttention(4)
    assert {name: tuple(value.shape) for name, value in module.named_parameters()} == {
        "p": (4,),
        "v": (4,),
        "w": (4, 4),
    }
    case = inputs(width=4)
    with torch.no_grad():
        module.p.copy_(case["p"])
        module.v.copy_(case["v"])
        module.w.mul_(2)
    torch.testing.assert_close(module(case["x"]), naive(case["x"], 2 * case["x"], case["p"], case["v"]))
    torch.testing.assert_close(module.probabilities(case["x"]), (2 * case["x"] @ case["p"]).softmax(-1))


@each_row(
    ("change", "words"),
    [
        ({"form": "exact"}, "form must be one of difference, plain"),
        ({"keys": torch.zeros(3, 4, 6).double()}, "same T"),
        ({"p": torch.zeros(5).double()}, r"p must be \[6\]"),
        ({"v": torch.zeros(3).double()}, r"v \[4\]"),
    ],
)
def test_bad_input(change, words):
    with pytest.raises(ValueError, match=words):
        prompt_attention(**{**inputs(), **change})


@each_row("dim", [0, 2.5, True, "3", None])
def test_bad_width_of_the_module(dim):
    with pytest.raises(ValueError, match=rf"dim must be an integer of at least 1, got {dim!r}"):
        PromptAttention(dim)


@pytest.mark.parametrize("call", ["forward", "probabilities"])
@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.zeros(2, 5, 3), TypeError, r"got x torch.float32, w torch.float64: give .double\(\)"),
        (torch.zeros(2, 5, 3).half(), TypeError, "got x torch.float16"),
        (torch.zeros(2, 5, 3).long(), TypeError, r"x must be of real floating-point numbers, got torch.int64"),
        (torch.zeros(2, 5, 3).cfloat(), TypeError, r"x must be of real floating-point numbers, got torch.complex64"),
        ([[[0.0] * 3]], TypeError, "x must be a tensor, got list"),
        (torch.zeros(2, 5, 4).double(), ValueError, r"with dim = 3, got \(2, 5, 4\)"),
        (torch.zeros(3).double(), ValueError, r"x must be \[..., T, dim\] with dim = 3, got \(3,\)"),
    ],
)
def test_bad_input_of_the_module(call, x, error, words):
    with pytest.raises(error, match=words):
        getattr(PromptAttention(3), call)(x)


def test_tensors_of_two_dtypes():
    with pytest.raises(TypeError, match=r"one dtype, got x torch.float64, keys torch.float64, p torch.float32"):
        prompt_attention(**{**inputs(), "p": torch.zeros(6)})
