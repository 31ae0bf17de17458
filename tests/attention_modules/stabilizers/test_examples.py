"""Every public function shows how it is used, by an example that runs."""

import doctest
from importlib import import_module

import pytest
import torch


@pytest.mark.parametrize("name", ["attach", "clip", "diversification", "entropy", "sigma"])
def test_examples_run(name):
    torch.manual_seed(0)
    done = doctest.testmod(import_module(f"attention_modules.stabilizers.{name}"))
    assert done.attempted > 0
    assert done.failed == 0
