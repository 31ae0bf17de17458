"""nn.MultiheadAttention: its masks, its fused path, its nested tensors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from attention_modules.mechanism import mechanism_class
from attention_modules.swap import AttentionSwapError, restore_attention, swap_attention
from tests.attention_modules.hosts.cases import (
    BATCH,
    BETWEEN_LAYERS,
    DIM,
    HEADS,
    HOSTS,
    MECHANISMS,
    ONE_QUERY_PER_KEY,
    TOKENS,
    features,
    padding_mask,
)
from tests.attention_modules.hosts.test_table import count_calls
from tests.rows import each_row

CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)


def additive(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, float("-inf"))


def layer(**options: bool) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    built = nn.MultiheadAttention(DIM, HEADS, **options).eval()
    nn.init.normal_(built.in_proj_weight, std=0.3)
    return built


MASKS = {
    "none": {},
    "boolean": {"attn_mask": CAUSAL},
    "additive": {"attn_mask": additive(CAUSAL)},
    "a-head": {"attn_mask": CAUSAL.repeat(BATCH * HEADS, 1, 1).logical_or(torch.rand(8, 6, 6) > 2)},
    "padding": {"key_padding_mask": padding_mask()},
    "additive-padding": {"key_padding_mask": additive(padding_mask())},
    "both": {"attn_mask": CAUSAL, "key_padding_mask": padding_mask()},
    "both-additive": {"attn_mask": additive(CAUSAL), "key_padding_mask": additive(padding_mask())},
    "mixed": {"attn_mask": additive(CAUSAL), "key_padding_mask": padding_mask()},
    "hint": {"attn_mask": CAUSAL, "is_causal": True},
    "hint-and-padding": {"attn_mask": CAUSAL, "key_padding_mask": padding_mask(), "is_causal": True},
}


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_masks_mean_what_they_meant(masks: dict) -> None:
    for batch_first in (True, False):
        module = layer(batch_first=batch_first)
        x = features() if batch_first else features().transpose(0, 1)
        plain = module(x, x, x, need_weights=False, **masks)[0]
        swap_attention(module, "softmax")
        torch.testing.assert_close(module(x, x, x, need_weights=False, **masks)[0], plain, atol=1e-5, rtol=1e-5)


def test_unbatched_input_and_no_bias() -> None:
    module, x = layer(bias=False), features()[1]
    masks = {"attn_mask": CAUSAL, "key_padding_mask": padding_mask()[1]}
    plain = module(x, x, x, **masks)[0]
    swap_attention(module, "softmax")
    torch.testing.assert_close(module(x, x, x, **masks)[0], plain, atol=1e-5, rtol=1e-5)
    swap_attention(module, "symmetric")
    assert module(x, x, x, **masks)[0].shape == x.shape


@pytest.mark.parametrize("average", [True, False], ids=["mean", "by-head"])
@pytest.mark.parametrize("kind", ["none", "a-head", "both", "mixed", "hint-and-padding"])
def test_softmax_gives_the_weights_that_are_asked_for(kind: str, average: bool) -> None:
    masks = MASKS[kind]
    module, x = layer(batch_first=True), features()
    asked = {"need_weights": True, "average_attn_weights": average, **masks}
    expected = [*module(x, x, x, **asked), *module(x[0], x[0], x[0], need_weights=True)]
    swap_attention(module, "softmax")
    got = [*module(x, x, x, **asked), *module(x[0], x[0], x[0], need_weights=True)]
    for mine, plain in zip(got, expected, strict=True):
        seen = plain.isfinite()  # the plain layer gives NaN for what sees nothing, a swapped one zeros
        assert torch.equal(mine[seen], plain[seen])
        assert mine.isfinite().all()
        assert mine.stride() == plain.stride()
    assert module(x, x, x, need_weights=False, **masks)[1] is None


def test_other_mechanisms_have_no_weights_to_give() -> None:
    module, x = layer(batch_first=True), features()
    for mechanism in ("symmetric", "rpc", "uniform"):
        swap_attention(module, mechanism)
        assert module(x, x, x)[1] is None
        assert module(x, x, x, need_weights=True, average_attn_weights=False)[1] is None


def test_a_hint_without_its_mask_is_an_error_as_in_the_plain_layer() -> None:
    module, x = layer(batch_first=True), features()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="attn_mask"):
            module(x, x, x, is_causal=True, need_weights=False)
        swap_attention(module, "softmax")


@each_row(
    ("mechanism", "lacks"), [("symmetric", "has no"), *((name, "needs a") for name in ("twicing", "forgetting", "mom"))]
)
def test_another_key_is_an_error_where_the_mechanism_is_one_of_self_attention(mechanism: str, lacks: str) -> None:
    module, x = layer(batch_first=True), features()
    swap_attention(module, mechanism)
    module(x, x, x)
    with pytest.raises(RuntimeError, match=rf"{mechanism_class(mechanism).__name__} {lacks} query.*another key"):
        module(x, features(1), features(1))


@each_row("option", ["add_bias_kv", "add_zero_attn"])
def test_keys_that_no_mechanism_sees_are_refused(option: str) -> None:
    with pytest.raises(AttentionSwapError, match="add_bias_kv or add_zero_attn"):
        swap_attention(layer(**{option: True}), "softmax")
    module, x = layer(batch_first=True), features(1)
    swap_attention(module, "softmax")
    module(x, x, x)
    if option == "add_zero_attn":
        module.add_zero_attn = True
    else:
        module.bias_k = module.bias_v = nn.Parameter(torch.zeros(1, 1, module.embed_dim))
    with pytest.raises(RuntimeError, match="changed after its swap: it adds a key of its own"):
        module(x, x, x)


def test_parametrized_projection_is_refused_where_it_would_be_split() -> None:
    module = layer(batch_first=True)
    nn.utils.parametrizations.spectral_norm(module, "in_proj_weight")
    with pytest.raises(AttentionSwapError, match="no plain Parameter"):
        swap_attention(module, "symmetric")
    plain = module(features(), features(), features())[0]
    swap_attention(module, "softmax")
    torch.testing.assert_close(module(features(), features(), features())[0], plain, atol=1e-5, rtol=1e-5)


def test_peft_around_the_whole_layer_is_refused() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(nn.ModuleDict({"attn": layer()}), peft.LoraConfig(r=2, target_modules=["attn"]))
    with pytest.raises(AttentionSwapError, match=r"peft.*merge_and_unload\(\)"):
        swap_attention(model, "softmax")


def encoder(depth: int = 2) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, HEADS, 32, batch_first=True), depth).eval()


@pytest.mark.parametrize("layers", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_the_fused_path_does_not_pass_the_mechanism_by(padded: bool, layers: list[int]) -> None:
    model = encoder()
    padding = padding_mask() if padded else None
    with torch.no_grad():
        plain = model(features(), src_key_padding_mask=padding)
        swap_attention(model, "softmax", layers=layers)
        calls = count_calls(model)
        keep = ~padding_mask() if padded else slice(None)
        out = model(features(), src_key_padding_mask=padding)
    torch.testing.assert_close(out[keep], plain[keep], atol=1e-5, rtol=1e-5)
    assert len(calls) == len(layers)


def test_the_fused_path_says_that_it_would_pass_the_mechanism_by_where_all_hooks_were_removed() -> None:
    model = encoder()
    swap_attention(model, "uniform")
    expected = model(features())
    for part in model.modules():
        part._forward_pre_hooks.clear()
    with torch.no_grad(), pytest.raises(RuntimeError, match="set_fastpath_enabled"):
        model(features())
    torch.testing.assert_close(model(features()), expected)


def test_nested_tensors_are_switched_off_and_on_again() -> None:
    model = nn.ModuleList([encoder(), encoder()])
    swap_attention(model, "softmax", where="0.layers.1.*")
    assert [part.use_nested_tensor for part in model] == [False, True]
    swap_attention(model, "symmetric", where="0.layers.0.*")
    restore_attention(model)
    assert [part.use_nested_tensor for part in model] == [True, True]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@each_row("norm", [False, True])
def test_padded_tokens_come_out_of_an_encoder_as_of_the_plain_one(norm: bool) -> None:
    """Zeros, before its norm, where padding lies behind each sequence, in evaluation without gradients."""
    behind, before = padding_mask(), padding_mask().flip(1)
    assert behind.any()
    masks: list[dict[str, torch.Tensor]] = [{"src_key_padding_mask": behind}, {"src_key_padding_mask": before}]
    masks += [
        {"src_key_padding_mask": additive(behind)},
        {"src_key_padding_mask": additive(behind), "mask": additive(CAUSAL)},
    ]
    conditions = itertools.product(masks, (True, False), (torch.no_grad, torch.enable_grad, torch.inference_mode))
    for given, training, gradients in conditions:
        model = encoder().train(training)
        model.norm = nn.LayerNorm(DIM) if norm else None
        for part in model.modules():
            if isinstance(part, nn.LayerNorm):
                nn.init.normal_(part.bias)
            elif isinstance(part, nn.Dropout):
                part.p = 0.0
            elif isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0
        with gradients():
            expected = model(features(), **given)
            swap_attention(model, "softmax")
            torch.testing.assert_close(model(features(), **given), expected, atol=1e-5, rtol=1e-5)
        restore_attention(model)
        assert (model.use_nested_tensor, [*model._forward_hooks]) == (True, [])


class Loops(nn.TransformerEncoder):
    """Gives what each of its layers gives, and no nested tensors to any."""

    def forward(self, x: torch.Tensor, src_key_padding_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states = [x]
        for part in self.layers:
            states.append(part(states[-1], src_key_padding_mask=src_key_padding_mask))
        return tuple(states)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_encoders_give_what_they_gave() -> None:
    own = Loops(nn.TransformerEncoderLayer(DIM, HEADS, 32, batch_first=True), 2).eval()
    with torch.no_grad():
        expected = own(features(), padding_mask())
        swap_attention(own, "softmax")
        torch.testing.assert_close(own(features(), padding_mask()), expected, atol=1e-5, rtol=1e-5)
        other = encoder()
        other.norm = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 3))  # it is not called with zeros
        expected = other(features(), src_key_padding_mask=padding_mask())
        swap_attention(other, "softmax")
        found = other(features(), src_key_padding_mask=padding_mask())
        seen = ~padding_mask()
        torch.testing.assert_close(found[seen], expected[seen], atol=1e-5, rtol=1e-5)
    for part in other.modules():
        part._forward_hooks.clear()
    restore_attention(other)
    assert other.use_nested_tensor


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_layer_swapped_apart_from_its_encoder_says_what_to_do_about_nested_tensors() -> None:
    model = encoder()
    swap_attention(model.layers[1], "softmax")
    with torch.no_grad(), pytest.raises(RuntimeError, match="use_nested_tensor to False"):
        model(features(), src_key_padding_mask=padding_mask())


def test_lightnings_transformer_is_swapped_unchanged() -> None:
    demos = pytest.importorskip("lightning.pytorch.demos")
    torch.manual_seed(0)
    model = demos.Transformer(vocab_size=20, ninp=DIM, nhead=HEADS, nhid=32, nlayers=2, dropout=0.0)
    tokens = torch.randint(0, 20, (BATCH, TOKENS))
    plain = model(tokens, tokens)
    report = swap_attention(model, "softmax")
    assert len(report) == 4
    torch.testing.assert_close(model(tokens, tokens), plain, atol=1e-5, rtol=1e-5)
    assert "cross-attention" in report.skipped[0].reason
    swap_attention(model, "symmetric")
    model(tokens, tokens).sum().backward()


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_hint_about_another_mask_means_what_it_means_in_the_plain_layer(need_weights: bool) -> None:
    """There the hint stands for the mask only where no weights are wanted, as by default they are."""
    module, x = layer(batch_first=True), features()
    other = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    other[1:, 0] = True
    for padding in (None, padding_mask()):
        given = {"attn_mask": other, "is_causal": True, "need_weights": need_weights, "key_padding_mask": padding}
        plain = module(x, x, x, **given)[0]
        swap_attention(module, "softmax")
        torch.testing.assert_close(module(x, x, x, **given)[0], plain, atol=1e-5, rtol=1e-5)
        restore_attention(module)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_compiled_layer_is_compiled_once_for_all_inputs(batch_first: bool) -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    swap_attention(layer, "softmax")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for _ in range(10):
        x = torch.randn(3, 3, 8)
        compiled(x, x, x, need_weights=False)
    assert len(graphs) == 1


class Around(nn.Module):
    """A layer under some name, with a Parameter beside it where one is named."""

    def __init__(self, name: str, parameter: str = "") -> None:
        super().__init__()
        *outer, name = name.split(".")
        held: nn.Module = self
        for each in outer:  # as in a list of blocks
            held.add_module(each, nn.Module())
            held = held.get_submodule(each)
        held.add_module(name, layer(batch_first=True))
        if parameter:
            self.register_parameter(parameter, nn.Parameter(torch.zeros(1, 1, DIM)))


@each_row(
    ("kind", "name", "parameter", "cross"),
    [
        ("SiglipMultiheadAttentionPoolingHead", "attention", "", True),
        ("AttnPooler", "attn", "", True),
        ("AriaCrossAttention", "attn", "", True),
        ("OneFormerTransformerDecoderLayer", "multihead_attn", "", True),
        ("TransformerDecoderLayerOptimal", "multihead_attn", "", True),
        ("Reader", "attn", "probe", True),
        ("Reader", "attn", "queries", True),
        ("Reader", "attn", "position", False),
        ("Reader", "cross_attn.0.attn", "", True),
        ("Reader", "cross_encoder.0.attn", "", False),
        ("Reader", "self_attn", "query", False),
        ("OneFormerTransformerDecoderLayer", "self_attn", "", False),
        ("EncoderBlock", "multihead_attn", "", False),
        ("CrossFormerBlock", "attn", "", False),
        ("MeanPoolingTransformer", "attn", "", False),
    ],
)
def test_a_layer_with_a_query_of_its_own_counts_as_cross_attention(kind, name, parameter, cross) -> None:
    around = type(kind, (Around,), {})(name, parameter)
    model = nn.ModuleDict({"head": around, "body": layer(batch_first=True)})
    report = swap_attention(model, "symmetric")
    assert [row.name for row in report] == ([] if cross else [f"head.{name}"]) + ["body"]
    assert [skipped.reason.partition(":")[0] for skipped in report.skipped] == ["cross-attention"] * cross
    restore_attention(model)
    swap_attention(model, "softmax", where=f"head.{name}")  # whoever names it gets it


def test_the_pooling_head_of_siglip_stays_as_it_is() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": DIM, "intermediate_size": DIM, "num_attention_heads": HEADS, "num_hidden_layers": 1}
    model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(image_size=16, patch_size=8, **sizes))
    report = swap_attention(model, "symmetric")
    assert [skipped.name for skipped in report.skipped] == ["head.attention"]
    assert model(torch.randn(BATCH, 3, 16, 16)).pooler_output.shape == (BATCH, DIM)


def test_cross_attention_takes_a_mechanism_or_refuses_it_before_anything_changes(subtests: pytest.Subtests) -> None:
    for mechanism in MECHANISMS:
        with subtests.test(mechanism=mechanism):
            check_cross_attention(mechanism)


def check_cross_attention(mechanism: str) -> None:
    model, (name, options) = HOSTS["decoder"].build().eval(), MECHANISMS[mechanism]
    plain = [type(module) for module in model.modules()]
    if mechanism in (*ONE_QUERY_PER_KEY, *BETWEEN_LAYERS):
        with pytest.raises(
            AttentionSwapError, match=rf"multihead_attn': (?=.*cross-attention).*{mechanism_class(name).__name__}"
        ):
            swap_attention(model, name, where="*.multihead_attn", **options)
        assert [type(module) for module in model.modules()] == plain
        return
    swap_attention(model, name, where="*.multihead_attn", **options)
    memory = torch.randn(BATCH, TOKENS + 3, DIM)
    assert torch.isfinite(model(features(), memory)).all()


X = torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(0))
FALSE = torch.zeros(4, 5, dtype=torch.bool)
# What nn.MultiheadAttention(4, 2, batch_first=True) refuses: arguments, and those by name.
MISFITS: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = {
    "padding of one row": ((X, X, X), {"key_padding_mask": FALSE[:1]}),
    "padding of other keys": ((X, X, X), {"key_padding_mask": FALSE[:, :4]}),
    "padding without a batch": ((X, X, X), {"key_padding_mask": FALSE[0]}),
    "padding with a batch": ((X[0], X[0], X[0]), {"key_padding_mask": FALSE[:1]}),
    "integer padding": ((X, X, X), {"key_padding_mask": FALSE.long()}),
    "flat key": ((X, X[0], X[0]), {}),
    "flat query": ((X[0], X, X), {}),
    "four dimensions": ((X[None], X[None], X[None]), {}),
    "longer key": ((X, X, X[:, :4]), {}),
    "longer value": ((X, X[:, :4], X), {}),
    "value of another batch": ((X, X, X[:1]), {}),
    "key of another batch": ((X, X[:2], X[:2]), {}),
    "narrower query": ((X[..., :2], X, X), {}),
    "narrower all": ((X[..., :2],) * 3, {}),
    "mask of one row": ((X, X, X), {"attn_mask": FALSE[:1, :5]}),
    "mask of other keys": ((X, X, X), {"attn_mask": FALSE.new_zeros(5, 4)}),
    "mask of one key": ((X, X, X), {"attn_mask": FALSE.new_zeros(5, 1)}),
    "mask of the batch": ((X, X, X), {"attn_mask": FALSE.new_zeros(4, 5, 5)}),
    "mask of one head": ((X, X, X), {"attn_mask": FALSE.new_zeros(1, 5, 5)}),
    "mask of one dimension": ((X, X, X), {"attn_mask": FALSE[0]}),
    "mask of four dimensions": ((X, X, X), {"attn_mask": FALSE.new_zeros(4, 2, 5, 5)}),
    "mask of the batch, flat": ((X[0], X[0], X[0]), {"attn_mask": FALSE.new_zeros(1, 5, 5)}),
    "integer mask": ((X, X, X), {"attn_mask": FALSE.new_zeros(5, 5).long()}),
    "causal without a mask": ((X, X, X), {"is_causal": True}),
}


@each_row("title", MISFITS)
def test_what_the_plain_layer_refuses_is_refused(title: str) -> None:
    arguments, named = MISFITS[title]
    for need_weights, mechanism in itertools.product((True, False), ("softmax", "rpc")):
        layer = nn.MultiheadAttention(4, 2, batch_first=True)  # in training: its fused path checks less
        with pytest.raises((AssertionError, RuntimeError)) as plain:
            layer(*arguments, need_weights=need_weights, **named)
        swap_attention(layer, mechanism)
        apart = mechanism == "rpc" and arguments[0] is not arguments[1]
        expected = (AssertionError, RuntimeError) if apart else plain.type
        with pytest.raises(expected):
            layer(*arguments, need_weights=need_weights, **named)


def test_other_widths_of_key_and_value_are_checked_as_in_the_plain_layer() -> None:
    layer = nn.MultiheadAttention(4, 2, kdim=6, vdim=8, batch_first=True)
    key, value = torch.randn(4, 7, 6), torch.randn(4, 7, 8)
    plain = layer(X, key, value)[0]
    swap_attention(nn.ModuleDict({"cross": layer}), "softmax", where="cross")
    torch.testing.assert_close(layer(X, key, value)[0], plain)
    with pytest.raises(AssertionError, match="does not match"):
        layer(X, key, value[:, :5])
    with pytest.raises(RuntimeError):
        layer(X, value, value)


@pytest.mark.parametrize("mechanism", ["softmax", "differential"])
def test_lora_goes_over_a_swapped_layer(mechanism: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, HEADS, 32, batch_first=True, dropout=0.0), 2)
    swap_attention(model, mechanism)
    plain = model.eval()(features())
    config = peft.LoraConfig(target_modules=["self_attn"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    calls = count_calls(adapted)
    with torch.no_grad():  # where the fused path would pass both by
        changed = adapted(features())
    assert len(calls) == 2
    assert not torch.allclose(changed, plain, atol=1e-3)
    with torch.no_grad(), adapted.disable_adapter():
        torch.testing.assert_close(adapted(features()), plain, atol=1e-5, rtol=1e-4)
    adapted.train()(features()).sum().backward()
    gradients = {name: parameter.grad for name, parameter in adapted.named_parameters() if "lora_" in name}
    assert len(gradients) == 8
    assert all(gradient is not None and gradient.any() for gradient in gradients.values())
    merged = adapted.eval().merge_and_unload()
    torch.testing.assert_close(merged(features()), changed, atol=1e-4, rtol=1e-3)
    restore_attention(merged)


def test_lora_is_refused_where_there_is_no_query_and_after_it_the_swap() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["self_attn"], r=2)
    model = encoder()
    swap_attention(model, "symmetric")
    with pytest.raises(ValueError, match="Only same embed for query/key/value"):
        peft.get_peft_model(model, config)
    restore_attention(model)
    adapted = peft.get_peft_model(encoder(), config)
    with pytest.raises(AttentionSwapError, match=r"merge_and_unload\(\) first, or swap before get_peft_model"):
        swap_attention(adapted, "sink")
