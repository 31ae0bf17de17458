"""Loaders that read the weight files of a swapped model alone: they get its weights, or say what they miss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attention_modules import load_pretrained, restore_attention, swap_attention
from attention_modules.hosts.base import MARK
from tests.attention_modules.hosts.saving.saved_models import SIZES, built, output
from tests.rows import each_row

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:saving 2 swapped attention layers")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {key: each for file in sorted(folder.glob("*.safetensors")) for key, each in load_file(file).items()}


def by_safetensors(model: nn.Module, folder: Path) -> None:
    from safetensors.torch import load_model

    load_model(model, folder / "model.safetensors")


def by_torch_load(model: nn.Module, folder: Path) -> None:
    torch.save(tensors_of(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    accelerate_in_model(model, folder)


def by_shards(model: nn.Module, folder: Path) -> None:
    from transformers.trainer_utils import load_sharded_checkpoint

    load_sharded_checkpoint(model, folder, strict=False)


def accelerate_in_model(model: nn.Module, folder: Path) -> None:
    pytest.importorskip("accelerate").load_checkpoint_in_model(model, folder)


def accelerate_dispatch(model: nn.Module, folder: Path) -> None:
    pytest.importorskip("accelerate").load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"})


LOADERS: dict[str, Callable[[nn.Module, Path], object]] = {
    "load_state_dict": lambda model, folder: model.load_state_dict(tensors_of(folder)),
    "not strictly": lambda model, folder: model.load_state_dict(tensors_of(folder), strict=False),
    "safetensors.load_model": by_safetensors,
    "pytorch_model.bin": by_torch_load,
    "load_sharded_checkpoint": by_shards,
    "accelerate, shards": accelerate_in_model,
    "accelerate, dispatch": accelerate_dispatch,
}


def trained(family: str, mechanism: str, **options: object) -> nn.Module:
    """A swapped model whose mechanisms are not as they start."""
    model = built(family)
    swap_attention(model, mechanism, **options)
    for name, parameter in model.named_parameters():
        if "mechanism" in name:
            nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("number", range(2 * len(LOADERS)))
def test_the_weight_files_alone_hold_everything(number: int, tmp_path: Path) -> None:
    """Each loader with two mechanisms."""
    loader, mechanism = [*LOADERS][number % len(LOADERS)], ("gated", "sink", "scaled", "symmetric")[number % 4]
    options = {"num_tokens": 5} if mechanism == "scaled" else {}
    model = trained("bert", mechanism, **options)
    model.save_pretrained(tmp_path, **({"max_shard_size": 5_000} if "shard" in loader else {}))
    torch.manual_seed(1)
    other = type(model)(model.config).eval()
    swap_attention(other, mechanism, **options)
    LOADERS[loader](other, tmp_path)
    assert torch.equal(output(other), output(model))
    if loader != "accelerate, dispatch":  # which sets Parameters by name, and a query without rows has none
        assert torch.equal(output_restored(other), output_restored(model))


def output_restored(model: nn.Module) -> Tensor:
    restore_attention(model)
    return output(model)


@each_row("mechanism", ["gated", "sink"])
def test_what_a_file_lacks_of_a_mechanism_is_missing(mechanism: str, tmp_path: Path) -> None:
    model = trained("bert", mechanism)
    model.save_pretrained(tmp_path)
    state, layer = tensors_of(tmp_path), "encoder.layer.1.attention.self."
    own = {key for key in state if key.startswith(f"{layer}mechanism.") and MARK not in key}
    for lacking in (own, {min(own)}, {key for key in state if key.startswith(layer)}):
        rest = {key: each for key, each in state.items() if key not in lacking}
        assert own & lacking <= {*model.load_state_dict(rest, strict=False).missing_keys}
        with pytest.raises(RuntimeError, match=r"Missing key.*layer\.1\.attention\.self\.mechanism"):
            model.load_state_dict(rest)


@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_from_before_the_swap_leaves_the_mechanism_as_it_is(strict: bool) -> None:
    plain, model = built("bert"), trained("bert", "gated")
    kept = {key: each.clone() for key, each in model.state_dict().items() if "mechanism" in key}
    assert not model.load_state_dict(plain.state_dict(), strict=strict).missing_keys
    assert all(torch.equal(model.state_dict()[key], each) for key, each in kept.items())


def thinned(model: nn.Module) -> nn.Module:
    """Without its first layer."""
    parent, name = (model.encoder, "layer") if hasattr(model, "encoder") else (model.transformer, "h")
    setattr(parent, name, getattr(parent, name)[1:])
    model.config.num_hidden_layers = 1
    return model


@pytest.mark.filterwarnings("ignore:saving 1 swapped attention layers")
@each_row(
    ("family", "mechanism", "options"),
    [
        ("bert", "differential", {}),
        ("bert", "differential", {"pairs": "heads"}),
        ("gpt2", "differential", {"pairs": "heads"}),
        ("bert", "performer", {}),
        ("gpt2", "performer", {}),
    ],
)
def test_what_a_mechanism_has_by_its_place_is_in_the_file(
    family: str, mechanism: str, options: dict[str, object], tmp_path: Path
) -> None:
    """A layer may have another place where it is loaded than where it was swapped."""
    model = thinned(trained(family, mechanism, **options))
    model.save_pretrained(tmp_path)
    assert torch.equal(output(load_pretrained(type(model), tmp_path)), output(model))
    other = thinned(built(family))
    swap_attention(other, mechanism, **options)
    other.load_state_dict(model.state_dict())
    assert torch.equal(output(other), output(model))
    half = thinned(built(family))
    swap_attention(half, mechanism, **options)
    half.half().load_state_dict({key: x.half() for key, x in model.state_dict().items()})
    assert torch.equal(output(half), output(model.half()))


@pytest.mark.filterwarnings("ignore:BartForCausalLM has no")
@pytest.mark.filterwarnings("ignore:saving 4 swapped attention layers")
def test_a_decoder_alone_computes_as_behind_its_encoder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = transformers.BartConfig(
        **sizes, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=20, max_position_embeddings=8
    )
    whole = transformers.BartForConditionalGeneration(config).eval()
    swap_attention(whole, "differential")
    whole.save_pretrained(tmp_path)
    alone = load_pretrained(transformers.BartForCausalLM, tmp_path)
    given = torch.randn(2, 5, 16)
    assert torch.equal(*(model.model.decoder(inputs_embeds=given, use_cache=False)[0] for model in (alone, whole)))


def test_a_folder_without_the_depth_of_a_layer_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = trained("bert", "differential")
    model.save_pretrained(tmp_path)
    state = {key: x for key, x in tensors_of(tmp_path).items() if not key.endswith("mechanism.depth")}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"(?s)not have the tensors of differential in .*Missing key.*depth"):
        load_pretrained(type(model), tmp_path)
    with pytest.raises(RuntimeError, match=r"Missing key.*layer\.1\.attention\.self\.mechanism\.depth"):
        model.load_state_dict(state)


def test_mechanisms_may_share_a_parameter(tmp_path: Path) -> None:
    model = trained("bert", "sink")
    first, second = (layer.attention.self.mechanism for layer in model.encoder.layer)
    for name in [*first._parameters]:
        second._parameters[name] = first._parameters[name]
    model.save_pretrained(tmp_path)
    assert {*model.state_dict()} <= {*tensors_of(tmp_path)}


def test_a_file_that_lacks_the_tensors_of_one_mechanism_is_told_of(tmp_path: Path) -> None:
    """As one of which two mechanisms shared a Parameter, which is saved once; or the second was swapped later."""
    from safetensors.torch import load_file, load_model, save_file, save_model

    def tied() -> nn.Module:
        model = trained("bert", "sink")
        first, second = (layer.attention.self.mechanism for layer in model.encoder.layer)
        second._parameters.update(first._parameters)
        return model

    path = tmp_path / "model.safetensors"
    for lacking in (0, 1):
        part = f"encoder.layer.{lacking}.attention.self.mechanism."
        save_file({key: x.clone() for key, x in tied().state_dict().items() if not key.startswith(part)}, path)
        other = trained("bert", "sink")
        other.register_load_state_dict_pre_hook(lambda *_: trained("bert", "sink").load_state_dict({}, strict=False))
        with pytest.warns(
            UserWarning, match=rf"layer\.{1 - lacking}\..* none for others .*layer\.{lacking}\.attention"
        ):
            assert not other.load_state_dict(load_file(path)).missing_keys
        with pytest.raises(RuntimeError, match=rf"Missing key.*layer\.{lacking}\.attention"):
            tied().load_state_dict(load_file(path))
    save_model(tied(), path)
    assert load_model(tied(), path) == (set(), [])


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    """transformers makes its state dict anew, without what was swapped."""
    model = trained("bert", "gated")
    model.hf_quantizer = nn.Identity()
    with pytest.raises(ValueError, match=r"Identity writes the weights.*restore_attention\(\).*torch.save"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_empty_state_dict_writes_no_plan(tmp_path: Path) -> None:
    """The Trainer gives one where DeepSpeed writes the weights."""
    model = trained("bert", "gated")
    model.save_pretrained(tmp_path, state_dict={})
    assert not list(tmp_path.glob("attnswap*"))


@pytest.mark.parametrize("mechanism", ["gated", "sink"])
def test_the_trainer_loads_its_best_model_and_resumes(mechanism: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 20, (8, 5), generator=generator)
    data = [{"input_ids": row, "labels": row[0] % 2} for row in tokens]
    config = transformers.BertConfig(**SIZES, vocab_size=20, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)

    def trainer(epochs: int) -> transformers.Trainer:
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(config)
        swap_attention(model, mechanism)
        kept = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
        best = {"metric_for_best_model": "eval_loss", "greater_is_better": True}  # the first is the worst
        quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
        rate = {"learning_rate": 0.05, "lr_scheduler_type": "constant", "num_train_epochs": epochs}
        arguments = transformers.TrainingArguments(str(tmp_path), **kept, **best, **quiet, **rate)
        return transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data)

    first = trainer(2)
    first.train()
    assert first.evaluate()["eval_loss"] == pytest.approx(first.state.best_metric, rel=1e-6)
    again = trainer(2)
    again._load_from_checkpoint(first.state.best_model_checkpoint)
    state = again.model.state_dict()
    assert all(torch.equal(state[key], each) for key, each in first.model.state_dict().items())
