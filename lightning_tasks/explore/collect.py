"""Maps and statistics of models as plain data: what the page of `attnswap explore` shows."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor, nn

from attention_modules import NoMapError
from attention_modules.analysis import attention_maps, largest_logit
from attention_modules.analysis.acting import acting_sums
from attention_modules.analysis.model_maps import Inputs, Layers, see_calls, stack_of
from attention_modules.base import queries_of
from attention_modules.hosts import AttentionLayer
from attention_modules.masks import seen_tokens
from attention_modules.mechanism import short_name
from attention_modules.mechanisms.shared.probe import acting_map, acting_passes
from lightning_tasks.errors import UsageError

MOST_BYTES = 3 << 24  # of the maps of a page before they are compressed: what a browser holds
MOST_MODELS = 4
FEWEST_ROWS = 8
_CURE = "show fewer inputs, or fewer layers (layers=[0, -1], --layers 0,-1)"


@dataclass(frozen=True)
class Shown:
    """A model by its name on the page, what it is called with, and lines that say where it comes from, by name."""

    label: str
    model: nn.Module
    inputs: Inputs
    about: dict[str, str] = field(default_factory=dict)


def collect(
    models: Sequence[Shown], samples: int | None, layers: Layers | None, rows: Sequence[int] | None
) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """What the page says of each model, and its maps of each sample, :func:`packed`.

    Args:
        models: one to four.
        samples: how many inputs there are; None for as many as the first map has.
        layers: which, as :func:`attnswap.attention_maps` takes them.
        rows: which queries; None for all, or as many as fit.

    Raises:
        UsageError: if there are too many models, a map does not exist, or the page would be too large.
        AttentionSwapError: as :func:`attnswap.attention_maps`.
    """
    if not 1 <= len(models) <= MOST_MODELS:
        raise UsageError(f"{len(models)} models were given, and a page shows 1 to {MOST_MODELS}: leave some out")
    seen = [_seen(shown, layers) for shown in models]
    samples = samples or seen[0][0]["samples"]
    if {layer["samples"] for found in seen for layer in found} == {seen[0][0]["samples"]} != {samples}:
        raise UsageError(
            f"each layer has {seen[0][0]['samples']} maps, and {samples} images, tokens or names were given: give one "
            "for each input; layers with windows, which have several maps for one, are not shown"
        )
    for shown, found in zip(models, seen, strict=True):
        for layer in found:
            if layer["samples"] != samples:
                raise UsageError(
                    f"{layer['name']!r} of {shown.label} has {layer['samples']} maps for {samples} inputs, as layers "
                    "with windows have: choose others (layers=, --layers)"
                )
    _choose_rows([layer for found in seen for layer in found], rows)
    described, blobs = [], []
    for shown, found in zip(models, seen, strict=True):
        maps, rolled, reason = _maps(shown, layers, found)
        blobs.append([packed([one[sample] for one in (*maps, *rolled)]) for sample in range(samples)])
        for layer, one in zip(found, maps, strict=True):  # padding, say
            layer["unseen"] = [(each == 0).flatten(0, 1).all(0).nonzero().flatten().tolist() for each in one]
        about = {"class": type(shown.model).__name__, **shown.about}
        described.append(
            {"name": shown.label, "about": about, "layers": found, "rollout": bool(rolled), "no_rollout": reason}
        )
    return described, blobs


def _seen(shown: Shown, layers: Layers | None) -> list[dict[str, Any]]:
    """What one pass shows of each layer: sizes, mechanism, statistics ``[samples][heads]`` of all rows; no map is held.

    Entropy in nats and sink mass are those of the mechanism's own map, the largest logit that of the q and k given.
    """
    found: dict[str, dict[str, Any]] = {}

    def take(layer: AttentionLayer, _: int, mechanism: Any, args: tuple[Tensor, ...], given: dict[str, Any]) -> None:
        acting = acting_map(mechanism, *args, **given)
        mask = {"attn_mask": given.get("attn_mask"), "is_causal": given.get("is_causal", False)}
        counting = None if layer.number is None else seen_tokens(mask["attn_mask"], *args[:2])
        sums, shares = acting_sums(
            acting, **mask, statistics=["entropy"], sink_rows=0, every_row=True, counting=counting
        )
        total, rows = sums["entropy"]
        statistics = {"entropy": total / rows, "sink": None if shares is None else shares.amax(-1), "logit": None}
        samples, heads, queries, keys = acting.shape
        if not mechanism.own_logits:
            q, k = queries_of(mechanism, *args[:2]), args[1]
            logits = largest_logit(q, k, **mask, scale=given.get("scale"), counting=counting)
            statistics["logit"] = logits.unflatten(1, (heads, -1)).amax(-1)  # of pairs of heads, where a map is of two
        found[layer.name] = {
            "name": layer.name,
            "mechanism": short_name(type(mechanism)),
            "passes": len(acting_passes(mechanism, *args, **given)),
            "cross": layer.number is None,
            "no_logit": mechanism.own_logits or "",
            **{"samples": samples, "heads": heads, "queries": queries, "keys": keys},
            **{name: each if each is None else _numbers(each) for name, each in statistics.items()},
        }

    try:
        names = see_calls(shown.model, shown.inputs, layers, take)
    except NoMapError as error:
        raise UsageError(f"{shown.label}: {error}; or leave its layers out (layers=, --layers)") from error
    if not found:
        raise UsageError(f"{shown.label}: none of the layers {', '.join(names[:4])} was called for these inputs")
    decoders = {stack_of(name) for name, layer in found.items() if layer["cross"]}
    for name, layer in found.items():
        layer["source"] = bool(decoders) and stack_of(name) not in decoders  # a layer of the encoder
    return [found[name] for name in names if name in found]


def _numbers(statistic: Tensor) -> list[list[float | None]]:
    return [[value if np.isfinite(value) else None for value in row] for row in statistic.tolist()]


def _choose_rows(layers: Sequence[dict[str, Any]], rows: Sequence[int] | None) -> None:
    """Say of each layer which rows the page has: those given, else all (None), else as many as fit, evenly.

    Raises:
        UsageError: if the page would be too large, or there is no such row.
    """

    def needed(most: int) -> int:
        return sum(each["samples"] * each["heads"] * min(most, each["queries"]) * each["keys"] for each in layers)

    longest = max(layer["queries"] for layer in layers)
    least = min(FEWEST_ROWS, longest) if rows is None else len(rows)
    if not least or needed(least) > MOST_BYTES:
        raise UsageError(
            f"{least} rows of each map take {needed(least):,} bytes, and a page holds {MOST_BYTES:,}: {_CURE}, or some "
            "rows (rows=[0, -1], --rows 0,-1)"
        )
    most = max(count for count in range(1, longest + 1) if needed(count) <= MOST_BYTES or count <= least)
    for layer in layers:
        queries = layer["queries"]
        if wrong := [row for row in rows or () if not -queries <= row < queries]:
            raise UsageError(f"there is no row {wrong[0]} in {layer['name']!r}: it has {queries}, counted from 0")
        some = None if queries <= most else np.linspace(0, queries - 1, most).round().astype(int).tolist()
        layer["rows"] = some if rows is None else sorted({row % queries for row in rows})


def _maps(
    shown: Shown, layers: Layers | None, seen: Sequence[dict[str, Any]]
) -> tuple[list[Tensor], list[Tensor], str]:
    """The maps of the layers, ``[S, H, R, M]``, and the rollout ``[S, 1, R, N]``, or why there is none.

    Raises:
        UsageError: if they would not fit into memory.
    """

    def asked(some: Sequence[dict[str, Any]]) -> dict[str, Any]:  # rows are named alike in layers of one size alone
        only = layers if len(some) == len(seen) else [layer["name"] for layer in some]
        return {"layers": only, "rows": some[0]["rows"]}

    try:
        found: dict[str, Tensor] = {}
        for size in {layer["queries"] for layer in seen}:
            some = [layer for layer in seen if layer["queries"] == size]
            found |= attention_maps(shown.model, shown.inputs, **asked(some))
        maps, alone = [found[layer["name"]] for layer in seen], [layer for layer in seen if not layer["cross"]]
        sizes = {(layer["queries"], layer["keys"]) for layer in alone}
        if len(sizes) != 1 or len(set(*sizes)) != 1:
            return maps, [], "its layers have no square maps of one size"
        try:
            rolled = attention_maps(shown.model, shown.inputs, **asked(alone), rollout=True)
        except ValueError as error:  # a layer is called several times
            return maps, [], str(error)
        return maps, [rolled.unsqueeze(1)], ""
    except MemoryError as error:
        raise UsageError(f"{shown.label}: {error}") from error


def packed(maps: Sequence[Tensor]) -> str:
    """Maps ``[H, R, M]`` of one sample, in steps of 1/128 of each head's range from its lowest value (0 at most) up.

    Where no value is negative, the steps of a row are halved as often as its largest value allows. Four parts: lowest
    value and range of each head, float32; how often the steps of each row are halved (255: it is not finite); the
    median of each column, in steps; and the steps of each row less the medians. Deflated, in base64.
    """
    parts: list[list[bytes]] = [[], [], [], []]
    for one in maps:
        values = one.cpu().double().numpy()
        finite = np.isfinite(values).all(-1)
        values = np.where(finite[..., None], values, 0.0)
        low = np.minimum(values.min((1, 2)), 0.0).astype("<f4")
        width = (np.maximum(values.max((1, 2)), 0.0) - low).astype("<f4")
        width[width == 0] = 1.0
        largest = np.where(low[:, None] < 0, width[:, None], np.maximum(values.max(-1), width[:, None] * 2.0**-99))
        halved = np.floor(np.log2(width[:, None] / largest)).clip(0, 99)
        steps = (values - low[:, None, None]) / width[:, None, None] * 128 * 2 ** halved[..., None]
        codes = np.rint(steps).astype(np.uint8)
        median = np.median(codes, axis=1, keepdims=True).astype(np.uint8)
        ends, exponents = np.stack([low, width], 1), np.where(finite, halved, 255).astype(np.uint8)
        for part, each in zip(parts, (ends, exponents, median, codes - median), strict=True):
            part.append(each.tobytes())
    deflate = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_FILTERED)
    return base64.b64encode(deflate.compress(b"".join(chain(*parts))) + deflate.flush()).decode("ascii")
