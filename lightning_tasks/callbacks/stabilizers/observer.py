"""Callbacks that read the queries and keys of training batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from attention_modules import AttentionMechanism
from attention_modules.base import queries_of
from attention_modules.function import FunctionAttention
from attention_modules.hosts import AttentionLayer
from attention_modules.masks import seen_tokens
from lightning_tasks.callbacks.monitoring.names import listed
from lightning_tasks.callbacks.monitoring.observer import ForwardPreHook, MechanismObserver


class QueryKeyObserver(MechanismObserver, shared=True):
    """Reads q, k and the logits' other arguments in the training batches for which a subclass calls :meth:`_open`."""

    def __init__(self, *choice: Any) -> None:
        super().__init__(*choice)
        self._layers: list[AttentionLayer] = []
        self._in_backward = False

    def _watches(self, stage: str) -> bool:
        return stage == "fit"

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._layers = self._chosen(pl_module)
        of_mechanism: dict[int, str] = {}
        for layer in self._layers:
            if layer.mechanism is not None and (other := of_mechanism.setdefault(id(layer.mechanism), layer.name)) != (
                layer.name
            ):
                raise ValueError(
                    f"{type(self).__name__} tells layers apart by their mechanisms, and {other!r} and {layer.name!r} "
                    "have one between them: build one for each, or name one of the layers in exclude="
                )

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._in_backward = True  # activation checkpointing runs forward again in there

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._in_backward = False

    def _open(self) -> None:
        """Read until :meth:`_unhook`."""
        self._forget()  # what a batch that was skipped before its end left
        self._in_backward = False
        self._hook(self._readers())

    def _readers(self) -> list[tuple[nn.Module, ForwardPreHook]]:
        """The hooks of a batch that is read."""
        return [(self._mechanism(layer), partial(self._read, index)) for index, layer in enumerate(self._layers)]

    def _read(
        self, index: int, mechanism: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]] | None:
        query, key = args[:2]
        given = {name: kwargs.get(name, default) for name, default in _LOGITS.items()}
        query = queries_of(self._mechanism(self._layers[index]), query, key)
        given["counting"] = seen_tokens(given["attn_mask"], query, key)  # rows of padding reach nobody
        return self._see(index, query, key, given, (args, kwargs))

    def _see(
        self, index: int, query: Tensor, key: Tensor, given: dict[str, Any], call: tuple[Any, dict[str, Any]]
    ) -> Any:
        """Take in what a layer's logits are made of; what is returned, if anything, replaces the mechanism's call."""
        raise NotImplementedError


_LOGITS = {"attn_mask": None, "is_causal": False, "scale": None}


def layers_with_own_logits(layers: list[AttentionLayer]) -> str:
    """The layers whose mechanism has logits of its own, or may have, each with the reason; "" where none has."""
    own = {}
    for layer in layers:
        found: AttentionMechanism | None = layer.mechanism
        why = "a function may change q and k" if isinstance(found, FunctionAttention) else found and found.own_logits
        if why:
            own[layer.name] = f"{type(found).__name__}: {why}"
    return listed(own) if own else ""
