"""Private operators: called under the schema that is known, and under no other."""

import pytest
import torch

from attention_modules import kernels, rpc_attention
from attention_modules.analysis import attention_entropy
from attention_modules.analysis.kernels import lse_and_mean_key
from tests.attention_modules.compare import assert_same, random_heads, values_and_gradients


@pytest.fixture
def fresh():
    """No operator is remembered, before and after."""
    kernels.private_operator.cache_clear()
    yield
    kernels.private_operator.cache_clear()


@pytest.mark.parametrize("name", kernels.SCHEMAS)
def test_this_pytorch_has_the_schema_that_is_called(name, fresh):
    assert kernels.private_operator(name) is not None


def test_what_is_gone_is_not_called(monkeypatch, fresh):
    monkeypatch.setitem(kernels.SCHEMAS, "_no_such_operator", "() -> ()")
    assert kernels.private_operator("_no_such_operator") is None


@pytest.mark.parametrize("changed", [kernels.FLASH, kernels.FLASH_BACKWARD, kernels.CHOICE])
def test_another_schema_takes_the_public_path(changed, monkeypatch, fresh):
    inputs = random_heads("kv")
    fast = values_and_gradients(lambda k, v: rpc_attention(k, v, lam=0.3), inputs)
    entropy = attention_entropy(inputs["k"].float(), inputs["k"].float())
    kernels.private_operator.cache_clear()
    monkeypatch.setitem(kernels.SCHEMAS, changed, kernels.SCHEMAS[changed].replace("Tensor query", "Tensor queries"))
    assert not kernels.has_flash_kernels()
    called = []
    monkeypatch.setattr("attention_modules.mechanisms.pursuit.flash", lambda *_: called.append(1))
    assert_same(values_and_gradients(lambda k, v: rpc_attention(k, v, lam=0.3), inputs), fast, 1e-10)
    assert not called
    missing = lse_and_mean_key(inputs["k"].float(), inputs["k"].float(), None, False, 1.0) is None
    assert missing == (changed == kernels.FLASH)
    torch.testing.assert_close(attention_entropy(inputs["k"].float(), inputs["k"].float()), entropy)
