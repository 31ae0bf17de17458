"""A layer is known by its call to transformers' attention interface, and what it hands over there is honored."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnswap
from attention_modules.hosts import attention_layers
from attention_modules.hosts.discovery import survey
from attention_modules.pretrained import load_pretrained
from attention_modules.swap import AttentionSwapError, restore_attention, swap_attention
from lightning_tasks.callbacks import AttentionMonitor

transformers = pytest.importorskip("transformers")
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from tests.attention_modules.hosts.huggingface.exercise import exercise  # noqa: E402
from tests.attention_modules.hosts.huggingface.tiny import built, classes_of, first_that_runs, running  # noqa: E402
from tests.rows import each_row  # noqa: E402


def plain_eager(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    logits = query @ key.transpose(-2, -1) * scaling
    weights = (logits if attention_mask is None else logits + attention_mask).softmax(-1)
    return (weights @ value).transpose(1, 2), weights


def leaning_eager(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Attention that prefers late keys, whatever the mask says."""
    return plain_eager(module, query, key, value, torch.arange(key.shape[2]) * 0.1, scaling)


class Own(nn.Module):
    """Somebody's own layer that calls the interface."""

    def __init__(self, config: Any, is_causal: bool = False) -> None:
        super().__init__()
        self.config, self.is_causal, self.num_heads, self.head_dim = config, is_causal, 2, 4
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))
        self.scaling = 0.5

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        query = self.heads(self.q_proj(x))
        key, value = self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, plain_eager)
        out, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return out.flatten(2)


class HeadByHead(Own):
    """One projection, in which each head has its query, key and value together."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.q_proj, self.k_proj, self.v_proj
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2).chunk(3, -1)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, plain_eager)
        out, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return out.flatten(2)


class Leaning(Own):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        query, key, value = self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, leaning_eager)
        return attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)[0].flatten(2)


class Hinted(Own):
    """It hands over what nobody knows."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        query, key, value = self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, plain_eager)
        return attend(self, query, key, value, attention_mask, hint=x, **kwargs)[0].flatten(2)


class Scaling(Own):
    """It multiplies its queries itself."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        query = self.heads(self.q_proj(x)) * self.scaling
        key, value = self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, plain_eager)
        return attend(self, query, key, value, attention_mask, scaling=1.0, **kwargs)[0].flatten(2)


class Shifting(Own):
    """It adds to its queries what keys do not have."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        query = self.heads(self.q_proj(x)) + x.mean()
        key, value = self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, plain_eager)
        return attend(self, query, key, value, attention_mask, scaling=1.0, **kwargs)[0].flatten(2)


def layer(kind: type[Own], implementation: str = "sdpa", **options: Any) -> Own:
    torch.manual_seed(0)
    config = transformers.PretrainedConfig()
    config._attn_implementation = implementation
    return kind(config, **options)


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_anybodys_layer_is_known_by_its_call(implementation: str, causal: bool) -> None:
    """Without a mask, sdpa hides the future where the layer says so, and eager never does."""
    own = layer(Own, implementation, is_causal=causal)
    plain = own(X)
    (row,) = swap_attention(own, "softmax")
    assert (row.host, row.dim, row.heads) == ("Hugging Face", 8, 2)
    torch.testing.assert_close(own(X), plain)
    restore_attention(own)
    assert type(own) is Own
    assert torch.equal(own(X), plain)


def test_the_argument_of_the_call_comes_before_the_layers_own() -> None:
    own = layer(Own, is_causal=True)
    expected = own(X, is_causal=False)
    swap_attention(own, "softmax")
    torch.testing.assert_close(own(X, is_causal=False), expected)
    assert not torch.allclose(own(X), expected)


@each_row(
    ("kind", "text"),
    [
        (Hinted, "it hands hint to the attention interface, which no mechanism is given"),
        (Leaning, "leaning_eager, which it calls, is no softmax attention"),
    ],
)
def test_what_is_no_softmax_of_queries_keys_and_a_mask_is_refused(kind: type[Own], text: str) -> None:
    own = layer(kind, "eager")
    with pytest.raises(AttentionSwapError, match=text):
        swap_attention(own, "softmax")
    assert type(own) is kind


