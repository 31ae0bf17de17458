"""Language models whose heads several processes share (tensor parallelism), on two processes and on one."""

import pytest
import torch

from tests.lightning_tasks.processes.spread_cases import TAKEN, main
from tests.lightning_tasks.programs import made_once, run_ranks

pytestmark = pytest.mark.costly
EXACT = {"rtol": 1e-10, "atol": 1e-10}
REFUSALS = {
    "talking_heads": "cannot spread 'layers.0.attn' over processes: TalkingHeadsAttention needs all 4 heads",
    "differential": "DifferentialAttention, pairs='heads' needs all 4 heads",
    "heads": "its 1 heads cannot be spread over 2 processes",
    "features": "its 13 hidden features are no multiple of 2 processes",
    "monitor": "AttentionMonitor cannot observe layers here: with tensor_parallel_size=2",
    "locater": "LocAteR cannot add to gradients here: with tensor_parallel_size=2",
    "spectrum": "SpectrumMonitor cannot read weights here: with tensor_parallel_size=2",
    "images": "needs a model that says how it is spread, as TransformerLM does, and VisionTransformer does not",
    "batches": "were given different batches",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What one process found, what each of two did, and one that loads the checkpoint of two."""

    def make(folder):
        run_ranks("tests.lightning_tasks.processes.spread_cases", str(folder), "2")
        run_ranks("tests.lightning_tasks.processes.spread_cases", str(folder), "1", ranks=1)

    folder = made_once(tmp_path_factory, "spread", make)
    two = [torch.load(folder / f"found_{rank}.pt", weights_only=True) for rank in range(2)]
    return main(folder, 1), two, torch.load(folder / "loaded.pt", weights_only=True)


@pytest.mark.parametrize("case", [name for name in TAKEN if name != "dropout"])
def test_processes_that_share_heads_train_as_one_with_all(runs, case):
    one, two, _ = runs
    for found in two:
        assert found[case]["logged"] == pytest.approx(one[case]["logged"], rel=1e-6)
        assert found[case]["weights"].keys() == one[case]["weights"].keys()
        for name, expected in one[case]["weights"].items():
            torch.testing.assert_close(found[case]["weights"][name], expected, **EXACT, msg=name)


def test_each_process_stores_half_of_heads_and_features(runs):
    for found in runs[1]:
        local, weights = found["scaled"]["local"], found["scaled"]["weights"]
        split = {name for name, share in local.items() if share.shape != weights[name].shape}
        layer = ("attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight", "mlp.0.weight", "mlp.0.bias", "mlp.2.weight")
        expected = {f"model.layers.{index}.{name}" for index in range(2) for name in layer}
        assert split == expected | {"model.layers.1.attn.mechanism.s"}
        assert all(2 * local[name].numel() == weights[name].numel() for name in split)
        assert local.keys() == weights.keys()  # all are DTensors, for clipping and optimizers


def test_dropout_of_what_all_have_is_the_same_in_each_process(runs):
    first, second = (found["dropout"]["local"] for found in runs[1])
    for name in ("model.embedding.weight", "model.norm.weight", "model.layers.0.attn.proj.bias"):
        assert torch.equal(first[name], second[name])


def test_a_checkpoint_of_two_processes_loads_on_one_and_on_two(runs):
    _, two, one = runs
    saved = two[0]["scaled"]["weights"]
    assert one["loss"] == pytest.approx(two[0]["scaled"]["logged"]["val/loss"], rel=1e-6)
    for found in (one, *(each["again"] for each in two)):
        assert all(torch.equal(found["weights"][name], weight) for name, weight in saved.items())
        assert any(not torch.equal(found["after"][name], weight) for name, weight in saved.items())
        for name, expected in one["after"].items():
            torch.testing.assert_close(found["after"][name], expected, **EXACT, msg=name)


@pytest.mark.parametrize("case", REFUSALS)
def test_what_needs_whole_layers_is_refused_in_words(runs, case):
    for found in runs[1]:
        assert REFUSALS[case] in found[f"refused {case}"]
