"""qk_weights: the logits of a layer are x W_qᵀ W_k xᵀ with them, whatever the host's layout."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attention_modules.analysis import layer_lipschitz_bound
from attention_modules.hosts import AttentionLayer, attention_layers
from attention_modules.hosts.weights import Rows
from attention_modules.mechanism import AttentionMechanism, mechanism_class
from attention_modules.mechanisms.scaled import ScaledAttention
from attention_modules.mechanisms.softmax import SoftmaxAttention
from attention_modules.swap import AttentionSwapError, restore_attention, swap_attention
from tests.attention_modules.hosts.cases import DIM, FEW, HOSTS, built, deep, features
from tests.rows import each_row

# Layers that read their input directly, so that the test can multiply by hand (rope and norms turn q and k).
PLAIN = [
    name for name in HOSTS if not any(part in name for part in ("norm", "rope", "llama", "mistral", "qwen", "sdpa"))
]


class Recorder(SoftmaxAttention):
    """Keeps its last queries and keys."""

    def forward(self, q: Tensor, k: Tensor, *args: object, **kwargs: object) -> Tensor:
        self.seen = (q.detach(), k.detach())
        return super().forward(q, k, *args, **kwargs)


class KeyRecorder(Recorder):
    """The same without a query."""

    uses_query = False


def zero_biases(model: nn.Module) -> None:
    """Biases are no part of W."""
    for name, parameter in model.named_parameters():
        if "bias" in name:
            nn.init.zeros_(parameter)


def tokens(args: tuple, kwargs: dict) -> tuple[Tensor, Tensor]:
    """What a layer was called with ``[B, N, C]``: its queries' and its keys' tokens."""
    if "query" in kwargs:  # mmsegmentation's wrappers, sequence-first
        return kwargs["query"].transpose(0, 1), kwargs["key"].transpose(0, 1)
    x = next(iter(args), kwargs.get("hidden_states"))
    return x, x


def check_logits(layer: AttentionLayer, run) -> None:
    """The recorded logits against those made of the layer's input and weights."""
    seen = {}
    handle = layer.module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(x=tokens(args, kwargs)), with_kwargs=True
    )
    run()
    handle.remove()
    mechanism = layer.mechanism
    assert isinstance(mechanism, Recorder)
    q, k = mechanism.seen
    w_q, w_k = layer.qk_weights()
    x, others = seen["x"]
    logits = torch.einsum("bnc,hdc,hde,bme->bhnm", x, w_q, w_k, others)
    torch.testing.assert_close(logits, q @ k.transpose(-1, -2), atol=1e-4, rtol=1e-4)
    assert w_q.shape == (layer.spec.num_heads, layer.spec.head_dim, layer.spec.dim) == w_k.shape


@pytest.mark.parametrize("host", PLAIN)
def test_weights_give_the_logits(host: str) -> None:
    check_weights(host, Recorder)
    if "symmetric" not in HOSTS[host].refuses:
        check_weights(host, KeyRecorder)


def check_weights(host: str, mechanism: type[Recorder]) -> None:
    case, model = HOSTS[host], built(host)
    zero_biases(model)
    plain = [layer.qk_weights() for layer in attention_layers(model)]
    swap_attention(model, mechanism)
    for layer, (_, w_k) in zip(attention_layers(model), plain, strict=True):
        check_logits(layer, lambda: case.run(model, None))
        assert torch.equal(layer.qk_weights()[1], w_k)
        assert (layer.qk_weights()[0] is layer.qk_weights()[1]) is False
        first, second = layer.qk_weights()
        assert (first is second) is (mechanism is KeyRecorder)


@pytest.mark.parametrize("host", sorted(HOSTS.keys() - {"sdpa"}))
def test_weights_are_differentiable_views_of_the_parameters_they_name(host: str) -> None:
    for mechanism in {None, "softmax", "symmetric"} - set(HOSTS[host].refuses):
        check_views(host, mechanism)