def test_without_a_query_the_layers_own_factor_on_it_is_kept() -> None:
    own, expected = layer(Scaling), layer(Own)
    for each in (own, expected):
        swap_attention(each, "symmetric")
    torch.testing.assert_close(own(X), expected(X))
    restore_attention(own)
    swap_attention(own, "softmax")
    torch.testing.assert_close(own(X), layer(Scaling)(X))


def test_queries_that_keys_cannot_stand_in_for_are_refused_without_one() -> None:
    own = layer(Shifting)
    expected = own(X)
    with pytest.raises(
        AttentionSwapError, match=r"computes 'self.heads\(self.q_proj\(x\)\) \+ x.mean\(\)' for queries"
    ):
        swap_attention(own, "symmetric")
    swap_attention(own, "softmax")
    torch.testing.assert_close(own(X), expected)


def test_other_heads_than_the_layer_says_are_an_error() -> None:
    own = layer(Own)
    swap_attention(own, "softmax")
    own.num_heads, own.head_dim = 4, 2
    with pytest.raises(RuntimeError, match="gives the attention interface 4 heads of width 2"):
        own(X)


@each_row(
    ("model", "argument", "mechanism"),
    [
        ("Gemma2Model", "softcap", "l2"),
        ("GptOssModel", "s_aux", "l2"),
        ("GraniteSWAModel", "s_aux", "sigmoid"),
        ("T5EncoderModel", "position_bias", "sinkhorn"),
    ],
)
def test_what_is_handed_over_is_honored_or_refused_by_name(model: str, argument: str, mechanism: str) -> None:
    tiny = built(getattr(transformers, model))
    assert exercise(tiny, first_that_runs(tiny)).problems == []
    with pytest.raises(AttentionSwapError, match=rf"it hands {argument} to its attention"):
        swap_attention(tiny, mechanism)
    assert attention_layers(tiny)[0].mechanism is None


def test_the_order_of_a_joint_projection_of_ones_own_is_asked_for() -> None:
    layer = HeadByHead(transformers.PretrainedConfig(attn_implementation="sdpa")).eval()
    asked = "in which order its 'qkv' holds queries, keys and values is not known .*: say it by attnswap.declare_host"
    with pytest.raises(AttentionSwapError, match=asked):
        swap_attention(layer, "symmetric")
    with pytest.raises(ValueError, match=asked):
        attention_layers(layer)[0].qk_weights()
    x = torch.randn(1, 5, 8)
    plain = layer(x)
    swap_attention(layer, "softmax")
    torch.testing.assert_close(layer(x), plain)


