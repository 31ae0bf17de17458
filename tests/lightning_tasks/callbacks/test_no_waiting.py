"""In a training step no callback waits for the device; the CPU stands for it, and tests/gpu tries a real one."""

import pytest
from lightning.pytorch import Callback

from attention_modules.stabilizers.attach import _Attached
from attnswap.callbacks import SwapAttention
from tests.another_device import AnotherDevice, WaitsForDeviceError
from tests.gpu.steps import CALLBACKS, MECHANISM, watched_fit

REAL_ALONE = ("NonFiniteGuard",)  # copies its flags by CUDA's own means


def device():
    return AnotherDevice("cuda", float64=True, may_wait=False)


@pytest.mark.parametrize("name", [name for name in CALLBACKS if name not in REAL_ALONE])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_callback_does_not_wait(name, monkeypatch):
    penalties = _Attached.backward  # the backward pass leaves every mode of functions

    def watched(ctx, *grads):
        with device():
            return penalties(ctx, *grads)

    monkeypatch.setattr(_Attached, "backward", staticmethod(watched))
    swap = [SwapAttention(MECHANISM[name])] if name in MECHANISM else []
    assert watched_fit(device, [*swap, CALLBACKS[name]()]) == 3


class Reads(Callback):
    def on_before_backward(self, trainer, pl_module, loss):
        self.last = float(loss.detach())


def test_one_that_waits_is_found():
    with pytest.raises(WaitsForDeviceError):
        watched_fit(device, [Reads()])
