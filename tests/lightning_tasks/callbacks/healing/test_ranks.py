"""In two processes Heal does what it does in one that has the samples of both."""

import json

import pytest
import torch

from tests.lightning_tasks.callbacks.healing.ranks import Linear, healed
from tests.lightning_tasks.programs import run_ranks


@pytest.mark.costly
def test_equals_one_process():
    found = json.loads(run_ranks("tests.lightning_tasks.callbacks.healing.ranks")[0].splitlines()[-1])
    encoder, linear = healed(), healed(Linear)
    for case, each in found.items():
        one = linear if case == "linear" else encoder
        torch.testing.assert_close(torch.tensor(each["weights"]), torch.tensor(one["weights"]), atol=5e-6, rtol=1e-4)
        figures = [name for name in one if name != "weights"]
        assert "val/drift/relative_error/layer_00" in figures
        for name in figures:
            assert each[name] == pytest.approx(one[name], rel=0.2)  # of the first batch of each, which are not one's
