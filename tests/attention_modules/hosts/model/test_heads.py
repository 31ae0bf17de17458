"""Which mechanisms say that their heads can be computed apart, and layers whose weights are spread already."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from attention_modules import AttentionSpec, AttentionSwapError, SoftmaxAttention, build_mechanism, swap_attention
from attention_modules.hosts import attention_layers
from attention_modules.layers import SelfAttention
from tests.attention_modules.hosts.cases import MECHANISMS

SPEC = AttentionSpec(dim=16, num_heads=2, head_dim=8, num_tokens=6)


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_mechanisms_that_mix_heads_or_draw_for_them_say_nothing_of_heads_apart():
    built = {name: build_mechanism(mechanism, SPEC, **options) for name, (mechanism, options) in MECHANISMS.items()}
    mixing = {name for name, mechanism in built.items() if mechanism.per_head is None}
    numbering = {"retention"}  # the pace of a head goes by its number
    assert mixing == {"talking_heads", "differential, pairs='heads'", "dam", "mom"} | numbering


def test_what_derives_from_a_mechanism_and_functions_say_it_themselves():
    class Mixing(SoftmaxAttention):
        def forward(self, q, k, v, *args, **kwargs):
            return super().forward(q, k, v.mean(1, keepdim=True).expand_as(v), *args, **kwargs)

    def own(q, k, v, **options):
        return F.scaled_dot_product_attention(q, k, v, **options)

    assert Mixing(SPEC).per_head is None
    assert build_mechanism(own, SPEC).per_head is None

    def apart(q, k, v, **options):
        return F.scaled_dot_product_attention(q, k, v, **options)

    apart.per_head = ()  # type: ignore[attr-defined]
    assert build_mechanism(apart, SPEC).per_head == ()


def test_layers_whose_weights_are_spread_already_are_refused(mesh):
    model = torch.nn.Sequential(SelfAttention(16, 2))
    parallelize_module(model, mesh, {"0.qkv": ColwiseParallel(), "0.proj": RowwiseParallel()})
    held = [id(weight) for weight in model.parameters()]
    with pytest.raises(AttentionSwapError, match=r"cannot swap '0'.*spread over processes by heads.*swap before"):
        swap_attention(model, "sink")
    assert held == [id(weight) for weight in model.parameters()]
    assert attention_layers(model)  # one process has all heads
