"""Modules that shard themselves (FSDP2) under Lightning's ModelParallelStrategy, on two processes and on one."""

import pytest
import torch

from tests.lightning_tasks.processes.sharded_cases import main
from tests.lightning_tasks.programs import made_once, run_ranks

pytestmark = pytest.mark.costly


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What one process found, and what each of two did."""

    def make(folder):
        run_ranks("tests.lightning_tasks.processes.sharded_cases", str(folder), "2")

    folder = made_once(tmp_path_factory, "sharded", make)
    return main(1), [torch.load(folder / f"result_{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("case", ["before", "own", "watched", "decayed", "frozen"])
def test_sharded_modules_train_and_are_watched_as_whole_ones(runs, case):
    one, two = runs
    for found in two:
        for name, weight in one[case]["weights"].items():
            torch.testing.assert_close(found[case]["weights"][name], weight, rtol=1e-6, atol=1e-6, msg=name)
        # In training maps are of a process's own batch, and pursuit of its first one.
        names = [name for name in one[case]["logged"] if name.startswith(("val/attention", "qk_spectrum", "locater"))]
        expected = {name: one[case]["logged"][name] for name in names}
        assert {name: found[case]["logged"][name] for name in names} == pytest.approx(expected, rel=2e-5, abs=1e-6)
        assert found[case]["logged"].keys() == one[case]["logged"].keys()


def test_what_sharded_modules_cannot_take_is_refused_in_words(runs):
    for found in runs[1]:
        assert "swap_now(self)" in found["late"]["error"]
        assert "LipschitzMonitor calls layers on their own" in found["lipschitz"]["error"]
        assert "LanguageModelingTask does not shard itself" in found["task"]["error"]
