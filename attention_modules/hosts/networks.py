"""Which networks a model holds: a student and its teacher, two towers, or just one.

Layers are counted within a network. What runs in series is one network: an encoder and its decoder, a backbone and its
head, stages, lists of blocks beside each other. Equal shapes alone do not tell two networks. Parts of equal shapes are
networks of their own, *twins*, where they are copies, where each takes an input that the other cannot give, where one
is called a teacher, or where one is frozen behind one that trains. So are, of any shapes, a frozen part that is called
a teacher beside one that trains, and parts that each embed an input of their own, as the towers of CLIP do, or are
called as those are.
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
_TEACHER = re.compile(r"teacher|target|momentum|ema$|^ema|average|reference")


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

    @property
    def stays(self) -> bool:
        """Whether a swap leaves it as it is, beside others: it is frozen, or called a teacher, which may be yet."""
        return self.frozen or any(map(_is_called_teacher, self.name.lower().split(".")))

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
            self._are_twins(one, other, alone) or self._is_teacher(one, other, alone) or _are_towers(one, other)
            for one, other in combinations(alone, 2)
        ):
            return True
        if any(self.layers[name].cross for names in parts.values() for name in names):
            return False
        kinds = {_unnumbered(part) for part in alone if _embeds(self.modules[part], self._inside(part, alone))}
        return len(kinds) > 1

    def _are_twins(self, one: str, other: str, parts: Mapping[str, Sequence[str]]) -> bool:
        """Whether something tells that neither runs on what the other gives; a number tells two layers of a stack."""
        numbered = _unnumbered(one) == _unnumbered(other)
        if numbered and not all(self._holds_a_stack(part, parts) for part in (one, other)):
            return False
        frozen = [_is_frozen(self.modules[part]) for part in (one, other)]
        # Of parts in series the first ones are frozen, and one of them alone embeds an input.
        teacher = frozen == [False, True]
        if teacher and numbered and all(_is_whole(self.modules[part]) for part in (one, other)):
            return True
        if not self._have_equal_stacks(one, other, parts):
            return False
        apart = teacher and not self._are_lists(one, other, parts)
        return apart or self._are_copies(one, other, parts) or self._take_inputs(one, other, parts)

    def _is_teacher(self, one: str, other: str, parts: Mapping[str, Sequence[str]]) -> bool:
        """Whether one alone is called so, beside a student, or frozen beside one that trains, or of equal shapes."""
        names = [part.rpartition(".")[2].lower() for part in (one, other)]
        of_moco = {name[:-1] for name in names} == {f"{names[0][:-2]}_"} and {name[-1:] for name in names} == {*"kq"}
        named = [bool(_TEACHER.search(name)) or (of_moco and name.endswith("k")) for name in names]
        if sorted(named) != [False, True]:
            return False
        frozen = [_is_frozen(self.modules[part]) for part in (one, other)]
        if frozen == named or (any(map(_is_called_teacher, names)) and any("student" in name for name in names)):
            return True
        return not self._are_lists(one, other, parts) and self._have_equal_stacks(one, other, parts)

    def _stacks(self, one: str, other: str, parts: Mapping[str, Sequence[str]]) -> list[nn.Module]:
        """What branches into the layers of two parts; the parts where one has a single layer."""
        stems = [self._branches(part, parts[part])[0] for part in (one, other)]
        return [self.modules[name] for name in ((one, other) if {*stems} & {*self.layers} else stems)]

    def _have_equal_stacks(self, one: str, other: str, parts: Mapping[str, Sequence[str]]) -> bool:
        first, second = self._stacks(one, other, parts)
        return _shape_of(first) == _shape_of(second)

    def _are_copies(self, one: str, other: str, parts: Mapping[str, Sequence[str]]) -> bool:
        """Whether their values are equal, and not because one layer was copied into all places of both."""
        if not are_copies(*self._stacks(one, other, parts)):
            return False
        first, *rest = [self.modules[name] for name in self._branches(one, parts[one])[1]] or [self.modules[one]]
        differ = not all(are_copies(first, block) for block in rest)
        return differ or _is_frozen(self.modules[one]) != _is_frozen(self.modules[other])

    def _are_lists(self, one: str, other: str, parts: Mapping[str, Sequence[str]]) -> bool:
        """Whether both are bare lists of what holds layers."""
        return all(
            isinstance(self.modules[part], nn.ModuleList | nn.Sequential)
            and {name.removeprefix(f"{part}.").partition(".")[0] for name in parts[part]}
            == {name for name, _ in self.modules[part].named_children()}
            for part in (one, other)
        )

    def _take_inputs(self, one: str, other: str, parts: Mapping[str, Sequence[str]]) -> bool:
        """Whether each embeds an input, or widens one that is no output of such a part."""
        return all(
            _embeds(self.modules[part], self._inside(part, parts)) or self._widens(part, parts) for part in (one, other)
        )

    def _widens(self, part: str, parts: Mapping[str, Sequence[str]]) -> bool:
        """Whether a projection before its numbered blocks widens features that its last one does not give again."""
        within = re.compile(re.escape(part) + r".*\.\d+(?=\.|$)")
        blocks = {block[0] if (block := within.match(name)) else name for name in parts[part]}
        inside = {id(each) for block in blocks for each in self.modules[block].modules()}
        first, last, before = None, None, True
        for each in self.modules[part].modules():
            before = before and id(each) not in inside
            widths = None if id(each) in inside else _widths(each)
            first, last = first or (widths if before else None), widths or last
        return first is not None and last is not None and first[0] < first[1] and first[0] != last[1]

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


def _is_called_teacher(name: str) -> bool:
    """Whether its last word says so: a teacher_forcing or teacher_head is none."""
    return name.rpartition("_")[2] in ("teacher", "teachers")


def _unnumbered(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _embeds(module: nn.Module, inside: Iterable[int]) -> bool:
    """Whether something outside its attention layers embeds tokens or patches."""
    kinds = (type(each) for each in module.modules() if id(each) not in inside)
    return any(
        issubclass(kind, nn.Embedding) or "PatchEmbed" in kind.__name__ or kind.__name__.endswith("Embeddings")
        for kind in kinds
    )


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """How many features a projection takes and gives; None for another module."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return module.in_channels, module.out_channels
    return None


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
