"""How far what a model computes is from what it computed before."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules.base import AttentionMechanism
from attention_modules.hosts.base import Host, Swapped, acting_mechanism
from attention_modules.hosts.discovery import Found, survey
from attention_modules.masks import OTHERS, not_padding, visible
from attention_modules.precision import to_float64
from attention_modules.swap import made_observable, make_observable

_STACK = re.compile(r"\.\d+\.|\.[^.]*$")  # after the part of a layer's name that its stack has in common


def relative_squares(given: Tensor, wanted: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """‖given - wanted‖² and ‖wanted‖² of each sample, ``[B]`` in fp32 or above.

    Args:
        given: a tensor.
        wanted: what it is compared with, of the same shape.
        valid: which tokens count, boolean ``[B, N]``, where the tensors are ``[B, N, ...]``; all where None.

    Example:
        >>> import torch
        >>> from attention_modules.analysis.agreement import relative_squares
        >>> relative_squares(torch.tensor([[3.0, 1.0]]), torch.tensor([[3.0, 0.0]]))
        (tensor([1.]), tensor([9.]))
    """
    with torch.autocast(wanted.device.type, enabled=False):
        given, wanted = wide(given), wide(wanted)
        error, size = (given - wanted).square(), wanted.square()
    if valid is not None and _has_tokens(wanted, valid):
        hidden = ~valid.reshape(*valid.shape, *[1] * (wanted.ndim - 2))
        error, size = error.masked_fill(hidden, 0.0), size.masked_fill(hidden, 0.0)
    return error.reshape(len(error), -1).sum(1), size.reshape(len(size), -1).sum(1)


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


def let_be_seen(model: nn.Module, names: Sequence[str]) -> None:
    """Put softmax into plain layers, for :func:`seeing`: those of these names, and what other self-attention takes it.

    Raises:
        AttentionSwapError: if one of these names does not take it.
    """
    make_observable(model, names)
    plain = [layer for layer in survey(model).layers if not hasattr(layer.module, "mechanism")]
    made_observable(model, [layer.name for layer in plain if not layer.cross])


class SeenTokens:
    """Which tokens some row sees by the masks of a model's layers, boolean ``[B, N]``; None where all count.

    What none sees reaches nobody, and counts nowhere where it is padding (by
    :func:`~attention_modules.masks.not_padding`).

    Args:
        named: which tokens count where a layer's mask does not say so, or is causal alone (as :func:`counting`).
    """

    def __init__(self, named: Tensor | None = None) -> None:
        self._named = named
        self._of_layers: dict[str, list[Tensor | None]] = {}  # of each call
        self._last: dict[tuple[int, ...], tuple[Tensor | None, bool]] = {}  # by size, and whether samples come first
        self._of_stacks: dict[tuple[str, int, int], Tensor | None] = {}
        self._told: dict[tuple[int, int], tuple[str, int, int]] = {}  # by size, the first whose masks say so

    def note(
        self,
        layer: Found,
        mechanism: AttentionMechanism,
        args: tuple[Tensor, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """A forward pre-hook of a layer's mechanism. The queries of cross-attention are tokens of its own stack."""
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
            self._last[samples, number] = seen, layer.host.batch_first(layer.module)
        for name in layer.names:
            self._of_layers.setdefault(name, []).append(seen)

    def of_layer(self, name: str, call: int = 0) -> Tensor | None:
        """Which tokens count of a layer's input and output in a call of it, ``[B, N]``."""
        calls = self._of_layers.get(name, [])
        return calls[call] if call < len(calls) else None

    def of(self, output: Tensor) -> Tensor | None:
        """Which tokens count of a model's output, ``[B, N]`` or ``[N, B]`` as its own: those of the last such layer."""
        size = tuple(output.shape[:2])
        for (samples, number), (seen, samples_first) in self._last.items():
            either = size == (samples, number) == (number, samples) and output.ndim > 2 and not samples_first
            flat = output.ndim == 2 and len(output) == samples * number > samples
            if seen is not None and (either or flat) and not bool(seen.all()):
                warnings.warn(
                    f"where the {samples} x {number} tokens stand in the output {tuple(output.shape)} is not known, so "
                    "that padding may count: let the model return [B, N, ...], and, where its layers have "
                    "batch_first=False, give other numbers of samples than of tokens",
                    stacklevel=2,
                )
        if size in self._last:
            return self._last[size][0]
        turned, _ = self._last.get(size[::-1], (None, True))
        return self._named if turned is None else turned.T


