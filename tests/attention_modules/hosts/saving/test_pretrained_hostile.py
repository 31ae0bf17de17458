"""Folders of swapped models that are damaged, edited, foreign or hostile: refused by name, and no code runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from attention_modules import load_pretrained, restore_attention, swap_attention
from attention_modules.hosts.base import PLAN
from tests.attention_modules.hosts.saving.saved_models import SIZES, built, output, saved
from tests.rows import each_row

transformers = pytest.importorskip("transformers")


def test_code_that_a_folder_brings_is_not_run(tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, "symmetric")
    folder = saved(model, tmp_path)
    canary = tmp_path / "canary"
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w').close()\nclass Config: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_pretrained(transformers.AutoModel, folder)
    assert not canary.exists()


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": 5_000}], ids=["one-file", "shards"])
def test_a_plan_beside_the_weights_of_a_plain_model_is_refused(shards: dict[str, int], tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, "uniform")
    with pytest.warns(UserWarning, match=PLAN):
        model.save_pretrained(tmp_path, **shards)
    assert torch.equal(output(load_pretrained(transformers.BertModel, tmp_path)), output(model))
    restore_attention(model)
    model.save_pretrained(tmp_path, **shards)
    with pytest.raises(ValueError, match=f"{PLAN} .* is not of the weights beside it"):
        load_pretrained(transformers.BertModel, tmp_path)


@each_row("shards", [{}, {"max_shard_size": 5_000}])
def test_a_plan_of_other_layers_than_the_weights_is_refused(shards: dict[str, int], tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, "symmetric")
    model.save_pretrained(tmp_path, **shards)
    plan = json.loads((tmp_path / PLAN).read_text("utf-8"))
    layers = [*plan["layers"]]
    for changed in (layers[:1], [{**layers[0], "name": "encoder.layer.7.attention.self"}, layers[1]]):
        (tmp_path / PLAN).write_text(json.dumps({**plan, "layers": changed}), "utf-8")
        with pytest.raises(
            ValueError, match=rf"names {len(changed)} swapped layers .* marks of 2 .*save the model again"
        ):
            load_pretrained(transformers.BertModel, tmp_path)


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": 5_000}], ids=["one-file", "shards"])
def test_a_plan_of_another_save_is_refused(shards: dict[str, int], tmp_path: Path) -> None:
    """Of the same layers and mechanism, with another option."""
    model = built("bert")
    swap_attention(model, "sink", start=1.0)
    model.save_pretrained(tmp_path, **shards)
    kept = (tmp_path / PLAN).read_bytes()
    swap_attention(model, "sink", start=2.0)
    model.save_pretrained(tmp_path, **shards)
    assert torch.equal(output(load_pretrained(transformers.BertModel, tmp_path)), output(model))
    (tmp_path / PLAN).write_bytes(kept)  # as after a kill between the two files
    with pytest.raises(ValueError, match=f"{PLAN} of .* is not of the weights beside it"):
        load_pretrained(transformers.BertModel, tmp_path)


@each_row(
    "content",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"format": 1, "layers": []}',
        '{"format": 4, "layers": [{"name": "encoder", "mechanism": "rpc", "options": {}, "query": true}]}',
        '{"format": 3, "layers": []}',
        '{"format": 3, "layers": 3}',
        '{"format": 3, "layers": [{"name": "a"}]}',
        '{"format": 3, "layers": [{"name": 1, "mechanism": "rpc", "options": {}, "query": true}]}',
        '{"format": 3, "layers": [{"name": "encoder", "mechanism": "os.system", "options": {}, "query": true}]}',
        '{"format": 3, "layers": [{"name": "*", "mechanism": "rpc", "options": {}, "query": true}]}',
        '{"format": 3, "layers": [{"name": "encoder", "mechanism": "rpc", "options": {"where": "*"}, "query": true}]}',
        '{"format": 3, "layers": [{"name": "encoder", "mechanism": "rpc", "options": {"spec": 1}, "query": true}]}',
        '{"format": 3, "layers": [{"name": "encoder", "mechanism": "rpc", "options": {}, "query": 1}]}',
        '{"format": 3, "layers": [{"name": "a", "mechanism": "rpc", "options": {}, "query": true, "is_causal": 1}]}',
        '{"format": 3, "layers": [%s, %s]}'
        % (('{"name": "encoder", "mechanism": "sink", "options": {}, "query": true}',) * 2),
    ],
)
def test_a_damaged_plan_is_named(content: str, tmp_path: Path) -> None:
    built("bert").save_pretrained(tmp_path)
    (tmp_path / PLAN).write_text(content)
    with pytest.raises(ValueError, match=PLAN):
        load_pretrained(transformers.BertModel, tmp_path)


def test_a_model_with_fewer_layers_has_those_that_it_has(tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, "symmetric")
    saved(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.warns(UserWarning, match=r"has no encoder\.layer\.1.*1 of 2 layers are swapped"):
        loaded = load_pretrained(transformers.BertModel, tmp_path)
    assert loaded.encoder.layer[0].attention.self.mechanism is not None
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 0}))
    with pytest.raises(ValueError, match="other layers than BertModel has"):
        load_pretrained(transformers.BertModel, tmp_path)


def test_a_class_with_other_layers_is_refused(tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, "sink")
    with pytest.raises(
        ValueError, match=f"{PLAN} is of other layers than ViTModel has: .* give the class that was saved"
    ):
        load_pretrained(transformers.ViTModel, saved(model, tmp_path), config=transformers.ViTConfig(**SIZES))


def test_weights_of_another_save_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes model.safetensors where shards lie beside it, and a kill may come before the weights."""
    first, second = built("bert"), built("bert")
    swap_attention(first, "rpc", iterations=2)
    swap_attention(second, "symmetric")
    first.save_pretrained(tmp_path / "both")
    second.save_pretrained(tmp_path / "both", max_shard_size=5_000)
    restore_attention(second)
    second.save_pretrained(tmp_path / "plain", max_shard_size=5_000)
    first.save_pretrained(tmp_path / "killed")
    swap_attention(second, "symmetric")

    def killed(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transformers.PreTrainedModel, "save_pretrained", killed)
        with pytest.raises(KeyboardInterrupt):
            second.save_pretrained(tmp_path / "killed")
    (tmp_path / "plain" / PLAN).write_bytes((tmp_path / "both" / PLAN).read_bytes())
    for name in ("both", "plain", "killed"):
        with pytest.raises(ValueError, match="not of the weights beside"):
            load_pretrained(transformers.BertModel, tmp_path / name)


