"""The maps of whole models against those that other libraries give, and models that stay as they were."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import attnswap
from attention_modules.analysis.model_maps import _free_bytes
from attnswap import AttentionSwapError, NoMapError, attention_maps, restore_attention, swap_attention
from tests.attention_modules.hosts.huggingface.generating import language_model
from tests.attention_modules.mechanisms.test_acting import squared

TOKENS = 7


def encoder(layers=2, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options)
    return nn.TransformerEncoder(layer, layers)


def test_torch():
    model, x = encoder().eval(), torch.randn(3, TOKENS, 16)
    padding = torch.arange(TOKENS).expand(3, -1) >= 5
    maps = attention_maps(model, {"src": x, "src_key_padding_mask": padding})
    assert list(maps) == ["layers.0.self_attn", "layers.1.self_attn"]
    for layer, found in zip(model.layers, maps.values(), strict=True):
        _, wanted = layer.self_attn(x, x, x, key_padding_mask=padding, average_attn_weights=False)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
        x = layer(x, src_key_padding_mask=padding)
    with torch.no_grad():
        causal = nn.Transformer.generate_square_subsequent_mask(TOKENS)
        found = attention_maps(model, (torch.randn(1, TOKENS, 16), causal))["layers.0.self_attn"]
    assert (found.triu(1) == 0).all()


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "eva02_tiny_patch14_224"])
def test_timm(name):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    x = torch.randn(1, 3, 224, 224)
    maps = attention_maps(model, x)
    seen = {}
    for layer in maps:
        attention = model.get_submodule(layer)
        attention.fused_attn = False
        attention.attn_drop.register_forward_pre_hook(lambda _, args, layer=layer: seen.__setitem__(layer, args[0]))
    with torch.no_grad():
        model(x)
    for layer, found in maps.items():
        torch.testing.assert_close(found, seen[layer], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["Bert", "Llama", "GPT2", "GptOss"])
def test_hugging_face(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
    if kind in ("Llama", "GptOss"):
        sizes |= {"num_key_value_heads": 2, "head_dim": 8}
    if kind == "GptOss":
        sizes |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(vocab_size=50, **sizes)).eval()
    if kind == "GptOss":
        for layer in model.layers:
            nn.init.normal_(layer.self_attn.sinks)
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, 5:] = 0
    inputs = {"input_ids": torch.randint(0, 50, (2, TOKENS)), "attention_mask": mask}
    maps = attention_maps(model, inputs)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        eager = model(**inputs, output_attentions=True).attentions
    assert len(maps) == len(eager) == 2
    for found, wanted in zip(maps.values(), eager, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_a_part_is_a_part_of_the_whole():
    model, x = encoder(3).double(), torch.randn(2, TOKENS, 16).double()
    for mechanism in ("softmax", "sigmoid", "twicing", "differential", "rpc"):
        swap_attention(model, mechanism)
        whole = attention_maps(model, x)
        some = attention_maps(model, x, layers=[0, -1], heads=1, rows=[-1, 2])
        assert list(some) == ["layers.0.self_attn", "layers.2.self_attn"]
        for name, found in some.items():
            assert found.dtype == torch.float64
            torch.testing.assert_close(found, whole[name][:, [1]][:, :, [-1, 2]])
        assert list(attention_maps(model, x, layers="layers.1.*", rows=0)) == ["layers.1.self_attn"]


def test_cross_attention_by_its_name():
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), 1)
    inputs = torch.randn(2, TOKENS, 16), torch.randn(2, 3, 16)
    assert list(attention_maps(model, inputs)) == ["layers.0.self_attn"]
    maps = attention_maps(model, inputs, layers=["*.multihead_attn"])
    assert {name: tuple(found.shape) for name, found in maps.items()} == {"layers.0.multihead_attn": (2, 2, TOKENS, 3)}


def test_rollout():
    model, x = encoder(), torch.randn(2, TOKENS, 16)
    maps = [found.mean(1) for found in attention_maps(model, x).values()]
    rolled = attention_maps(model, x, rollout=True)
    torch.testing.assert_close(rolled, attnswap.analysis.attention_rollout(maps))
    torch.testing.assert_close(attention_maps(model, x, rollout=True, rows=[3]), rolled[:, [3]])
    assert attention_maps(model.double(), x.double(), rollout=True).dtype == torch.float64


class Twice(nn.Module):
    """A layer that is called twice, as ALBERT's are."""

    def __init__(self):
        super().__init__()
        self.inner = encoder(1)

    def forward(self, x):
        return self.inner(self.inner(x))


