"""Swapped Hugging Face models: saved, loaded as they were, and never taken for plain ones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attention_modules import (
    AttentionMechanism,
    AttentionSpec,
    AttentionSwapError,
    SoftmaxAttention,
    load_pretrained,
    restore_attention,
    swap_attention,
)
from attention_modules.hosts.base import MARK, PLAN, TENSORS
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


def test_saving_again_and_copies_write_the_plan_too(tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, "rpc", iterations=2)
    first = load_pretrained(transformers.BertModel, saved(model, tmp_path / "first"))
    for name, other in {
        "loaded": first,
        "copied": copy.deepcopy(model),
        "pickled": pickle.loads(pickle.dumps(model)),
    }.items():
        nn.init.zeros_(model.embeddings.word_embeddings.weight)  # the copy saves itself, not what it was copied from
        folder = saved(other, tmp_path / name)
        loaded = load_pretrained(transformers.BertModel, folder)
        assert torch.equal(output(loaded), output(other))
        assert loaded.embeddings.word_embeddings.weight.any()


def test_an_adapter_is_saved_alone_and_that_is_said(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", minversion=transformers.integrations.peft.MIN_PEFT_VERSION)
    model = built("bert")
    swap_attention(model, "gated")
    model.add_adapter(peft.LoraConfig(target_modules=["value"]))
    with pytest.warns(UserWarning, match="2 swapped attention layers are not recorded, nor are the Parameters of 2"):
        model.save_pretrained(tmp_path)
    assert not (tmp_path / PLAN).exists()


@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["mechanism"]}])
def test_the_model_within_a_peft_model_is_saved_once_its_adapters_are_merged(more: object, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = built("bert")
    swap_attention(model, "gated")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["value"], init_lora_weights=False, **more))
    before = output(adapted)
    with pytest.raises(ValueError, match=r"around 'encoder\.layer\.0\.attention\.self\.value'.*merge_and_unload"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(output(merged), before)
    assert torch.equal(output(load_pretrained(transformers.BertModel, saved(merged, tmp_path))), output(merged))


def test_a_restored_model_saves_as_a_plain_one(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    model = built("bert")
    swap_attention(model, "symmetric")
    restore_attention(model)
    model.save_pretrained(tmp_path)
    assert not (tmp_path / PLAN).exists()
    assert "save_pretrained" not in vars(model)
    assert not recwarn.list


def test_softmax_in_place_of_softmax_saves_a_plain_model(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    model = built("bert")
    swap_attention(model, "softmax")
    model.save_pretrained(tmp_path)
    assert not (tmp_path / PLAN).exists()
    assert not recwarn.list
    _, info = transformers.BertModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())


def test_softmax_is_in_the_plan_only_where_its_values_are_read(tmp_path: Path) -> None:
    """A monitor puts softmax into plain layers, and leaves no trace in a folder."""
    for other, named in (("gated", 1), ("neutreno", 2)):
        model = built("bert")
        swap_attention(model, "softmax", layers=[0])
        swap_attention(model, other, layers=[1])
        assert len(recorded(saved(model, tmp_path / other))) == named


def test_a_stale_plan_does_not_outlive_its_model(tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, "symmetric")
    saved(model, tmp_path)
    swap_attention(model, "softmax")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"has no {PLAN}"):
        load_pretrained(transformers.BertModel, tmp_path)


class Unregistered(SoftmaxAttention):
    """A mechanism without a short name; its import path in a file is never imported."""

    def __init__(self, spec: AttentionSpec, factor: object = 1.0) -> None:
        super().__init__(spec)
        self.factor = factor


def test_a_state_dict_that_is_given_is_what_is_saved(tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, "gated")
    state = {key: torch.full_like(tensor, 0.1) for key, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=state)
    for key, tensor in load_pretrained(transformers.BertModel, tmp_path).state_dict().items():
        assert torch.equal(tensor, torch.full_like(tensor, 0.1)), key
    missing = next(key for key in state if "mechanism" in key)
    with pytest.raises(ValueError, match=f"state_dict has no '{missing}'"):
        model.save_pretrained(tmp_path, state_dict={key: each for key, each in state.items() if key != missing})


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


def test_a_mechanism_without_a_short_name_must_be_given(tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, Unregistered, factor=2.0)
    folder = saved(model, tmp_path)
    with pytest.raises(ValueError, match=r"Unregistered', which is not registered here.*mechanism="):
        load_pretrained(transformers.BertModel, folder)
    loaded = load_pretrained(transformers.BertModel, folder, mechanism=Unregistered)
    assert loaded.encoder.layer[0].attention.self.mechanism.factor == 2.0


class Doubled(Unregistered):
    """A second mechanism without a short name."""

    def forward(self, *args: Tensor, **kwargs: object) -> Tensor:
        return 2 * super().forward(*args, **kwargs)


def test_several_mechanisms_without_a_short_name_are_given_by_those_in_the_file(tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, Unregistered, layers=[0], factor=2.0)
    swap_attention(model, Doubled, layers=[1], factor=3.0)
    folder = saved(model, tmp_path)
    given = {each["mechanism"]: kind for each, kind in zip(recorded(folder), (Unregistered, Doubled), strict=True)}
    loaded = load_pretrained(transformers.BertModel, folder, mechanism=given)
    assert [layer.attention.self.mechanism.factor for layer in loaded.encoder.layer] == [2.0, 3.0]
    assert torch.equal(output(loaded), output(model))
    with pytest.raises(ValueError, match="a mapping by their names"):
        load_pretrained(transformers.BertModel, folder, mechanism=Unregistered)
    with pytest.raises(ValueError, match="Doubled', which is not registered here"):
        load_pretrained(transformers.BertModel, folder, mechanism=dict(list(given.items())[:1]))
    with pytest.raises(ValueError, match=r"has no place: .* leave out what is not asked for"):
        load_pretrained(transformers.BertModel, folder, mechanism={**given, "elsewhere.Other": Doubled})


def test_a_mechanism_that_nothing_asks_for_is_refused(tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, "gated")
    saved(model, tmp_path)
    for given in ("rpc", Unregistered, {"gated": Unregistered}):
        with pytest.raises(ValueError, match=r"mechanism=.* has no place: attnswap.json of .* names gated"):
            load_pretrained(transformers.BertModel, tmp_path, mechanism=given)


def test_another_mechanism_than_the_recorded_one_is_refused(tmp_path: Path) -> None:
    class Other(Unregistered):
        pass

    model = built("bert")
    swap_attention(model, Unregistered, factor=2.0)
    folder = saved(model, tmp_path)
    with pytest.raises(ValueError, match=r"mechanism= gives .*Other, and attnswap.json has .*Unregistered'"):
        load_pretrained(transformers.BertModel, folder, mechanism=Other)
    moved = type("Unregistered", (Unregistered,), {"__module__": "elsewhere"})
    loaded = load_pretrained(transformers.BertModel, folder, mechanism=moved)
    assert type(loaded.encoder.layer[1].attention.self.mechanism) is moved


def test_the_main_process_alone_removes_a_stale_plan(tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, "symmetric")
    saved(model, tmp_path / "model")
    swap_attention(model, "softmax")
    model.save_pretrained(tmp_path / "model", is_main_process=False)
    assert (tmp_path / "model" / PLAN).exists()
    model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model" / PLAN).exists()
    (tmp_path / "file").write_text("mine")
    model.save_pretrained(tmp_path / "file")  # transformers logs that this is a file
    assert (tmp_path / "file").read_text() == "mine"


CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize("factor", [torch.ones(2), {"a": [{1: "a key that comes back as a string"}]}, CIRCLE])
def test_options_that_are_no_plain_data_are_said(factor: object, tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, Unregistered, factor=factor)
    with pytest.warns(UserWarning, match=r"options of encoder.layer.0.* are no plain data"):
        model.save_pretrained(tmp_path)

    def factory(spec: AttentionSpec) -> AttentionMechanism:
        return Unregistered(spec, torch.ones(2))

    loaded = load_pretrained(transformers.BertModel, tmp_path, mechanism=factory)
    assert isinstance(loaded.encoder.layer[1].attention.self.mechanism, Unregistered)


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


def test_all_files_are_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers' own rule: what is newer than the time stamps that it took at its start."""
    uploaded: list[str] = []

    def upload(self: object, folder: str, repo: str, stamps: dict[str, float], **kwargs: object) -> None:
        uploaded.extend(each.name for each in Path(folder).iterdir() if each.name not in stamps)

    monkeypatch.setattr(transformers.PreTrainedModel, "_upload_modified_files", upload)
    plain = transformers.PreTrainedModel.save_pretrained

    def pushing(self: nn.Module, folder: Path, *args: object, **kwargs: object) -> None:
        stamps = {each.name: 0.0 for each in Path(folder).iterdir()}
        plain(self, folder, *args, **kwargs)
        self._upload_modified_files(folder, "me/model", stamps)

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", pushing)
    model = built("bert")
    swap_attention(model, "gated")
    saved(model, tmp_path)
    assert {PLAN, TENSORS, "model.safetensors"} <= {*uploaded}
    assert "_upload_modified_files" not in vars(model)


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


