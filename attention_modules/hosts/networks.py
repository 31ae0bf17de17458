"""Which networks a model holds: a student and its teacher, two towers, or just one.

Layers are counted within a network. Two parts of a model are networks of their own where they are *twins*, whose
stacks of layers have Parameters of equal names and shapes. So are a frozen part that is called a teacher beside one
that trains, and parts that each embed an input of their own, as the towers of CLIP do, or are called as those are. What
runs in series is one network: an encoder and its decoder, a backbone and its head, numbered stages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attention_modules.hosts.base import Swapped
from attention_modules.hosts.trained import plain_parameters

if TYPE_CHECKING:
    from attention_modules.hosts.discovery import Found


_TOWERS = re.compile(r"visual|vision|image"), re.compile(r"text|^transformer$")  # of CLIP, by OpenAI and open_clip
_TEACHER = re.compile(r"teacher|target|momentum|ema$|^ema|average|reference|frozen")


@dataclass(frozen=True)
class Network:
    """A network within a model.

    Args:
        name: its name in the model; "" where it is the model, or what other networks leave of it.
        stem: name of the module that branches into its layers.
        layers: names of its attention layers, in module order.
        frozen: whether none of its Parameters trains.
    """

    name: str
    stem: str
    layers: tuple[str, ...]
    frozen: bool

    def within(self, layer: str) -> str:
        """A layer's name below the stem, which its counterpart in a twin shares."""
        return layer.removeprefix(self.stem).removeprefix(".")


def networks_of(modules: Mapping[str, nn.Module], layers: Sequence[Found]) -> list[Network]:
    """The networks of a model, in module order; one where nothing tells parts of it apart.

    Args:
        modules: every module by name.
        layers: every attention layer of them.
    """
    return _Model(modules, layers).networks("", [layer.name for layer in layers])


def are_twins(one: Network, other: Network, modules: Mapping[str, nn.Module]) -> bool:
    """Whether the stacks of two networks have Parameters of equal names and shapes."""
    return one != other and _shape_of(modules[one.stem]) == _shape_of(modules[other.stem])


def are_copies(one: nn.Module, other: nn.Module) -> bool:
    """Whether the Parameters of two modules are equal, value by value, whatever mechanisms act in them."""
    if _shape_of(one) != _shape_of(other):
        return False
    first, second = plain_parameters(one), plain_parameters(other)
    return first.keys() == second.keys() and all(_equal(tensor, second[name]) for name, tensor in first.items())


def _equal(one: Tensor, other: Tensor) -> bool:
    alike = one.device == other.device and one.dtype == other.dtype and not one.is_meta
    return alike and torch.equal(one, other)


