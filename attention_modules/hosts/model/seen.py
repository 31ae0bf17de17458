"""Which tokens count of what a model computes: what no row sees reaches nobody."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules.base import AttentionMechanism
from attention_modules.hosts.base import acting_mechanism
from attention_modules.hosts.discovery import Found
from attention_modules.masks import OTHERS, not_padding, visible

_STACK = re.compile(r"\.\d+\.|\.[^.]*$")  # after the part of a layer's name that its stack has in common
_MARK = 100.0  # times the largest number, so that it is seen behind a small LayerScale


def counting(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Which tokens count by the ``attention_mask`` ``[B, N]`` of a call, boolean; None where it has none.

    Of an encoder-decoder model all count: the mask is of one of its sequences alone. Where a model of sound makes
    frames of samples, it is asked which frames count.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    try:
        given = {**inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments, **kwargs}
    except TypeError:  # the call itself will say what it does not take
        given = dict(kwargs)
    mask = given.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    if (of_frames := getattr(model, "_get_feature_vector_attention_mask", None)) is not None:
        mask = of_frames(int(model._get_feat_extract_output_lengths(mask.shape[1])), mask)  # type: ignore[operator]
    return mask.bool()


@dataclass
class _Call:
    """A call of self-attention: which of its tokens are seen, of how many samples and tokens, and how these lie.

    What :func:`_look` finds: whether some are not seen, and others than in the first call of this size that says so.
    """

    seen: Tensor | None
    size: tuple[int, int]
    samples_first: bool
    is_padded: bool = False
    differs: bool = False

    def lies_in(self, size: tuple[int, ...]) -> bool:
        """Whether an output whose first dimensions have this size may be of these tokens."""
        return size == self.size or (size == self.size[::-1] and not self.samples_first)


class SeenTokens:
    """Which tokens some row sees by the masks of a model's layers; None where all count.

    What none sees reaches nobody, and counts nowhere where it is padding (by
    :func:`~attention_modules.masks.not_padding`). Where it lies in an output that has other tokens than the layers is
    found by a second call, in which that padding is marked.

    Args:
        layers: those that have a mechanism are asked.
        named: which tokens count where a layer's mask does not say so, or is causal alone (as :func:`counting`).
    """

    def __init__(self, layers: Sequence[Found], named: Tensor | None = None) -> None:
        self._layers, self._named = layers, named
        self._calls: list[_Call] = []
        self._of_layers: dict[str, list[Tensor | None]] = {}  # of each call
        self._of_stacks: dict[tuple[str, int, int], Tensor | None] = {}
        self._told: dict[tuple[int, int], tuple[str, int, int]] = {}  # by size, the first whose masks say so
        self._of_outputs: dict[str, Tensor | None] = {}
        self.of_output: Tensor | None = None

    @contextmanager
    def noting(self) -> Iterator[SeenTokens]:
        """Notes, while the model runs, which tokens its layers see."""
        with self._hooked(
            lambda layer, mechanism: mechanism.register_forward_pre_hook(partial(self._note, layer), with_kwargs=True)
        ):
            yield self

    def _note(
        self,
        layer: Found,
        mechanism: AttentionMechanism,
        args: tuple[Tensor, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """The queries of cross-attention are tokens of its own stack."""
        (q, k), mask = args[:2], kwargs.get("attn_mask")
        samples, number = len(q), q.shape[-2]
        stack = _STACK.split(f".{layer.name}")[0], samples, number
        if layer.cross or bool(getattr(k, OTHERS, False)):
            seen = self._of_stacks.get(stack)
        else:
            if mask is not None and mask.shape[-1] > number and not bool(visible(mask[..., number:]).any()):
                k, mask = k[..., :number, :], mask[..., :number]  # without the empty places of a static cache
            seen = not_padding(mask, q, k)
            hides = mask is not None or bool(kwargs.get("is_causal"))  # else its tokens may be others, as many,
            if seen is not None:
                self._told.setdefault((samples, number), stack)
            others = self._told.get((samples, number), stack) != stack  # as those of another stack are
            if seen is None and hides and not others and getattr(self._named, "shape", None) == (samples, number):
                seen = self._named
            self._of_stacks[stack] = seen
            self._calls.append(_Call(seen, (samples, number), layer.host.batch_first(layer.module)))
        for name in layer.names:
            self._of_layers.setdefault(name, []).append(seen)

    def of_layer(self, name: str, call: int = 0) -> Tensor | None:
        """Which tokens count of a layer's queries in a call of it, ``[B, N]``."""
        calls = self._of_layers.get(name, [])
        return calls[call] if call < len(calls) else None

    def of_layer_output(self, name: str) -> Tensor | None:
        """Which tokens count of the output of a layer's first call, ``[B, N]``."""
        return self._of_outputs.get(name)

    def settle(
        self,
        output: Tensor,
        of_layers: Mapping[str, Tensor],
        again: Callable[[], tuple[Tensor, Mapping[str, Tensor]]] | None = None,
    ) -> None:
        """Tell, from what a call gave, which tokens count of it: ``of_output`` and :meth:`of_layer_output`.

        ``of_output`` has the first dimensions of the output: ``[B, N]`` or ``[N, B]`` of ``[B, N, ...]`` or
        ``[N, B, ...]``, ``[B, N]`` of a number for each token, ``[tokens]`` of ``[tokens, C]``.

        Args:
            output: what the model gave.
            of_layers: by name, what layers gave in their first calls, ``[B, N, C]``.
            again: calls the model with the same, and returns both; where None, one is warned if it were needed.
        """
        _look(self._calls)
        self._of_outputs = {name: self.of_layer(name) for name in of_layers}
        size = tuple(output.shape[:2])
        of_size = [call for call in self._calls if call.lies_in(size)] if output.ndim > 2 else []
        padded = any(call.is_padded for call in self._calls)
        is_known = bool(of_size) and _are_one(of_size, size)
        if is_known:
            seen = of_size[0].seen
            self.of_output = seen if seen is None or seen.shape == size else seen.T
        elif not padded and not of_size and output.ndim > 2 and self._named is not None:
            self.of_output = self._named if self._named.shape == size else None
        doubtful = [
            name
            for name, seen in self._of_outputs.items()
            if seen is not None and seen.shape != of_layers[name].shape[:2]
        ]
        found: dict[str, Tensor | None] = dict.fromkeys(doubtful)
        if padded and (doubtful or (not is_known and self._may_hold_tokens(output))):
            if again is None:
                warnings.warn(
                    f"where the tokens of padding lie in the output {tuple(output.shape)} is not known, so that they "
                    "may count: let the model return [B, N, ...] of the tokens of its layers",
                    stacklevel=2,
                )
            else:
                with self._marking():
                    other, others = again()
                self.of_output = self.of_output if is_known else self._unmarked(output, other)
                found = {name: self._unmarked(of_layers[name], others[name]) for name in doubtful}
        self._of_outputs |= found
        if self.of_output is None and output.ndim > 3 and of_size:
            self.of_output = torch.ones(size, dtype=torch.bool, device=output.device)

    def _may_hold_tokens(self, output: Tensor) -> bool:
        """Whether the output may be more than one row of numbers for each sample."""
        if output.ndim == 0:
            return False
        samples, size = {call.size[0] for call in self._calls}, tuple(output.shape)
        return output.ndim > 2 or len(output) not in samples or any(call.size == size for call in self._calls)

    def _unmarked(self, output: Tensor, marked: Tensor) -> Tensor | None:
        """Which tokens of the output are not made of padding; None where all count, or padding reaches all."""
        same = (output == marked) | (output.isnan() & marked.isnan())
        something = output != 0  # zeros may be filled in, or cut off, whatever is marked
        if output.ndim > 2:
            same, something = same.flatten(2).all(-1), something.flatten(2).any(-1)
        elif output.ndim == 2 and all(output.shape != call.size for call in self._calls):
            same, something = same.all(-1), something.any(-1)
        known = same & something
        gone = [~call.seen.any(1) for call in self._calls if call.seen is not None and len(call.seen) == len(same)]
        if same.ndim == 2 and gone:
            without = torch.stack(gone).all(0)
            of_tokens = (known.any(1) & (~same).any(1)).any()  # else a row is of a sample, and all of it is changed
            known = known if bool(of_tokens) else (~without)[:, None].expand_as(known)
        return None if bool(known.all()) or not bool(known.any()) else known

    @contextmanager
    def _marking(self) -> Iterator[None]:
        """While the model runs, what its self-attention gives to padding is something else."""
        with self._hooked(lambda layer, mechanism: mechanism.register_forward_hook(self._mark(layer))):
            yield

    def _mark(self, layer: Found) -> Callable[..., Tensor | None]:
        numbers = count()

        def hook(mechanism: AttentionMechanism, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            seen = self.of_layer(layer.name, next(numbers))
            if layer.cross or seen is None or output.shape[-2] != seen.shape[-1]:
                return None
            found = output.nan_to_num()
            step = _MARK * (1 + found.abs().amax()) * (1 - 2 * (torch.arange(output.shape[-1]) % 2)).to(found)
            return torch.where(seen[:, None, :, None], output, found + step)

        return hook

    @contextmanager
    def _hooked(self, hook: Callable[[Found, AttentionMechanism], Any]) -> Iterator[None]:
        handles = []
        for layer in self._layers:
            if (mechanism := acting_mechanism(getattr(layer.module, "mechanism", None))) is not None:
                handles.append(hook(layer, mechanism))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _look(calls: Sequence[_Call]) -> None:
    """Ask the tensors of all calls at once, as each answer would have a device waited for."""
    told = [(call, call.seen) for call in calls if call.seen is not None]
    first: dict[tuple[int, int], Tensor] = {}
    for call, seen in told:
        first.setdefault(call.size, seen)
    if not told:
        return
    answers = [torch.stack([~seen.all(), (seen != first[call.size]).any()]) for call, seen in told]
    found = torch.stack([each.to(answers[0]) for each in answers]).tolist()
    for (call, _), (is_padded, differs) in zip(told, found, strict=True):
        call.is_padded, call.differs = is_padded, differs


def _are_one(calls: Sequence[_Call], size: tuple[int, ...]) -> bool:
    """Whether these calls tell the same of an output of this size, and of how its tokens lie."""
    if size[0] == size[1] and not all(call.samples_first for call in calls):
        return False
    alike = all(call.size == calls[0].size and call.seen is not None and not call.differs for call in calls)
    return alike or not any(call.is_padded for call in calls)


def unplaced(seen: Tensor, tokens: Tensor) -> Tensor:
    """Of which samples of a layer's input it is not known where padding lies, boolean ``[B]``.

    A layer may attend among other tokens, as it pads inside, or puts registers in front.

    Args:
        seen: which of the tokens that it attends among some row sees.
        tokens: its input, ``[B, N, C]``.
    """
    hidden, more = ~seen, seen.numel() // len(tokens) - tokens.shape[1]
    if len(seen) != len(tokens):
        return (hidden.sum() > max(0, more) * len(tokens)).expand(len(tokens))
    return hidden.sum(1) > max(0, more)
