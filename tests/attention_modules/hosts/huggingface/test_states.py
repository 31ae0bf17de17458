"""A cache whose layers keep states: what it gives equals what one call gives, and what it cannot is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

import transformers
from transformers import DynamicCache, StaticCache

from attention_modules import AttentionSwapError, restore_attention, swap_attention
from tests.rows import each_row, pairwise

MECHANISMS: dict[str, dict[str, Any]] = {
    "window": {"window": 5, "sinks": 2},
    "gated_delta": {},
    "hedgehog": {"window": 4, "features": 6},
    "performer": {},
}
LAYERS = {"all": None, "every other one, from the first": [0, 2], "every other one, from the second": [1, 3]}
EXACT = 1e-12
TOKENS = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(2))
MASK = torch.ones_like(TOKENS)
MASK[0, [0, 3, 4, 7]] = MASK[1, 5] = 0
SHORT = {"vocab_size": 60, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


def llama(layers: int = 4, **options: Any) -> nn.Module:
    """With two query heads for each key head."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    family = options.pop("family", "Llama")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **sizes, **SHORT, num_hidden_layers=layers, max_position_embeddings=1024, **options
    )
    return getattr(transformers, f"{family}ForCausalLM")(config).eval().double()


def gpt2(layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=layers, n_head=4, n_positions=256, **SHORT)
    return transformers.GPT2LMHeadModel(config).eval().double()


FAMILIES: dict[str, Callable[..., nn.Module]] = {"llama": llama, "gpt2": gpt2}


def swapped(mechanism: str, layers: list[int] | None = None, make: Callable[..., nn.Module] = llama) -> nn.Module:
    model = make()
    swap_attention(model, mechanism, layers=layers, **MECHANISMS[mechanism])
    return model


def static(model: Any) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=20)


