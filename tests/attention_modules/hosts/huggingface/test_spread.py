"""Hugging Face models whose heads are spread over processes (``tp_plan="auto"``), on two processes and on one."""

from __future__ import annotations

import re

import pytest
import torch

from tests.attention_modules.hosts.huggingface.spread_cases import TAKEN, main, save_plain
from tests.lightning_tasks.programs import made_once, run_ranks

pytestmark = pytest.mark.costly
EXACT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What one process found, and what each of two did."""

    def make(folder):
        save_plain(folder)
        run_ranks("tests.attention_modules.hosts.huggingface.spread_cases", str(folder))

    folder = made_once(tmp_path_factory, "spread_llama", make)
    return main(folder), [torch.load(folder / f"found_{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("mechanism", TAKEN)
def test_each_process_computes_its_heads_as_one_process_computes_all(runs, mechanism):
    one, two = runs
    for found in two:
        torch.testing.assert_close(found[mechanism]["logits"], one[mechanism]["logits"], **EXACT)
        for kind in ("gradients", "weights"):
            assert found[mechanism][kind].keys() == one[mechanism][kind].keys()
            for name, expected in one[mechanism][kind].items():
                torch.testing.assert_close(found[mechanism][kind][name], expected, **EXACT, msg=f"{kind} of {name}")


def test_saved_models_are_whole_and_load_on_any_number_of_processes(runs):
    one, two = runs
    for found in two:
        for name, expected in one["loaded"].items():
            torch.testing.assert_close(found["loaded"][name], expected, **EXACT, msg=name)
        torch.testing.assert_close(found["restored"], one["restored"], **EXACT)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("talking_heads", "TalkingHeadsAttention needs all 4 heads in one process.*each of 2 has 2"),
        ("differential", "DifferentialAttention, pairs='heads' needs all 4 heads"),
        ("rpc", "its query projection is spread over processes"),
        ("dam", "needs all 4 heads"),
        ("one key head", "its 1 key heads cannot be spread over 2 processes"),
        ("joint", "only those of separate projections to queries, keys and values are known"),
    ],
)
def test_what_needs_all_heads_is_refused_by_name(runs, case, text):
    for found in runs[1]:
        assert re.search(text, found[f"refused {case}"])
        assert found["unchanged"]


def test_maps_of_some_heads_are_no_maps_of_the_layer(runs):
    for found in runs[1]:
        assert "has its 4 heads in 2 processes" in found["maps"]
