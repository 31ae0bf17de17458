"""Kernel PCA of keys and the measures of the reproduction study, against formulas written out token by token."""

import math
from itertools import permutations, product
from statistics import median

import numpy as np
import pytest
import torch

from attention_modules.analysis import compare_values, gamma_constancy, kernel_pca, projection_loss
from tests.rows import each_row


def draw(*shape, scale=1.0):
    return scale * torch.randn(*shape, dtype=torch.float64)


def naive_kernel(k):
    """K_φ, centered, and g, as the equations stand, of one head ``[N, d]``."""
    tokens = len(k)
    kernel = torch.exp(k @ k.T / math.sqrt(k.shape[1]))
    g = kernel @ torch.ones(tokens, dtype=k.dtype)
    phi = kernel / torch.outer(g, g)
    ones = torch.full((tokens, tokens), 1 / tokens, dtype=k.dtype)
    return phi - ones @ phi - phi @ ones + ones @ phi @ ones, g


@pytest.mark.parametrize(("causal", "keys"), [(False, 6), (True, 6), (False, 3), (False, 1)])
def test_projection_loss_token_by_token(causal, keys):
    q, k, v = draw(2, 3, 6, 4), draw(2, 3, keys, 4), draw(2, 3, keys, 5)
    found_phi = torch.zeros(2, 3, 6, dtype=torch.float64)
    h = torch.zeros(2, 3, 6, 5, dtype=torch.float64)
    for b, head, i in np.ndindex(2, 3, 6):
        seen = i + 1 if causal else keys
        weights = torch.exp(k[b, head, :seen] @ q[b, head, i] / 2)
        h[b, head, i] = weights @ v[b, head, :seen] / weights.sum()
        found_phi[b, head, i] = torch.exp(q[b, head, i] @ q[b, head, i] / 2) / weights.sum() ** 2
    loss = projection_loss(q, k, h, is_causal=causal)
    norm = h.square().sum(-1)
    torch.testing.assert_close(loss.phi, found_phi.mean(-1))
    torch.testing.assert_close(loss.h, norm.mean(-1))
    torch.testing.assert_close(loss.signed, (found_phi - norm).mean(-1))
    torch.testing.assert_close(loss.absolute, (found_phi - norm).abs().mean(-1))
    mask = torch.ones(6, 6, dtype=torch.bool).tril() if causal else torch.ones(1, 1, 6, keys, dtype=torch.bool)
    for given in (mask, torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)):
        torch.testing.assert_close(projection_loss(q, k, h, attn_mask=given).signed, loss.signed)
    # A scale of 2 / √d is that of queries and keys √2 as long.
    longer = projection_loss(2**0.5 * q, 2**0.5 * k, h, is_causal=causal)
    torch.testing.assert_close(projection_loss(q, k, h, is_causal=causal, scale=1.0).phi, longer.phi)


def test_rows_that_see_nothing_do_not_count_and_large_queries_do_not_overflow():
    q, k, h = draw(1, 1, 3, 2), draw(1, 1, 3, 2), draw(1, 1, 3, 2)
    mask = torch.tensor([[True, True, True], [True, True, True], [False, False, False]])
    assert projection_loss(q, k, h, attn_mask=mask).h == h[0, 0, :2].square().sum(-1).mean()
    big = 40 * torch.ones(1, 1, 3, 2)  # exp(q·q/√d) alone is above 1e900
    assert projection_loss(big, big, h).phi.item() == pytest.approx(math.exp(-40 * 40 * math.sqrt(2)) / 9)


