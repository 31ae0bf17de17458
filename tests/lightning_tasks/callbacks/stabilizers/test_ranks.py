"""In two processes stabilizers do what they do in one that has the samples of both."""

import json

import pytest
import torch

from tests.lightning_tasks.callbacks.stabilizers.ranks import CALLBACKS, trained
from tests.lightning_tasks.programs import run_ranks


@pytest.fixture(scope="module")
def two_processes():
    report = json.loads(run_ranks("tests.lightning_tasks.callbacks.stabilizers.ranks")[0].splitlines()[-1])
    return {name: torch.tensor(weights) for name, weights in report.items()}


@pytest.mark.costly
@pytest.mark.parametrize("name", CALLBACKS)
def test_equals_one_process(two_processes, name):
    torch.testing.assert_close(two_processes[name], trained(*CALLBACKS[name]()), atol=5e-6, rtol=1e-5)
    same = two_processes[name].shape == two_processes["none"].shape  # σReparam has further parameters
    assert name == "none" or not same or (two_processes[name] - two_processes["none"]).abs().max() > 1e-3