def check_views(host: str, mechanism: str | None) -> None:
    model = built(host)
    if mechanism is not None:
        swap_attention(model, FEW[mechanism][0], **FEW[mechanism][1])
    known = {id(parameter) for parameter in model.parameters()}
    for layer in attention_layers(model):
        parameters = layer.qk_parameters()
        assert {id(parameter) for parameter in parameters} <= known
        w_q, w_k = layer.qk_weights()
        gradients = torch.autograd.grad((w_q * w_k).sum(), parameters)
        assert all(gradient.abs().sum() > 0 for gradient in gradients)
        assert (layer.mechanism is None) == (mechanism is None and host != "own")


def test_grouped_keys_are_repeated_for_each_query_head() -> None:
    for host in ("llama-grouped", "timm-rope-grouped"):
        (layer,) = attention_layers(built(host))
        _, w_k = layer.qk_weights()
        assert torch.equal(w_k[0], w_k[1])
        assert torch.equal(w_k[2], w_k[3])
        assert not torch.equal(w_k[0], w_k[2])


def test_separate_projections_of_multihead_attention() -> None:
    layer = nn.MultiheadAttention(16, 4, kdim=8, vdim=8)
    decoder = nn.ModuleList([nn.MultiheadAttention(16, 4)])
    decoder.append(layer)
    assert [found.name for found in attention_layers(decoder)] == ["0"]  # another key width: cross-attention
    from attention_modules.hosts.torch import MultiheadAttentionHost

    host = MultiheadAttentionHost()
    found = AttentionLayer("1", layer, host, host.spec(layer, None))
    w_q, w_k = found.qk_weights()
    assert torch.equal(w_q.flatten(0, 1), layer.q_proj_weight)
    assert torch.equal(w_k.flatten(0, 1), layer.k_proj_weight)
    assert found.qk_parameters()[1] is layer.k_proj_weight


@each_row(
    ("host", "text"),
    [
        ("timm-attention", None),
        ("timm-attention-norm", "q/k norm"),
        ("timm-rope", "rope"),
        ("mha", None),
        ("gpt2", None),
        ("bert", None),
        ("llama", "rope"),
        ("qwen3", "q/k norm"),
    ],
)
def test_spectrum_caveat(host: str, text: str | None) -> None:
    model = built(host)
    for _ in range(2):
        caveat = attention_layers(model)[0].spectrum_caveat
        assert caveat is None if text is None else text in str(caveat)
        swap_attention(model, "softmax")


def lora(host: str, target: str) -> nn.Module:
    """The host's model under peft, with an adapter that changes something."""
    peft = pytest.importorskip("peft")
    holder = nn.ModuleDict({"model": built(host)})
    transposed = host == "gpt2"
    model = peft.get_peft_model(holder, peft.LoraConfig(r=2, target_modules=[target], fan_in_fan_out=transposed))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    return model.eval()


LORA = [("timm-attention", "qkv"), ("gpt2", "c_attn"), ("bert", "query")]


@pytest.mark.parametrize(("host", "target"), LORA)
def test_lora_is_swapped_with_its_effective_weight(host: str, target: str) -> None:
    model = lora(host, target)
    zero_biases(model)
    inner = model.base_model.model["model"]
    plain = HOSTS[host].run(inner, None)
    swap_attention(model, Recorder)
    torch.testing.assert_close(HOSTS[host].run(inner, None), plain, atol=1e-5, rtol=1e-5)
    (layer,) = attention_layers(model)
    check_logits(layer, lambda: HOSTS[host].run(inner, None))
    assert len(layer.qk_parameters()) == (3 if target != "query" else 4)
    merged = [weight.detach() for weight in layer.qk_weights()]
    restore_attention(model)
    (after,) = attention_layers(model.merge_and_unload())
    for got, expected in zip(after.qk_weights(), merged, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_bound_counts_the_bias_of_an_adapter() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], lora_bias=True, init_lora_weights=False)
    model = peft.get_peft_model(nn.ModuleDict({"model": built("bert")}), config)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B.default.bias"):
            nn.init.normal_(parameter, std=10.0)
    bound, merged = (
        layer_lipschitz_bound(attention_layers(each())[0], radius=1.0, num_tokens=5)
        for each in (lambda: model, model.merge_and_unload)
    )
    torch.testing.assert_close(bound, merged)


