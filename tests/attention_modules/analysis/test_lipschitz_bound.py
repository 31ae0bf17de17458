"""The bound is never below the estimate, and refused where it does not hold."""

import math

import pytest
import timm
import torch
from torch import nn

from attention_modules import SelfAttention, swap_attention
from attention_modules.analysis import layer_lipschitz_bound, lipschitz_bound, local_lipschitz
from attention_modules.hosts import attention_layers
from tests.rows import each_row, pairwise


def layer_of(module):
    (layer,) = attention_layers(module)
    return layer


def radius_of(x):
    return x.norm(dim=-1).max().item()


@pytest.mark.parametrize(("seed", "masked", "qkv_bias"), pairwise(range(6), (False, True), (False, True)))
def test_never_below_the_estimate(seed, masked, qkv_bias):
    torch.manual_seed(seed)
    heads, tokens = 1 + seed % 4, 1 + seed % 6
    module = SelfAttention(4 * heads, heads, qkv_bias=qkv_bias).double().eval()
    if qkv_bias:
        nn.init.normal_(module.qkv.bias, std=3.0)
    x = torch.randn(4, tokens, 4 * heads).double() * 10 ** torch.linspace(-2, 1, 4).double().view(4, 1, 1)
    mask = (torch.rand(tokens, tokens) > 0.4) | torch.eye(tokens, dtype=torch.bool) if masked else None
    for sample in x:
        value = local_lipschitz(lambda x, mask=mask: module(x, attn_mask=mask), sample[None]).value.item()
        bound = layer_lipschitz_bound(layer_of(module), radius=radius_of(sample), num_tokens=tokens).item()
        assert 0 < value <= bound


def test_the_query_bias_cannot_be_left_out():
    eye = torch.eye(4).double()[None]
    b_q = torch.tensor([[100.0, 0.0, 0.0, 0.0]]).double()
    x = torch.tensor([[[0.0, 1.0, 0.0, 0.0], [0.0, -1.0, 0.0, 0.0]]]).double()

    def attend(x):
        return (b_q @ x.mT / 2).softmax(-1).expand(-1, 2, -1) @ x

    value = local_lipschitz(attend, x).value.item()
    sizes = {"radius": 1.0, "num_tokens": 2}
    assert value > 5 * lipschitz_bound(0 * eye, eye, eye, **sizes).item()
    assert value <= lipschitz_bound(0 * eye, eye, eye, b_q=b_q, **sizes).item()


def test_equals_the_formula():
    torch.manual_seed(0)
    w_q, w_k, w_v = torch.randn(3, 2, 3, 6).double()
    w_o, b_q = torch.randn(2, 5, 3).double(), torch.randn(2, 3).double()
    expected = 0.0
    for h in range(2):
        a = torch.linalg.matrix_norm(w_k[h].T @ w_q[h] * 0.3, 2).item()
        c = (w_k[h].T @ b_q[h] * 0.3).norm().item()
        inner = 7 + a**2 * 2**4 + 4 * 7 * 2**2 * (a * 2 + c) ** 2
        v, o = (torch.linalg.matrix_norm(weight[h], 2).item() for weight in (w_v, w_o))
        expected += math.sqrt(3) * o * v * math.sqrt(inner)
    found = lipschitz_bound(w_q, w_k, w_v, w_o, radius=2.0, num_tokens=7, b_q=b_q, scale=0.3)
    assert found.item() == pytest.approx(expected, rel=1e-12)


def test_the_same_weights_in_every_known_layer_have_the_same_bound():
    torch.manual_seed(0)
    ours = SelfAttention(8, 2, qkv_bias=True)
    nn.init.normal_(ours.qkv.bias)
    theirs = timm.layers.attention.Attention(8, 2, qkv_bias=True)
    theirs.load_state_dict({name: value for name, value in ours.state_dict().items()})
    torchs = nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        torchs.in_proj_weight.copy_(ours.qkv.weight)
        torchs.in_proj_bias.copy_(ours.qkv.bias)
        torchs.out_proj.weight.copy_(ours.proj.weight)
    bounds = [layer_lipschitz_bound(layer_of(module), radius=2.0, num_tokens=5) for module in (ours, theirs, torchs)]
    swap_attention(theirs, "softmax")
    bounds.append(layer_lipschitz_bound(layer_of(theirs), radius=2.0, num_tokens=5))
    torch.testing.assert_close(torch.stack(bounds), bounds[0].expand(4))


