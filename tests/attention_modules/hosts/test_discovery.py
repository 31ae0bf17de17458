"""A survey asks few hosts about few modules, finds what asking all about all finds, and remembers no model."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import timm
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from attention_modules import SelfAttention, restore_attention, swap_attention
from attention_modules.hosts import discovery
from attention_modules.hosts.base import Host
from attention_modules.hosts.discovery import Survey, survey
from attention_modules.hosts.table import loaded_hosts


class OwnForward(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class NobodysAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Mixed(nn.Module):
    """Layers of several hosts, shared ones, near misses, and strangers."""

    def __init__(self) -> None:
        super().__init__()
        self.own = SelfAttention(8, 2)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 8)
        self.decoder = nn.TransformerDecoderLayer(8, 2, 8)
        self.shared = nn.ModuleList([self.encoder.self_attn, nn.Linear(2, 2)])
        self.odd = nn.ModuleList([OwnForward(8, 2), NobodysAttention()])
        self.vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
        self.swin = timm.create_model(
            "swin_tiny_patch4_window7_224", img_size=56, window_size=7, depths=(1, 1), embed_dim=8
        )
        self.bert = BertModel(
            BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
        )


def swap_some(model: Mixed) -> None:
    swap_attention(model, "symmetric", where=["vit.blocks.1.attn", "own", "bert.*"])


def set_forward(model: Mixed) -> None:
    layer = model.vit.blocks[0].attn
    layer.forward = type(layer).forward.__get__(layer)


@pytest.fixture(scope="module")
def model() -> Mixed:
    return Mixed()


@pytest.mark.parametrize("change", [lambda _: None, swap_some, restore_attention, set_forward])
def test_what_asking_every_host_about_every_module_finds(
    model: Mixed, change: Callable[[Mixed], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    survey(model)
    change(model)
    found = survey(model)
    for kind in {base for host in loaded_hosts() for base in type(host).__mro__ if "concerns" in vars(base)}:
        monkeypatch.setattr(kind, "concerns", lambda self, kind: True)
    assert found == survey(model)
    assert len(found.layers) >= 9
    assert len(found.others) >= 2


def names(found: Survey) -> list[str]:
    return [layer.name for layer in found.layers]


def test_the_next_survey_sees_every_change() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 1), nn.Linear(4, 4))
    assert names(survey(model)) == ["0"]
    model[0] = nn.Linear(4, 4)
    model[1] = layer = nn.MultiheadAttention(4, 2)
    assert [(each.name, each.module) for each in survey(model).layers] == [("1", layer)]
    swap_attention(model, "softmax")
    assert type(survey(model).layers[0].module) is not nn.MultiheadAttention
    restore_attention(model)
    layer.forward = nn.MultiheadAttention.forward.__get__(layer)  # its class's own, as accelerate leaves it
    assert names(survey(model)) == ["1"]
    layer.forward = nn.Identity().forward
    assert names(survey(model)) == []
    assert [other.name for other in survey(model).others] == ["1"]


def test_nothing_of_a_model_is_kept() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 1))
    layer = weakref.ref(model[0])
    survey(model)
    del model
    gc.collect()
    assert layer() is None


def test_modules_of_no_attention_are_no_question(model: Mixed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host is asked once for each class, and then about the modules of those that it names: 0.8 ms for 12 ms."""
    asked: list[type] = []

    class Counting(Host):
        def concerns(self, kind: type[nn.Module]) -> bool:
            asked.append(kind)
            return False

        def understands(self, module: nn.Module) -> bool:
            raise AssertionError(f"asked about {module}")

        spec = query_parts = qk_rows = Host.groups  # type: ignore[assignment]

    monkeypatch.setattr(discovery, "loaded_hosts", lambda: [Counting()])
    survey(nn.Sequential(*(nn.Linear(1, 1) for _ in range(50))))
    assert asked == [nn.Sequential, nn.Linear]
