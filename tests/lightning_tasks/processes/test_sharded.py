"""Modules that shard themselves (FSDP2) under Lightning's ModelParallelStrategy, on two processes and on one."""

import pytest
import torch

from tests.lightning_tasks.processes.sharded_cases import main
from tests.lightning_tasks.programs import made_once, run_ranks

pytestmark = pytest.mark.costly


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What one process found, what each of two did, and one that loads the checkpoint of two."""

    def make(folder):
        run_ranks("tests.lightning_tasks.processes.sharded_cases", str(folder), "2")
        run_ranks("tests.lightning_tasks.processes.sharded_cases", str(folder), "1", ranks=1)

    folder = made_once(tmp_path_factory, "sharded", make)
    two = [torch.load(folder / f"result_{rank}.pt", weights_only=True) for rank in range(2)]
    return main(1, folder), two, torch.load(folder / "loaded.pt", weights_only=True)


@pytest.mark.parametrize("case", ["before", "own", "watched", "decayed", "frozen"])
def test_sharded_modules_train_and_are_watched_as_whole_ones(runs, case):
    one, two, _ = runs
    for found in two:
        for name, weight in one[case]["weights"].items():
            torch.testing.assert_close(found[case]["weights"][name], weight, rtol=1e-6, atol=1e-6, msg=name)
        # In training maps are of a process's own batch, and pursuit of its first one.
        names = [name for name in one[case]["logged"] if name.startswith(("val/attention", "qk_spectrum", "locater"))]
        expected = {name: one[case]["logged"][name] for name in names}
        assert {name: found[case]["logged"][name] for name in names} == pytest.approx(expected, rel=2e-5, abs=1e-6)
        assert found[case]["logged"].keys() == one[case]["logged"].keys()


@pytest.mark.parametrize("kind", ["images", "text", "masks"])
def test_tasks_shard_themselves_and_train_as_whole_ones(runs, kind):
    one, two, _ = runs
    exact = 1e-10 if kind == "text" else 1e-5
    for found in two:
        assert set(found[kind]["sharded"]) == {name for name in found[kind]["weights"] if name.startswith("model.")}
        for name, weight in one[kind]["weights"].items():
            torch.testing.assert_close(found[kind]["weights"][name], weight, rtol=exact, atol=exact, msg=name)
        names = [name for name in one[kind]["logged"] if name.startswith(("val/", "locater", "qk_spectrum"))]
        expected = {name: one[kind]["logged"][name] for name in names}
        assert {name: found[kind]["logged"][name] for name in names} == pytest.approx(expected, rel=2e-5, abs=1e-6)


def test_a_checkpoint_of_two_processes_loads_on_one(runs):
    _, (first, _), found = runs
    assert found["loss"] == pytest.approx(first["text"]["logged"]["val/loss"], rel=1e-6)
    assert all(torch.equal(found["weights"][name], weight) for name, weight in first["text"]["weights"].items())
    assert found["steps"] == 5


def test_what_sharded_modules_cannot_take_is_refused_in_words(runs):
    for found in runs[1]:
        assert "swap_now(self)" in found["late"]["error"]
        assert "shards blocks that hold an attention layer, and " in found["no blocks"]["error"]
        assert "LipschitzMonitor calls layers on their own" in found["lipschitz"]["error"]
