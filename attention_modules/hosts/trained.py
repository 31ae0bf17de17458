"""Parameters that a swap made, and the optimizers that should hold them.

An optimizer that was built before a swap holds the former Parameters: what stands in their place would stay as it
is without a word. So the Parameters that a swap makes are remembered, by weak references only, until the first step of
an optimizer that holds them; a step of one that holds their predecessors is an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet, ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from attention_modules.hosts.base import Swapped
from attention_modules.mechanism import AttentionMechanism


@dataclass(eq=False)
class _Made:
    """A place in a model whose Parameter a swap put there, or took away for a later one to come.

    Args:
        name: the Parameter's name in the model.
        layer: the attention layer.
        owner: the module that holds the Parameter.
        tensor: the Parameter's name in its owner.
        old: what stood there before; None where nothing did.
        met: the optimizers that were looked at.
    """

    name: str
    layer: ref[nn.Module]
    owner: ref[nn.Module]
    tensor: str
    old: ref[nn.Parameter] | None
    met: WeakSet[Optimizer] = field(default_factory=WeakSet)

    def _training(self) -> nn.Parameter | None:
        owner = self.owner()
        current = None if owner is None else owner._parameters.get(self.tensor)
        return current if current is not None and current.requires_grad else None

    def forgotten(self) -> bool:
        """Whether the layer, or all that could be held in place of the Parameter, is gone."""
        return self.owner() is None or self.layer() is None or (self.old is not None and self.old() is None)

    def stale(self, optimizer: Optimizer, held: set[int]) -> bool:
        """Whether the optimizer holds the old Parameter in place of one that trains now."""
        old, current = self.old and self.old(), self._training()
        if old is None:
            return False
        if id(old) not in held or (current is not None and id(current) in held):
            self.met.add(optimizer)
            return False
        return current is not None

    def left_out(self, optimizer: Optimizer, held: set[int]) -> bool:
        """Whether the optimizer passes by this additional Parameter, but not by its layer, for the second time.

        At the first step the optimizer that holds it may be still to come.
        """
        layer, current = self.layer(), self._training()
        if self.old is not None or layer is None or current is None:
            return False
        if not any(id(other) in held for other in layer.parameters()):
            return False
        second = optimizer in self.met
        self.met.add(optimizer)
        return second

    def held_as_added(self, held: set[int]) -> bool:
        """Whether this is an additional Parameter, and the optimizer's."""
        current = self._training()
        return self.old is None and current is not None and id(current) in held


_made: list[_Made] = []
_hooks: list[Any] = []


class _Place(NamedTuple):
    """Where a Parameter stands."""

    name: str
    layer: nn.Module
    owner: nn.Module
    tensor: str
    parameter: nn.Parameter


Owned = dict[tuple[int, str], _Place]


def owned_parameters(layers: Mapping[str, nn.Module]) -> Owned:
    """Every Parameter of the layers, given by name, and where it stands."""
    return {
        (id(owner), tensor): _Place(f"{path}.{tensor}" if path else tensor, layer, owner, tensor, parameter)
        for name, layer in layers.items()
        for path, owner in layer.named_modules(prefix=name)
        for tensor, parameter in owner._parameters.items()
        if parameter is not None
    }


def made_parameters(layers: Mapping[str, nn.Module], before: Owned) -> list[_Place]:
    """The Parameters of these layers that :func:`owned_parameters` did not give before."""
    old = {id(place.parameter) for place in before.values()}
    return [place for place in owned_parameters(layers).values() if id(place.parameter) not in old]


def remember_made(layers: Mapping[str, nn.Module], before: Owned) -> None:
    """Remember which Parameters of these layers are others than :func:`owned_parameters` gave before."""
    now = {key: id(place.parameter) for key, place in owned_parameters(layers).items()}
    changed = [(place, ref(place.parameter)) for key, place in before.items() if now.get(key) != id(place.parameter)]
    added = [
        (place, None) for place in made_parameters(layers, before) if (id(place.owner), place.tensor) not in before
    ]
    _made[:] = [made for made in _made if not made.forgotten()]
    for place, replaced in (*changed, *added):
        _made.append(_Made(place.name, ref(place.layer), ref(place.owner), place.tensor, replaced))
    if _made and not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check_step))


def forget_made(model: nn.Module) -> None:
    """Forget what swaps made in a model that no optimizer is to train, as a copy that shares another's weights."""
    parts = {id(module) for module in model.modules()}
    _made[:] = [made for made in _made if id(made.layer()) not in parts]


def _check_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Before a step of any optimizer: does it hold what the swaps since the last check made?

    Raises:
        RuntimeError: if it holds a Parameter that was replaced by one that it lacks.
    """
    if all(made.old is not None and optimizer in made.met for made in _made):
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    _made[:] = [made for made in _made if not (made.forgotten() or made.held_as_added(held))]
    stale = [made.name for made in _made if made.stale(optimizer, held)]
    if stale:
        raise RuntimeError(
            f"this {type(optimizer).__name__} was built before the attention was swapped or restored: it holds "
            f"{_some(stale, 'Parameter')} as before, and what the model has there now would never train. Swap first "
            "and build the optimizer then; or build it, and its scheduler, again now"
        )
    left = [made for made in _made if made.left_out(optimizer, held)]
    if left:
        _made[:] = [made for made in _made if made not in left]
        warnings.warn(
            f"no optimizer holds {_some([made.name for made in left], 'new Parameter')} of the swapped attention, "
            f"while this {type(optimizer).__name__} trains the same layers: add them by add_param_group(), or "
            "build it after the swap; requires_grad_(False) says that they are to stay as they are",
            stacklevel=3,
        )


def _some(names: list[str], what: str) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{len(names)} {what}{'s' if len(names) > 1 else ''} ({names[0]}{more})"


def plain_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every Parameter by name, as :func:`~attention_modules.restore_attention` would leave it; the model stays.

    Mechanisms' own tensors are left out, and kept query rows stand before the current keys and values. Two models that
    differ in their attention alone start from the same weights exactly where these are equal.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Swapped)}
    mechanisms = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, AttentionMechanism))
    plain: dict[str, Tensor] = {
        name: parameter.detach() for name, parameter in model.named_parameters() if not name.startswith(mechanisms)
    }
    for name, layer in layers.items():
        for part in layer.dropped_query:
            key = part.key(f"{name}." if name else "")
            rows = part.rows_in(layer)
            if rows is not None and part.filled(layer):
                plain[key] = part.join(rows.to(plain[key]), plain[key]) if key in plain else rows
    return plain
