"""On a compiled model stabilizers do what they do on the plain one."""

import pytest
import torch

from lightning_tasks.callbacks import AttentionDiversification, EntropyRegularizer, QKClip, SigmaReparam
from tests.lightning_tasks.callbacks.modules import TinyLM, fit, weights_of

CALLBACKS = {
    "EntropyRegularizer": lambda: EntropyRegularizer(20.0, floor=0.95),
    "AttentionDiversification": lambda: AttentionDiversification(5.0, threshold=1.0),
    "QKClip": lambda: QKClip(0.05),
    "SigmaReparam": lambda: SigmaReparam(gamma=1.0),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_equals_the_plain_model(name):
    found, expected = TinyLM(), TinyLM()
    found.net["encoder"].compile(backend="eager")
    fit(found, [CALLBACKS[name]()], max_steps=2)
    fit(expected, [CALLBACKS[name]()], max_steps=2)
    torch.testing.assert_close(weights_of(found), weights_of(expected), atol=2e-6, rtol=1e-5)