class _Model:
    """A model whose networks are looked for."""

    def __init__(self, modules: Mapping[str, nn.Module], layers: Sequence[Found]) -> None:
        self.modules = modules
        self.layers = {layer.name: layer for layer in layers}

    def networks(self, name: str, held: Sequence[str]) -> list[Network]:
        """The networks below a module, which holds these layers."""
        stem, parts = self._branches(name, held)
        if self._tells_apart(parts):
            return [network for part, names in parts.items() for network in self.networks(part, names)]
        found: list[Network] = []
        for part, names in parts.items():
            inner = [] if part.rpartition(".")[2].isdecimal() else self.networks(part, names)
            found += inner if len(inner) > 1 else []
        taken = {layer for network in found for layer in network.layers}
        rest = tuple(layer for layer in held if layer not in taken)
        own = [Network(name, stem, rest, _is_frozen(self.modules[name]))] if rest else []
        return sorted([*found, *own], key=lambda network: held.index(network.layers[0]))

    def _branches(self, name: str, held: Sequence[str]) -> tuple[str, dict[str, list[str]]]:
        """The module at or below ``name`` that branches into layers, and its children that hold some."""
        while True:
            depth = len(name.split(".")) if name else 0
            parts: dict[str, list[str]] = {}
            for layer in held:
                if layer != name:
                    parts.setdefault(".".join(layer.split(".")[: depth + 1]), []).append(layer)
            if len(parts) != 1:
                return name, parts
            (name,) = parts

    def _tells_apart(self, parts: Mapping[str, Sequence[str]]) -> bool:
        """Whether these parts are networks, and not parts of one."""
        alone = {
            part: names
            for part, names in parts.items()
            if part not in self.layers and "decoder" not in part.rpartition(".")[2].lower()
        }
        if any(
            self._are_twins(one, other, alone) or self._is_teacher(one, other) or _are_towers(one, other)
            for one, other in combinations(alone, 2)
        ):
            return True
        if any(self.layers[name].cross for names in parts.values() for name in names):
            return False
        kinds = {_unnumbered(part) for part in alone if _embeds(self.modules[part], self._inside(part, alone))}
        return len(kinds) > 1

    def _are_twins(self, one: str, other: str, parts: Mapping[str, Sequence[str]]) -> bool:
        """Numbers tell layers and stages apart: there only a copy of a stack counts."""
        stems = [self._branches(part, parts[part]) for part in (one, other)]
        if any(stem in self.layers for stem, _ in stems):  # one layer, of which only what is around it tells
            stems = [(part, {}) for part in (one, other)]
        first, second = (self.modules[stem] for stem, _ in stems)
        if _unnumbered(one) != _unnumbered(other):
            return _shape_of(first) == _shape_of(second)
        if not all(self._holds_a_stack(part, parts) for part in (one, other)):
            return False
        # Of stages in series the first ones are frozen, and one of them alone embeds an input.
        teacher = not _is_frozen(self.modules[one]) and _is_frozen(self.modules[other])
        if teacher and all(_is_whole(self.modules[part]) for part in (one, other)):
            return True
        apart = teacher or all(_embeds(self.modules[part], self._inside(part, parts)) for part in (one, other))
        return are_copies(first, second) or (apart and _shape_of(first) == _shape_of(second))

    def _is_teacher(self, one: str, other: str) -> bool:
        """Whether one is frozen and called so, and the other trains."""
        named = [bool(_TEACHER.search(part.rpartition(".")[2].lower())) for part in (one, other)]
        frozen = [_is_frozen(self.modules[part]) for part in (one, other)]
        return named != [True, True] and any(named) and frozen == named

    def _holds_a_stack(self, part: str, parts: Mapping[str, Sequence[str]]) -> bool:
        """Whether a part holds numbered layers, and is no layer of a stack itself, nor one with parallel attentions."""
        return any(re.search(r"(?<!\.attns)\.\d+(\.|$)", layer.removeprefix(part)) for layer in parts[part])

    def _inside(self, part: str, parts: Mapping[str, Sequence[str]]) -> set[int]:
        return {id(module) for name in parts[part] for module in self.modules[name].modules()}


def _are_towers(one: str, other: str) -> bool:
    """Whether one part is called as what sees images is, and the other as what reads texts."""
    names = [part.rpartition(".")[2].lower() for part in (one, other)]
    seen = [[bool(kind.search(name)) for kind in _TOWERS] for name in names]
    return sorted(seen) == [[False, True], [True, False]]


def _unnumbered(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _embeds(module: nn.Module, inside: Iterable[int]) -> bool:
    """Whether something outside its attention layers embeds tokens or patches."""
    kinds = (type(each) for each in module.modules() if id(each) not in inside)
    return any(
        issubclass(kind, nn.Embedding) or "PatchEmbed" in kind.__name__ or kind.__name__.endswith("Embeddings")
        for kind in kinds
    )


def _is_whole(module: nn.Module) -> bool:
    """Whether a module is a model of a library, as its configuration tells."""
    return hasattr(module, "pretrained_cfg") or hasattr(getattr(module, "config", None), "model_type")


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def _shape_of(module: nn.Module) -> tuple[object, ...]:
    """Class, and names and shapes of Parameters, as they are without mechanisms."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    for name, layer in module.named_modules():
        if not isinstance(layer, Swapped):
            continue
        prefix = f"{name}." if name else ""
        shapes = {key: shape for key, shape in shapes.items() if not key.startswith(f"{prefix}mechanism.")}
        for part in layer.dropped_query:
            key, rows = part.key(prefix), part.rows_in(layer)
            held = shapes.get(key, () if rows is None else tuple(rows.shape))
            shapes[key] = (*held[: part.dim], part.full, *held[part.dim + 1 :])
    kind = module.plain_class if isinstance(module, Swapped) else type(module)
    return (kind, *sorted(shapes.items()))