SIZES = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 8}
GPT2 = {"n_embd": 12, "n_head": 3, "n_layer": 2, "n_positions": 8}


def hugging_face(kind, **options):
    """A self-attention layer of random weights and biases, with its model's configuration."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **(GPT2 if kind == "gpt2" else SIZES), **options)
    layer = attention_layers(transformers.AutoModel.from_config(config, attn_implementation="sdpa"))[-1]
    for parameter in layer.module.double().eval().parameters():
        nn.init.normal_(parameter)
    return layer


KINDS = [(kind, {}) for kind in ("bert", "roberta", "vit", "gpt2")]
KINDS.append(("gpt2", {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}))


@pytest.mark.parametrize("swapped", [False, True], ids=["plain", "swapped"])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_never_below_the_estimate_in_hugging_face_layers(kind, options, swapped):
    torch.manual_seed(0)
    layer = hugging_face(kind, **options)
    if swapped:
        swap_attention(layer.module, "softmax")
    for size in (0.01, 0.1, 1.0, 4.0):
        for tokens in (1, 2, 6):
            x = size * torch.randn(1, tokens, 12).double()
            value = local_lipschitz(lambda x: layer.module(x)[0], x).value.item()
            bound = layer_lipschitz_bound(layer, radius=radius_of(x), num_tokens=tokens).item()
            assert 0 < value <= bound


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_the_bound_of_a_hugging_face_layer_is_that_of_its_weights(kind, options):
    torch.manual_seed(0)
    layer = hugging_face(kind, **options)
    module = layer.module
    if kind == "gpt2":
        rows = module.c_attn.weight.T.chunk(3)
        bias, out = module.c_attn.bias[:12], module.c_proj.weight.T
    elif kind == "vit":
        rows = [getattr(module, f"{name}_proj").weight for name in "qkv"]
        bias, out = module.q_proj.bias, module.o_proj.weight
    else:
        rows = [getattr(module, name).weight for name in ("query", "key", "value")]
        bias, out = module.query.bias, None
    weights = [weight.view(3, 4, 12) for weight in rows]
    if out is not None:
        weights.append(torch.stack(out.split(4, dim=1)))
    sizes = {"radius": 1.5, "num_tokens": 5}
    scale = 1 / 2 if options else None  # the second of two layers
    expected = lipschitz_bound(*weights, b_q=bias.view(3, 4), scale=scale, **sizes)
    torch.testing.assert_close(layer_lipschitz_bound(layer, **sizes), expected)


def test_concatenated_heads_add_as_squares():
    torch.manual_seed(0)
    w_q, w_k, w_v = torch.randn(3, 2, 3, 6).double()
    alone = [lipschitz_bound(w_q[[h]], w_k[[h]], w_v[[h]], radius=1.0, num_tokens=4) for h in range(2)]
    both = lipschitz_bound(w_q, w_k, w_v, radius=1.0, num_tokens=4)
    torch.testing.assert_close(both, torch.stack(alone).square().sum().sqrt())


class Rope(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = timm.layers.AttentionRope(8, 2)


def albert():
    from transformers import AlbertConfig, AlbertModel

    sizes = {"hidden_size": 16, "embedding_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    return AlbertModel(AlbertConfig(vocab_size=9, num_hidden_layers=1, **sizes))


REFUSED = {
    "rpc": (lambda: SelfAttention(8, 2, "rpc"), "RPCAttention"),
    "scaled": (lambda: SelfAttention(8, 2, "scaled", {"variant": "scalar"}), "ScaledAttention"),
    "symmetric": (lambda: SelfAttention(8, 2, "symmetric"), "SymmetricAttention"),
    "q/k norm": (lambda: SelfAttention(8, 2, qk_norm=True, norm_layer=nn.LayerNorm), "q/k norm"),
    "gate": (lambda: SelfAttention(8, 2, gated=True), "a gate"),
    "output norm": (lambda: SelfAttention(8, 2, scale_norm=True, norm_layer=nn.LayerNorm), "normalizes the output"),
    "rope": (Rope, "rope"),
    "another of Hugging Face": (lambda: hugging_face("opt").module, "the weights of .* are not read"),
    "what holds its output too": (albert, "the weights of AlbertAttention are not read"),
    "rope of Hugging Face": (lambda: hugging_face("llama").module, "rope"),
    "zero key": (lambda: nn.MultiheadAttention(8, 2, add_zero_attn=True), "a key of its own"),
}


@each_row(("build", "reason"), REFUSED.values())
def test_what_it_does_not_cover_is_refused(build, reason):
    with pytest.raises(ValueError, match=f"does not cover .*{reason}"):
        layer_lipschitz_bound(layer_of(build()), radius=1.0, num_tokens=3)


W = torch.ones(2, 3, 6)
BAD = {
    "radius": ({"radius": -1.0, "num_tokens": 1}, (W, W, W), "radius must be .* got -1.0"),
    "infinite": ({"radius": math.inf, "num_tokens": 1}, (W, W, W), "got inf"),
    "beyond a float": ({"radius": 10**400, "num_tokens": 1}, (W, W, W), "radius must be a finite number, got 1000"),
    "large": ({"radius": 1e100, "num_tokens": 1}, (W, W, W), "beyond float64 at radius 1e.100"),
    "scale": ({"radius": 1.0, "num_tokens": 1, "scale": math.nan}, (W, W, W), "scale must be a finite .* got nan"),
    "tokens": ({"radius": 1.0, "num_tokens": 0}, (W, W, W), "num_tokens must be .* got 0"),
    "keys": ({"radius": 1.0, "num_tokens": 1}, (W, W[:1], W), r"got \(2, 3, 6\) and \(1, 3, 6\)"),
    "values": ({"radius": 1.0, "num_tokens": 1}, (W, W, W[..., :5]), r"w_v must be .*got \(2, 3, 5\)"),
    "output": ({"radius": 1.0, "num_tokens": 1}, (W, W, W, W), r"w_o must be .*got \(2, 3, 6\)"),
    "bias": ({"radius": 1.0, "num_tokens": 1, "b_q": W}, (W, W, W), r"b_q must be .*got \(2, 3, 6\)"),
    "nan": ({"radius": 1.0, "num_tokens": 1}, (W, W, torch.nan * W), "w_v holds NaN"),
}


@each_row(("options", "weights", "message"), BAD.values())
def test_bad_input_is_named(options, weights, message):
    with pytest.raises(ValueError, match=message):
        lipschitz_bound(*weights, **options)


WRONG = {
    "list": ({"radius": 1.0}, ([1.0], W, W), "w_q must be a tensor, got a list"),
    "none": ({"radius": 1.0}, (W, W, None), "w_v must be a tensor, got a NoneType"),
    "radius": ({"radius": "1"}, (W, W, W), "radius must be a number, got '1'"),
    "scale": ({"radius": 1.0, "scale": "1"}, (W, W, W), "scale must be a number, got '1'"),
}


@each_row(("options", "weights", "message"), WRONG.values())
def test_other_types_are_named(options, weights, message):
    with pytest.raises(TypeError, match=message):
        lipschitz_bound(*weights, num_tokens=1, **options)


def test_a_module_is_no_layer():
    module = nn.MultiheadAttention(16, 2, batch_first=True)
    with pytest.raises(TypeError, match=r"one of attention_layers\(model\), got a MultiheadAttention"):
        layer_lipschitz_bound(module, radius=1.0, num_tokens=3)
