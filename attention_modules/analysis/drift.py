"""What a swap does to a model that was trained with another attention, before any training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules.analysis.acting import acting_sums
from attention_modules.analysis.agreement import (
    NOT_MEASURED,
    Agreement,
    AgreementSums,
    layer_output,
    let_be_seen,
    other_problem,
    output_of,
    relative_error,
    relative_squares,
)
from attention_modules.base import AttentionMechanism
from attention_modules.hosts import attention_layers
from attention_modules.hosts.base import acting_mechanism
from attention_modules.hosts.discovery import Selector, survey
from attention_modules.hosts.model.inputs import copied_arguments
from attention_modules.hosts.model.seen import SeenTokens, counting
from attention_modules.hosts.trained import forget_made
from attention_modules.mechanism import Mechanism
from attention_modules.mechanisms.shared.acting import NoMapError
from attention_modules.mechanisms.shared.probe import acting_map
from attention_modules.mechanisms.shared.unchanged import Draw, unchanged
from attention_modules.precision import to_float64
from attention_modules.sharing import READS
from attention_modules.swap import AttentionSwapError, make_observable, swap_attention
from attention_modules.teacher import shared_copy

Run = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class LayerDrift:
    """What a swap does to one layer, the others being as they were.

    Args:
        layer: its name.
        relative_error: ‖after - before‖ / ‖before‖ of the layer's output on the inputs that it had before.
        entropy_before: of its attention in nats, mean over the rows that see a key (of padding none), heads and
            samples; of a swapped layer as ``entropy_after``.
        entropy_after: with the mechanism, of its own map (:func:`attnswap.attention_maps`); NaN where it has none.
        output: how far the model's output is when this layer alone is swapped.
        refused: why the layer cannot be swapped alone, all else NaN; "" where it can.

    Example:
        >>> import torch
        >>> from attnswap.analysis import swap_drift
        >>> model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
        >>> row = swap_drift(model, "uniform", torch.randn(2, 5, 16)).layers[0]
        >>> row.layer, row.relative_error > 0.01, round(row.entropy_after, 2)  # ln 5
        ('self_attn', True, 1.61)
    """

    layer: str
    relative_error: float
    entropy_before: float
    entropy_after: float
    output: Agreement
    refused: str = ""


@dataclass(frozen=True)
class Drift:
    """What a swap does to a model before any training.

    Args:
        layers: each layer swapped alone, in module order.
        output: how far the model's output is when all of them are swapped.

    Example:
        >>> import torch
        >>> from attnswap.analysis import swap_drift
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
        >>> drift = swap_drift(torch.nn.TransformerEncoder(layer, 3), "symmetric", torch.randn(2, 5, 16))
        >>> len(drift.ranked()), drift.output.cosine < 1
        (3, True)
    """

    layers: tuple[LayerDrift, ...]
    output: Agreement

    def ranked(self) -> list[LayerDrift]:
        """The layers, those first that can be swapped alone at the least error of the model's output."""

        def cost(row: LayerDrift) -> tuple[bool, float]:
            error = row.output.relative_error
            return (math.isnan(error), error)

        return sorted(self.layers, key=cost)


@torch.inference_mode(False)
@torch.no_grad()
def swap_drift(
    model: nn.Module,
    mechanism: Mechanism,
    batches: Any,
    *,
    where: Selector | None = None,
    layers: int | Sequence[int] | None = None,
    exclude: Selector = (),
    run: Run | None = None,
    logits: bool | None = None,
    **mechanism_options: Any,
) -> Drift:
    """How far a mechanism takes a trained model from what it computes: in each layer, alone and together.

    Each batch is shown to the model as it is, to a copy for each layer where that layer alone is swapped, and to one
    where all are, all in eval mode and with the same random numbers: copies share the model's weights, and the model is
    not changed. In the copy with one layer swapped, that layer gets just the input that it had before, so that its
    error is its own.

    Args:
        model: the trained model. The mechanism is compared with the attention that its layers have now: softmax in
            plain layers, and in swapped ones, of which all may be, their own mechanism.
        mechanism, where, layers, exclude, mechanism_options: as :func:`~attention_modules.swap_attention`.
        batches: what the model is called with: tensors, tuples of arguments, or mappings of arguments by name; one of
            them, or several in a list or an iterator. Tokens that the masks of the layers hide from all (padding, say)
            count nowhere.
        run: ``run(model, batch)`` in place of these calls.
        logits: whether the output is logits of classes that exclude each other, of which a KL divergence has a meaning;
            by default, where the model names it logits, unless its ``config.problem_type`` says something else.

    Returns:
        A row for each layer, and how far the model's output is in the end.

    Raises:
        AttentionSwapError, ValueError, TypeError: as :func:`~attention_modules.swap_attention`.
        ValueError: if there is no batch, it is a tuple that may be one or several, it cannot be copied for each of the
            calls, or a layer is not called.
        TypeError: if no output is found in what the model returns.

    Example:
        >>> import torch
        >>> from attnswap.analysis import swap_drift
        >>> model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
        >>> drift = swap_drift(model, "sink", torch.randn(2, 5, 16), start=-60.0)  # nearly softmax
        >>> drift.layers[0].layer, drift.output.relative_error < 1e-5
        ('self_attn', True)
    """
    choice: dict[str, Any] = {"where": where, "layers": layers, "exclude": exclude}
    together = shared_copy(model).eval()
    names = [row.name for row in swap_attention(together, mechanism, **choice, **mechanism_options)]
    forget_made(together)
    before = shared_copy(model).eval()
    mechanisms = {name: getattr(before.get_submodule(name), "mechanism", None) for name in names}
    let_be_seen(before, [name for name, held in mechanisms.items() if acting_mechanism(held) is None])
    with_masks = survey(before).layers
    alone = {
        name: _swapped_alone(model, name, mechanism, mechanism_options, _mechanism_of(together, name)) for name in names
    }
    on_batch = run or _call

    draw = Draw(model)

    def call(model: nn.Module, batch: Any) -> Any:
        with unchanged(model), draw.again(model):
            return on_batch(model, copied_arguments(batch))  # as a call adds to a cache

    sums = {name: _LayerSums() for name in names}
    whole: AgreementSums | None = None
    outputs: dict[str, AgreementSums] = {}
    for batch in _several(batches):
        args = batch if isinstance(batch, (tuple, list)) else ()
        seen = SeenTokens(with_masks, counting(model, args, batch if isinstance(batch, Mapping) else {}))
        entropies = {name: sums[name].entropy_before for name in names}
        with seen.noting(), _entropies(before, entropies, seen):
            result, layers_before = _recorded(before, call, batch, names)
        wanted, named = output_of(result)

        def again(batch: Any = batch) -> tuple[Tensor, dict[str, Tensor]]:
            result, of_layers = _recorded(before, call, batch, names)
            return output_of(result)[0], of_layers

        seen.settle(wanted, layers_before, again)
        valid = seen.of_output
        if whole is None:
            kind = named and other_problem(model) is None if logits is None else logits
            whole, outputs = AgreementSums(kind), {name: AgreementSums(kind) for name in names}
        for name, copy in alone.items():
            if isinstance(copy, str):
                continue
            with _entropies(copy, {name: sums[name].entropy_after}, seen):
                result, layers_after = _recorded(copy, call, batch, [name])
            sums[name].error.add(*relative_squares(layers_after[name], layers_before[name], seen.of_layer_output(name)))
            outputs[name].add(output_of(result)[0], wanted, valid)
        whole.add(output_of(call(together, batch))[0], wanted, valid)
    if whole is None:
        raise ValueError("batches is empty: give at least one")
    rows = []
    for name, copy in alone.items():
        found, why = sums[name], copy if isinstance(copy, str) else ""
        error = math.nan if why else relative_error(found.error.first, found.error.second)
        output = NOT_MEASURED if why else outputs[name].mean()
        rows.append(LayerDrift(name, error, found.entropy_before.mean, found.entropy_after.mean, output, why))
    return Drift(tuple(rows), whole.mean())