def dynamic(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


CACHES: dict[str, Callable[[Any], Any]] = {"dynamic": dynamic, "made as it is filled": lambda _: DynamicCache()}
CACHES["static"] = static
CUTS = {"tokens": [1] * 12, "two parts": [5, 7], "parts and tokens": [4, 1, 1, 6]}


def in_parts(model: Any, cache: Any, sizes: list[int], mask: Tensor | None = None) -> Tensor:
    """The logits of :data:`TOKENS`, given in parts."""
    found, done = [], 0
    for size in sizes:
        here = slice(done, done + size)
        given = {} if mask is None else {"attention_mask": mask[:, : done + size]}
        positions = torch.arange(done, done + size).expand(2, -1)
        found.append(model(TOKENS[:, here], past_key_values=cache, position_ids=positions, **given).logits)
        done += size
    return torch.cat(found, 1)


@torch.no_grad()
@each_row(
    ("mechanism", "family", "layers", "cache", "cuts", "masked"),
    pairwise(MECHANISMS, FAMILIES, LAYERS, CACHES, CUTS, (False, True)),
)
def test_parts_of_a_sequence_give_what_it_gives_as_a_whole(mechanism, family, layers, cache, cuts, masked):
    model = swapped(mechanism, LAYERS[layers], FAMILIES[family])
    mask = MASK if masked else None
    shown = MASK.bool() if masked else torch.ones_like(MASK, dtype=torch.bool)
    positions = torch.arange(12).expand(2, -1)
    whole = model(TOKENS, attention_mask=mask, position_ids=positions, use_cache=False).logits[shown]
    found = in_parts(model, CACHES[cache](model), CUTS[cuts], mask)[shown]
    torch.testing.assert_close(found, whole, atol=EXACT, rtol=EXACT)


def generated(model: nn.Module, padded: bool = False, tokens: int = 9, batch: int = 2, **how: Any) -> Tensor:
    prompt = torch.randint(5, 60, (2, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompt)
    if padded:
        mask[1, :4] = prompt[1, :4] = 0
    # Without the token of padding: an assistant is given no mask, and finds it by the padding among what it wrote.
    how |= {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": [0]}
    return model.generate(prompt[:batch], attention_mask=mask[:batch], **how)


WAYS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "padding": {"padded": True},
    "padding, static": {"padded": True, "cache_implementation": "static", "disable_compile": True},
    "chunks": {"prefill_chunk_size": 3},
    "beams": {"num_beams": 3},
    "beams and padding": {"num_beams": 3, "padded": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 4, "batch": 1},
    "prompt lookup, a long prompt": {"prompt_lookup_num_tokens": 4, "batch": 1, "tokens": 150},
    "an assistant": {"assistant_model": True, "batch": 1},
}


@pytest.mark.filterwarnings("ignore")
@each_row(("mechanism", "family", "layers", "way"), pairwise(MECHANISMS, FAMILIES, LAYERS, WAYS))
def test_generation_equals_generation_without_a_cache(mechanism, family, layers, way):
    model, how = swapped(mechanism, LAYERS[layers], FAMILIES[family]), dict(WAYS[way])
    plain = {name: how[name] for name in ("padded", "num_beams", "batch", "tokens") if name in how}
    if how.get("assistant_model"):
        how["assistant_model"] = swapped(mechanism, LAYERS[layers], lambda: FAMILIES[family](4))
    assert torch.equal(generated(model, **how), generated(model, use_cache=False, **plain))


@pytest.mark.filterwarnings("ignore")
@each_row("layers", LAYERS)
def test_an_assistant_that_exits_early_has_no_state_of_later_layers(layers):
    """The cache of the assistant has two layers, and the model four."""
    model = swapped("gated_delta", LAYERS[layers])
    without = generated(model, use_cache=False, batch=1)
    assert torch.equal(generated(model, assistant_early_exit=2, batch=1), without)


@torch.no_grad()
@each_row("mechanism", MECHANISMS)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_model_whose_weights_are_offloaded_writes_the_same(mechanism, recorded):
    """Accelerate's hooks copy the dicts that a module is called with."""
    accelerate = pytest.importorskip("accelerate")
    model = swapped(mechanism, [1, 2])
    whole = model(TOKENS, use_cache=False).logits
    accelerate.cpu_offload(model, execution_device="cpu")
    cache = model(TOKENS[:, :5], past_key_values=DynamicCache()).past_key_values
    if recorded:
        cache.activate_past_recording()
        model(TOKENS[:, 5:8].flip(1), past_key_values=cache)
        cache.crop(-3)
    found = [model(TOKENS[:, [at]], past_key_values=cache).logits for at in range(5, 12)]
    torch.testing.assert_close(torch.cat(found, 1), whole[:, 5:], atol=EXACT, rtol=EXACT)


@torch.no_grad()
def test_a_program_with_a_cache_is_refused():
    program = torch.nn.Module()
    program.model = swapped("gated_delta", [1])
    program.forward = lambda tokens: program.model(tokens, past_key_values=static(program.model)).logits
    with pytest.raises(NotImplementedError, match=r"torch\.export would not hold: export with use_cache=False"):
        torch.export.export(program, (TOKENS[:, :1],), strict=False)


@torch.no_grad()
@pytest.mark.parametrize("taken", [list, lambda cache: DynamicCache([(one.keys, one.values) for one in cache.layers])])
def test_a_cache_that_is_taken_apart_is_refused(taken):
    """As DataParallel and exporters do: what they make of it would begin anew, without a word."""
    cache = swapped("gated_delta", [1])(TOKENS, use_cache=True).past_key_values
    with pytest.raises(AttributeError, match=r"keeps the state of GatedDeltaAttention in place of keys and values"):
        taken(cache)


@torch.no_grad()
@each_row("mechanism", ["window", "gated_delta", "hedgehog"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_cache_is_copied_cropped_repeated_and_reset(mechanism, copied):
    model = swapped(mechanism, [1, 2])
    whole = model(TOKENS, use_cache=False).logits

    def go_on(cache: Any, first: int, rows: Tensor = TOKENS) -> Tensor:
        return model(rows[:, first:], past_key_values=cache).logits

    cache = model(TOKENS[:, :6], past_key_values=DynamicCache()).past_key_values
    cache.activate_past_recording()
    model(TOKENS[:, 6:8], past_key_values=cache)
    other = copied(cache)
    go_on(other, 8, TOKENS.flip(1))
    other.crop(-4)
    for past in (cache, other):
        torch.testing.assert_close(go_on(past, 8), whole[:, 8:], atol=EXACT, rtol=EXACT)
    cache.crop(-5)
    torch.testing.assert_close(go_on(cache, 7), whole[:, 7:], atol=EXACT, rtol=EXACT)
    with pytest.raises(NotImplementedError, match=r"cannot be taken back by 7 tokens, of which 6 were recorded"):
        cache.crop(-7)
    with pytest.raises(RuntimeError, match=r"or its crop\(\), ended in an error in layer 1"):  # layer 0 is cropped
        go_on(cache, 7)
    cache.reset()
    torch.testing.assert_close(go_on(cache, 0), whole, atol=EXACT, rtol=EXACT)
    twice = model(TOKENS[:1, :6], past_key_values=DynamicCache()).past_key_values
    twice.batch_repeat_interleave(3)
    twice.batch_select_indices(torch.tensor([0, 2]))
    found = go_on(twice, 6, TOKENS[:1].expand(2, -1))
    torch.testing.assert_close(found, whole[:1, 6:].expand(2, -1, -1), atol=EXACT, rtol=EXACT)


@torch.no_grad()
@each_row(("family", "inputs"), [("Marian", "input_ids"), ("Bart", "input_ids"), ("Whisper", "input_features")])
def test_an_encoder_with_a_state_needs_no_place_in_the_cache(family, inputs):
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 60, "pad_token_id": 0}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None}
    more = {"num_mel_bins": 8, "max_source_positions": 10, "begin_suppress_tokens": None, "suppress_tokens": None}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads, **ends, **(more if family == "Whisper" else {}))
    kind = {"Marian": "MarianMTModel"}.get(family, f"{family}ForConditionalGeneration")
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).eval()
    swap_attention(model, "linear", where="model.encoder.*")
    given = {inputs: torch.randn(2, 8, 20) if family == "Whisper" else TOKENS[:2]}
    fixed = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(**given, **fixed), model.generate(**given, **fixed, use_cache=False))
    first = model.generate(**given, **fixed, return_dict_in_generate=True)
    again = torch.cat([first.sequences, first.sequences[:, -1:]], 1)
    # A second turn is not what it is without a cache, in plain models too; it is not refused.
    assert len(model.generate(**given, **fixed, decoder_input_ids=again, past_key_values=first.past_key_values)) == 2


