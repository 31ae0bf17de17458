import math

import pytest
import torch
from torch import nn

from attention_modules import AttentionSpec, SelfAttention, SoftmaxAttention, available_mechanisms, mechanism_class
from lightning_tasks.models import TransformerLM
from tests.rows import each_row

SMALL = {"vocab_size": 23, "num_layers": 2, "dim": 16, "num_heads": 2, "mlp_dim": 24, "num_tokens": 12}


def small(**options):
    return TransformerLM(**{**SMALL, **options})


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("tied", [True, False])
def test_shapes_and_gradients(norm, positions, tied):
    model = small(norm=norm, positions=positions, tied=tied)
    tokens = torch.randint(0, 23, (3, 9))
    logits = model(tokens)
    assert logits.shape == (3, 9, 23)
    torch.testing.assert_close(model.eval().head(model.hidden(tokens)), model(tokens))
    logits.logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert (model.head.weight is model.embedding.weight) is tied


@each_row("attention", [name for name in available_mechanisms() if mechanism_class(name).row_masks])
def test_no_mechanism_sees_the_future(attention):
    model = small(attention=attention).eval()
    tokens = torch.randint(0, 23, (1, 12))
    changed = tokens.clone()
    changed[:, 7:] = (tokens[:, 7:] + 1) % 23
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :7], before[:, :7])
    assert not torch.allclose(after[:, 7:], before[:, 7:])


@each_row("chosen", [1, -1])
def test_attention_layers_chooses_where(chosen):
    model = small(attention="rpc", attention_options={"iterations": 2}, attention_layers=[chosen])
    kinds = [type(layer.attn.mechanism).__name__ for layer in model.layers]
    assert kinds == ["SoftmaxAttention", "RPCAttention"]
    assert all(isinstance(layer.attn, SelfAttention) for layer in model.layers)


def test_attention_by_callable():
    seen = []

    def factory(spec: AttentionSpec) -> SoftmaxAttention:
        seen.append(spec)
        return SoftmaxAttention(spec)

    small(attention=factory)
    assert [(spec.dim, spec.num_heads, spec.num_tokens) for spec in seen] == [(16, 2, 12)] * 2


def test_equals_torch_encoder_layer_post_norm():
    model = small(norm="post", num_layers=1, dropout=0.0).eval()
    layer = model.layers[0]
    twin = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True).eval()
    with torch.no_grad():
        twin.self_attn.in_proj_weight.copy_(layer.attn.qkv.weight)
        twin.self_attn.in_proj_bias.copy_(layer.attn.qkv.bias)
        twin.self_attn.out_proj.load_state_dict(layer.attn.proj.state_dict())
        twin.linear1.load_state_dict(layer.mlp[0].state_dict())
        twin.linear2.load_state_dict(layer.mlp[2].state_dict())
    x = torch.randn(2, 7, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    torch.testing.assert_close(layer(x), twin(x, src_mask=mask, is_causal=True))
    layer.pre_norm, twin.norm_first = True, True
    torch.testing.assert_close(layer(x), twin(x, src_mask=mask, is_causal=True))


def test_initial_values():
    model = TransformerLM(vocab_size=4000, num_layers=1, dim=64, num_heads=1, mlp_dim=64, num_tokens=8)
    assert model.embedding.weight.std().item() == pytest.approx(1 / 8, rel=0.02)
    assert model.head.weight.std().item() == pytest.approx(1 / 8, rel=0.02)
    limit = math.sqrt(6 / 128) / math.sqrt(2)
    for projection in model.layers[0].attn.qkv.weight.split(64):
        assert projection.abs().max().item() == pytest.approx(limit, rel=0.02)
    assert (model.layers[0].attn.proj.bias == 0).all()


def test_sinusoidal_positions_are_sines_and_cosines_and_no_parameter():
    model = small(positions="sinusoidal")
    torch.testing.assert_close(model.positions[3, 0], torch.tensor(3.0).sin())
    torch.testing.assert_close(model.positions[3, 8], torch.tensor(3.0).cos())
    torch.testing.assert_close(model.positions[5, 7], torch.tensor(5e-4).sin())
    assert "positions" not in model.state_dict()


def test_same_seed_same_initial_weights_for_softmax_and_uniform():
    torch.manual_seed(3)
    first = small().state_dict()
    torch.manual_seed(3)
    second = small(attention="uniform").state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@each_row(
    ("options", "text"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"norm": "middle"}, "'pre' or 'post', got 'middle'"),
        ({"positions": "none"}, "'learned' or 'sinusoidal', got 'none'"),
        ({"num_heads": 3}, "16.*3"),
        ({"attention_layers": [2]}, r"-2 to 1, got \[2\]"),
        ({"attention_layers": [-3]}, r"-2 to 1, got \[-3\]"),
        ({"attention": "sofmax"}, "Did you mean 'softmax'"),
        ({"dim": 5, "num_heads": 1, "positions": "sinusoidal"}, "even dim of at least 4, got 5"),
    ],
)
def test_bad_arguments(options, text):
    with pytest.raises(ValueError, match=text):
        small(**options)


@each_row("shape", [(2, 13), (5,)])
def test_bad_tokens(shape):
    with pytest.raises(ValueError, match=rf"N of at most 12, got \{list(shape)}"):
        small()(torch.zeros(shape, dtype=torch.long))


def test_narrow_heads_have_fewer_parameters_and_need_not_divide_the_width():
    wide, narrow = (TransformerLM(11, dim=16, num_heads=4, attn_head_dim=width) for width in (None, 3))
    count = [sum(each.numel() for each in model.layers[0].attn.parameters()) for model in (wide, narrow)]
    assert count == [4 * 16 * 16 + 4 * 16, 4 * 16 * 12 + 3 * 12 + 16]
    assert TransformerLM(11, dim=10, num_heads=3, attn_head_dim=4)(torch.zeros(1, 5, dtype=torch.int64)).shape == (
        1,
        5,
        11,
    )
    with pytest.raises(ValueError, match="attn_head_dim must be at least 1, got 0"):
        TransformerLM(11, attn_head_dim=0)