@pytest.mark.parametrize("mechanism", ["symmetric", "rpc", "softmax"])
def test_a_layer_may_clamp_its_queries_in_place(mechanism):
    """OLMo does. The witness: by bounds that no number reaches, the same as without."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    found = []
    for clip in (None, 1e3):
        torch.manual_seed(0)
        model = transformers.OlmoModel(transformers.OlmoConfig(**sizes, vocab_size=20, pad_token_id=0, clip_qkv=clip))
        swap_attention(model.eval(), mechanism)
        found.append(model(torch.arange(1, 9)[None]).last_hidden_state)
        found[-1].sum().backward()
    assert torch.equal(*found)


NEW = "query_states = query_states.new_ones(query_states.shape)"
ROOM = "weights = query_states.new_zeros(query_states.shape[0])"
ALIKE = "; ".join(f"{x} = torch.where({x}.isnan(), {x}.new_zeros(()), {x})" for x in ("query_states", "key_states"))


@pytest.mark.parametrize(
    "change", ["query_states.mul_(3.0)", "query_states[:, 0] = 0", "query_states *= self.layer_idx", NEW, ROOM, ALIKE]
)
def test_what_changes_queries_alone_is_refused_where_a_mechanism_uses_none(change, tmp_path, monkeypatch):
    from transformers.models.olmo import modeling_olmo

    source = inspect.getsource(modeling_olmo)
    rotary = "        query_states, key_states = apply_rotary_pos_emb("
    assert source.count(rotary) == 1
    (tmp_path / "modeling_own.py").write_text(
        re.sub(r"from \.\.\.", "from transformers.", source)
        .replace("from .configuration_olmo", "from transformers.models.olmo.configuration_olmo")
        .replace(rotary, f"        {change}\n{rotary}")
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "modeling_own", raising=False)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.OlmoConfig(**sizes, vocab_size=20, pad_token_id=0)
    model = importlib.import_module("modeling_own").OlmoModel(config)
    refused = pytest.raises(AttentionSwapError, match=re.escape(change))
    with nullcontext() if change in (ROOM, ALIKE) else refused:
        swap_attention(model, "symmetric")
    restore_attention(model)
    tokens = torch.arange(1, 9)[None]
    plain = model.eval()(tokens).last_hidden_state
    swap_attention(model, "softmax")
    torch.testing.assert_close(model(tokens).last_hidden_state, plain)


SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 20}
OF_A_STATE = ["linear", "retention", "performer", "hedgehog"]


@pytest.mark.parametrize("mechanism", [*OF_A_STATE, "gated_delta", "gla", "delta", "window"])
@pytest.mark.parametrize("kind", ["Bert", "Llama"])
def test_a_bias_of_the_logits_is_refused_by_mechanisms_without_logits(kind, mechanism):
    """As ALiBi, and the relative positions of many encoders; whatever its numbers are, where it has a gradient."""
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**SIZES)).eval()
    tokens = torch.arange(1, 9)[None]
    causal = torch.full((8, 8), -torch.inf).triu(1).expand(1, 1, 8, 8) if kind == "Llama" else torch.zeros(1, 1, 8, 8)
    try:
        swap_attention(model, mechanism)
    except AttentionSwapError as error:
        assert kind == "Bert"
        assert "sees the future" in str(error)  # noqa: PT017 - a case that is another test's
        return
    model(tokens, attention_mask=causal)
    for bias in (-0.1 * (torch.arange(8) - torch.arange(8)[:, None]).abs(), torch.zeros(8, 8, requires_grad=True)):
        with pytest.raises(RuntimeError, match="no logits to which a bias could be added"):
            model(tokens, attention_mask=causal + bias)


@pytest.mark.parametrize("mechanism", [*OF_A_STATE, "softmax", "sinkhorn", "symmetric"])
def test_a_layer_that_does_not_say_whether_it_hides_the_future_is_asked(mechanism):
    """Splinter's have no is_causal. The witness: BERT, whose layers have, with the same weights."""
    found, tokens = [], torch.arange(1, 9)[None]
    for kind in ("Splinter", "Bert"):
        config = getattr(transformers, f"{kind}Config")(**SIZES, initializer_range=0.3, layer_norm_eps=1e-12)
        kwargs = {"add_pooling_layer": False} if kind == "Bert" else {}
        found.append(getattr(transformers, f"{kind}Model")(config, **kwargs).eval())
    found[1].load_state_dict(found[0].state_dict())
    if mechanism in ("softmax", "symmetric"):
        swap_attention(found[0], mechanism)
        restore_attention(found[0])
    else:
        with pytest.raises(AttentionSwapError, match=r"does not say whether it hides the future.*set its is_causal"):
            swap_attention(found[0], mechanism)
        found[0].encoder.layer[0].attention.self.is_causal = False
    for model in found:
        torch.manual_seed(0)
        swap_attention(model, mechanism)
    mask = torch.ones_like(tokens)
    mask[0, 6:] = 0
    for given in (None, mask):
        one, other = (model(tokens, attention_mask=given).last_hidden_state for model in found)
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["Splinter", "Llama"])
def test_what_a_user_said_of_it_comes_back_with_the_folder(kind, tmp_path):
    """Splinter has no is_causal; Llama's is changed, as of a decoder that is made an encoder."""
    tokens, plain = torch.arange(1, 9)[None], getattr(transformers, f"{kind}Model")
    model = plain(getattr(transformers, f"{kind}Config")(**SIZES, use_cache=False)).eval()
    for layer in model.modules():
        if type(layer).__name__.endswith("Attention"):
            layer.is_causal = False
    swap_attention(model, "linear")
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(plain, tmp_path).eval()
    assert torch.equal(loaded(tokens).last_hidden_state, model(tokens).last_hidden_state)