def test_predicted_values_as_the_equations_stand():
    k = draw(2, 2, 9, 4)
    found = kernel_pca(k)
    assert found.values.shape == (2, 2, 9, 4)
    for b, head in np.ndindex(2, 2):
        centered, g = naive_kernel(k[b, head])
        eigenvalues, vectors = np.linalg.eigh(centered.numpy())
        order = np.argsort(-eigenvalues)[:4]
        np.testing.assert_allclose(found.eigenvalues[b, head], eigenvalues[order], atol=1e-12)
        a = torch.from_numpy(vectors[:, order].copy())
        a = a * (a * found.vectors[b, head]).sum(0).sign()  # a sign is arbitrary
        torch.testing.assert_close(found.vectors[b, head], a, atol=1e-8, rtol=0)
        ones = torch.full((9, 9), 1 / 9, dtype=torch.float64)
        torch.testing.assert_close(found.values[b, head], torch.diag(1 / g) @ (a - ones @ a), atol=1e-9, rtol=1e-6)
    assert found.vectors.mean(-2).abs().max() < 1e-10  # 1_N A = 0


def test_long_keys_do_not_overflow():
    k = 1200**0.5 * torch.nn.functional.normalize(draw(1, 1, 9, 4), dim=-1)  # logits of 600: g gᵀ would overflow
    found = kernel_pca(k)
    assert found.values.isfinite().all()
    assert (found.values != 0).any(-1).all()
    assert all(each.isfinite().all() for each in gamma_constancy(k, draw(1, 1, 9, 4)).values())


def naive_cka(one, other, kernel):
    grams = [one.new_tensor([[kernel(a, b, each) for b in each] for a in each]) for each in (one, other)]
    center = torch.eye(len(one), dtype=torch.float64) - 1 / len(one)
    one, other = (center @ gram @ center for gram in grams)
    return (one * other).sum() / (one.norm() * other.norm())


def gaussian(a, b, points):
    distances = [float((x - y).square().sum()) for x in points for y in points]
    return math.exp(-float((a - b).square().sum()) / (2 * median(each for each in distances if each > 0)))


def test_measures_of_likeness_token_by_token():
    v, predicted = draw(2, 1, 5, 3), draw(2, 1, 5, 3)
    found = compare_values(v, predicted)
    for b in range(2):
        one, other = v[b, 0], predicted[b, 0]
        cosine = torch.tensor([[x @ y / (x.norm() * y.norm()) for y in other] for x in one])
        assert found["direct_cosine"][b, 0].item() == pytest.approx(cosine.diagonal().mean().item(), abs=1e-6)
        best = max(sum(cosine[i, j].item() for i, j in enumerate(order)) / 5 for order in permutations(range(5)))
        assert found["matched_cosine"][b, 0].item() == pytest.approx(best, abs=1e-6)
        flipped = [other * other.new_tensor(signs) for signs in product((-1, 1), repeat=3)]
        signed = max(torch.cosine_similarity(one, each, dim=-1).mean().item() for each in flipped)
        assert found["signed_cosine"][b, 0].item() == pytest.approx(signed, abs=1e-6)
        linear = naive_cka(one, other, lambda a, b, _: float(a @ b))
        assert found["linear_cka"][b, 0].item() == pytest.approx(linear.item(), abs=1e-6)
        assert found["rbf_cka"][b, 0].item() == pytest.approx(naive_cka(one, other, gaussian).item(), abs=1e-6)
        assert found["relative_error"][b, 0].item() == pytest.approx(((one - other).norm() / one.norm()).item())


def test_values_that_are_those_predicted_are_found_alike_in_every_measure():
    k = draw(1, 2, 12, 4)
    predicted = kernel_pca(k).values
    same = compare_values(predicted, predicted) | gamma_constancy(k, predicted)
    for name in ("direct_cosine", "matched_cosine", "linear_cka", "rbf_cka"):
        torch.testing.assert_close(same[name], torch.ones_like(same[name]))
    for name in ("relative_error", "gamma_absolute", "gamma_relative", "eigen_residual"):
        assert same[name].max() < 1e-6
    turned = torch.linalg.qr(draw(4, 4)).Q
    assert (compare_values(predicted @ turned, predicted)["linear_cka"] > 0.999).all()
    shuffled = compare_values(predicted[:, :, torch.randperm(12)], predicted)
    torch.testing.assert_close(shuffled["matched_cosine"], torch.ones_like(shuffled["matched_cosine"]))
    assert shuffled["direct_cosine"].max() < 0.9


