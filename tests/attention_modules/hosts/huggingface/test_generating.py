"""Generation with a key-value cache: what docs/how_to/generating.md says, and what caches are asked beside."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

import transformers
from transformers import DynamicCache, StaticCache

from attention_modules import AttentionSwapError, restore_attention, swap_attention
from attention_modules.hosts.base import Swapped
from attention_modules.hosts.huggingface.caches import CACHE
from attention_modules.sharing import SharedValueError
from tests.attention_modules.hosts.cases import WITH_A_STATE
from tests.attention_modules.hosts.huggingface import generating
from tests.attention_modules.hosts.huggingface.generating import NAMES, PAGE, TOLERANCE, WAYS, language_model
from tests.attention_modules.hosts.huggingface.tiny import classes_of, running
from tests.rows import each_row

REFUSED = ("rpc", "scaled", "dam", "neutreno", "position_bias", "twicing")
OF_OTHER_LAYERS, MIXED = ("elliptical", "value_residual"), "sliding and full layers"


@pytest.mark.parametrize("name", NAMES)
def test_cached_generation_equals_generation_without(name: str) -> None:
    found = {way: generating.difference(name, way) for way in WAYS}
    refused = [
        name in REFUSED
        or (way == MIXED and name in OF_OTHER_LAYERS)
        or ("window" in given and name in WITH_A_STATE)  # which is shorter than the prompt
        for way, given in WAYS.items()
    ]
    assert [value is None for value in found.values()] == refused
    assert all(value is None or value <= TOLERANCE for value in found.values()), found
    (row,) = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(f"| `{name}` |")]
    assert [mark.strip() for mark in row.split("|")[2:-1]] == ["refused" if no else "✓" for no in refused]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", ["softmax", "symmetric", "forgetting", "ssmax"])
def test_a_cache_agrees_with_the_whole_sequence_where_tokens_between_are_hidden(name: str, window: int | None) -> None:
    model = generating.swapped_model(name, window)
    tokens = torch.randint(5, 60, (2, 10), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens)
    mask[0, [0, 3, 4, 7]] = mask[1, 5] = 0
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask, use_cache=False).logits
        other = model(torch.where(mask == 1, tokens, 7), attention_mask=mask, use_cache=False).logits
        cache, parts = DynamicCache(config=model.config), []
        for first, last in ((0, 5), (5, 6), (6, 7), (7, 10)):
            given = {"attention_mask": mask[:, :last], "position_ids": torch.arange(first, last).expand(2, -1)}
            parts.append(model(tokens[:, first:last], past_key_values=cache, **given).logits)
    shown = mask.bool()
    torch.testing.assert_close(other[shown], whole[shown], atol=5 * TOLERANCE, rtol=0)
    torch.testing.assert_close(torch.cat(parts, 1)[shown], whole[shown], atol=5 * TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["symmetric", "forgetting"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copied_and_cropped_cache_goes_on(name: str, copied: object) -> None:
    model = generating.swapped_model(name)
    tokens = torch.randint(5, 60, (2, 10), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        cache = model(tokens[:, :6], past_key_values=DynamicCache()).past_key_values
        other = copied(cache)
        model(tokens[:, 6:].flip(1), past_key_values=other)
        other.crop(-4)
        for past in (cache, other):
            got = model(tokens[:, 6:], past_key_values=past).logits
            torch.testing.assert_close(got, whole[:, 6:], atol=5 * TOLERANCE, rtol=0)
        cache.reset()
        torch.testing.assert_close(model(tokens, past_key_values=cache).logits, whole, atol=5 * TOLERANCE, rtol=0)
        twice = model(tokens[:1, :6], past_key_values=DynamicCache()).past_key_values
        twice.batch_repeat_interleave(2)
        got = model(tokens[:1, 6:].expand(2, -1), past_key_values=twice).logits
        torch.testing.assert_close(got, whole[:1, 6:].expand(2, -1, -1), atol=5 * TOLERANCE, rtol=0)


@each_row("name", ["symmetric", "forgetting"])
def test_a_cache_from_before_the_swap_is_refused(name: str) -> None:
    model = language_model()
    tokens = torch.randint(5, 60, (1, 6))
    for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=16)):
        model(tokens, past_key_values=cache)
        swap_attention(model, name)
        with pytest.raises(NotImplementedError, match=r"holds 6 tokens of layer 0 .*: start with an empty cache"):
            model(tokens, past_key_values=cache)
        restore_attention(model)


@torch.no_grad()
def test_a_cache_with_tokens_of_another_mechanism_or_cut_by_hand_is_refused() -> None:
    model, other = generating.swapped_model("forgetting"), generating.swapped_model("sink")
    tokens = torch.randint(5, 60, (1, 8))
    mixed, cut = (model(tokens[:, :4], past_key_values=DynamicCache()).past_key_values for _ in range(2))
    other(tokens[:, 4:6], past_key_values=mixed)
    for layer in cut.layers:
        layer.keys, layer.values = layer.keys[..., :2, :], layer.values[..., :2, :]
    for cache in (mixed, cut):
        with pytest.raises(NotImplementedError, match=r"start with an empty cache, or shorten it with its own crop"):
            model(tokens[:, 6:], past_key_values=cache)


def test_plain_layers_go_on_from_a_cache_that_was_kept() -> None:
    model, tokens = language_model(), torch.randint(5, 60, (1, 8))
    swap_attention(model, "symmetric", layers=[1])
    whole = model(tokens, use_cache=False).logits
    cache = model(tokens[:, :5]).past_key_values
    torch.testing.assert_close(
        model(tokens[:, 5:], past_key_values=cache).logits, whole[:, 5:], atol=5 * TOLERANCE, rtol=0
    )


def test_training_with_a_cache_in_the_call_has_the_same_gradients() -> None:
    tokens, gradients = torch.randint(5, 60, (2, 8)), []
    for use_cache in (False, True):
        model = generating.swapped_model("forgetting").train()
        model(tokens, labels=tokens, use_cache=use_cache).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, atol=0, rtol=0)


def test_the_swap_warns_of_a_cache_that_will_be_refused() -> None:
    model = language_model()
    with pytest.warns(UserWarning, match=r"RPCAttention needs the whole sequence.*generation_config.use_cache = False"):
        swap_attention(model, "rpc")
    with pytest.raises(NotImplementedError, match="use_cache=False"):
        model.generate(torch.randint(5, 60, (1, 6)), max_new_tokens=2, do_sample=False)
    model.generation_config.use_cache = False
    assert model.generate(torch.randint(5, 60, (1, 6)), max_new_tokens=2, do_sample=False).shape == (1, 8)


def _of_an_encoder() -> torch.nn.Module:
    sizes = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(d_model=16, vocab_size=60, max_position_embeddings=16, **sizes, **heads)
    return transformers.BartForConditionalGeneration(config)


def _of_images() -> torch.nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    text = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=60)
    vision = transformers.CLIPVisionConfig(**sizes, image_size=4, patch_size=2)
    return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(vision_config=vision, text_config=text))


@pytest.mark.parametrize(("of", "where"), [(_of_an_encoder, "*encoder*"), (_of_images, "*vision*")])
def test_no_cache_reaches_an_encoder_or_a_tower_of_images(of: Any, where: str) -> None:
    model = of().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swap_attention(model, "rpc", where=where)
    prompt = torch.randint(5, 60, (1, 6))
    assert model.generate(prompt, max_new_tokens=2, do_sample=False).shape[0] == 1
    with pytest.warns(UserWarning, match=r"RPCAttention needs the whole sequence"):
        swap_attention(model, "rpc")


@each_row("name", OF_OTHER_LAYERS)
def test_the_swap_warns_where_only_some_layers_keep_a_window(name: str) -> None:
    model = language_model(4, mixed=True)
    with pytest.warns(UserWarning, match=r"reads the values of other layers.*window.*generation_config.use_cache = F"):
        swap_attention(model, name)
    with pytest.raises(SharedValueError, match="use_cache=False"):
        model.generate(torch.randint(5, 60, (1, 9)), max_new_tokens=3, do_sample=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swap_attention(language_model(4), name)
        model.generation_config.use_cache = False
        swap_attention(model, name)


def _of_a_family(family: str, **options: object) -> torch.nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, vocab_size=60, pad_token_id=0, **options)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    model.generation_config.eos_token_id = None
    return model


def test_gates_are_kept_once_where_a_layer_attends_twice_in_a_call() -> None:
    model = _of_a_family("DiffLlama", num_hidden_layers=2)
    swap_attention(model, "forgetting")
    tokens, logits = generating.generated(model, use_cache=False)
    cached, of_cached = generating.generated(model)
    assert torch.equal(cached, tokens)
    torch.testing.assert_close(of_cached, logits, atol=TOLERANCE, rtol=TOLERANCE)
    with pytest.raises(AttentionSwapError, match=r"attends several times in a call, to other values each time"):
        swap_attention(model, "value_residual")


def test_layers_with_the_keys_of_others_remember_nothing_of_their_own() -> None:
    model = _of_a_family(
        "Gemma3nText",
        num_hidden_layers=4,
        head_dim=8,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=60,
        laurel_rank=4,
    )
    with pytest.warns(UserWarning, match="remembers something of each token, in layers that have the keys of others"):
        swap_attention(model, "forgetting")
    prompt = torch.randint(5, 60, (1, 9))
    assert model.generate(prompt, max_new_tokens=3, do_sample=False, use_cache=False).shape == (1, 12)
    with pytest.raises(NotImplementedError, match=r"must remember something of every token.*pass use_cache=False"):
        model.generate(prompt, max_new_tokens=3, do_sample=False)


def test_the_warning_names_each_model_inside_that_generates_with_a_cache() -> None:
    other = language_model()
    model = torch.nn.ModuleDict({"net": language_model(), "plain": language_model(), "other": other})
    with pytest.warns(UserWarning, match="TwicingAttention needs the whole sequence") as caught:
        swap_attention(model, "twicing", where=["net.*", "other.*"])
    (said,) = [str(each.message) for each in caught if "whole sequence" in str(each.message)]
    assert "set model.net.generation_config.use_cache = False and model.other.generation_config" in said
    model["net"].generation_config.use_cache = other.generation_config.use_cache = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("default", ".*have equal layers")  # of the plain one, which is left out
        swap_attention(model, "twicing", where=["net.*", "other.*"])


@pytest.mark.parametrize("name", ["past_key_values", "past_key_value", "layer_past", "cache"])
def test_a_layer_finds_its_cache_under_each_name_that_transformers_has_had(name: str) -> None:
    model, cache = generating.swapped_model("symmetric"), DynamicCache()
    (layer, *_) = [module for module in model.modules() if isinstance(module, Swapped)]
    assert layer._cache((), {name: cache}) == {CACHE: cache}
    assert layer._cache((), {name: None}) == {}


def _tiny(family: str, name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return running(next(kind for kind in classes_of(family)[1] if kind.__name__ == name))


BESIDE = "lie in another order or beside those of another sequence"


def test_keys_of_another_sequence_beside_those_of_the_cache_are_refused_by_what_remembers() -> None:
    model, _ = _tiny("t5gemma2", "T5Gemma2ForConditionalGeneration")
    with pytest.raises(AttentionSwapError, match="cross-attention has no query for each key"):
        swap_attention(model.eval(), "forgetting", where="*decoder*.self_attn")


def test_a_window_beside_the_keys_of_a_prefill_is_refused_by_what_remembers() -> None:
    model, _ = _tiny("unlimited_ocr", "UnlimitedOcrForConditionalGeneration")
    swap_attention(model.eval(), "forgetting")
    cache = DynamicCache(config=model.config.get_text_config())
    model(input_ids=torch.randint(5, 35, (1, 6)), past_key_values=cache, use_cache=True)

    def continued() -> None:
        for token in torch.randint(5, 35, (20, 1, 1)):
            model(input_ids=token, past_key_values=cache, use_cache=True)

    with torch.no_grad(), pytest.raises(NotImplementedError, match=BESIDE):
        continued()


def test_a_paged_implementation_without_its_cache_is_refused() -> None:
    model = generating.swapped_model("sink")
    model.set_attn_implementation("paged|eager")
    with pytest.raises(ValueError, match="was called without a paged attention cache"):
        model(torch.tensor([[5, 9, 3]]))
