"""mmsegmentation's attention: maps that nobody reads, keys that come from a smaller image, what is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from attention_modules.hosts import attention_layers
from attention_modules.hosts.mmseg import ReducedKeysHost
from attention_modules.hosts.torch import MultiheadAttentionHost
from attention_modules.swap import AttentionSwapError, restore_attention, swap_attention
from tests.attention_modules.hosts.cases import DIM, HEADS, mmseg_layer

pytest.importorskip("mmseg", reason="the extra [mmseg] is not installed")


class LargestMap(TorchDispatchMode):
    """Counts the results whose last two axes are queries and keys."""

    def __init__(self, queries: int, keys: int) -> None:
        super().__init__()
        self.sizes, self.seen = (queries, keys), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            self.seen += isinstance(tensor, torch.Tensor) and tuple(tensor.shape[-2:]) == self.sizes
        return out


def test_no_map_is_made_where_nobody_reads_it() -> None:
    model, x = mmseg_layer("vit")().eval(), torch.randn(2, 37, DIM)
    seen = []
    for swapped in (False, True):
        if swapped:
            swap_attention(model, "softmax")
        with LargestMap(37, 37) as maps, torch.no_grad():
            model(x)
        seen.append(maps.seen)
    assert seen[0] > 0
    assert seen[1] == 0


def test_the_same_tokens_through_two_views_are_the_same() -> None:
    layer = nn.MultiheadAttention(DIM, HEADS)
    swap_attention(layer, "symmetric")
    x = torch.randn(2, 5, DIM)
    layer(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))
    on_meta = x.to("meta")
    layer.to("meta")(on_meta.transpose(0, 1), on_meta.transpose(0, 1), on_meta.transpose(0, 1))
    layer.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="another key"):
        layer(x.transpose(0, 1), x.clone().transpose(0, 1), x.transpose(0, 1))


def test_a_whole_layer_compiles_without_a_query() -> None:
    model, x = mmseg_layer("vit")().eval(), torch.randn(2, 5, DIM)
    swap_attention(model, "symmetric")
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), expected)


def segformer() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"reduced": mmseg_layer("mit", sr_ratio=2)(), "last": mmseg_layer("mit")()}).eval()


def test_reduced_keys_refuse_by_name_and_leave_the_model_as_it_was() -> None:
    model = segformer()
    hosts = [type(layer.host) for layer in attention_layers(model)]
    assert hosts == [ReducedKeysHost, MultiheadAttentionHost]
    names = dict(model.named_parameters()).keys()
    for mechanism, kind in (("symmetric", "SymmetricAttention"), ("rpc", "RPCAttention")):
        with pytest.raises(AttentionSwapError, match=rf"'reduced\.attn\.attn': {kind} needs one query for each key"):
            swap_attention(model, mechanism)
        assert dict(model.named_parameters()).keys() == names
    assert [row.name for row in swap_attention(model, "symmetric", layers=[1])] == ["last.attn.attn"]
    swap_attention(model, "softmax")
    with pytest.raises(AttentionSwapError, match="ScaledAttention needs one query"):
        swap_attention(model, "scaled", variant="scalar")
    assert len(restore_attention(model)) == 2


@pytest.mark.parametrize(
    ("library", "kind", "reason"),
    [
        ("swin", "WindowMSA", "windows with a relative position bias"),
        ("beit", "BEiTAttention", "relative position bias"),
        ("mae", "MAEAttention", "relative position bias"),
        ("twins", "LocallyGroupedSelfAttention", "windows of its own"),
        ("mscan", "MSCAAttention", "not attention among tokens"),
    ],
)
def test_what_has_a_class_of_its_own_is_reported(library: str, kind: str, reason: str) -> None:
    vit = mmseg_layer("vit")()
    module = __import__(f"mmseg.models.backbones.{library}", fromlist=[kind])
    stranger = getattr(module, kind).__new__(getattr(module, kind))
    nn.Module.__init__(stranger)
    report = swap_attention(nn.ModuleDict({"known": vit, "other": stranger}), "softmax")
    assert [row.name for row in report] == ["known.attn.attn"]
    assert [(left.kind, reason in left.reason) for left in report.skipped] == [(kind, True)]
