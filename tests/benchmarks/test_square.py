"""Our Square with rules of the library, as the benchmark asks it."""

import pytest
import torch
from torch import nn

from benchmarks import square
from lightning_tasks.robustness.attacks.square import square_share


def test_rules_hold_inside_a_call_alone():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4))
    images, generator = torch.rand(5, 3, 8, 8), torch.Generator()
    labels = model(images).argmax(1)
    plain = square.OURS._inside, square.OURS._REDRAWS, square.OURS.square_share
    for attack in (square.ours, square.ATTACKS["ours, all three"]):
        points = attack(model, images, labels, eps=8 / 255, queries=20, seed=0)
        assert (points - images).abs().max() <= 8 / 255 + 1e-6
    assert (square.OURS._inside, square.OURS._REDRAWS, square.OURS.square_share) == plain
    assert not square.inner(8, 3, 1000, generator)[:, -1].any()
    assert square.OURS._inside(8, 3, 1000, generator)[:, -1].any()


@pytest.mark.parametrize(("query", "library", "ours"), [(0, 1, 1), (4999, 128, 512), (40, 2, 4)])
def test_the_schedule_of_the_library_is_that_of_ten_thousand_queries(query, library, ours):
    assert square.as_of_ten_thousand(0.8, query, 5000) == 0.8 / library
    assert square_share(0.8, query, 5000) == 0.8 / ours


def test_the_library_keeps_that_schedule():
    library = pytest.importorskip("pyautoattack")
    attack = library.AutoAttack(nn.Identity(), eps=0.1, version="custom", attacks=["square"], device="cpu").square
    assert [attack.p_selection(query) for query in (0, 40, 4999)] == [0.8, 0.4, 0.8 / 128]
