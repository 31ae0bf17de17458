"""In two processes Heal does what it does in one that has the samples of both."""

import json

import pytest
import torch

from tests.lightning_tasks.callbacks.healing.ranks import healed
from tests.lightning_tasks.programs import run_ranks


@pytest.mark.costly
def test_equals_one_process():
    found = json.loads(run_ranks("tests.lightning_tasks.callbacks.healing.ranks")[0].splitlines()[-1])
    one = healed()
    for each in found.values():
        torch.testing.assert_close(torch.tensor(each["weights"]), torch.tensor(one["weights"]), atol=5e-6, rtol=1e-4)
        for name in (
            "val/drift/relative_error/layer_00",
            "val/drift/relative_error/layer_01",
            "val/drift/output_error",
        ):
            assert each[name] == pytest.approx(one[name], rel=0.2)  # of the first batch of each, which are not one's
