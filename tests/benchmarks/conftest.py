"""Benchmarks set the number of threads; other tests keep theirs."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _threads_stay():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