@pytest.mark.parametrize("mechanism", ["sink", "linear"])
@pytest.mark.parametrize("decoder", [True, False])
def test_a_folder_that_is_loaded_as_a_decoder_hides_the_future(decoder, mechanism, tmp_path):
    config = transformers.BertConfig(**SIZES, is_decoder=not decoder, use_cache=False)
    model = transformers.BertModel(config, add_pooling_layer=False)
    swap_attention(model, mechanism)
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(transformers.BertModel, tmp_path, is_decoder=decoder, add_pooling_layer=False).eval()
    one, other = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]])
    first, second = (loaded(each[None]).last_hidden_state[0, :3] for each in (one, other))
    assert torch.equal(first, second) is decoder


@pytest.mark.parametrize("mechanism", ["linear", "gated_delta", "window"])
def test_a_decoder_that_does_not_say_that_it_hides_the_future_is_asked_too(mechanism):
    """A Llama without its is_causal. The witness: with it."""
    found = []
    for says in (True, False):
        torch.manual_seed(0)
        model = transformers.LlamaModel(transformers.LlamaConfig(**SIZES)).eval()
        if not says:
            del model.layers[0].self_attn.is_causal
            with pytest.raises(AttentionSwapError, match="does not say whether it hides the future"):
                swap_attention(model, mechanism)
            model.layers[0].self_attn.is_causal = True
        swap_attention(model, mechanism)
        mask = torch.ones(2, 8, dtype=torch.long)
        mask[0, :3] = 0
        tokens = torch.arange(1, 9).expand(2, 8)
        outs = [model(tokens).last_hidden_state, model(tokens, attention_mask=mask).last_hidden_state]
        found.append([out[mask.bool()] for out in outs])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


class Adapted(nn.Module):
    """A projection and what is added to it, as LoRA is written by hand."""

    def __init__(self, linear):
        super().__init__()
        self.low = nn.Linear(linear.in_features, 4)
        self.linear, self.added = linear, nn.Identity()

    def forward(self, x):
        return self.added(self.linear(x))


@pytest.mark.parametrize("mechanism", ["softmax", "symmetric", "sink"])
def test_a_key_projection_that_is_wrapped_by_hand_groups_no_heads(mechanism):
    found = []
    for wraps in (False, True):
        torch.manual_seed(0)
        model = transformers.BertModel(transformers.BertConfig(**SIZES)).eval()
        layer = model.encoder.layer[0].attention.self
        layer.key = Adapted(layer.key) if wraps else layer.key
        swap_attention(model, mechanism)
        found.append(model(torch.arange(1, 9)[None]).last_hidden_state)
    assert torch.equal(*found)


