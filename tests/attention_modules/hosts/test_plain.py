"""What a swapped model's Parameters are without the swap."""

import pytest
import torch

from attention_modules import swap_attention
from attention_modules.hosts.trained import plain_parameters
from tests.attention_modules.hosts.cases import FEW, HOSTS, built


@pytest.mark.parametrize("host", HOSTS)
def test_a_swap_changes_no_plain_parameter(host: str) -> None:
    mechanism = next(name for name in ("rpc", "scaled", "softmax") if name not in HOSTS[host].refuses)
    model = built(host)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    swap_attention(model, mechanism, **FEW[mechanism][1])
    after = plain_parameters(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