def test_adaptive_lora_has_a_factor_more() -> None:
    peft = pytest.importorskip("peft")
    holder = nn.ModuleDict({"model": built("bert")})
    model = peft.get_peft_model(holder, peft.AdaLoraConfig(init_r=2, total_step=4, target_modules=["query"]))
    layer, names = attention_layers(model)[0], {id(each): name for name, each in model.named_parameters()}
    parameters = layer.qk_parameters()
    assert [names[id(each)].split(".")[-2] for each in parameters[1:4]] == ["lora_A", "lora_E", "lora_B"]
    read = torch.stack([weight.square().sum() for weight in layer.qk_weights()]).sum()
    assert len(torch.autograd.grad(read, parameters[1:4])) == 3


@each_row(("host", "target"), LORA)
def test_lora_around_a_query_that_would_be_dropped_is_refused(host: str, target: str) -> None:
    model = lora(host, target)
    before = [id(parameter) for parameter in model.parameters()]
    with pytest.raises(AttentionSwapError, match=r"wrapped by peft .*merge_and_unload\(\)"):
        swap_attention(model, "symmetric")
    assert [id(parameter) for parameter in model.parameters()] == before


def test_lora_put_around_a_shrunk_projection_must_go_before_restoring() -> None:
    peft = pytest.importorskip("peft")
    holder = nn.ModuleDict({"model": built("timm-attention")})
    swap_attention(holder, "symmetric")
    model = peft.get_peft_model(holder, peft.LoraConfig(r=2, target_modules=["qkv"]))
    assert isinstance(HOSTS["timm-attention"].run(model.base_model.model["model"], None), Tensor)
    with pytest.raises(AttentionSwapError, match="merge_and_unload"):
        restore_attention(model)
    assert any(isinstance(module, AttentionMechanism) for module in model.modules())
    restored = model.merge_and_unload()
    restore_attention(restored)
    assert restored["model"](features()).shape == features().shape


@each_row(
    ("host", "target"), [("gpt2", "c_attn"), ("llama", "q_proj"), ("bert", "query"), ("timm-rope-unfused", "q_proj")]
)
def test_lora_on_a_query_that_was_dropped_is_refused_with_the_cure(host: str, target: str) -> None:
    peft = pytest.importorskip("peft")
    holder = nn.ModuleDict({"model": built(host)})
    swap_attention(holder, "symmetric")
    with pytest.raises(
        ValueError, match=r"leave it out of target_modules, .*k_proj, v_proj.*query\|.*restore_attention\(\) first"
    ):
        peft.get_peft_model(holder, peft.LoraConfig(r=2, target_modules=[target]))


@pytest.mark.parametrize("host", ["gpt2", "llama"])
def test_lora_on_all_linear_leaves_out_a_query_that_was_dropped(host: str) -> None:
    peft = pytest.importorskip("peft")
    holder = nn.ModuleDict({"model": built(host)})
    swap_attention(holder, "symmetric")
    model = peft.get_peft_model(holder, peft.LoraConfig(r=2, target_modules="all-linear"))
    output = HOSTS[host].run(model.base_model.model["model"], None)
    output.square().sum().backward()
    adapters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert adapters
    assert [name for name, parameter in adapters.items() if parameter.grad is None] == []