def test_gamma_pair_by_pair_and_what_its_absolute_form_cannot_tell():
    k, v = draw(1, 1, 7, 3), draw(1, 1, 7, 3)
    centered, g = naive_kernel(k[0, 0])
    a = torch.diag(g) @ v[0, 0]
    a = a - a.mean(0)
    gamma = centered @ a / (7 * a)
    absolute, relative, residuals = [], [], []
    for column, image in zip(a.T, (centered @ a).T, strict=True):
        rho = column @ image / (column @ column)
        residuals.append((image - rho * column).norm() / image.norm())
    for d in range(3):
        for i in range(7):
            for j in range(i + 1, 7):
                difference = abs(gamma[i, d] - gamma[j, d]).item()
                absolute.append(difference)
                relative.append(difference / max(abs(gamma[i, d].item()), abs(gamma[j, d].item())))
    found = gamma_constancy(k, v)
    assert found["gamma_absolute"].item() == pytest.approx(np.mean(absolute))
    assert found["gamma_relative"].item() == pytest.approx(np.mean(relative))
    assert found["eigen_residual"].item() == pytest.approx(torch.stack(residuals).mean().item())
    # Random values: far from eigenvectors, and yet |γ_i - γ_j| is all but zero.
    random = gamma_constancy(draw(1, 1, 64, 8), draw(1, 1, 64, 8))
    assert random["gamma_absolute"] < 0.01
    assert random["gamma_relative"] > 0.5


def one_long_key():
    k = draw(1, 1, 9, 4)
    k[0, 0, 3] *= 100
    return k


def test_an_integer_mask_is_refused():
    with pytest.raises(TypeError, match="attn_mask must be boolean"):
        projection_loss(*draw(3, 1, 1, 4, 2), attn_mask=torch.ones(4, 4, dtype=torch.long))


@each_row(
    ("call", "words"),
    [
        (lambda: kernel_pca(draw(1, 1, 4, 4)), "4 tokens have at most 3 principal components, 4 are needed"),
        (lambda: kernel_pca(draw(1, 4, 4)), r"k must be \[B, H, N, d\]"),
        (lambda: kernel_pca(torch.full((1, 1, 4, 2), torch.nan)), "k holds NaN"),
        (lambda: kernel_pca(100 * draw(1, 1, 9, 4)), "below what float64 holds: a key is too long"),
        (lambda: kernel_pca(one_long_key()), "below what float64 holds"),
        (lambda: gamma_constancy(one_long_key(), draw(1, 1, 9, 4)), "below what float64 holds"),
        (lambda: kernel_pca(torch.ones(1, 1, 9, 4)), "all alike: they have no principal component"),
        (lambda: kernel_pca(draw(1, 1, 9, 4), components=0), "components must be an integer of at least 1, got 0"),
        (lambda: kernel_pca(draw(1, 1, 9, 4), scale=math.nan), "scale must be a finite number, got nan"),
        (lambda: projection_loss(*draw(3, 1, 1, 4, 2), attn_mask=torch.ones(3, 4) > 0), "does not broadcast"),
        (lambda: projection_loss(*draw(3, 1, 1, 4, 2), attn_mask=torch.full((4, 4), math.nan)), "attn_mask holds NaN"),
        (lambda: projection_loss(draw(1, 1, 4, 2), draw(1, 1, 4, 3), draw(1, 1, 4, 2)), "q and k must be alike"),
        (lambda: projection_loss(draw(1, 1, 4, 2), draw(1, 1, 5, 2), draw(1, 1, 5, 2)), "N of q"),
        (lambda: compare_values(draw(1, 1, 4, 2), draw(1, 1, 4, 3)), "must be alike"),
        (lambda: gamma_constancy(draw(1, 1, 1, 2), draw(1, 1, 1, 2)), "at least 2 tokens"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()
