"""Learned maps of positions read columns: positions that are none are refused by name."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import CLIPConfig, CLIPModel

from attention_modules.hosts.huggingface.columns import check_positions
from attention_modules.swap import restore_attention, swap_attention
from tests.attention_modules.hosts.cases import HOSTS, decoder, gpt2, hugging_face

CAUSAL_BUILDS = {"llama": decoder("Llama", num_hidden_layers=2), "gpt2": gpt2(n_layer=2)}
FIRST, SECOND = torch.tensor([[5, 9, 3, 8, 22]]), torch.tensor([[7, 30, 31, 2]])
BY_COLUMN = [("position_bias", {"num_tokens": 16}), ("scaled", {"num_tokens": 16})]
OTHERS = [("softmax", {}), ("rpc", {}), ("dam", {"num_tokens": 16}), ("scaled", {"variant": "scalar"})]


def swapped_model(family: str, name: str, options: dict[str, object]) -> nn.Module:
    torch.manual_seed(0)
    model = CAUSAL_BUILDS[family]().eval()
    swap_attention(model, name, **options)
    for path, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.3)
        if "mechanism" in path:
            nn.init.normal_(parameter, std=0.3)
    return model


def run(model: nn.Module, tokens: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
    return model(tokens, use_cache=False, **given)[0]


@pytest.mark.parametrize("family", CAUSAL_BUILDS)
@pytest.mark.parametrize(("name", "options"), BY_COLUMN, ids=[name for name, _ in BY_COLUMN])
def test_other_positions_are_refused(family: str, name: str, options: dict[str, object]) -> None:
    model = swapped_model(family, name, options)
    packed, positions = torch.cat([FIRST, SECOND], 1), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    with pytest.raises(ValueError, match=r"counts columns, and these position_ids are not 0 to N - 1"):
        run(model, packed, position_ids=positions)
    left = torch.tensor([[0, 0, *SECOND[0].tolist()]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="counts columns, and these position_ids"):
        run(model, left, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    with pytest.raises(ValueError, match="counts columns, and this mask hides a token"):
        run(model, left, attention_mask=mask)
    right = torch.tensor([[*SECOND[0].tolist(), 0, 0]])
    padded = run(model, right, attention_mask=mask.flip(1))[:, :4]
    torch.testing.assert_close(padded, run(model, SECOND), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("name", "options"), OTHERS, ids=[f"{name} {options}" for name, options in OTHERS])
def test_relative_mechanisms_take_packed_sequences(name: str, options: dict[str, object]) -> None:
    model = swapped_model("llama", name, options)
    packed, positions = torch.cat([FIRST, SECOND], 1), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    together = run(model, packed, position_ids=positions)
    torch.testing.assert_close(together[:, 5:], run(model, SECOND), atol=1e-5, rtol=1e-4)


def test_distances_over_a_gap_are_those_of_columns_where_positions_are_columns() -> None:
    model = HOSTS["bert"].build().eval()
    swap_attention(model, "dam", num_tokens=16)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1]])
    one, other = (model(torch.tensor([[5, 9, hidden, 3, 8, 22]]), attention_mask=mask)[0] for hidden in (1, 7))
    shown = mask[0].bool()
    torch.testing.assert_close(one[:, shown], other[:, shown])


def test_a_part_whose_module_is_gone_is_no_obstacle() -> None:
    """As of code that was executed and never imported."""
    model = HOSTS["bert"].build().eval()
    words = model.get_input_embeddings()
    words.__class__ = type("Own", (type(words),), {"__module__": "gone"})
    swap_attention(model, "dam", num_tokens=16)
    model(torch.tensor([[5, 9, 3]]))


def test_positions_of_several_axes_are_taken() -> None:
    positions = torch.arange(6).expand(3, 2, 6)  # of time, height and width
    check_positions("dam", positions, torch.tensor([[False] * 4 + [True] * 2] * 2), by_distance=True)
    with pytest.raises(ValueError, match="these position_ids do not rise"):
        check_positions("dam", positions // 2, torch.zeros(2, 6, dtype=torch.bool), by_distance=True)


@pytest.mark.parametrize("family", [*CAUSAL_BUILDS, "roberta"])
def test_distances_over_a_gap_are_refused(family: str) -> None:
    """Where positions go on behind padding, as of what a model makes of the mask or of its tokens."""
    model = (HOSTS["roberta"].build if family == "roberta" else CAUSAL_BUILDS[family])().eval()
    swap_attention(model, "dam", num_tokens=16)
    tokens, mask = torch.tensor([[5, 9, 1, 1, 8, 22]]), torch.tensor([[1, 1, 0, 0, 1, 1]])
    positions = {} if family == "roberta" else {"position_ids": mask.cumsum(-1) - mask}
    with pytest.raises(ValueError, match=r"counts columns, and these position_ids do not"):
        model(tokens, attention_mask=mask, **positions)
    order = mask.argsort(dim=1, descending=True, stable=True)  # padded behind
    behind, seen = tokens.gather(1, order), mask.gather(1, order)
    model(behind, attention_mask=seen)
    if family == "roberta":  # whose padding is told by its tokens, too
        model(behind)
        model(behind, attention_mask=seen[:, None, None].expand(-1, -1, 6, -1).bool())


def test_padding_before_is_refused_where_all_tokens_are_seen_too() -> None:
    model = hugging_face("BertModel", "BertConfig", hidden_size=16, num_attention_heads=2, vocab_size=50)().eval()
    swap_attention(model, "position_bias", num_tokens=8)
    seen = torch.tensor([[0, 0, 1, 1, 1]])
    model(FIRST, attention_mask=seen.flip(1))
    with pytest.raises(ValueError, match="counts columns, and this mask hides a token"):
        model(FIRST, attention_mask=seen)


POSITIONED = {
    "distilbert": ("DistilBertModel", "DistilBertConfig", {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}),
    "modernbert": (
        "ModernBertModel",
        "ModernBertConfig",
        {"hidden_size": 16, "num_hidden_layers": 1, "pad_token_id": 0},
    ),
    "clip": ("CLIPTextModel", "CLIPTextConfig", {"hidden_size": 16, "num_hidden_layers": 1, "eos_token_id": 2}),
    "bert": ("BertModel", "BertConfig", {"hidden_size": 16, "num_hidden_layers": 1}),
}
REVERSED = torch.arange(4, -1, -1)[None]


@pytest.mark.parametrize("name", ["position_bias", "scaled", "dam"])
@pytest.mark.parametrize("family", POSITIONED)
def test_positions_that_only_the_model_is_told_are_refused(family: str, name: str) -> None:
    model_class, config_class, sizes = POSITIONED[family]
    model = hugging_face(model_class, config_class, num_attention_heads=2, vocab_size=50, **sizes)().eval()
    swap_attention(model, name, num_tokens=16)
    plain = model(FIRST)[0]
    torch.testing.assert_close(model(FIRST, position_ids=torch.arange(5)[None])[0], plain)
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ValueError, match="counts columns, and these position_ids"):
            twin(FIRST, position_ids=REVERSED)
    swap_attention(model, "softmax")
    model(FIRST, position_ids=REVERSED)
    swap_attention(model, name, num_tokens=16)
    restore_attention(model)
    model(FIRST, position_ids=REVERSED)
    assert not any(part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize("where", ["vision_model*", "text_model*"])
def test_positions_of_a_text_are_none_of_an_image(where: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": 50, "max_position_embeddings": 16}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 16, "patch_size": 4})).eval()
    given = {"input_ids": torch.arange(3, 11)[None], "pixel_values": torch.randn(1, 3, 16, 16)}
    given["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    before = model(**given).logits_per_image
    swap_attention(model, "position_bias", where=where, num_tokens=17)
    refused = pytest.raises(ValueError, match="are not 0 to N - 1") if where.startswith("text") else nullcontext()
    with refused:
        torch.testing.assert_close(model(**given).logits_per_image, before)