@dataclass
class _Sums:
    """Two sums whose ratio is wanted."""

    first: float = 0.0
    second: float = 0.0

    def add(self, first: Tensor, second: Tensor) -> None:
        self.first += float(to_float64(first).sum())
        self.second += float(to_float64(second).sum())

    @property
    def mean(self) -> float:
        return self.first / self.second if self.second else math.nan


class _LayerSums:
    def __init__(self) -> None:
        self.error, self.entropy_before, self.entropy_after = _Sums(), _Sums(), _Sums()


def _mechanism_of(model: nn.Module, name: str) -> AttentionMechanism:
    found = model.get_submodule(name).mechanism
    assert isinstance(found, AttentionMechanism)
    return found


def _swapped_alone(
    model: nn.Module, name: str, mechanism: Mechanism, options: Mapping[str, Any], built: AttentionMechanism
) -> nn.Module | str:
    """A copy of the model with the mechanism in one layer, or why there can be none."""
    copy = shared_copy(model).eval()
    if set(built.needs) & set(READS):  # plain softmax gives the other layers' values
        make_observable(copy, [layer.name for layer in attention_layers(copy) if layer.mechanism is None])
    try:
        swap_attention(copy, mechanism, where=[name], **options)
    except AttentionSwapError as error:
        return str(error)
    forget_made(copy)
    return copy


def _several(batches: Any) -> Iterable[Any]:
    if isinstance(batches, tuple) and len(batches) > 1 and not any(isinstance(each, Mapping) for each in batches):
        raise ValueError(
            f"batches is a tuple of {len(batches)}, which may be the arguments of one call or as many batches: give "
            "[batches] or list(batches)"
        )
    return [batches] if isinstance(batches, (Tensor, Mapping)) else batches


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _recorded(model: nn.Module, call: Run, batch: Any, names: Sequence[str]) -> tuple[Any, dict[str, Tensor]]:
    """What the model returns, and the output of the first call of each of these layers.

    Raises:
        ValueError: if a layer is not called.
    """
    outputs: dict[str, Tensor] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: Any) -> None:
            outputs.setdefault(name, layer_output(module, output).clone())  # the model may change it in place

        return hook

    handles = [model.get_submodule(name).register_forward_hook(record(name)) for name in names]
    try:
        result = call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    if missing := [name for name in names if name not in outputs]:
        raise ValueError(f"layer {missing[0]!r} is not called for these inputs: leave it out by exclude=")
    return result, outputs


@contextmanager
def _entropies(model: nn.Module, sums: Mapping[str, _Sums], seen: SeenTokens) -> Iterator[None]:
    """Add the entropy of these layers' attention, and of how many rows it is, while the model runs."""

    def observe(name: str, into: _Sums) -> Callable[..., None]:
        numbers = count()

        def hook(mechanism: AttentionMechanism, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = {name: kwargs[name] for name in ("attn_mask", "is_causal") if name in kwargs}
            rows = seen.of_layer(name, next(numbers))
            try:
                acting = acting_map(mechanism, *args, **kwargs)
                sums, _ = acting_sums(acting, statistics=["entropy"], every_row=True, counting=rows, **given)
            except NoMapError:
                into.first = math.nan  # nor is there a mean over the other calls
                return
            into.add(*sums["entropy"])

        return hook

    handles = []
    for name, into in sums.items():
        handles.append(_mechanism_of(model, name).register_forward_pre_hook(observe(name, into), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