def test_a_rollout_multiplies_in_the_order_of_calls():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(attnswap.SelfAttention(16, 2) for _ in range(3))
            for parameter in self.parameters():
                nn.init.normal_(parameter, std=0.5)

        def forward(self, x):
            for block in reversed(self.blocks):
                x = x + block(x)
            return x

    model, x = Backwards(), torch.randn(2, TOKENS, 16)
    maps = [found.mean(1) for found in attention_maps(model, x).values()]
    rolled = attention_maps(model, x, rollout=True)
    torch.testing.assert_close(rolled, attnswap.analysis.attention_rollout(maps[::-1]))
    assert not torch.allclose(rolled, attnswap.analysis.attention_rollout(maps), atol=1e-3)


def test_a_rollout_of_a_layer_that_is_called_twice_is_refused():
    with pytest.raises(ValueError, match=r"'inner.layers.0.self_attn' is called several times"):
        attention_maps(Twice(), torch.randn(2, TOKENS, 16), rollout=True)
    page = attnswap.explore(Twice(), torch.randn(2, TOKENS, 16))  # which has its map, and says why no rollout
    assert "is called several times" in page.html


def test_a_rollout_over_two_networks_is_refused():
    model, x = nn.Transformer(16, 2, 1, 1, 32, batch_first=True), torch.randn(2, TOKENS, 16)
    with pytest.raises(ValueError, match="a rollout is of one network, and these layers are of 2"):
        attention_maps(model, (x, x), rollout=True)
    rolled = attention_maps(model, (x, x), layers=["encoder.*"], rollout=True)
    torch.testing.assert_close(rolled, attention_maps(model.encoder, x, rollout=True))


def test_every_pass_on_request():
    model, x = encoder(), torch.randn(2, TOKENS, 16)
    swap_attention(model, "rpc", layers=[0], iterations=3)
    maps = attention_maps(model, x, passes=True)
    last = "layers.0.self_attn/pass_3"
    assert list(maps) == [*(f"layers.0.self_attn/pass_{place}" for place in (1, 2, 3)), "layers.1.self_attn"]
    torch.testing.assert_close(maps[last], attention_maps(model, x)["layers.0.self_attn"])


def state(model):
    hooks = [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()]
    kinds = [(type(part), part.training) for part in model.modules()]
    own = {name: dict.fromkeys(part.__dict__) for name, part in model.named_modules()}
    return hooks, kinds, own, list(model.state_dict())


