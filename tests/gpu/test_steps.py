"""A training step with our callbacks: the host does not wait for the GPU."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from lightning.pytorch import Callback

from attnswap.callbacks import SwapAttention
from tests.gpu.conftest import is_dry
from tests.gpu.steps import CALLBACKS, MECHANISM, watched_fit


@contextmanager
def no_waiting():
    """An error where the host waits for the GPU; nothing in a dry run, where tests/another_device.py stands for it."""
    if is_dry():
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_does_not_wait(name, precision, device):
    swap = [SwapAttention(MECHANISM[name])] if name in MECHANISM else []
    kind = "gpu" if device.type == "cuda" else "cpu"
    assert watched_fit(no_waiting, [*swap, CALLBACKS[name]()], accelerator=kind, precision=precision) == 3


class Reads(Callback):
    def on_before_backward(self, trainer, pl_module, loss):
        self.last = float(loss.detach())


def test_one_that_waits_is_found(device):
    if is_dry():
        pytest.skip("the CPU waits for nobody")
    with pytest.raises(RuntimeError, match="synchroniz"):
        watched_fit(no_waiting, [Reads()], accelerator="gpu")