@each_row("index", ["[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "gone.safetensors"}}', "{"])
def test_a_damaged_index_is_named(index: str, tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, "uniform")
    model.save_pretrained(tmp_path, max_shard_size=5_000)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"the weights of .* cannot be read"):
        load_pretrained(transformers.BertModel, tmp_path)


def test_a_file_that_is_removed_meanwhile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another process, say, that saves a plain model."""
    model = built("bert")
    swap_attention(model, "gated")
    folder, find = saved(model, tmp_path), transformers.utils.cached_file

    def meanwhile(*args: Any, **kwargs: Any) -> str:
        found = find(*args, **kwargs)
        (folder / PLAN).unlink()
        return found

    monkeypatch.setattr(transformers.utils, "cached_file", meanwhile)
    with pytest.raises(FileNotFoundError, match=f"{PLAN} was removed .*another process .*once that is done"):
        load_pretrained(transformers.BertModel, folder)


def test_a_folder_without_weights_is_no_folder_of_other_weights(tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, "uniform")
    (saved(model, tmp_path) / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=f"beside {PLAN} there is no model.safetensors"):
        load_pretrained(transformers.BertModel, tmp_path)


@pytest.mark.parametrize("safe", [None, True, False])
def test_the_marks_that_are_read_are_those_of_the_weights_that_are_loaded(safe: bool | None, tmp_path: Path) -> None:
    """A folder may hold weights of both kinds, of which transformers takes those that are asked for."""
    model, other = built("bert"), built("bert")
    swap_attention(model, "gated")
    folder = saved(model, tmp_path)
    torch.save(other.state_dict(), folder / "pytorch_model.bin")
    if safe is not False:
        assert torch.equal(output(load_pretrained(transformers.BertModel, folder, use_safetensors=safe)), output(model))
        return
    with pytest.raises(ValueError, match="saved without swapped attention"):
        load_pretrained(transformers.BertModel, folder, use_safetensors=False)


def test_weights_of_another_name_are_refused(tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, "gated")
    folder = saved(model, tmp_path)
    (folder / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": "other.safetensors"}))
    with pytest.raises(ValueError, match=r"transformers_weights='other.safetensors'.*take it out"):
        load_pretrained(transformers.BertModel, folder)
    with pytest.raises(ValueError, match="gguf_file= names other weights"):
        load_pretrained(transformers.BertModel, folder, gguf_file="other.gguf")


def test_weights_that_were_cast_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = built("bert")
    swap_attention(model, "uniform")
    file = saved(model, tmp_path) / "model.safetensors"
    save_file({key: tensor.half() for key, tensor in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(ValueError, match="or weights that were cast"):
        load_pretrained(transformers.BertModel, tmp_path)


def test_another_class_is_refused(tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, "symmetric")
    saved(model, tmp_path)
    with pytest.raises(TypeError, match="class of Hugging Face models"):
        load_pretrained(nn.Linear, tmp_path)


@pytest.mark.parametrize("outside", ["../{}", "{folder}/../{}", "below/../../{}", "link/{}", "..\\{}", "C:\\{}", ""])
def test_shards_outside_the_folder_are_refused(outside: str, tmp_path: Path) -> None:
    model, folder = built("bert"), tmp_path / "model"
    swap_attention(model, "symmetric")
    model.save_pretrained(folder, max_shard_size=5_000)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    (shard, *_) = sorted({*content["weight_map"].values()})
    (folder / shard).rename(tmp_path / shard)
    (folder / "link").symlink_to(tmp_path)
    named = outside.format(shard, folder=folder)
    content["weight_map"] = {key: named if file == shard else file for key, file in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="which is no file of the index's folder"):
        load_pretrained(transformers.BertModel, folder)


def test_shards_that_are_links_into_the_blobs_of_a_cache_are_read(tmp_path: Path) -> None:
    model, folder, blobs = built("bert"), tmp_path / "snapshots" / "0", tmp_path / "blobs"
    swap_attention(model, "symmetric")
    model.save_pretrained(folder, max_shard_size=5_000)
    blobs.mkdir()
    for place, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(place))
        file.symlink_to(Path("../../blobs", str(place)))
    assert torch.equal(output(load_pretrained(transformers.BertModel, folder)), output(model))