class HandMadeLora(nn.Module):
    """An adapter as people write it, that reads nothing but the sizes of its base."""

    def __init__(self, base: nn.Module, width: int, out: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize(("host", "path", "out"), [("gpt2", "c_attn", 3), ("llama", "q_proj", 1), ("bert", "query", 1)])
def test_a_hand_made_adapter_on_a_query_that_was_dropped_is_refused(host: str, path: str, out: int) -> None:
    model = built(host)
    swap_attention(model, "symmetric")
    layer = attention_layers(model)[0].module
    plain = getattr(layer, path)
    setattr(layer, path, HandMadeLora(plain, DIM, out * DIM))
    with pytest.raises(RuntimeError, match=rf"'{path}' was replaced by a HandMadeLora .*restore_attention\(\) first"):
        HOSTS[host].run(model, None)
    setattr(layer, path, plain)
    HOSTS[host].run(model, None)


def test_reading_the_weight_of_a_dropped_query_names_the_cure() -> None:
    model = built("llama")
    swap_attention(model, "symmetric")
    projection = attention_layers(model)[0].module.q_proj
    with pytest.raises(AttributeError, match=r"no weight.*restore_attention\(\) first") as refusal:
        projection.weight  # noqa: B018
    assert "target_modules" not in str(refusal.value)  # nobody spoke of adapters
    assert not hasattr(projection, "weight")
    restore_attention(model)
    assert projection.weight.shape == (DIM, DIM)


def test_the_regular_expression_of_the_refusal_adapts_the_queries_that_are_left() -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=20))
    swap_attention(model, "symmetric", layers=[1])
    config = peft.LoraConfig(r=2, target_modules=".*layer[.](0)[.].*query|.*(key|value)")
    adapted = {
        name.split(".lora_")[0] for name, _ in peft.get_peft_model(model, config).named_parameters() if "lora_" in name
    }
    parts = {".".join(name.split(".")[-4:]) for name in adapted}
    assert parts == {f"{layer}.attention.self.{part}" for layer in (0, 1) for part in ("query", "key", "value")} - {
        "1.attention.self.query"
    }


def test_adapters_keep_a_mechanism_s_parameters_where_modules_to_save_names_it(tmp_path: Path) -> None:
    """The copy that peft trains is the layer's mechanism, for hosts and for those who observe it."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

    def swapped() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=20))
        swap_attention(model, "scaled", num_tokens=5)
        return model

    config = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["mechanism"])
    model, tokens = peft.get_peft_model(swapped(), config).eval(), torch.arange(10).view(2, 5)
    (layer,) = attention_layers(model)
    assert isinstance(layer.mechanism, ScaledAttention)
    model(tokens)[0].sum().backward()
    assert layer.mechanism.s.grad is not None
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(swapped(), tmp_path).eval()
    assert torch.equal(again(tokens)[0], model(tokens)[0])
    assert attention_layers(again)[0].mechanism.s.any()
    with model.disable_adapter():
        assert not layer.mechanism.s.any()


class Codes(nn.Parameter):
    """A quantizer's tensor that calls itself floating."""


Codes.__module__ = "torchao.dtypes"