@pytest.mark.parametrize("mechanism", ["softmax", "window", "hedgehog", "gated"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_look_under_autocast_where_values_are_narrower_than_queries(mechanism, padded):
    """Llama's rotary positions leave queries and keys wider. The witness: the entropy without autocast."""
    tokens, found = torch.arange(1, 17)[None], []
    mask = (torch.arange(16) > 2).long()[None] if padded else None
    for enabled in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaModel(transformers.LlamaConfig(**SIZES))
        swap_attention(model, mechanism, **({"window": 4} if mechanism in ("window", "hedgehog") else {}))
        logged: dict[str, Any] = {}
        with (
            attnswap.watch(
                model, callbacks=[AttentionMonitor(1)], log=lambda values, step, into=logged: into.update(values)
            ),
            torch.autocast("cpu", torch.bfloat16, enabled=enabled),
        ):
            model(tokens, attention_mask=mask).last_hidden_state.float().square().mean().backward()
        found.append(logged)
    entropies = [name for name in found[0] if name.endswith("/entropy/layer_00")]
    assert entropies
    for key in entropies:
        assert float(found[1][key]) == pytest.approx(float(found[0][key]), abs=0.05)


def scaling_queries(kind):
    """A model, its input and its first attention layer; OPT's and Whisper's multiply their queries themselves."""
    torch.manual_seed(0)
    if kind == "OPT":
        sizes = {"hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
        config = transformers.OPTConfig(**sizes, vocab_size=20, word_embed_proj_dim=32, init_std=0.3, use_cache=False)
        model = transformers.OPTModel(config).eval()
        return model, torch.arange(1, 9)[None], model.decoder.layers[0].self_attn
    sizes = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 32, "num_mel_bins": 8}
    config = getattr(transformers, {"Whisper": "WhisperConfig"}.get(kind, f"{kind}EncoderConfig"))
    config = config(**sizes, max_source_positions=20, init_std=0.3)
    model = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
    model = getattr(model, f"{kind}Encoder")(config).eval()
    return model, torch.randn(2, 8, 40), model.layers[0].self_attn  # Qwen2Audio's with another helper around


SCALED = [
    (kind, each)
    for kind in ("OPT", "Whisper", "Qwen2Audio")
    for each in ("l2", "qk_norm", "scaled", "ssmax", "symmetric")
]


@pytest.mark.parametrize(("kind", "mechanism"), [*SCALED, ("Whisper", "rkde"), ("OPT", "differential")])
def test_a_mechanism_is_given_queries_as_they_were_before_a_layer_scales_them(kind, mechanism):
    """The witness: the mechanism with what the projections give, at 1/sqrt(d)."""
    model, x, layer = scaling_queries(kind)
    swap_attention(model, mechanism, where=["*self_attn"])
    made, calls = {}, []
    for name in ("q_proj", "k_proj", "v_proj"):
        part = getattr(layer, name)
        part.register_forward_hook(lambda _, args, out, name=name: made.update({name: out}))
    hook = layer.mechanism.register_forward_hook(lambda *call: calls.append(call[2:]), with_kwargs=True)
    model(x)
    hook.remove()
    ((given, out),) = calls
    heads = {name: each.unflatten(-1, (4, 8)).transpose(1, 2) for name, each in made.items() if each is not None}
    q = heads["k_proj" if mechanism == "symmetric" else "q_proj"]
    expected = layer.mechanism(q, heads["k_proj"], heads["v_proj"], **{**given, "scale": None})
    torch.testing.assert_close(out, expected)
    restore_attention(model)


def part_of(folder: str, name: str) -> tuple[nn.Module, partial[Any]]:
    """A part of a model in which some layers read another sequence, and a call of it."""
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    if name == "Idefics2PerceiverResampler":
        sizes = {"hidden_size": 16, "resampler_n_latents": 4, "resampler_depth": 2, "resampler_n_heads": 2}
        config = module.Idefics2PerceiverConfig(**sizes, resampler_head_dim=8, num_key_value_heads=2)
        given: tuple[Tensor, ...] = (torch.randn(2, 9, 16), torch.ones(2, 9))
    elif name == "Molmo2Adapter":
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
        config = module.Molmo2AdapterConfig(**sizes, vision_feature_layer=[-1])
        given = (torch.randn(2, 9, 16), torch.arange(12).reshape(3, 4))
    elif folder.startswith("kosmos"):
        text = {"vocab_size": 9, "embed_dim": 16, "layers": 1, "ffn_dim": 16, "attention_heads": 2}
        config = getattr(transformers, name.replace("ImageToTextProjection", "Config"))(
            text_config=text, vision_config={"hidden_size": 16}, latent_query_num=4
        )
        config.text_config._attn_implementation = "eager"
        given = (torch.randn(2, 9, 16),)
    else:
        config = getattr(module, name.replace("TwoWayTransformer", "MaskDecoderConfig"))(
            hidden_size=16, num_hidden_layers=2, mlp_dim=20, num_attention_heads=2
        )
        given = (torch.randn(2, 1, 3, 16), torch.randn(2, 16, 2, 2), torch.randn(2, 16, 2, 2))
    config._attn_implementation = "eager"
    kwargs = {"attention_similarity": None} if name.endswith("TwoWayTransformer") else {}
    model = getattr(module, name)(config).eval()
    return model, partial(model, *given, **kwargs)


def as_many_keys(model: nn.Module, call: partial[Any]) -> dict[str, bool]:
    """Whether each layer that ran projects as many queries as keys, in a call of the plain model."""
    seen: dict[str, dict[str, list[int]]] = {}
    for layer in survey(model).layers:
        for place, names in (("q", ("q_proj", "Wq", "query")), ("k", ("k_proj", "Wk", "key"))):
            (part,) = (layer.module.get_submodule(name) for name in names if name in layer.module._modules)
            made = seen.setdefault(layer.name, {"q": [], "k": []})[place]
            part.register_forward_hook(lambda _, args, out, made=made: made.append(out.shape[-2]))
    with torch.no_grad():
        call()
    return {name: made["q"] == made["k"] for name, made in seen.items() if made["q"]}


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        *(("sam", "SamTwoWayTransformer"), ("sam_hq", "SamHQTwoWayTransformer"), ("sam2", "Sam2TwoWayTransformer")),
        *(("sam2_video", "Sam2VideoTwoWayTransformer"), ("edgetam", "EdgeTamTwoWayTransformer")),
        *(("sam3_tracker", "Sam3TrackerTwoWayTransformer"), ("idefics2", "Idefics2PerceiverResampler")),
        *(("kosmos2", "Kosmos2ImageToTextProjection"), ("kosmos2_5", "Kosmos2_5ImageToTextProjection")),
        ("molmo2", "Molmo2Adapter"),
    ],
)
def test_a_layer_with_other_keys_than_queries_is_cross_attention_whatever_its_name(folder: str, name: str) -> None:
    model, call = part_of(folder, name)
    own = as_many_keys(model, call)
    assert not all(own.values())
    assert {layer.name: not layer.cross for layer in survey(model).layers} == own


