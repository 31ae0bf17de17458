"""Inputs for token selection: sizes, planted selections, seeds."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from attnswap.datamodules import TokenSelectionDataModule
from attnswap.datamodules.token_selection import CONSTRUCTIONS, GAP

from tests.rows import each_row


@each_row(("seed", "name"), itertools.product(range(8), CONSTRUCTIONS))
def test_the_best_token_leads_along_one_direction(name, seed):
    problem = TokenSelectionDataModule(name, seed=seed).problem
    assert problem.x.shape == CONSTRUCTIONS[name]
    assert problem.x.dtype == torch.float64
    scores = problem.labels.unsqueeze(-1) * (problem.x @ problem.v)
    assert scores.amax(-1).gt(0).all()
    from attention_modules.analysis import max_margin_direction

    assert max_margin_direction(problem.x, scores.argmax(-1)).norm() <= 1 / GAP + 1e-6


def test_seed_draws_the_inputs():
    first, again, other = (TokenSelectionDataModule("multi", seed=seed).problem for seed in (1, 1, 2))
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.v, again.v)
    assert not torch.equal(first.x, other.x)


def test_random_sizes_and_batches():
    data = TokenSelectionDataModule("random", num_inputs=4, num_tokens=5, dim=6, steps_per_epoch=3)
    batches = list(data.train_dataloader())
    assert len(batches) == 3
    assert len(data.val_dataloader()) == 1
    for x, labels in batches:
        assert torch.equal(x, data.problem.x)
        assert labels.tolist() == [1, -1, 1, -1]
    assert data.dim == 6
    assert data.problem.w.shape == (6, 6)


@each_row(
    ("options", "words"),
    [
        ({"construction": "double"}, "give single, multi, joint or random"),
        ({"construction": "single", "dim": 4}, "dim cannot be set"),
        ({"construction": "random", "num_inputs": 2, "num_tokens": 3}, "dim is None"),
        ({"seed": "a"}, r"seed is 'a': give an integer from 0 to 2\*\*63 - 1"),
        ({"seed": -1}, "seed is -1: give an integer"),
        ({"seed": 1.5}, "seed is 1.5: give an integer"),
        ({"seed": 2**70}, "give an integer"),
        ({"steps_per_epoch": 0}, "steps_per_epoch is 0"),
    ],
)
def test_bad_settings(options, words):
    with pytest.raises(ValueError, match=words):
        TokenSelectionDataModule(**options)


def test_one_batch_is_not_predicted_on_two_processes():
    data = TokenSelectionDataModule("joint")
    data.trainer = SimpleNamespace(world_size=2)
    with pytest.raises(ValueError, match=r"one batch, which 2 processes cannot share: .*devices=1"):
        data.predict_dataloader()