@contextmanager
def seeing(layers: Sequence[Found], named: Tensor | None = None) -> Iterator[SeenTokens]:
    """Notes, while a model runs, which tokens its layers see of those that have a mechanism (:func:`let_be_seen`)."""
    seen, handles = SeenTokens(named), []
    for layer in layers:
        if (mechanism := acting_mechanism(getattr(layer.module, "mechanism", None))) is not None:
            handles.append(mechanism.register_forward_pre_hook(partial(seen.note, layer), with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def layer_output(layer: nn.Module, output: Any) -> Tensor:
    """A layer's output, ``[B, N, C]`` also where the layer gives ``[N, B, C]``."""
    found, _ = output_of(output)
    host: Host | None = getattr(type(layer), "host", None) if isinstance(layer, Swapped) else None
    batch_first = getattr(layer, "batch_first", True) if host is None else host.batch_first(layer)
    return found if found.ndim != 3 or batch_first else found.transpose(0, 1)


def wide(values: Tensor) -> Tensor:
    """The values in fp32 or above."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def counted(values: Tensor, valid: Tensor | None) -> Tensor:
    """The tokens that count of ``[B, N, ...]``, ``[tokens, ...]``; all as they are where ``valid`` is not of them."""
    return values if valid is None or not _has_tokens(values, valid) else values[valid]


def _has_tokens(values: Tensor, valid: Tensor) -> bool:
    return values.ndim >= 3 and values.shape[:2] == valid.shape


def kl_divergence(given: Tensor, wanted: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(softmax(wanted / T) ‖ softmax(given / T)) in nats over the last dimension, in fp32 or above ``[...]``.

    A class whose wanted logit is -inf counts nothing. One logit alone is that of a sigmoid.

    Example:
        >>> import torch
        >>> from attention_modules.analysis.agreement import kl_divergence
        >>> kl_divergence(torch.tensor([0.0, 0.0]), torch.tensor([0.0, -torch.inf]))
        tensor(0.6931)
    """
    with torch.autocast(wanted.device.type, enabled=False):
        log_given = (_of_classes(wide(given)) / temperature).log_softmax(-1)
        log_wanted = (_of_classes(wide(wanted)) / temperature).log_softmax(-1)
        probability = log_wanted.exp()
        terms = probability * (log_wanted - log_given)
        return terms.masked_fill(probability == 0, 0.0).sum(-1)


def same_class(given: Tensor, wanted: Tensor) -> Tensor:
    """Where the largest logit is of the same class 1, else 0, over the last dimension; NaN where a logit is NaN.

    One logit alone is that of a sigmoid.

    Example:
        >>> import torch
        >>> from attention_modules.analysis.agreement import same_class
        >>> same_class(torch.tensor([[0.0, 1.0], [torch.nan, 1.0]]), torch.tensor([[0.0, 2.0], [2.0, 0.0]]))
        tensor([1., nan])
    """
    unknown = (given.isnan() | wanted.isnan()).any(-1)
    same = _of_classes(given).argmax(-1) == _of_classes(wanted).argmax(-1)
    return same.float().masked_fill(unknown, math.nan)


def _of_classes(logits: Tensor) -> Tensor:
    """The logits of two classes in place of a sigmoid's one."""
    return logits if logits.shape[-1] > 1 else torch.cat([torch.zeros_like(logits), logits], -1)


def classes_last(logits: Tensor) -> Tensor:
    """Logits with their classes in the last dimension; of images ``[B, C, H, W]`` and volumes, and of one ``[B]``."""
    if logits.ndim == 1:
        return logits.unsqueeze(-1)
    return logits.movedim(1, -1) if logits.ndim > 3 else logits


@dataclass(frozen=True)
class Agreement:
    """How far outputs of a model are from those that it gave before.

    Args:
        relative_error: ‖now - before‖ / ‖before‖ over all positions.
        cosine: of the angle between the two, its mean over positions.
        kl: KL(before ‖ now) of the classes in nats, its mean over positions; NaN where the outputs are no logits.
        same_class: the share of positions where the largest logit is of the same class; NaN likewise.

    Example:
        >>> import torch
        >>> from attnswap.analysis import swap_drift
        >>> model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
        >>> found = swap_drift(model, "softmax", torch.randn(2, 5, 16)).output
        >>> found.relative_error < 1e-5, found.kl  # the output is no logits
        (True, nan)
    """

    relative_error: float
    cosine: float
    kl: float = math.nan
    same_class: float = math.nan


NOT_MEASURED = Agreement(math.nan, math.nan)


class AgreementSums:
    """The sums of an :class:`Agreement` over batches.

    Args:
        logits: whether the outputs are logits.
    """

    def __init__(self, logits: bool) -> None:
        self.logits = logits
        self._sums = [0.0] * 5
        self._positions = 0

    def add(self, given: Tensor, wanted: Tensor, valid: Tensor | None = None) -> None:
        """Take in outputs of a batch, ``[B]``, ``[B, N, C]``, ``[B, C]``, ``[B, C, H, W]`` or ``[B, C, D, H, W]``.

        Raises:
            ValueError: if their shapes differ.
        """
        if given.shape != wanted.shape:
            raise ValueError(f"outputs {tuple(given.shape)} cannot be compared with {tuple(wanted.shape)}")
        error, size = (to_float64(part).sum() for part in relative_squares(given, wanted, valid))
        given, wanted = counted(classes_last(given), valid), counted(classes_last(wanted), valid)
        cosine = torch.nn.functional.cosine_similarity(wide(given), wide(wanted), dim=-1)
        zero = torch.zeros_like(error)
        kl = to_float64(kl_divergence(given, wanted)).sum() if self.logits else zero
        same = to_float64(same_class(given, wanted)).sum() if self.logits else zero
        new = torch.stack([part.cpu() for part in (error, size, to_float64(cosine).sum(), kl, same)]).tolist()
        self._sums = [old + more for old, more in zip(self._sums, new, strict=True)]
        self._positions += cosine.numel()

    def mean(self) -> Agreement:
        """The agreement over all that was added; NaN where that is nothing."""
        error, size, cosine, kl, same = self._sums
        if not self._positions:
            return NOT_MEASURED
        number = self._positions
        share = (kl / number, same / number) if self.logits else (math.nan, math.nan)
        return Agreement(relative_error(error, size), cosine / number, *share)


def relative_error(error: float, size: float) -> float:
    """sqrt(error / size) of two sums of squares: NaN where both are 0, infinite where ``size`` alone is."""
    if size == 0:
        return math.nan if error == 0 or math.isnan(error) else math.inf
    return math.sqrt(error / size)


def output_of(result: Any) -> tuple[Tensor, bool]:
    """The tensor that stands for what a model returns, and whether it is named logits.

    Of an object or mapping its ``logits``, else its ``last_hidden_state``; of a tuple its first part that is no loss.

    Raises:
        TypeError: if none of these is a floating tensor.
    """
    for name in ("logits", "last_hidden_state"):
        found = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
        if isinstance(found, Tensor):
            return found, name == "logits"
    parts = result if isinstance(result, (tuple, list)) else [result]
    first = next((each for each in parts if not (isinstance(each, Tensor) and each.ndim == 0)), None)
    if not isinstance(first, Tensor) or not first.is_floating_point():
        raise TypeError(
            f"the model returns {type(result).__name__}, in which no output is found: it must be a floating tensor of "
            "some dimension, a tuple that begins with one (behind a loss), or have logits or last_hidden_state"
        )
    return first, False