@torch.no_grad()
def test_many_tokens_are_recorded_in_constant_memory():
    model = swapped("gated_delta")
    tokens = torch.randint(5, 60, (1, 600), generator=torch.Generator().manual_seed(3))
    cache = model(tokens[:, :2], past_key_values=DynamicCache()).past_key_values
    cache.activate_past_recording()
    for first, last in ((2, 203), (203, 303), (303, 403), (403, 503)):
        model(tokens[:, first:last], past_key_values=cache)
    assert 128 <= cache.layers[0].recent["q"].shape[2] <= 256
    cache.crop(-128)
    found = model(tokens[:, 375:], past_key_values=cache).logits
    torch.testing.assert_close(found, model(tokens, use_cache=False).logits[:, 375:], atol=1e-10, rtol=1e-10)


@torch.no_grad()
@each_row("mechanism", ["window", "gated_delta", "hedgehog"])
def test_packed_sequences_begin_anew(mechanism):
    model = swapped(mechanism)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]]).expand(2, -1)
    packed = model(TOKENS, position_ids=positions, use_cache=False).logits
    alone = [model(TOKENS[:, here], use_cache=False).logits for here in (slice(5), slice(5, 8), slice(8, 12))]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=EXACT, rtol=EXACT)


def _bytes(cache: Any) -> list[int]:
    """Of each layer of a cache, what its tensors hold."""
    found = []
    for layer in cache.layers:
        state = getattr(layer, "state", None)
        parts = (layer.keys, layer.values) if state is None else state.values()
        found.append(sum(part.untyped_storage().nbytes() for part in parts))
    return found


