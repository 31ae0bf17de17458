"""Maps and statistics of models as plain data: what the page of `attnswap explore` shows."""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from attention_modules import NoMapError
from attention_modules.analysis import attention_maps, largest_logit
from attention_modules.analysis.acting import acting_sums
from attention_modules.analysis.model_maps import Inputs, Layers, see_calls
from attention_modules.hosts import AttentionLayer
from attention_modules.mechanism import short_name
from attention_modules.mechanisms.shared.probe import acting_map, acting_passes
from lightning_tasks.errors import UsageError

MOST_BYTES = 1 << 26  # of the maps of a page before they are compressed: what a browser holds
MOST_MODELS = 4
FEWEST_ROWS = 8
STATISTICS = ("entropy", "sink", "logit")
_CURE = "show fewer inputs, or fewer layers (layers=[0, -1], --layers 0,-1)"


@dataclass(frozen=True)
class Shown:
    """A model, and what it is called with.

    Args:
        label: its name on the page.
        model: the model.
        inputs: as :func:`attnswap.attention_maps` takes them.
        about: lines that say where it comes from, by name.
    """

    label: str
    model: nn.Module
    inputs: Inputs
    about: dict[str, str] = field(default_factory=dict)


@dataclass
class LayerSeen:
    """What one pass shows of a layer; statistics are ``[samples, H]``, over all of its rows.

    Args:
        name: of the layer.
        mechanism: short name of what acts in it.
        passes: how many passes over the values it makes.
        cross: whether its keys are other tokens than its queries.
        shape: of its map, ``[samples, H, N, M]``.
        statistics: entropy in nats, and the largest share of a key, of its own map; the largest logit that it is given.
        no_logit: why the mechanism has no such logits; "" where it has.
    """

    name: str
    mechanism: str
    passes: int
    cross: bool
    shape: tuple[int, int, int, int]
    statistics: dict[str, list[list[float | None]]]
    no_logit: str

    def bytes_of(self, rows: int) -> int:
        """What so many rows of its map take on the page, and two numbers for the steps of each."""
        samples, heads, _, keys = self.shape
        return samples * heads * rows * (keys + 8)


def seen_layers(shown: Shown, layers: Layers | None) -> list[LayerSeen]:
    """What one pass shows of each layer; no map is held.

    Raises:
        UsageError: if a mechanism has no map, or no layer was called.
        AttentionSwapError: as :func:`attnswap.attention_maps`.
    """
    found: dict[str, LayerSeen] = {}

    def take(
        layer: AttentionLayer, alike: int, mechanism: Any, args: tuple[Tensor, ...], given: dict[str, Any]
    ) -> None:
        acting = acting_map(mechanism, *args, **given)
        mask = {"attn_mask": given.get("attn_mask"), "is_causal": given.get("is_causal", False)}
        sums, shares = acting_sums(acting, **mask, statistics=["entropy"], sink_rows=0)
        total, rows = sums["entropy"]
        statistics = {"entropy": total / rows}
        if shares is not None:
            statistics["sink"] = shares.amax(-1)
        if not mechanism.own_logits:
            query = args[0] if mechanism.uses_query else args[1]
            logits = largest_logit(query, args[1], **mask, scale=given.get("scale"))
            statistics["logit"] = logits.unflatten(1, (acting.shape[1], -1)).amax(-1)  # of pairs of heads
        found[layer.name] = LayerSeen(
            layer.name,
            short_name(type(mechanism)),
            len(acting_passes(mechanism, *args, **given)),
            layer.number is None,
            acting.shape,
            {name: [[_number(one) for one in row] for row in each.tolist()] for name, each in statistics.items()},
            mechanism.own_logits or "",
        )

    try:
        names = see_calls(shown.model, shown.inputs, layers, take)
    except NoMapError as error:
        raise UsageError(f"{shown.label}: {error}; or leave its layers out (layers=, --layers)") from error
    if not found:
        raise UsageError(f"{shown.label}: none of the layers {', '.join(names[:4])} was called for these inputs")
    return [found[name] for name in names if name in found]


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None


def chosen_rows(
    models: Sequence[tuple[str, Sequence[LayerSeen]]], rows: Sequence[int] | None
) -> dict[int, list[int] | None]:
    """For each number of queries which rows the page has: those given, else all, else as many as fit, evenly.

    Raises:
        UsageError: if the page would be too large, or there is no such row.
    """
    layers = [(label, layer) for label, of_model in models for layer in of_model]
    sizes = sorted({layer.shape[2] for _, layer in layers})

    def needed(most: int) -> int:
        return sum(layer.bytes_of(min(most, layer.shape[2])) for _, layer in layers)

    if rows is not None:
        for label, layer in layers:
            if wrong := [row for row in rows if not -layer.shape[2] <= row < layer.shape[2]]:
                raise UsageError(f"there is no row {wrong[0]} in {layer.name} of {label}: it has {layer.shape[2]}")
        if not rows or needed(len(rows)) > MOST_BYTES:
            raise UsageError(
                f"{len(rows)} rows of these maps take {needed(len(rows)):,} bytes, and a page holds {MOST_BYTES:,}: "
                f"give some, fewer rows, or {_CURE}"
            )
        return {size: sorted({row % size for row in rows}) for size in sizes}
    most = sizes[-1]
    if needed(most) > MOST_BYTES:
        most = max(count for count in range(most) if count == 0 or needed(count) <= MOST_BYTES)
    if most < min(FEWEST_ROWS, sizes[-1]):
        raise UsageError(
            f"{FEWEST_ROWS} rows of each map take {needed(FEWEST_ROWS):,} bytes, and a page holds {MOST_BYTES:,}: "
            f"{_CURE}, or rows by number (rows=[0], --rows 0)"
        )
    return {
        size: None if size <= most else np.linspace(0, size - 1, most).round().astype(int).tolist() for size in sizes
    }


