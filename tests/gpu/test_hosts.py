"""Every host with a swapped layer in bfloat16 autocast, and restored."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from attention_modules import AttentionSwapError, restore_attention, swap_attention
from tests.attention_modules.hosts.cases import HOSTS, MECHANISMS, built, padding_mask
from tests.gpu.measures import distance

SWAPS = ("symmetric", "sigmoid")  # without a query, and with one
LIMIT, GRADIENT_LIMIT = 0.03, 0.1  # of the distance to float32 on the CPU, over its norm


class Placed(nn.Module):
    """A model that takes its inputs to its device."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.model, self.place = model.to(device), device

    def forward(self, *args, **kwargs):
        args, kwargs = tree_map(lambda x: x.to(self.place) if torch.is_tensor(x) else x, (args, kwargs))
        return self.model(*args, **kwargs)


def output_and_gradients(model, run, padding, autocast):
    """By name, on the CPU; those of what gets no gradient are left out."""
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        out = run(model, padding)
    out.float().sin().sum().backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return {name: each.detach().cpu().double() for name, each in {"output": out, **found}.items()}


@pytest.mark.parametrize("mechanism", SWAPS)
@pytest.mark.parametrize("host", HOSTS)
def test_swapped_in_bfloat16_and_restored(host, mechanism, device, record_property):
    case, (name, options) = HOSTS[host], MECHANISMS[mechanism]
    padding = padding_mask() if case.padding else None
    plain, model = built(host), Placed(built(host), device)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        first = case.run(model, padding)
    if mechanism in case.refuses:
        with pytest.raises(AttentionSwapError, match=case.refuses[mechanism]):
            swap_attention(model, name, **options)
    else:
        swap_attention(plain, name, **options)
        swap_attention(model, name, **options)
        exact = output_and_gradients(Placed(plain, torch.device("cpu")), case.run, padding, autocast=False)
        found = output_and_gradients(model, case.run, padding, autocast=True)
        assert found.keys() == exact.keys()
        largest = max(each.norm() for key, each in exact.items() if key != "output")
        errors = {key: float((found[key] - exact[key]).norm() / largest) for key in found if key != "output"}
        output, gradient = distance(found["output"], exact["output"]), max(errors.values())
        record_property("output", f"{output:.1e}")
        record_property("gradient", f"{gradient:.1e}")
        assert output <= LIMIT
        assert gradient <= GRADIENT_LIMIT
        restore_attention(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) and after[key].device.type == device.type for key in before)
    with torch.no_grad():
        assert torch.equal(case.run(model, padding), first)