@pytest.mark.parametrize(
    ("folder", "name", "cross"),
    [
        *(("ctrl", "CTRLModel", ""), ("mobilebert", "MobileBertModel", ""), ("segformer", "SegformerModel", "")),
        *(("inkling2", "Inkling2TextModel", ""), ("t5gemma2", "T5Gemma2ForConditionalGeneration", "decoder|head")),
    ],
)
def test_a_layer_that_is_given_its_own_sequence_alone_is_self_attention(folder: str, name: str, cross: str) -> None:
    """One tensor three times, or a reduced one; the decoder of T5Gemma 2 reads the encoder's output beside its own."""
    model, _ = running(next(kind for kind in classes_of(folder)[1] if kind.__name__ == name))
    expected = {layer.name: bool(cross and re.search(cross, layer.name)) for layer in survey(model).layers}
    assert {layer.name: layer.cross for layer in survey(model).layers} == expected


class OfThree(Own):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        query, key, value = (self.heads(each) for each in (self.q_proj(query), self.k_proj(key), self.v_proj(value)))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, plain_eager)
        return attend(self, query, key, value, None, scaling=self.scaling)[0].flatten(2)


class Latents(Own):
    def forward(self, latents: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        both = torch.cat((context, latents), dim=1)
        query, key, value = (self.heads(each) for each in (self.q_proj(latents), self.k_proj(both), self.v_proj(both)))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, plain_eager)
        return attend(self, query, key, value, None, scaling=self.scaling)[0].flatten(2)


class Block(nn.Module):
    def __init__(self, kind: type[Own]) -> None:
        super().__init__()
        self.attn = kind(transformers.BertConfig(attn_implementation="eager"))


class OnOne(Block):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.attn(x, x, value=x)


class OnTwo(Block):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.attn(x, value=memory, key=memory)


class Unpacked(Block):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.attn(*(x, x, x))


class OnLatents(Block):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.attn(x, memory)


@pytest.mark.parametrize(
    ("around", "kind", "cross"),
    [(OnOne, OfThree, False), (OnTwo, OfThree, True), (Unpacked, OfThree, False), (OnLatents, Latents, True)],
)
def test_in_a_class_of_ones_own_the_call_tells_self_attention_from_cross_attention(around, kind, cross) -> None:
    model = around(kind)
    x, memory = torch.randn(2, 5, 8), torch.randn(2, 7, 8)
    for _ in ("plain", "swapped by name"):
        assert [layer.cross for layer in survey(model).layers] == [cross]
        expected = model(x, memory)
        swap_attention(model, "softmax", where="attn")
        torch.testing.assert_close(model(x, memory), expected)
    restore_attention(model)
    if cross:
        with pytest.raises(AttentionSwapError):
            swap_attention(model, "sink")
    else:
        assert [row.name for row in swap_attention(model, "sink")] == ["attn"]
