"""Folders of models whose mechanism has no short name: it is given, and never imported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from attention_modules import AttentionMechanism, AttentionSpec, SoftmaxAttention, load_pretrained, swap_attention
from attention_modules.hosts.base import PLAN
from attention_modules.mechanism import short_name
from tests.attention_modules.hosts.saving.saved_models import built, output, recorded, saved
from tests.rows import each_row

transformers = pytest.importorskip("transformers")


class Unregistered(SoftmaxAttention):
    """A mechanism without a short name; its import path in a file is never imported."""

    def __init__(self, spec: AttentionSpec, factor: object = 1.0) -> None:
        super().__init__(spec)
        self.factor = factor


def test_a_mechanism_without_a_short_name_must_be_given(tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, Unregistered, factor=2.0)
    folder = saved(model, tmp_path)
    says = r"Unregistered', which is not registered here: it is known by its import path, .* Give .* as mechanism="
    with pytest.raises(ValueError, match=says) as refused:
        load_pretrained(transformers.BertModel, folder)
    assert "mport its package" not in str(refused.value)  # it is imported
    loaded = load_pretrained(transformers.BertModel, folder, mechanism=Unregistered)
    assert loaded.encoder.layer[0].attention.self.mechanism.factor == 2.0
    plan = folder / PLAN
    plan.write_text(plan.read_text().replace(short_name(Unregistered), "absent"))
    with pytest.raises(ValueError, match="'absent', which is not registered here: import the package that registers"):
        load_pretrained(transformers.BertModel, folder)


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


CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)


@each_row("factor", [torch.ones(2), {"a": [{1: "a key that comes back as a string"}]}, CIRCLE])
def test_options_that_are_no_plain_data_are_said(factor: object, tmp_path: Path) -> None:
    model = built("bert")
    swap_attention(model, Unregistered, factor=factor)
    with pytest.warns(UserWarning, match=r"options of encoder.layer.0.* are no plain data"):
        model.save_pretrained(tmp_path)

    def factory(spec: AttentionSpec) -> AttentionMechanism:
        return Unregistered(spec, torch.ones(2))

    with pytest.raises(
        ValueError, match=r"no options of .*Unregistered', .* Give a callable that takes an AttentionSpec"
    ):
        load_pretrained(transformers.BertModel, tmp_path, mechanism=Unregistered)
    loaded = load_pretrained(transformers.BertModel, tmp_path, mechanism=factory)
    assert isinstance(loaded.encoder.layer[1].attention.self.mechanism, Unregistered)
