"""In two processes stabilizers do what they do in one that has the samples of both."""

import json

import pytest
import torch

from tests.lightning_tasks.callbacks.stabilizers.probed import Probed
from tests.lightning_tasks.callbacks.stabilizers.ranks import CALLBACKS, first_gradients, trained
from tests.lightning_tasks.callbacks.stabilizers.test_map_penalties import KINDS, InLoss
from tests.lightning_tasks.programs import run_ranks


@pytest.fixture(scope="module")
def two_processes():
    report = json.loads(run_ranks("tests.lightning_tasks.callbacks.stabilizers.ranks")[0].splitlines()[-1])
    return {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in report.items()}


@pytest.mark.costly
@pytest.mark.parametrize("name", CALLBACKS)
def test_equals_one_process(two_processes, name):
    torch.testing.assert_close(two_processes[name], trained(*CALLBACKS[name]()).double(), atol=5e-6, rtol=1e-5)
    same = two_processes[name].shape == two_processes["none"].shape  # σReparam has further parameters
    assert name == "none" or not same or (two_processes[name] - two_processes["none"]).abs().max() > 1e-3


@pytest.mark.costly
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_double_precision_equal_those_of_the_loss_form(two_processes, kind):
    """Of one process, beside gradients that the step takes itself."""

    class Written(InLoss, Probed):
        penalty = staticmethod(KINDS[kind][1].penalty)

    found = two_processes[f"gradients: {kind}"]
    torch.testing.assert_close(found, first_gradients(Written()), atol=1e-12, rtol=1e-10)
    assert (found - first_gradients(Probed())).abs().max() > 1e-3