@torch.no_grad()
@each_row("mechanism", MECHANISMS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_cache_of_a_layer_does_not_grow(mechanism, cache):
    model = swapped(mechanism, [0, 2])
    tokens = torch.randint(5, 60, (1, 512), generator=torch.Generator().manual_seed(3))
    past = DynamicCache() if cache == "dynamic" else StaticCache(config=model.config, max_cache_len=512)
    held = []
    for first, last in ((0, 64), (64, 65), (65, 511), (511, 512)):
        model(tokens[:, first:last], past_key_values=past)
        held.append(_bytes(past))
    assert held[0][::2] == held[1][::2] == held[2][::2] == held[3][::2]
    assert held[-1][1] >= 2 * 512 * 2 * 8 * 8  # keys and values of two heads of width 8, as float64
    assert past.get_seq_length() == 512


@torch.no_grad()
@pytest.mark.parametrize(
    "mechanism", ["gated_delta", *(pytest.param(name, marks=pytest.mark.slow) for name in ("window", "hedgehog"))]
)
def test_a_step_compiles_whole_and_writes_into_the_static_cache(mechanism):
    model = swapped(mechanism, [1])
    whole = model(TOKENS, use_cache=False).logits
    cache, graphs = static(model), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch.compiler.reset()
    step = torch.compile(model, backend=backend, fullgraph=True)
    found = [model(TOKENS[:, :6], past_key_values=cache).logits]
    places = {name: x.data_ptr() for name, x in cache.layers[1].state.items()}
    for at in range(6, 12):
        found.append(step(TOKENS[:, at : at + 1], past_key_values=cache, position_ids=torch.tensor([[at]])).logits)
    torch.testing.assert_close(torch.cat(found, 1), whole, atol=EXACT, rtol=EXACT)
    assert places == {name: x.data_ptr() for name, x in cache.layers[1].state.items()}
    assert len(graphs) <= 2  # the second is for all further steps


@torch.no_grad()
def test_masks_that_a_state_cannot_honor_are_refused():
    model, (first, then) = swapped("gated_delta"), (TOKENS[:, :6], TOKENS[:, 6:8])
    past = torch.ones(12, 12, dtype=torch.bool).tril()
    for mask in (past.triu(-3), torch.ones(12, 12, dtype=torch.bool)):
        with pytest.raises(RuntimeError, match=r"takes masks that hide the future and padding alone"):
            model(TOKENS, attention_mask=mask[None, None].expand(2, 1, -1, -1), use_cache=False)
    padded, whole = (model(first, attention_mask=m, past_key_values=DynamicCache()) for m in (MASK[:, :6], None))
    with pytest.raises(RuntimeError, match="this mask hides others of them"):
        model(then, past_key_values=padded.past_key_values)
    with pytest.raises(RuntimeError, match="this mask hides others of them"):
        model(then, attention_mask=MASK[:, :8], past_key_values=whole.past_key_values)


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_cache_is_not_continued_after_an_error(cache):
    """Its tokens were counted: those that follow would have other positions."""
    model = swapped("gated_delta")
    past = model(TOKENS[:, :6], past_key_values=CACHES[cache](model)).past_key_values
    with pytest.raises(RuntimeError, match=r"takes masks that hide the future|this mask hides others of them"):
        model(TOKENS[:, 6:8], attention_mask=MASK[:, :8], past_key_values=past)
    for again in (copy.deepcopy(past), past):
        with pytest.raises(
            RuntimeError, match=r"ended in an error in layer 0, .*: start with an empty cache, or reset"
        ):
            model(TOKENS[:, 6:], past_key_values=again)
    past.reset()
    whole = model(TOKENS, use_cache=False).logits
    torch.testing.assert_close(model(TOKENS, past_key_values=past).logits, whole, atol=EXACT, rtol=EXACT)
    with pytest.raises(ValueError, match=r"whose 'S' is \(1, 4, 8, 8\), and this one's is \(2, 4, 8, 8\)"):
        model(TOKENS[:1, :1], past_key_values=past)


@torch.no_grad()
@pytest.mark.parametrize("place", ["mlp", "self_attn"])
def test_nor_after_one_between_two_layers(place):
    """As of memory, or of the keyboard: the first layer has taken tokens in that the second never saw."""
    model = llama()
    swap_attention(model, "gated_delta")
    past = model(TOKENS[:, :6], past_key_values=DynamicCache()).past_key_values
    part = model.model.layers[0].mlp if place == "mlp" else model.model.layers[1].self_attn

    def fails(*args):
        raise MemoryError

    handle = part.register_forward_pre_hook(fails)
    with pytest.raises(MemoryError):
        model(TOKENS[:, 6:8], past_key_values=past)
    handle.remove()
    for again in (past, past):
        with pytest.raises(
            RuntimeError, match=r"ended in an error in layer 1, .*: start with an empty cache, or reset"
        ):
            model(TOKENS[:, 6:7], past_key_values=again)
    past.reset()
    whole = model(TOKENS, use_cache=False).logits
    torch.testing.assert_close(model(TOKENS, past_key_values=past).logits, whole, atol=EXACT, rtol=EXACT)


@torch.no_grad()
@pytest.mark.parametrize("order", [[0, 1, 1, 2], [1, 0, 1], [0, 0, 1]])
def test_a_layer_that_runs_twice_in_a_call_has_one_place(order):
    model = swapped("gated_delta")
    model.model.layers = nn.ModuleList(model.model.layers[index] for index in order)
    model.config.num_hidden_layers = len(order)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    with pytest.raises(RuntimeError, match="where one layer runs twice in a call, pass use_cache=False"):
        model(TOKENS)
    assert model(TOKENS, use_cache=False).logits.isfinite().all()


@torch.no_grad()
def test_caches_of_other_layers_are_refused():
    model = llama()
    kept = model(TOKENS, past_key_values=DynamicCache()).past_key_values
    swap_attention(model, "window", window=5)
    with pytest.raises(NotImplementedError, match=r"holds 12 tokens of layer 0 .*: start with an empty cache"):
        model(TOKENS, past_key_values=kept)
    cache = model(TOKENS, past_key_values=DynamicCache()).past_key_values
    swap_attention(model, "gated_delta")
    with pytest.raises(
        NotImplementedError, match=r"holds the state of WindowAttention in layer 0, which now has Gated"
    ):
        model(TOKENS, past_key_values=cache)
    restore_attention(model)
    with pytest.raises(NotImplementedError, match=r"holds the state of WindowAttention, and no keys and values"):
        model(TOKENS, past_key_values=cache)
    cache.reset()  # what is empty serves any layer
    whole = model(TOKENS, use_cache=False).logits
    torch.testing.assert_close(model(TOKENS, past_key_values=cache).logits, whole, atol=EXACT, rtol=EXACT)


@torch.no_grad()
def test_a_sliding_layer_keeps_a_state_up_to_its_window():
    model = llama(2, family="Mistral", sliding_window=12)
    swap_attention(model, "gated_delta")
    whole = model(TOKENS, use_cache=False).logits
    for make in (dynamic, static):
        cache = make(model)
        torch.testing.assert_close(in_parts(model, cache, [5, 1, 6]), whole, atol=EXACT, rtol=EXACT)
        with pytest.raises(NotImplementedError, match=r"this layer's mask hides those beyond 12"):
            model(TOKENS[:, :1], past_key_values=cache)


def test_continuous_batching_and_caches_of_other_kinds_are_refused():
    model = swapped("window", [1])
    with pytest.raises(
        NotImplementedError, match=r"continuous batching: WindowAttention keeps a state of each request"
    ):
        model.init_continuous_batching()
    cache = DynamicCache(config=model.config)
    cache.layers[1] = type("OtherLayer", (type(cache.layers[1]),), {})()
    with pytest.raises(NotImplementedError, match=r"for which a OtherLayer has no place: take a DynamicCache"):
        model.generate(TOKENS, past_key_values=cache, max_new_tokens=2)


def test_layers_that_learn_their_place_in_a_cache_at_the_call_are_refused():
    for name in ("forgetting", "window"):
        swap_attention(model := llama(), name)
        model.model.layers[1].self_attn.layer_idx = -1  # as in the blocks that Zamba2 shares
        with pytest.raises(NotImplementedError, match=r"pass use_cache=False"):
            model(TOKENS, past_key_values=DynamicCache(config=model.config))


def test_layers_whose_keys_others_take_are_refused():
    model = llama()
    model.model.layers[1].self_attn.store_full_length_kv = True
    with pytest.raises(AttentionSwapError, match="other layers share its keys and values, and WindowAttention keeps a"):
        swap_attention(model, "window")


def test_layers_that_attend_twice_in_a_call_are_refused():
    model = llama(family="DiffLlama")
    with pytest.raises(
        AttentionSwapError, match="attends several times in a call, and WindowAttention keeps one state"
    ):
        swap_attention(model, "window")


def test_training_with_a_cache_in_the_call_has_the_same_gradients():
    gradients = []
    for use_cache in (False, True):
        model = swapped("hedgehog").train()
        model(TOKENS, labels=TOKENS, use_cache=use_cache).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("asked", ["by the call", "of the layer"])
def test_a_call_that_sees_the_future_is_one_or_is_refused(asked):
    """As a decoder that is made an encoder."""
    for mechanism in ("gated_delta", "linear"):
        model = llama(1)
        swap_attention(model, mechanism)
        causal = model(TOKENS, use_cache=False).logits
        given = {"is_causal": False} if asked == "by the call" else {}
        if not given:
            model.model.layers[0].self_attn.is_causal = False
        if mechanism == "gated_delta":
            with pytest.raises(ValueError, match="must hide the future"):
                model(TOKENS, use_cache=False, **given)
        else:
            assert (model(TOKENS, use_cache=False, **given).logits - causal).abs().max() > 1e-3
