"""``torch.export`` of swapped models with a free batch and a free number of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from attention_modules import swap_attention
from attention_modules.layers import SelfAttention
from attention_modules.mechanism import mechanism_class
from tests.attention_modules.hosts.cases import (
    BETWEEN_LAYERS,
    DIM,
    ENCODER,
    MECHANISMS,
    OF_A_LENGTH,
    built,
    hugging_face,
    settled,
)

LONGEST = 200  # more than the rows of a chunk
SIZES = {"batch": {0: Dim("batch", max=64)}, "length": {1: Dim("length", min=3, max=LONGEST)}}
ALL = {**MECHANISMS, "scaled, variant='matrix'": ("scaled", {"variant": "matrix", "num_tokens": LONGEST})}
STATES = [name for name, (mechanism, _) in ALL.items() if mechanism_class(mechanism).cache == "state"]
FEW = ("softmax", "rpc", "entmax", "forgetting", "mom")


def _swapped(model: nn.Module, mechanism: str) -> nn.Module:
    name, options = ALL[mechanism]
    swap_attention(model, name, **{**options, **({"num_tokens": LONGEST} if "num_tokens" in options else {})})
    return model


def _program(model: nn.Module, given: dict[str, Tensor], sizes: dict[str, Any], strict: bool = False) -> nn.Module:
    return export(model, (), given, dynamic_shapes=sizes, strict=strict).module()


def _of_features(model: nn.Module, sizes: dict[int, Any], strict: bool = False) -> nn.Module:
    return export(model, (torch.randn(3, 9, DIM),), dynamic_shapes=(sizes,), strict=strict).module()


def _subject(mechanism: str) -> nn.Module:
    """A layer alone, which takes half the time of an encoder, or an encoder where layers read each other's values."""
    if mechanism in BETWEEN_LAYERS:
        return _swapped(settled(ENCODER), mechanism)
    return _swapped(settled(lambda: SelfAttention(DIM, 4, is_causal=mechanism in STATES)), mechanism)


def _encoder(mechanism: str) -> nn.Module:
    model = settled(ENCODER)
    if mechanism not in BETWEEN_LAYERS:
        model.layers = model.layers[:1]
    return _swapped(model, mechanism)


def _assert_equal(model: nn.Module, program: nn.Module, batch: int, length: int) -> None:
    x = torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(length))
    torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mechanism", STATES)
def test_with_a_state_the_batch_is_free_and_a_free_length_is_refused(mechanism):
    model = _subject(mechanism)
    program = _of_features(model, SIZES["batch"])
    for batch in (1, 5):
        _assert_equal(model, program, batch, 9)
    with pytest.raises(Exception, match="export for one number of tokens"):
        _of_features(model, SIZES["batch"] | SIZES["length"])


@pytest.mark.parametrize("mechanism", [name for name in ALL if name not in STATES])
def test_batch_and_length_are_free(mechanism):
    model = _subject(mechanism)
    program = _of_features(model, SIZES["batch"] | SIZES["length"])
    for batch, length in ((1, 9), (5, LONGEST), (2, 3)):
        _assert_equal(model, program, batch, length)


def _alternating() -> list[Any]:
    """Batch and length in turn; those that take seconds and share their code with others are slow."""
    names = [name for name in ALL if name not in STATES]
    marks = [() if name in FEW else pytest.mark.slow for name in names]
    return [
        pytest.param(name, list(SIZES)[i % 2], marks=mark)
        for i, (name, mark) in enumerate(zip(names, marks, strict=True))
    ]


@pytest.mark.parametrize(("mechanism", "free"), _alternating())
def test_one_of_them_is_free_in_strict_mode(mechanism, free):
    model = _encoder(mechanism)
    program = _of_features(model, SIZES[free], strict=True)
    _assert_equal(model, program, *((5, 9) if free == "batch" else (3, 150)))


@pytest.mark.parametrize("mechanism", OF_A_LENGTH)
def test_a_table_bounds_the_length(mechanism):
    name = "scaled, variant='matrix'" if mechanism == "scaled" else mechanism
    model = _subject(name)
    with pytest.raises(Exception, match=rf"Dim\('length', max={LONGEST}\)"):
        _of_features(model, {1: Dim("length", max=LONGEST + 1)})
    program = _of_features(model, {1: Dim.AUTO})
    _assert_equal(model, program, 3, LONGEST)
    with pytest.raises(Exception, match=f"<= ?{LONGEST}|{LONGEST} tokens"):
        program(torch.randn(3, LONGEST + 1, DIM))


@pytest.mark.parametrize("mechanism", FEW)
def test_a_vision_transformer_takes_any_batch(mechanism):
    model = _swapped(built("timm-vit"), mechanism)
    program = _program(model, {"x": torch.randn(3, 3, 8, 8)}, {"x": SIZES["batch"]})
    images = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(program(x=images), model(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mechanism", FEW)
def test_bert_takes_any_length_with_padding(mechanism):
    sizes = {"hidden_size": DIM, "num_attention_heads": 4, "intermediate_size": DIM, "max_position_embeddings": LONGEST}
    build = hugging_face("BertModel", "BertConfig", vocab_size=50, num_hidden_layers=1, **sizes)
    model = _swapped(settled(build), mechanism)
    free = {"input_ids": SIZES["length"], "attention_mask": SIZES["length"]}

    def given(length: int) -> dict[str, Tensor]:
        ids = torch.randint(5, 40, (2, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones(2, length, dtype=torch.long)
        mask[1, -2:] = mask[0, 1] = 0
        return {"input_ids": ids, "attention_mask": mask}

    program = _program(model, given(9), free)
    found, expected = program(**given(150))[0], model(**given(150))[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