@pytest.mark.filterwarnings("ignore:saving 2 swapped")
def test_two_may_save_at_once(tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, "gated")
    models = [model, copy.deepcopy(model)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(10):
            list(pool.map(lambda model: model.save_pretrained(tmp_path), models))
    assert torch.equal(output(load_pretrained(transformers.BertModel, tmp_path)), output(model))
    assert not list(tmp_path.glob("*.partial"))


def test_a_variant_has_its_own_weights(tmp_path: Path) -> None:
    built("bert").save_pretrained(tmp_path)
    model = built("bert")
    swap_attention(model, "gated")
    model.save_pretrained(tmp_path, variant="fp16")
    loaded = load_pretrained(transformers.BertModel, tmp_path, variant="fp16")
    assert torch.equal(output(loaded), output(model))
    with pytest.raises(ValueError, match="saved without swapped attention"):
        load_pretrained(transformers.BertModel, tmp_path)


def test_other_processes_write_nothing_and_may_have_no_weights(tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, "gated")
    model.save_pretrained(tmp_path, is_main_process=False, state_dict={})
    assert not (tmp_path / PLAN).exists()


def test_wrapped_layers_are_saved_by_their_own_names(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = built("bert")
    swap_attention(model, "gated", layers=[0])
    swap_attention(model, "symmetric", layers=[1])
    before = output(model)
    for index in range(2):
        model.encoder.layer[index] = checkpoint_wrapper(model.encoder.layer[index])
    assert torch.equal(output(load_pretrained(transformers.BertModel, saved(model, tmp_path))), before)


def test_a_projection_that_was_replaced_after_the_swap_is_saved_as_it_is(tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, "symmetric")
    before = output(model)
    model.encoder.layer[0].attention.self.query = nn.Linear(16, 16)
    assert torch.equal(output(load_pretrained(transformers.BertModel, saved(model, tmp_path))), before)


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