def maps_of(
    shown: Shown, layers: Layers | None, seen: Sequence[LayerSeen], rows: dict[int, list[int] | None]
) -> tuple[list[Tensor], Tensor | None, str]:
    """The maps of the layers, ``[S, H, R, M]``, the rollout ``[S, R, N]``, and why there is none.

    Raises:
        UsageError: if they would not fit into memory.
    """
    found: dict[str, Tensor] = {}
    try:
        for size, of_size in rows.items():  # rows are named alike in layers of one size alone
            names = [layer.name for layer in seen if layer.shape[2] == size]
            if names:
                only = layers if len(names) == len(seen) else names
                found |= attention_maps(shown.model, shown.inputs, only, rows=of_size)
        alone = [layer for layer in seen if not layer.cross]
        if len({layer.shape[2:] for layer in alone}) != 1 or alone[0].shape[2] != alone[0].shape[3]:
            return [found[layer.name] for layer in seen], None, "its layers have no square maps of one size"
        only = layers if len(alone) == len(seen) else [layer.name for layer in alone]
        rolled = attention_maps(shown.model, shown.inputs, only, rows=rows[alone[0].shape[2]], rollout=True)
    except MemoryError as error:
        raise UsageError(f"{shown.label}: {error}") from error
    return [found[layer.name] for layer in seen], rolled, ""


def packed(maps: Sequence[Tensor]) -> str:
    """Maps ``[H, R, M]`` of one sample: each row in 256 steps from its lowest value (0 at most) to its largest.

    First the ends of all rows, float32, by map all lowest and then all largest (NaN where a row is not finite); then
    the steps, each row less the one before it. Deflated, in base64.
    """
    ends, steps = [], []
    for one in maps:
        values = one.float().cpu().numpy()
        finite = np.isfinite(values).all(-1)
        values = np.where(finite[..., None], values, 0.0)
        low, high = np.minimum(values.min(-1), 0.0), np.maximum(values.max(-1), 0.0)
        width = np.where(high > low, high - low, 1.0)[..., None]
        codes = np.rint((values - low[..., None]) / width * 255).astype(np.uint8)
        ends += [np.where(finite, end, np.nan).astype("<f4").tobytes() for end in (low, high)]
        steps.append(np.diff(codes, axis=1, prepend=np.uint8(0)).tobytes())
    return base64.b64encode(zlib.compress(b"".join([*ends, *steps]), 9)).decode("ascii")


def collect(
    models: Sequence[Shown], samples: int | None, layers: Layers | None, rows: Sequence[int] | None
) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """What the page says of each model, and its maps of each sample, packed.

    Args:
        models: two to four, or one.
        samples: how many inputs there are; None for as many as the first map has.
        layers: which, as :func:`attnswap.attention_maps` takes them.
        rows: which queries; None for all where they fit.

    Raises:
        UsageError: if there are too many models, a map does not exist, or the page would be too large.
    """
    if not 1 <= len(models) <= MOST_MODELS:
        raise UsageError(f"{len(models)} models were given, and a page shows 1 to {MOST_MODELS}: leave some out")
    seen = [(shown.label, seen_layers(shown, layers)) for shown in models]
    samples = samples or seen[0][1][0].shape[0]
    for label, of_model in seen:
        for layer in of_model:
            if layer.shape[0] != samples:
                raise UsageError(
                    f"{layer.name} of {label} has {layer.shape[0]} maps for {samples} inputs, as layers with windows "
                    "have: choose others (layers=, --layers)"
                )
    wanted = chosen_rows(seen, rows)
    described, blobs = [], []
    for shown, (_, of_model) in zip(models, seen, strict=True):
        maps, rolled, reason = maps_of(shown, layers, of_model, wanted)
        of_rollout = [] if rolled is None else [rolled.unsqueeze(1)]
        blobs.append([packed([one[sample] for one in (*maps, *of_rollout)]) for sample in range(samples)])
        described.append(
            {
                "name": shown.label,
                "about": {"class": type(shown.model).__name__, **shown.about},
                "layers": [_described(layer, wanted[layer.shape[2]], of_model) for layer in of_model],
                "rollout": None if rolled is None else {"keys": rolled.shape[2]},
                "no_rollout": reason,
            }
        )
    return described, blobs


def _described(layer: LayerSeen, rows: list[int] | None, others: Sequence[LayerSeen]) -> dict[str, Any]:
    stacks = {_stack(other.name) for other in others if other.cross}
    _, heads, queries, keys = layer.shape
    return {
        "name": layer.name or "the model",
        "mechanism": layer.mechanism,
        "passes": layer.passes,
        "cross": layer.cross,
        "source": bool(stacks) and _stack(layer.name) not in stacks,  # of the encoder
        "heads": heads,
        "queries": queries,
        "keys": keys,
        "rows": rows,
        "no_logit": layer.no_logit,
        **{name: layer.statistics.get(name) for name in STATISTICS},
    }


def _stack(name: str) -> str:
    """The part of a name before the layer's number."""
    return re.split(r"\.\d+\.", name)[0]