class Decoded(nn.Linear):
    """A quantizer's layer, with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@each_row("how", ["int8", "float8", "torchao", "a method", "a layer"])
def test_quantized_weights_are_refused_by_name(how: str) -> None:
    projection = nn.Linear(8, 8)
    weight = projection.weight.data
    if how == "int8":
        projection.weight = nn.Parameter((weight * 127).to(torch.int8), requires_grad=False)
    elif how == "float8":
        projection.weight = nn.Parameter(weight.to(torch.float8_e4m3fn), requires_grad=False)
    elif how == "torchao":
        projection._parameters["weight"] = Codes(weight)
    elif how == "a layer":
        projection = Decoded(8, 8)
        projection.weight = nn.Parameter((weight * 127).to(torch.uint8), requires_grad=False)
    else:  # torch.ao.nn.quantized.dynamic.Linear
        del projection._parameters["weight"]
        projection.weight = lambda: weight
    with pytest.raises(ValueError, match=r"(Linear|Decoded) is quantized .*dequantize"):
        Rows(projection, 0, 4).weight()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_quantized_projection_is_not_split(dtype: torch.dtype) -> None:
    """Its scales are of the whole projection; what keeps the projection swaps."""
    model = nn.MultiheadAttention(DIM, 2)
    model.in_proj_weight = nn.Parameter(torch.ones(3 * DIM, DIM).to(dtype), requires_grad=False)
    with pytest.raises(AttentionSwapError, match=r"quantized .*dequantize"):
        swap_attention(model, "rpc")
    assert type(model) is nn.MultiheadAttention
    swap_attention(model, "softmax")
    timm = pytest.importorskip("timm")
    block = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=DIM, num_heads=2)
    qkv = block.blocks[0].attn.qkv
    qkv.weight = nn.Parameter(qkv.weight.detach().to(dtype), requires_grad=False)
    with pytest.raises(AttentionSwapError, match=r"'qkv' .*quantized .*dequantize"):
        swap_attention(block, "rpc")
    assert qkv.weight.shape == (3 * DIM, DIM)


def test_a_monitor_is_refused_where_keys_are_int8() -> None:
    model = nn.MultiheadAttention(DIM, 2)
    model.in_proj_weight = nn.Parameter(torch.ones(3 * DIM, DIM, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="int8"):
        attention_layers(model)[0].qk_weights()


def test_what_is_swapped_in_after_the_adapters_is_said_not_to_be_in_their_file() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32), nn.Linear(16, 16))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["1"]))
    with pytest.warns(UserWarning, match=r"mechanism\.s came after the adapters.*modules_to_save=\['mechanism'\]"):
        swap_attention(adapted, "scaled", num_tokens=4)


@pytest.mark.parametrize("mechanism", ["gated", "forgetting", "value_residual", "neutreno"])
@pytest.mark.parametrize(("host", "targets"), [("llama", ["q_proj", "v_proj"]), ("timm-vit", ["qkv"])])
def test_adapted_layers_give_their_input_and_their_values(host: str, targets: list[str], mechanism: str) -> None:
    model, run = deep(host)
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    expected = run(model, None)
    with warnings.catch_warnings():  # of parameters that come after the adapters, which another test shows
        warnings.simplefilter("ignore")
        swap_attention(adapted, mechanism, **(mechanism_class(mechanism).neutral or {}))
    out = run(model, None)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    out.square().sum().backward()
    assert not [name for name, value in adapted.named_parameters() if value.requires_grad and value.grad is None]
    restore_attention(adapted)
    assert torch.equal(run(model, None), expected)


class ByHand(nn.Module):
    """An adapter around a linear layer, as tutorials write it."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.more = linear, nn.Linear(linear.in_features, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.more(x)


def test_a_projection_that_is_wrapped_by_hand_is_swapped_around_or_refused():
    model = pytest.importorskip("timm").create_model("vit_tiny_patch16_224", img_size=32, depth=1).eval()
    model.blocks[0].attn.qkv = ByHand(model.blocks[0].attn.qkv)
    x = torch.randn(2, 3, 32, 32)
    expected = model(x)
    with pytest.raises(AttentionSwapError, match=r"its projection 'qkv' is a .*ByHand, and only a plain Linear"):
        swap_attention(model, "symmetric")
    swap_attention(model, "softmax")
    assert torch.equal(model(x), expected)


def test_rows_of_queries_and_keys_that_lie_head_by_head() -> None:
    """GPTBigCode's do, where its heads do not share their keys."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 8, "vocab_size": 20}
    model = transformers.GPTBigCodeModel(transformers.GPTBigCodeConfig(**sizes, multi_query=False)).eval()
    swap_attention(model, "softmax")
    attention, seen = model.h[0].attn, []
    attention.mechanism.register_forward_pre_hook(lambda _, args: seen.extend(args[:2]))
    attention.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(torch.arange(5)[None], use_cache=False)
    x, *made = seen
    for weight, given in zip(attention_layers(model)[0].qk_weights(), made, strict=True):
        differences = (x @ weight.mT - given)[0].diff(dim=-2)  # of a bias nothing is left
        assert differences.abs().max() < 1e-5


def test_copies_of_projections_that_peft_trains_are_read() -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    plain = transformers.BertModel(transformers.BertConfig(vocab_size=9, **sizes))
    config = peft.LoraConfig(target_modules=["value"], modules_to_save=["query", "key"])
    model = peft.get_peft_model(plain, config)
    query = model.base_model.model.encoder.layer[0].attention.self.query.modules_to_save["default"]
    nn.init.normal_(query.weight)
    (layer,) = attention_layers(model)
    assert torch.equal(layer.qk_weights()[0].flatten(0, 1), query.weight)
