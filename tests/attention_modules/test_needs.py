"""What a mechanism asks for beside q, k and v: the layer's input, in every host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention_modules import AttentionMechanism, AttentionSwapError, swap_attention
from attention_modules.hosts import attention_layers
from tests.attention_modules.hosts.cases import HOSTS, built, padding_mask
from tests.rows import each_row


class Seeing(AttentionMechanism):
    """Softmax attention that keeps what it is given."""

    needs = ("x",)

    def forward(self, q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0, scale=None, *, x: Tensor | None = None):
        self.seen, self.queries = (self.needed("x", x), k), q.shape[2]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)


@each_row("name", sorted(HOSTS.keys() - {"sdpa"}))  # whose projections nobody told
def test_the_layers_input_is_what_its_keys_are_made_of(name):
    host, model = HOSTS[name], built(name)
    padding = padding_mask() if host.padding else None
    plain = host.run(model, padding)
    swap_attention(model, Seeing)
    torch.testing.assert_close(host.run(model, padding), plain, atol=1e-5, rtol=1e-5)
    layers = [layer for layer in attention_layers(model) if isinstance(layer.mechanism, Seeing)]
    assert len(layers) == host.layers
    for layer in layers:
        x, k = layer.mechanism.seen
        assert x.shape == (*k.shape[:1], layer.mechanism.queries, layer.spec.dim)
        if layer.spectrum_caveat is None and x.shape[1] == k.shape[2]:
            rest = k - torch.einsum("bnc,hdc->bhnd", x, layer.qk_weights()[1])  # the bias alone
            torch.testing.assert_close(rest, rest[:1, :, :1].expand_as(rest), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["timm-rope", "llama", "qwen3"])
@pytest.mark.parametrize(
    ("mechanism", "taken"), [("qk_norm", {"gain": "scalar"}), ("differential", {"pairs": "heads"})]
)
def test_features_that_rope_has_turned_are_not_treated_apart(name, mechanism, taken):
    model = built(name)
    with pytest.raises(AttentionSwapError, match=r"rotary positions have turned.*(QKNorm|Differential)Attention"):
        swap_attention(model, mechanism)
    swap_attention(model, mechanism, **taken)
    assert HOSTS[name].run(model, None).isfinite().all()
