"""How many loader processes a data module takes where none are asked for."""

import os
from types import SimpleNamespace

import pytest
from attnswap.datamodules import CIFAR10DataModule, DigitsDataModule
from attnswap.datamodules.shared.base import default_workers


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.delenv("ATTNSWAP_NUM_WORKERS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(("processes", "workers"), [(1, 8), (2, 4), (3, 2), (5, 0), (8, 0), (20, 0)])
def test_the_share_of_a_process(processes, workers):
    assert default_workers(processes) == workers
    module = CIFAR10DataModule()
    module.trainer = SimpleNamespace(num_devices=processes)
    assert module.loader_workers == workers


@pytest.mark.usefixtures("cores")
def test_what_is_asked_for_comes_first(monkeypatch):
    assert CIFAR10DataModule().loader_workers == 8
    assert CIFAR10DataModule(num_workers=3).loader_workers == 3
    assert DigitsDataModule().loader_workers == 0
    monkeypatch.setenv("ATTNSWAP_NUM_WORKERS", "5")
    assert (CIFAR10DataModule().loader_workers, CIFAR10DataModule(num_workers=0).loader_workers) == (5, 0)
    monkeypatch.setenv("ATTNSWAP_NUM_WORKERS", "many")
    with pytest.raises(ValueError, match="ATTNSWAP_NUM_WORKERS is 'many': give an integer of at least 0"):
        default_workers(1)
