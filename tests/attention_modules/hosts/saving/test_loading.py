"""Folders of swapped Hugging Face models: loaded as they were, and never taken for plain ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attention_modules import AttentionSwapError, load_pretrained, restore_attention, swap_attention
from attention_modules.hosts.base import MARK
from attention_modules.hosts.query import lose_query
from tests.attention_modules.hosts.saving.saved_models import (
    MODELS,
    SIZES,
    built,
    output,
    output_of_ids,
    recorded,
    saved,
)

transformers = pytest.importorskip("transformers")
MECHANISMS = {
    "uniform": {},
    "symmetric": {},
    "rpc": {"iterations": 2, "lam": 1.0},
    "scaled": {"num_tokens": 5},
}


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("family", MODELS)
def test_a_saved_model_loads_as_it_was_swapped(family: str, mechanism: str, tmp_path: Path) -> None:
    model = built(family)
    swap_attention(model, mechanism, layers=[1], **MECHANISMS[mechanism])
    for name, parameter in model.named_parameters():
        if "mechanism" in name:
            nn.init.normal_(parameter)
    loaded, info = load_pretrained(type(model), saved(model, tmp_path), output_loading_info=True)
    assert type(loaded) is type(model)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not loaded.training
    assert torch.equal(output(loaded), output(model))
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert not any(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))


@pytest.mark.parametrize("family", MODELS)
def test_from_pretrained_of_a_swapped_folder_is_loud(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also for a mechanism that has no tensors and drops none: the layers are named in transformers' report."""
    model = built(family)
    swap_attention(model, "uniform")
    folder = saved(model, tmp_path)
    transformers.utils.logging.enable_propagation()
    try:
        _, info = type(model).from_pretrained(folder, output_loading_info=True)
    finally:
        transformers.utils.logging.disable_propagation()
    assert len(info["unexpected_keys"]) == 2
    assert all(MARK in key for key in info["unexpected_keys"])
    assert "UNEXPECTED" in caplog.text
    assert MARK in caplog.text


def test_an_auto_class_finds_the_class(tmp_path: Path) -> None:
    model = built("vit")
    swap_attention(model, "rpc", iterations=2)
    loaded = load_pretrained(transformers.AutoModelForImageClassification, saved(model, tmp_path))
    assert torch.equal(output(loaded), output(model))
    (tmp_path / "config.json").rename(tmp_path / "elsewhere.json")
    with_it = load_pretrained(transformers.AutoModelForImageClassification, tmp_path, config=model.config)
    assert torch.equal(output(with_it), output(model))


@pytest.mark.parametrize("family", MODELS)
def test_query_rows_are_in_the_folder(family: str, tmp_path: Path) -> None:
    """A plain model loads them, and so does a swapped one, for restore."""
    model = built(family)
    before = output(model)
    swap_attention(model, "symmetric")
    folder = saved(model, tmp_path)
    assert torch.equal(output(type(model).from_pretrained(folder)), before)
    loaded = load_pretrained(type(model), folder)
    assert torch.equal(output(loaded), output(model))
    restore_attention(loaded)
    assert torch.equal(output(loaded), before)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_query_rows_that_nobody_knows_are_not_restored(family: str, tmp_path: Path) -> None:
    model = built(family)
    swap_attention(model, "symmetric")
    layer = next(module for module in model.modules() if hasattr(module, "dropped_query"))
    lose_query(layer, layer.dropped_query)
    folder = saved(model, tmp_path)
    assert [each["query"] for each in recorded(folder)] == [False, True]
    loaded = load_pretrained(type(model), folder)
    assert torch.equal(output(loaded), output(model))
    with pytest.raises(AttentionSwapError, match=r"query rows .* are gone"):
        restore_attention(loaded)


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_a_model_may_be_loaded_under_another_head(prefix: str, tmp_path: Path) -> None:
    base, headed = transformers.BertModel, transformers.BertForSequenceClassification
    config = transformers.BertConfig(**SIZES, vocab_size=20)
    model = (headed if prefix else base)(config).eval()
    swap_attention(model, "scaled")
    for name, parameter in model.named_parameters():
        if "mechanism" in name:
            nn.init.normal_(parameter)
    loaded = load_pretrained(base if prefix else headed, saved(model, tmp_path))
    mine, theirs = (each.bert if isinstance(each, headed) else each for each in (model, loaded))
    assert torch.equal(output_of_ids(mine), output_of_ids(theirs))


def joint() -> nn.Module:
    """Its file has one projection for queries, keys and values; the model has three."""
    if not hasattr(transformers, "NomicBertModel"):
        pytest.skip("this version of transformers has no such model")
    return transformers.NomicBertModel(transformers.NomicBertConfig(**SIZES, vocab_size=20))


def own_init() -> nn.Module:
    """Its class gives every projection a first value by name when a file is loaded."""
    config = transformers.SiglipTextConfig(**SIZES, vocab_size=20, max_position_embeddings=8, projection_size=16)
    return transformers.SiglipTextModel(config)


