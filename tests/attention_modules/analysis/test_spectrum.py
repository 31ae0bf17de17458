"""The QK spectrum against the dense d_model x d_model matrix."""

import pytest
import torch

from attention_modules.analysis import frobenius_squared, qk_spectrum, qk_statistics, trace, trace_squared
from tests.rows import each_row

HEADS, HEAD_DIM, DIM = 3, 4, 10


def weights(head_dim=HEAD_DIM, dim=DIM):
    torch.manual_seed(0)
    return torch.randn(HEADS, head_dim, dim).double(), torch.randn(HEADS, head_dim, dim).double()


def dense_statistics(w_q, w_k):
    """The definitions, on W = W_qᵀ W_k with all its zeros."""
    w = w_q.mT @ w_k  # [H, dim, dim]
    eigenvalues = torch.linalg.eigvals(w)
    mean = eigenvalues.mean(-1)
    return {
        "mean": mean.real,
        "variance": (eigenvalues - mean.unsqueeze(-1)).abs().square().mean(-1),
        "variance_real": eigenvalues.real.var(-1, correction=0),
        "scale": torch.linalg.matrix_norm(w).square(),
        "max": eigenvalues.real.amax(-1),
        "min": eigenvalues.real.amin(-1),
        "max_abs": eigenvalues.abs().amax(-1),
        "trace": w.diagonal(dim1=-2, dim2=-1).sum(-1),
        "trace_variance": (w @ w).diagonal(dim1=-2, dim2=-1).sum(-1) / w.shape[-1] - mean.real.square(),
    }


@pytest.mark.parametrize("shape", [(HEAD_DIM, DIM), (DIM, DIM), (1, DIM)], ids=str)
def test_equals_the_dense_matrix(shape):
    w_q, w_k = weights(*shape)
    found, expected = qk_statistics(w_q, w_k), dense_statistics(w_q, w_k)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-9, rtol=1e-9, msg=name)


def test_extremes_count_the_zeros():
    w, _ = weights()
    positive = qk_statistics(w, w)  # W = wᵀw: no negative eigenvalue
    assert positive["min"].eq(0).all()
    assert positive["max"].gt(0).all()
    assert qk_statistics(w, -w)["max"].eq(0).all()


def test_trace_variance_may_be_negative_where_the_variance_is_not():
    rotation = torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]]).double()
    found = qk_statistics(torch.eye(2).double().unsqueeze(0), rotation)
    assert found["trace_variance"].item() == pytest.approx(-1)
    assert found["variance"].item() == pytest.approx(1)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_head_that_is_not_finite_is_nan_and_the_others_are_not(bad):
    w_q, w_k = weights()
    expected = qk_spectrum(w_q, w_k).eigenvalues
    spoilt = w_q.clone()
    spoilt[0, 0, 0] = bad
    found = qk_spectrum(spoilt, w_k).eigenvalues
    assert found[0].isnan().all()
    torch.testing.assert_close(found[1:], expected[1:])


def test_differentiable_parts():
    w_q, w_k = weights()
    for function in (frobenius_squared, trace, trace_squared):
        assert torch.autograd.gradcheck(function, (w_q.requires_grad_(), w_k.requires_grad_()))


def test_number_of_eigenvalues_is_the_head_dim():
    assert qk_spectrum(*weights()).eigenvalues.shape == (HEADS, HEAD_DIM)


@each_row("shapes", [((2, 4, 8), (2, 4, 9)), ((4, 8), (4, 8)), ((2, 8, 4), (2, 8, 4))])
def test_bad_shapes(shapes):
    with pytest.raises(ValueError, match="head_dim"):
        qk_statistics(*(torch.zeros(shape) for shape in shapes))
