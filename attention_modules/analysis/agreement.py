"""How far what a model computes is from what it computed before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules.hosts.base import Host, Swapped
from attention_modules.hosts.discovery import survey
from attention_modules.precision import to_float64
from attention_modules.swap import made_observable, make_observable


def relative_squares(given: Tensor, wanted: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """‖given - wanted‖² and ‖wanted‖² of each sample, ``[B]`` in fp32 or above.

    Args:
        given: a tensor.
        wanted: what it is compared with, of the same shape.
        valid: which tokens count, boolean of the tensors' first dimensions (``[B, N]``); all where None.

    Example:
        >>> import torch
        >>> from attention_modules.analysis.agreement import relative_squares
        >>> relative_squares(torch.tensor([[3.0, 1.0]]), torch.tensor([[3.0, 0.0]]))
        (tensor([1.]), tensor([9.]))
    """
    with torch.autocast(wanted.device.type, enabled=False):
        given, wanted = wide(given), wide(wanted)
        error, size = (given - wanted).square(), wanted.square()
    if valid is not None:
        hidden = ~valid.reshape(*valid.shape, *[1] * (wanted.ndim - valid.ndim))
        error, size = error.masked_fill(hidden, 0.0), size.masked_fill(hidden, 0.0)
    return error.reshape(len(error), -1).sum(1), size.reshape(len(size), -1).sum(1)


def let_be_seen(model: nn.Module, names: Sequence[str]) -> None:
    """Put softmax into plain layers, for :func:`seeing`: those of these names, and what other self-attention takes it.

    Raises:
        AttentionSwapError: if one of these names does not take it.
    """
    make_observable(model, names)
    plain = [layer for layer in survey(model).layers if not hasattr(layer.module, "mechanism")]
    made_observable(model, [layer.name for layer in plain if not layer.cross])


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
    """The numbers of the tokens that count, with their classes in the last dimension (:func:`classes_last`)."""
    return classes_last(values) if valid is None else _of_tokens(values, valid)[valid]


def _of_tokens(values: Tensor, valid: Tensor) -> Tensor:
    return values.unsqueeze(-1) if values.ndim == valid.ndim else values


def kl_divergence(given: Tensor, wanted: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(softmax(wanted / T) ‖ softmax(given / T)) in nats over the last dimension, in fp32 or above ``[...]``.

    A class whose wanted logit is -inf counts nothing. One logit alone is that of a sigmoid; several are of classes that
    exclude each other.

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


def other_problem(model: nn.Module) -> str | None:
    """What transformers says of logits that are of no one softmax, by ``config.problem_type``; None else."""
    kind = getattr(getattr(model, "config", None), "problem_type", None)
    return kind if kind in ("multi_label_classification", "regression") else None


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
        given, wanted = counted(given, valid), counted(wanted, valid)
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