@pytest.mark.parametrize("make", [joint, own_init])
@pytest.mark.parametrize("mechanism", ["symmetric", "sink"])
def test_models_whose_file_is_converted_or_whose_class_fills_weights(
    make: Callable[[], nn.Module], mechanism: str, tmp_path: Path
) -> None:
    model = make().eval()
    swap_attention(model, mechanism)
    loaded = load_pretrained(type(model), saved(model, tmp_path))
    assert torch.equal(output_of_ids(loaded), output_of_ids(model))


def test_on_the_meta_device_transformers_says_what_is_wrong(tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, "gated")
    folder = saved(model, tmp_path)
    with torch.device("meta"), pytest.raises(RuntimeError, match=r"from_pretrained.* with a meta device"):
        load_pretrained(transformers.BertModel, folder)


class Towers(transformers.PreTrainedModel):
    """Two models by names that are no identifiers."""

    config_class = transformers.BertConfig
    base_model_prefix = "towers"

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.by_pair = nn.ModuleDict({pair: transformers.BertModel(config) for pair in ("en-de", "de en")})
        self.post_init()

    def forward(self, tokens: Tensor) -> tuple[Tensor]:
        return (torch.cat([tower(tokens)[0] for tower in self.by_pair.values()]),)


def test_layers_may_have_any_names(tmp_path: Path) -> None:
    model = Towers(transformers.BertConfig(**SIZES, vocab_size=20)).eval()
    swap_attention(model, "sink", start=1.0)
    assert torch.equal(output_of_ids(load_pretrained(Towers, saved(model, tmp_path))), output_of_ids(model))


def test_shared_layers_are_loaded(tmp_path: Path) -> None:
    config = transformers.AlbertConfig(**SIZES, embedding_size=8, vocab_size=20)
    model = transformers.AlbertModel(config).eval()
    swap_attention(model, "sink")
    model.save_pretrained(tmp_path)
    assert torch.equal(output_of_ids(load_pretrained(transformers.AlbertModel, tmp_path)), output_of_ids(model))


@pytest.mark.parametrize(
    "swaps", [[("softmax", [0]), ("neutreno", [1])], [("gated", [0]), ("value_residual", [1]), ("softmax", [0])]]
)
def test_layers_that_others_read_are_loaded_with_them(swaps: list[tuple[str, list[int]]], tmp_path: Path) -> None:
    model = built("bert")
    for name, layers in swaps:
        swap_attention(model, name, layers=layers)
    loaded = load_pretrained(transformers.BertModel, saved(model, tmp_path))
    assert torch.equal(output(loaded), output(model))


