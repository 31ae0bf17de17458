"""Hugging Face models: masks, caches, implementations, saving."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from attention_modules.hosts import attention_layers, huggingface
from attention_modules.hosts.discovery import survey
from attention_modules.mechanisms.softmax import SoftmaxAttention
from attention_modules.swap import AttentionSwapError, make_observable, restore_attention, swap_attention
from tests.attention_modules.hosts.cases import (
    DIM,
    HEADS,
    HOSTS,
    MECHANISMS,
    TOKENS,
    built,
    decoder,
    gpt2,
    hugging_face,
    padding_mask,
    run_tokens,
    subject,
    token_ids,
)
from tests.rows import each_row, pairwise

transformers = pytest.importorskip("transformers")
CAUSAL = {"gpt2": gpt2, "llama": lambda **options: decoder("Llama", **options)}
TWO_LAYERS = {"gpt2": {"n_layer": 2}, "llama": {"num_hidden_layers": 2}}


def causal_model(family: str, implementation: str = "sdpa", **options: object) -> nn.Module:
    """A random causal model of two layers, in eval mode."""
    torch.manual_seed(0)
    model = CAUSAL[family](attn_implementation=implementation, **{**TWO_LAYERS[family], **options})()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def states(model: nn.Module, tokens: Tensor, **options: object) -> Tensor:
    with torch.no_grad():
        return model(tokens, **{"use_cache": False, **options})[0]


def with_another_future(tokens: Tensor) -> Tensor:
    """The same tokens, but for the last two."""
    changed = tokens.clone()
    changed[:, -2:] = (changed[:, -2:] + 7) % 40
    return changed


def _accepted(host: str, mechanism: str, *others: object) -> bool:
    return mechanism not in HOSTS[host].refuses


HIDDEN = pairwise(CAUSAL, MECHANISMS, ("sdpa", "eager"), (False, True), allowed=_accepted)


@pytest.mark.parametrize(("family", "mechanism", "implementation", "padded"), HIDDEN)
def test_the_future_stays_hidden(family: str, mechanism: str, implementation: str, padded: bool) -> None:
    model = causal_model(family, implementation)
    name, options = MECHANISMS[mechanism]
    swap_attention(model, name, **options)
    mask = (~padding_mask()).long().flip(1) if padded else None  # padding on the left, as for generation
    tokens = token_ids()
    if padded and mechanism == "position_bias":
        with pytest.raises(ValueError, match="PositionBiasAttention counts columns"):
            states(model, tokens, attention_mask=mask)
        return
    before = states(model, tokens, attention_mask=mask)
    after = states(model, with_another_future(tokens), attention_mask=mask)
    seen = slice(2, -2) if padded else slice(0, -2)
    torch.testing.assert_close(after[:, seen], before[:, seen], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(after[:, -2:], before[:, -2:])


def test_a_mask_of_padding_is_read_as_one_row_and_no_other_is() -> None:
    model, plain = built("bert"), built("bert")
    swap_attention(model, "sinkhorn", iterations=1)  # softmax attention
    keep, mask = ~padding_mask(), (~padding_mask()).long()
    expected = plain(token_ids(), attention_mask=mask)[0]
    torch.testing.assert_close(model(token_ids(), attention_mask=mask)[0][keep], expected[keep], atol=1e-5, rtol=1e-4)
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    with pytest.raises(RuntimeError, match="SinkhornAttention takes masks of padding alone"):
        model(token_ids(), attention_mask=causal)


@pytest.mark.parametrize("family", CAUSAL)
def test_without_is_causal_the_future_would_be_seen(family: str) -> None:
    model, tokens = causal_model(family), token_ids()
    swap_attention(model, "softmax")
    for layer in attention_layers(model):
        layer.module.is_causal = False
    seen = [states(model, given)[:, :-2] for given in (tokens, with_another_future(tokens))]
    assert not torch.allclose(*seen)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_a_layer_builds_its_masks_under_our_name(padded: bool) -> None:
    from transformers.masking_utils import create_causal_mask

    model = causal_model("llama")
    swap_attention(model, "softmax")
    config = model.layers[0].self_attn.config
    assert config._attn_implementation == huggingface.INTERFACE
    mask = create_causal_mask(
        config=config,
        inputs_embeds=torch.randn(2, TOKENS, DIM),
        attention_mask=(~padding_mask()).long() if padded else None,
        past_key_values=None,
        position_ids=None,
    )
    if padded:
        assert mask.dtype == torch.bool
        assert not mask[0, 0].triu(1).any()
    else:
        assert mask is None  # and the layer's own is_causal is honored


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", CAUSAL)
def test_the_other_layers_and_the_configuration_keep_their_implementation(family: str, implementation: str) -> None:
    model, tokens = causal_model(family, implementation), token_ids()
    plain, config = states(model, tokens), model.config
    swap_attention(model, "softmax", layers=[1])
    first, second = attention_layers(model)
    assert model.config is config
    assert model.config._attn_implementation == first.module.config._attn_implementation == implementation
    assert second.module.config._attn_implementation == huggingface.INTERFACE
    assert (first.mechanism is None, second.mechanism is None) == (True, False)
    torch.testing.assert_close(states(model, tokens), plain, atol=1e-5, rtol=1e-4)
    restore_attention(model)
    assert second.module.config is config
    assert torch.equal(states(model, tokens), plain)


def test_a_model_is_still_swapped_after_its_implementation_is_set_again() -> None:
    model, tokens = causal_model("gpt2"), token_ids()
    swap_attention(model, "symmetric")
    before = states(model, tokens)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(states(model, tokens), before, atol=1e-5, rtol=1e-4)
    restore_attention(model)
    assert {layer.module.config._attn_implementation for layer in attention_layers(model)} == {"eager"}


def test_another_implementation_is_refused() -> None:
    model = causal_model("llama", "flex_attention")
    with pytest.raises(AttentionSwapError, match=r"uses 'flex_attention'.*set_attn_implementation\(\"sdpa\"\)"):
        swap_attention(model, "softmax")


@pytest.mark.parametrize("family", CAUSAL)
def test_cached_decoding_equals_the_whole_sequence(family: str) -> None:
    model, tokens = causal_model(family), token_ids()
    plain = states(model, tokens)
    swap_attention(model, "softmax")
    past, steps = None, []
    for piece in (tokens[:, :3], tokens[:, 3:5], tokens[:, 5:]):
        with torch.no_grad():
            out = model(piece, past_key_values=past, use_cache=True)
        past = out.past_key_values
        steps.append(out.last_hidden_state)
    torch.testing.assert_close(torch.cat(steps, 1), plain, atol=1e-5, rtol=1e-4)


def test_a_static_cache_hides_its_empty_part() -> None:
    model, tokens = causal_model("llama"), token_ids()
    plain = states(model, tokens)
    swap_attention(model, "softmax")
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    prompt = states(model, tokens[:, :-1], past_key_values=cache, use_cache=True)
    last = states(model, tokens[:, -1:], past_key_values=cache, use_cache=True)
    torch.testing.assert_close(torch.cat([prompt, last], 1), plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mechanism", ["rpc", "scaled"])
@pytest.mark.parametrize("family", CAUSAL)
def test_a_cache_that_a_mechanism_cannot_continue_is_refused(family: str, mechanism: str) -> None:
    model, tokens = causal_model(family), token_ids()
    name, options = MECHANISMS[mechanism]
    swap_attention(model, name, **options)
    past = model(tokens[:, :-1], use_cache=True).past_key_values
    with pytest.raises((NotImplementedError, ValueError), match="use_cache=False"):
        model(tokens[:, -1:], past_key_values=past)


def test_generation_with_and_without_a_cache() -> None:
    torch.manual_seed(0)
    options = {"vocab_size": 50, "n_embd": DIM, "n_layer": 1, "n_head": HEADS, "n_positions": 32}
    ids = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    model = hugging_face("GPT2LMHeadModel", "GPT2Config", **options, **ids)().eval()
    prompt = token_ids()
    plain = model.generate(prompt, max_new_tokens=4, do_sample=False)
    swap_attention(model, "softmax")
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), plain)
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=False), plain)
    swap_attention(model, "symmetric")
    symmetric = model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=False)
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), symmetric)


def test_gpt2_projection_without_a_query_still_splits_in_three() -> None:
    model = causal_model("gpt2")
    swap_attention(model, "symmetric")
    projection = model.h[0].attn.c_attn
    assert projection.weight.shape == (DIM, 2 * DIM)
    query, key, value = projection(torch.randn(2, 3, DIM)).split(DIM, dim=2)
    assert torch.equal(query, key)
    assert not torch.equal(key, value)
    restore_attention(model)
    assert type(projection) is transformers.pytorch_utils.Conv1D
    assert projection.nf == 3 * DIM


@pytest.mark.parametrize("option", [{"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}], ids=str)
def test_the_layers_own_scale_is_kept(option: dict) -> None:
    model, tokens = causal_model("gpt2", **option), token_ids()
    plain = states(model, tokens)
    swap_attention(model, "softmax")
    torch.testing.assert_close(states(model, tokens), plain, atol=1e-5, rtol=1e-4)


def test_dropout_and_causality_reach_the_mechanism() -> None:
    model = causal_model("gpt2", attn_pdrop=0.25)
    swap_attention(model, "softmax", layers=[0])
    seen: list[tuple[float, bool]] = []
    model.h[0].attn.mechanism.register_forward_pre_hook(
        lambda _, __, kw: seen.append((kw["dropout_p"], kw["is_causal"])), with_kwargs=True
    )
    states(model.train(), token_ids())
    states(model.eval(), token_ids())
    assert seen == [(0.25, True), (0.0, True)]
    assert attention_layers(model)[0].spec.is_causal


SAVED = [
    (host, mechanism)
    for index, mechanism in enumerate(MECHANISMS)
    for host in (("bert", "hf-vit"), ("gpt2", "bert"), ("llama", "bert"))[index % 3]
    if _accepted(host, mechanism)
]


@pytest.mark.parametrize(("host", "mechanism"), SAVED)
def test_save_and_load_pretrained(host: str, mechanism: str, tmp_path) -> None:
    from safetensors.torch import load_file

    (model, run), (name, options) = subject(host, mechanism), MECHANISMS[mechanism]
    swap_attention(model, name, **options)
    if mechanism == "scaled":
        for layer in attention_layers(model):
            nn.init.constant_(layer.mechanism.s, 0.3)
    expected = run(model, None)
    model.save_pretrained(tmp_path)
    assert "attnswap" not in (tmp_path / "config.json").read_text()
    fresh = type(model)(type(model.config).from_pretrained(tmp_path)).eval()
    swap_attention(fresh, name, **options)
    if host != "hf-vit":  # ViT's names on disk are those of older versions
        fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
        assert torch.equal(run(fresh, None), expected)
    if mechanism == "softmax":
        again = type(model).from_pretrained(tmp_path).eval()
        swap_attention(again, name)
        assert torch.equal(run(again, None), expected)


def test_cross_attention_in_a_decoder_is_skipped_and_can_be_named() -> None:
    model, tokens = causal_model("gpt2", add_cross_attention=True), token_ids()
    memory = torch.randn(2, 9, DIM)
    plain = states(model, tokens, encoder_hidden_states=memory)
    report = swap_attention(model, "symmetric")
    assert [row.name for row in report] == ["h.0.attn", "h.1.attn"]
    assert [skipped.name for skipped in report.skipped] == ["h.0.crossattention", "h.1.crossattention"]
    states(model, tokens, encoder_hidden_states=memory)
    with pytest.raises(AttentionSwapError, match="cross-attention needs a query"):
        swap_attention(model, "symmetric", where="*.crossattention")
    restore_attention(model)
    swap_attention(model, "softmax", where=["*.attn", "*.crossattention"])
    torch.testing.assert_close(states(model, tokens, encoder_hidden_states=memory), plain, atol=1e-5, rtol=1e-4)


def test_a_pooling_head_that_calls_the_interface_counts_as_cross_attention() -> None:
    from transformers.models.videoprism import modeling_videoprism as videoprism

    sizes = {"hidden_size": DIM, "intermediate_size": DIM, "num_attention_heads": HEADS}
    config = transformers.VideoPrismVisionConfig(**sizes)
    config._attn_implementation = "eager"
    model = nn.ModuleDict({"pool": videoprism.VideoPrismMultiheadAttentionPoolingHead(config)})
    assert [layer.cross for layer in survey(model).layers] == [True]


def test_bert_as_a_decoder_with_cross_attention() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": DIM, "num_hidden_layers": 1, "num_attention_heads": HEADS}
    model = hugging_face(
        "BertModel", "BertConfig", intermediate_size=32, is_decoder=True, add_cross_attention=True, **sizes
    )().eval()
    memory, tokens = torch.randn(2, 9, DIM), token_ids()
    plain = states(model, tokens, encoder_hidden_states=memory)
    report = swap_attention(model, "softmax", where=["*.self"])
    assert [row.name for row in report] == ["encoder.layer.0.attention.self", "encoder.layer.0.crossattention.self"]
    torch.testing.assert_close(states(model, tokens, encoder_hidden_states=memory), plain, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(*[states(model, t, encoder_hidden_states=memory)[:, -1] for t in (tokens, tokens + 1)])


def test_attention_maps_are_neither_invented_nor_shifted() -> None:
    model = causal_model("gpt2", "eager")
    swap_attention(model, "symmetric", layers=[0])
    first, second = model(token_ids(), output_attentions=True, use_cache=False).attentions
    assert first.shape == (2, HEADS, TOKENS, 0)  # None would be dropped, and the second map would pass for the first
    assert second.shape == (2, HEADS, TOKENS, TOKENS)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_softmax_gives_the_attentions_that_are_asked_for_and_no_others(family: str) -> None:
    model = causal_model(family, "eager")
    expected = model(token_ids(), output_attentions=True, use_cache=False)
    swap_attention(model, "softmax")
    got = model(token_ids(), output_attentions=True, use_cache=False)
    for mine, plain in zip(got.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got.last_hidden_state, expected.last_hidden_state, atol=1e-5, rtol=1e-5)
    for implementation in ("eager", "sdpa"):  # the plain layer gives its map at every call with eager alone
        model, seen = causal_model(family, implementation), []
        swap_attention(model, "softmax")
        for module in model.modules():
            if isinstance(module, SoftmaxAttention):
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, seen=seen: seen.append("weights" in kwargs), with_kwargs=True
                )
        model(token_ids(), use_cache=False)
        assert seen == [implementation == "eager"] * len(expected.attentions)


@pytest.mark.parametrize("observed", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_hooks_on_eager_layers_get_the_maps_of_the_plain_ones(family: str, observed: bool) -> None:
    model, seen = causal_model(family, "eager"), []
    names = [layer.name for layer in attention_layers(model)]
    for name in names:
        model.get_submodule(name).register_forward_hook(lambda module, args, out: seen.append(out[1]))
    plain = run_tokens(model, None)
    maps = list(seen)
    seen.clear()
    if observed:
        make_observable(model, names)
    else:
        swap_attention(model, "softmax")
    assert torch.equal(run_tokens(model, None), plain)
    assert all(torch.equal(one, other) for one, other in zip(seen, maps, strict=True))


@pytest.mark.parametrize("host", ["bert", "llama"])
@pytest.mark.parametrize("mechanism", ["symmetric", "forgetting"])  # told of the layer's arguments by their names
def test_what_reads_the_layers_arguments_compiles_as_one_graph(mechanism: str, host: str) -> None:
    model = built(host).eval()
    swap_attention(model, mechanism)
    plain = run_tokens(model, padding_mask())
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(run_tokens(compiled, padding_mask()), plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["flex_attention", "of_a_user"])
@pytest.mark.parametrize("family", CAUSAL)
def test_an_implementation_without_masks_set_after_a_swap_is_refused_by_name(family: str, implementation: str) -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # As with flash attention, models make no mask for it, and a swapped layer would see the future.
    AttentionInterface.register("of_a_user", sdpa_attention_forward)
    model = causal_model(family)
    plain = run_tokens(model, None)
    swap_attention(model, "softmax")
    model.config._attn_implementation = implementation
    refused = rf"{implementation}.*set_attn_implementation\(.sdpa.\)"
    eager = torch.compiler.set_stance("force_eager")  # transformers compiles what makes the mask
    with eager, pytest.raises(NotImplementedError, match=refused):
        run_tokens(model, None)
    model.set_attn_implementation("sdpa")  # the cure
    torch.testing.assert_close(run_tokens(model, None), plain, atol=1e-5, rtol=1e-5)


def test_classes_with_attention_code_of_their_own_are_refused_by_name() -> None:
    sizes = {"vocab_size": 50, "hidden_size": DIM, "num_hidden_layers": 1, "num_attention_heads": HEADS}
    model = hugging_face("DebertaV2Model", "DebertaV2Config", intermediate_size=32, **sizes)()
    refused = r"DebertaV2Attention\): its forward does not call transformers' attention interface"
    with pytest.raises(AttentionSwapError, match=refused):
        swap_attention(model, "softmax")


def test_subclasses_with_their_own_forward_are_refused() -> None:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    class Louder(GPT2Attention):
        def forward(self, *args: object, **kwargs: object):
            return super().forward(*args, **kwargs)

    model = causal_model("gpt2")
    model.h[0].attn.__class__ = Louder
    (skipped,) = swap_attention(model, "softmax").skipped
    assert "unsupported subclass: Louder has a forward of its own" in skipped.reason


@each_row(
    ("given", "text"),
    [
        ({"attention_mask": torch.ones(2, TOKENS, dtype=torch.bool)}, r"takes masks \[B, H, N, M\], got \(2, 6\)"),
        ({"attention_mask": None, "softcap": 30.0}, "L2Attention cannot honor softcap"),
        ({"attention_mask": None, "s_aux": torch.zeros(HEADS)}, "L2Attention cannot honor s_aux"),
        ({"attention_mask": None, "block_indices": torch.zeros(1)}, "cannot honor block_indices"),
    ],
)
def test_what_a_mechanism_cannot_see_is_an_error(given: dict, text: str) -> None:
    model = causal_model("gpt2")
    swap_attention(model, "l2")
    q = torch.randn(2, HEADS, TOKENS, DIM // HEADS)
    with pytest.raises(NotImplementedError, match=text):
        huggingface.mechanism_attention_forward(model.h[0].attn, q, q, q, **given)


def test_gradient_checkpointing_and_a_copy() -> None:
    model = causal_model("llama").train()
    swap_attention(model, "symmetric")
    twin = copy.deepcopy(model)
    assert twin.layers[0].self_attn.plain_config is twin.config
    twin.gradient_checkpointing_enable()
    for each in (model, twin):
        run_tokens(each, None).square().sum().backward()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


@pytest.mark.parametrize("host", ["gpt2", "bert", "roberta"])
def test_learned_positions_tell_how_many_tokens_there_are(host: str) -> None:
    model = built(host)
    assert attention_layers(model)[0].spec.num_tokens == model.config.max_position_embeddings > TOKENS
    plain = run_tokens(model, None)
    swap_attention(model, "scaled")
    torch.testing.assert_close(run_tokens(model, None), plain, atol=1e-5, rtol=1e-4)  # S = 0, of fewer tokens


def test_rope_needs_the_number_of_tokens_as_an_option() -> None:
    model = causal_model("llama")
    with pytest.raises(ValueError, match="option num_tokens=N"):
        swap_attention(model, "scaled")
    swap_attention(model, "scaled", num_tokens=TOKENS + 3)
    assert attention_layers(model)[0].mechanism.s.shape == (HEADS, TOKENS + 3, TOKENS + 3)


@pytest.mark.parametrize("options", [{"num_tokens": TOKENS}, {"num_tokens": TOKENS + 5}], ids=["full", "shorter"])
@pytest.mark.parametrize("family", CAUSAL)
def test_scaled_by_a_matrix_hides_the_future_from_shorter_inputs(family: str, options: dict[str, int]) -> None:
    model = causal_model(family)
    swap_attention(model, "scaled", **options)
    for layer in attention_layers(model):
        nn.init.normal_(layer.mechanism.s, std=0.3)
    tokens = token_ids()
    before, after = states(model, tokens), states(model, with_another_future(tokens))
    torch.testing.assert_close(after[:, :-2], before[:, :-2], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(after[:, -2:], before[:, -2:])
