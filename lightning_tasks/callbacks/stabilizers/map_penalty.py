"""What penalties of attention maps share: they enter the loss through what queries and keys of a map are made of."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from attention_modules import AttentionMechanism, NoMapError
from attention_modules.kernels import has_autocast
from attention_modules.mechanisms.shared.acting import FactorMap
from attention_modules.mechanisms.shared.probe import acting_map, other_parameters
from lightning_tasks.callbacks.stabilizers.loss_penalty import LossPenalty


class MapPenalty(LossPenalty, shared=True):
    """Adds weight · Σ over layers and calls of :meth:`_penalty` to the loss of each training batch.

    The map is the one that acts, where that is softmax of some queries and keys, its rows over their sums. All that the
    mechanism is given takes the gradient if it trains (queries, keys, values, a learned bias on the logits), and so do
    the mechanism's Parameters.
    """

    of = "neither queries nor keys"

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self._taken: set[int] = set()  # layers that have such a map

    @abstractmethod
    def _penalty(self, query: Tensor, key: Tensor, given: dict[str, Any]) -> Tensor:
        """Of one layer's call, a scalar, without the weight; the map is softmax(query keyᵀ), by the logits' rest."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._taken.clear()

    def _see(
        self, index: int, query: Tensor, key: Tensor, given: dict[str, Any], call: tuple[Any, dict[str, Any]]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not query.numel():
            return None
        args, kwargs = call
        mechanism = self._mechanism(self._layers[index])
        if index not in self._taken:
            with torch.no_grad():
                self._factors(index, mechanism, args, kwargs)
            self._taken.add(index)
        owned = {name: each for name, each in mechanism.named_parameters() if each.requires_grad}
        x = [] if kwargs.get("x") is None else [kwargs["x"]]
        parts = [query, key, *x, *owned.values()]
        if any(each.requires_grad for each in parts):
            further = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
            parts += [each for each in further if each.requires_grad]
        parts = list({id(part): part for part in parts}.values())
        as_now = _autocast_as_now(query.device)
        counting = given["counting"]

        def penalty(*given: Tensor) -> Tensor:
            now = _by_part(parts, given)
            parameters = {name: now[id(each)] for name, each in owned.items()}
            with as_now, other_parameters(mechanism, parameters):
                factors = self._factors(index, mechanism, *_exchanged(args, kwargs, now))
            mask = factors.attn_mask
            logits = {"attn_mask": mask, "is_causal": factors.is_causal, "scale": factors.scale}
            return self._penalty(factors.q, factors.k, {**logits, "counting": counting})

        attached = self._attach(index, penalty, *parts)
        if attached is None:
            return None
        return _exchanged(args, kwargs, _by_part(parts, attached))

    def _factors(
        self, index: int, mechanism: AttentionMechanism, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> FactorMap:
        """The queries and keys of which the map's rows, over their sums, are softmax.

        Raises:
            ValueError: if there are none.
        """
        try:
            found, why = acting_map(mechanism, *args, **kwargs), ""
        except NoMapError as error:
            found, why = None, f" ({error})"
        if not isinstance(found, FactorMap) or found.weight is not None:
            raise ValueError(
                f"{type(self).__name__} is of maps that are softmax of some queries and keys, and that of "
                f"{type(mechanism).__name__} in {self._layers[index].name!r} is none with this mask{why}; exclude= it"
            )
        return found.normalized()


def _by_part(parts: Sequence[Tensor], given: Sequence[Tensor]) -> dict[int, Tensor]:
    """Others in place of tensors, with what hosts note at these (such as keys that have no value)."""
    for part, new in zip(parts, given, strict=True):
        vars(new).update(vars(part))
    return {id(part): new for part, new in zip(parts, given, strict=True)}


def _exchanged(
    args: Sequence[Any], kwargs: Mapping[str, Any], now: Mapping[int, Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with other tensors in place of some."""
    new = {name: now.get(id(value), value) for name, value in kwargs.items()}
    return tuple(now.get(id(value), value) for value in args), new


def _autocast_as_now(device: torch.device) -> AbstractContextManager[Any]:
    """A context with the autocast that is here, for the backward pass, which has none."""
    if not has_autocast(device.type) or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, torch.get_autocast_dtype(device.type))
