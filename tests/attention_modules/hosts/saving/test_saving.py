"""What `save_pretrained` of a swapped Hugging Face model writes, and what it leaves alone."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from attention_modules import load_pretrained, restore_attention, swap_attention
from attention_modules.hosts.base import PLAN
from tests.attention_modules.hosts.saving.saved_models import built, output, recorded, saved

transformers = pytest.importorskip("transformers")


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


@pytest.mark.parametrize("saved", [None, ["mechanism"]])
def test_an_adapter_is_saved_alone_and_that_is_said(tmp_path: Path, saved: list[str] | None) -> None:
    peft = pytest.importorskip("peft", minversion=transformers.integrations.peft.MIN_PEFT_VERSION)
    model = built("bert")
    swap_attention(model, "gated")
    model.add_adapter(peft.LoraConfig(target_modules=["value"], modules_to_save=saved))
    lost = r"\. Swap the plain" if saved else ", nor are the Parameters of 2"
    with pytest.warns(UserWarning, match=f"2 swapped attention layers are not recorded{lost}"):
        model.save_pretrained(tmp_path)
    assert not (tmp_path / PLAN).exists()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("mechanism", ["twicing", "softmax", None])
def test_the_folder_of_a_peft_model_tells_of_no_swap_and_that_is_said(
    mechanism: str | None, after: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    peft = pytest.importorskip("peft")
    model = built("bert")
    if not after:
        swap_attention(model, mechanism or "twicing")
    adapted = copy.deepcopy(peft.get_peft_model(model, peft.LoraConfig(target_modules=["value"])))
    if after:
        swap_attention(adapted, mechanism or "twicing")
    if mechanism is None:
        restore_attention(adapted)
    recwarn.clear()
    adapted.save_pretrained(tmp_path)
    said = [str(each.message) for each in recwarn if "with 2 swapped attention layers (Twicing" in str(each.message)]
    assert len(said) == (mechanism == "twicing")
    loaded = copy.deepcopy(adapted)
    loaded.load_adapter(tmp_path, "again")
    assert torch.equal(output(loaded), output(adapted))
    assert mechanism is not None or not any(part._state_dict_pre_hooks for part in adapted.modules())


@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["mechanism"]}])
@pytest.mark.parametrize("mechanism", ["gated", "twicing"])
def test_the_parameters_of_mechanisms_that_an_adapter_file_lacks_are_named(
    mechanism: str, more: dict, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    peft = pytest.importorskip("peft")
    model = built("bert")
    swap_attention(model, mechanism)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["value"], **more))
    recwarn.clear()
    adapted.save_pretrained(tmp_path)
    said = " ".join(str(each.message) for each in recwarn)
    lacks = mechanism == "gated" and not more
    assert ("the Parameters of 2 mechanisms are in no file" in said) == lacks
    assert ("modules_to_save=['mechanism']" in said) == lacks


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


def test_the_model_card_names_what_was_swapped(tmp_path: Path) -> None:
    """In a section of its own: what others wrote there stays, and it goes with the swap."""
    model, card = built("bert"), tmp_path / "README.md"
    swap_attention(model, "rpc", layers=[0], iterations=2)
    saved(model, tmp_path)
    assert "| rpc | iterations=2 | 1 |" in card.read_text()
    assert "attnswap.load_pretrained(BertModel, folder)" in card.read_text()
    own = "---\nlicense: mit\n---\n\n# Mine\n\nWith an ü.\n"
    card.write_bytes(own.encode("latin-1"))  # whatever its encoding
    for mechanism in ("gated", lambda q, k, v, **_: v):
        swap_attention(model, mechanism)
        saved(model, tmp_path)
    text = card.read_bytes().decode("latin-1")
    assert text.startswith(own)
    assert text.count("## Attention") == 1
    restore_attention(model)
    swap_attention(model, "softmax")  # for which save_pretrained stays ours
    model.save_pretrained(tmp_path)
    assert card.read_bytes() == own.encode("latin-1")


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
    assert {PLAN, "model.safetensors"} <= {*uploaded}
    assert "_upload_modified_files" not in vars(model)


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


def test_the_method_keeps_its_signature(tmp_path: Path) -> None:
    model = built("bert")
    plain = inspect.signature(type(model).save_pretrained)
    swap_attention(model, "sink")
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # diffusers asks it before it saves
        assert inspect.signature(each.save_pretrained) == plain


@pytest.mark.parametrize("mechanism", ["softmax", "sink", "symmetric", "entmax"])
def test_models_of_other_libraries_say_what_their_folder_lacks(mechanism: str, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")

    class Own(nn.Module, hub.PyTorchModelHubMixin):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)

    model = Own()
    swap_attention(model, mechanism)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.save_pretrained(tmp_path)
        restore_attention(model)
        model.save_pretrained(tmp_path)
    texts = [str(each.message) for each in told]
    assert [("Own.from_pretrained builds plain" in text) for text in texts] == [True] * (mechanism != "softmax")
    assert "save_pretrained" not in vars(model)