@pytest.mark.parametrize("mechanism", [None, "rpc", "talking_heads", "sink"])
@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_as_it_was(mechanism, training):
    model, x = encoder(dropout=0.5), torch.randn(2, TOKENS, 16)
    if mechanism is not None:
        swap_attention(model, mechanism)
    model.train(training)
    model.layers[0].linear1.eval()
    called = []
    model.layers[1].self_attn.register_forward_hook(lambda *_: called.append(1))
    before, weights = state(model), copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    first = attention_maps(model, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert called == [1]
    assert state(model) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert not any(parameter.grad is not None for parameter in model.parameters())
    for name, found in attention_maps(model, x).items():
        assert torch.equal(found, first[name])
        assert not found.requires_grad
    with pytest.raises(TypeError):
        attention_maps(model, {"unknown": x})
    assert state(model) == before
    if mechanism is not None:
        restore_attention(model)


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.heads = nn.Linear(16, 48), 2

    def forward(self, x, cache):
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        cache.append((k, v))
        k, v = (torch.cat(parts, 2) for parts in zip(*cache, strict=True))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_a_cache_grows_once():
    model, x, cache = nn.ModuleDict({"attn": Cached()}), torch.randn(2, TOKENS, 16), []
    model.forward = lambda x, cache: model["attn"](x, cache)
    (found,) = attention_maps(model, {"x": x, "cache": cache}).values()
    assert found.shape == (2, 2, TOKENS, TOKENS)
    assert len(cache) == 1


def after_some(name, **options):
    """A model, some tokens, and a cache that holds all but the last of them."""
    from transformers import DynamicCache

    model, tokens = language_model(), torch.randint(2, 60, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    swap_attention(model, name, **options)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens[:, :-1], past_key_values=cache)
    return model, tokens, cache


@pytest.mark.parametrize(
    ("name", "options"), [("softmax", {}), ("forgetting", {}), ("symmetric", {}), ("l2", {"shared": True})]
)
def test_a_call_that_continues_from_a_cache_has_the_last_rows(name, options):
    model, tokens, cache = after_some(name, **options)
    whole = attention_maps(model, {"input_ids": tokens, "use_cache": False})
    for layer, found in attention_maps(model, {"input_ids": tokens[:, -1:], "past_key_values": cache}).items():
        torch.testing.assert_close(found, whole[layer][:, :, -1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize("name", ["linear", "retention", "gated_delta", "performer", "hedgehog", "window"])
def test_a_call_that_continues_from_a_state_has_no_map(name, passes):
    model, tokens, cache = after_some(name)
    given = {"input_ids": tokens[:, -1:], "past_key_values": cache}
    with pytest.raises(NoMapError, match=r"Attention has no attention map of a call that continues .*use_cache=False"):
        attention_maps(model, given, passes=passes)
    maps = attention_maps(model, {"input_ids": tokens, "use_cache": False}, passes=passes)
    assert all(found.shape[-2:] == (TOKENS, TOKENS) for found in maps.values())


def test_a_shared_layer_gives_its_last_call():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = encoder(1)

        def forward(self, x):
            return self.layer(self.layer(x))

    model, x = Twice().eval(), torch.randn(2, TOKENS, 16)
    (found,) = attention_maps(model, x).values()
    (wanted,) = attention_maps(model.layer, model.layer(x)).values()
    torch.testing.assert_close(found, wanted)


def test_threads_wait_for_each_other():
    model, x = encoder(), torch.randn(2, TOKENS, 16)
    wanted = attention_maps(model, x)
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(lambda _: attention_maps(model, x), range(12)):
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_bad_input(monkeypatch):
    model, x = encoder(), torch.randn(2, TOKENS, 16)
    with pytest.raises(ValueError, match=r"no row 9 in 'layers.0.self_attn', which has 7"):
        attention_maps(model, x, rows=[9])
    with pytest.raises(ValueError, match=r"no head 2 in 'layers.0.self_attn', which has 2"):
        attention_maps(model, x, heads=2)
    for wrong in ([], 1.5, "0", True, [[0]], torch.tensor(1.0), torch.tensor([True, False])):
        for name in ("heads", "rows"):
            with pytest.raises(TypeError, match=f"{name} must be an integer or some of them"):
                attention_maps(model, x, **{name: wrong})
    for number in (np.int64(1), torch.tensor(1), [np.int64(1)], torch.tensor([1])):
        assert attention_maps(model, x, heads=number, rows=number)["layers.0.self_attn"].shape == (2, 1, 1, TOKENS)
    with pytest.raises(AttentionSwapError, match=r"out of range|no layer"):
        attention_maps(model, x, layers=[5])
    with pytest.raises(AttentionSwapError, match=r"^layers='encoder\.\*' matches no"):
        attention_maps(model, x, layers="encoder.*")
    with pytest.raises(TypeError, match="numbers, or patterns of names, and not both"):
        attention_maps(model, x, layers=[0, "layers.1.self_attn"])
    with pytest.raises(ValueError, match="one map of each layer"):
        attention_maps(model, x, rollout=True, passes=True)
    with pytest.raises(AttentionSwapError):
        attention_maps(nn.Linear(16, 16), x)
    swap_attention(model, squared, layers=[1])
    with pytest.raises(NoMapError, match="squared has no attention map"):
        attention_maps(model, x)
    assert list(attention_maps(model, x, layers=0)) == ["layers.0.self_attn"]


def test_what_does_not_fit_is_refused_with_its_bytes(monkeypatch):
    assert (_free_bytes(torch.device("cpu")) or 10**9) > 2**20
    monkeypatch.setattr("attention_modules.analysis.model_maps._free_bytes", lambda device: 1000)
    model, x = encoder(), torch.randn(2, TOKENS, 16)
    with pytest.raises(MemoryError, match=r"take 1,568 bytes, and 1,000 are free.*rows=\[0\].*layers=\[-1\]"):
        attention_maps(model, x)
    attention_maps(model, x, rows=[0])
    attention_maps(model, x, layers=0)