def test_layers_whose_readers_come_first_are_loaded(tmp_path: Path) -> None:
    config = transformers.BertConfig(**{**SIZES, "num_hidden_layers": 3}, vocab_size=20)
    model = transformers.BertModel(config).eval()
    swap_attention(model, "gated", layers=[1])
    swap_attention(model, "elliptical", layers=[0, 2])
    loaded = load_pretrained(transformers.BertModel, saved(model, tmp_path))
    assert torch.equal(output_of_ids(loaded), output_of_ids(model))


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights_are_loaded(zipped: bool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = built("bert")
    swap_attention(model, "gated")
    file = saved(model, tmp_path) / "model.safetensors"
    torch.save(load_file(file), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    file.unlink()
    assert torch.equal(output(load_pretrained(transformers.BertModel, tmp_path)), output(model))


def test_a_model_on_several_devices_is_dispatched_after_loading(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = built("bert")
    swap_attention(model, "gated")
    folder = saved(model, tmp_path / "model")
    spread = {"embeddings": "cpu", "encoder.layer.0": "cpu", "encoder.layer.1": "disk", "pooler": "cpu"}
    offload = {"offload_folder": tmp_path / "one"}
    with pytest.raises(ValueError, match=r"onto one device, and call accelerate\.dispatch_model"):
        load_pretrained(transformers.BertModel, folder, device_map=spread, **offload)
    plain = transformers.BertModel.from_pretrained(folder, device_map=spread, **offload)
    with pytest.raises(AttentionSwapError, match="remove_hook_from_module"):
        swap_attention(plain, "gated", where=["encoder.layer.0.attention.self"])
    loaded = load_pretrained(transformers.BertModel, folder, device_map="auto")
    accelerate.dispatch_model(loaded, spread, offload_dir=tmp_path / "two")
    assert torch.equal(output(loaded), output(model))


def test_query_rows_beside_offloaded_weights_are_refused_before_a_file_is_written(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = built("bert")
    swap_attention(model, "symmetric")
    expected = output(model)
    folder = saved(model, tmp_path / "model")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    spread = {"embeddings": "cpu", "encoder.layer.0": "disk", "encoder.layer.1": "cpu", "pooler": "cpu"}
    accelerate.dispatch_model(model, spread, main_device="cpu", offload_dir=tmp_path / "offloaded")
    with pytest.raises(
        ValueError, match=r"'encoder\.layer\.0\.attention\.self' are offloaded, .*remove_hook_from_module"
    ):
        model.save_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    model.save_pretrained(folder)
    assert torch.equal(output(load_pretrained(type(model), folder)), expected)


def test_a_variant_has_its_own_weights(tmp_path: Path) -> None:
    built("bert").save_pretrained(tmp_path)
    model = built("bert")
    swap_attention(model, "gated")
    model.save_pretrained(tmp_path, variant="fp16")
    loaded = load_pretrained(transformers.BertModel, tmp_path, variant="fp16")
    assert torch.equal(output(loaded), output(model))
    with pytest.raises(ValueError, match="saved without swapped attention"):
        load_pretrained(transformers.BertModel, tmp_path)


@pytest.mark.parametrize("family", MODELS)
def test_the_weights_file_loads_into_a_model_that_is_swapped_by_hand(family: str, tmp_path: Path) -> None:
    """The mark in the file is no weight: it does not stop a strict load."""
    model, other = built(family), built(family)
    swap_attention(model, "rpc", iterations=2)
    swap_attention(other, "rpc", iterations=2)
    state = {**model.state_dict(), **{f"{name}.mechanism.{MARK}": torch.ones(1) for name in _swapped_names(model)}}
    other.load_state_dict(state)


def _swapped_names(model: nn.Module) -> list[str]:
    return [name.removesuffix(".mechanism") for name, _ in model.named_modules() if name.endswith(".mechanism")]


class SwapsItself(transformers.BertModel):
    """A class whose model is swapped when it is built."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        swap_attention(self, config.mechanism)  # type: ignore[attr-defined]
        self.post_init()


@pytest.mark.parametrize("mechanism", ["talking_heads", "sink", "forgetting"])
def test_a_class_that_swaps_itself_reads_a_plain_folder(mechanism: str, tmp_path: Path) -> None:
    plain = built("bert")
    plain.save_pretrained(tmp_path / "plain")
    config = transformers.BertConfig.from_pretrained(tmp_path / "plain")
    config.mechanism = mechanism
    expected = built("bert")
    swap_attention(expected, mechanism)
    for model in (SwapsItself(config), SwapsItself.from_pretrained(tmp_path / "plain", config=config)):
        for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            if "mechanism" in name and not name.endswith("gate.weight"):  # which is drawn
                assert torch.equal(one, other), name
    model.eval()
    for name, parameter in model.named_parameters():
        if "mechanism" in name:
            nn.init.normal_(parameter)
    model.config.mechanism = mechanism
    again = SwapsItself.from_pretrained(saved(model, tmp_path / "own"))
    assert torch.equal(output(again.eval()), output(model))


class SwapsItsFused(transformers.GPT2LMHeadModel):
    """The same, of a model with one projection for queries, keys and values."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        swap_attention(self, config.mechanism)  # type: ignore[attr-defined]


@pytest.mark.parametrize("ignore", [False, True])
def test_a_class_that_drops_rows_of_one_projection_itself_is_refused(ignore: bool, tmp_path: Path) -> None:
    model = built("gpt2")
    model.config.mechanism = "symmetric"
    model.save_pretrained(plain := tmp_path / "plain")
    swap_attention(model, "symmetric")
    own = saved(model, tmp_path / "own")
    for folder in (plain, own):
        with pytest.raises(AttentionSwapError, match=r"load 'transformer.h.0.attn.c_attn.bias' of \[48\] into \[32\]"):
            SwapsItsFused.from_pretrained(folder, ignore_mismatched_sizes=ignore)
    assert torch.equal(output(load_pretrained(transformers.GPT2LMHeadModel, own)), output(model))
    model.config.mechanism = "sink"
    model.config.save_pretrained(plain)
    assert isinstance(SwapsItsFused.from_pretrained(plain, ignore_mismatched_sizes=ignore), SwapsItsFused)


class Around(transformers.PreTrainedModel):
    """A model of one's own around another."""

    config_class = transformers.PretrainedConfig

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__(transformers.PretrainedConfig())
        self.encoder, self.head = encoder, nn.Linear(8, 2)
        self.post_init()


def _decoded(encoder: nn.Module) -> nn.Module:
    config = transformers.BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)
    return transformers.EncoderDecoderModel(encoder=encoder, decoder=transformers.BertLMHeadModel(config))


@pytest.mark.parametrize(
    "put", [Around, _decoded, lambda encoder: encoder.post_init()], ids=["own", "decoder", "itself"]
)
@pytest.mark.parametrize("again", ["kept", "copied", "loaded"])
def test_what_is_built_around_a_trained_mechanism_leaves_it(
    put: Callable[[nn.Module], object], again: str, tmp_path: Path
) -> None:
    model = built("bert")
    swap_attention(model, "gated")
    for name, parameter in model.named_parameters():
        if "mechanism" in name:
            nn.init.normal_(parameter)
    if again == "loaded":
        model = load_pretrained(type(model), saved(model, tmp_path))
    elif again == "copied":
        model = copy.deepcopy(model)
    expected = output(model)
    put(model)
    assert torch.equal(output(model.eval()), expected)
