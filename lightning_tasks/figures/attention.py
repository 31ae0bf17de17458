"""Attention drawn: over images, and token by token."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import interpolate

from attention_modules.hosts.discovery import Found, survey
from lightning_tasks.figures.names import plain_names

_TITLE_LETTERS = 13  # an inch
_MOST_PREFIX = 9  # class, distillation and register tokens before the patches
# Our Segmenter's decoder and that of mmsegmentation; Hiera of timm and of transformers; MAE's encoder.
_OTHERWISE = ("MaskTransformer", "SegmenterMaskTransformerHead", "Hiera", "HieraEncoder", "ViTMAEModel")

# In names of embeddings: of positions, distances, classes, registers, times.
_NO_WORDS = re.compile(r"pos|(^|[._])(rel(ative)?|class|cls|labels?|reg(ister)?s?|y|time(step)?s?|types?|mask)([._]|$)")


def patch_grid(tokens: int, height: int, width: int) -> tuple[int, int, int] | None:
    """Prefix tokens, rows and columns of patches that so many tokens of an image are; None where no grid fits.

    The fewest prefix tokens with which square patches tile the image (our reading: models do not say it alike).
    """
    for prefix in range(min(_MOST_PREFIX, tokens - 1) + 1):
        side = math.sqrt(height * width / (tokens - prefix))
        rows, columns = round(height / side), round(width / side)
        if rows * columns == tokens - prefix and rows * width == columns * height and height % rows == 0:
            return prefix, rows, columns
    return None


def no_rasters(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Which of these layers have tokens that are no patches of the image row by row, so that no grid fits them.

    Those of a mask transformer, whose class tokens stand behind the patches; of Hiera and the encoder of MAE, in an
    order of their own; of a network of words; of a decoder, whose queries attend to the image.
    """
    layers = survey(model).layers
    cross = {layer.name for layer in layers if layer.cross}
    blocks = {layer.name: _block(layer.name, layers) for layer in layers}
    asking = {blocks[name] for name in cross}
    return {
        name
        for name in names
        if name not in cross and (blocks.get(name, name) in asking or _is_no_raster(_around(model, name)))
    }


def _block(name: str, layers: Sequence[Found]) -> str:
    """The innermost part around a layer that holds another one, too."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        prefix = ".".join([*parts[:end], ""])
        if sum(layer.name.startswith(prefix) for layer in layers) > 1:
            return prefix
    return ""


def _around(model: nn.Module, layer: str) -> list[nn.Module]:
    """The modules around a layer, innermost first."""
    parts = layer.split(".")
    return [model.get_submodule(".".join(parts[:end])) for end in range(len(parts) - 1, -1, -1)]


def _is_no_raster(around: Sequence[nn.Module]) -> bool:
    if any(kind.__name__ in _OTHERWISE for each in around for kind in type(each).__mro__):
        return True
    for each in around:  # the innermost that says what its tokens are made of
        if any(isinstance(part, (nn.Conv2d, nn.Conv3d)) for part in each.modules()):
            return False
        if any(isinstance(part, nn.Embedding) and not _NO_WORDS.search(name) for name, part in each.named_modules()):
            return True
    return False


@plain_names()
def draw_over_images(images: Tensor, maps: Tensor, rows: Sequence[str], columns: Sequence[str], title: str) -> Any:
    """A Matplotlib figure: a sample and query a row; the image, then the map of each head over it.

    Args:
        images: ``[S, C, H, W]`` in any range.
        maps: attention to the patches, ``[S, R, K, h, w]`` for R queries and K heads; each is scaled to its largest.
        rows: names of the queries.
        columns: names of the heads.
        title: of the figure.
    """
    samples, queries, heads = maps.shape[:3]
    height, width = images.shape[-2:]
    figure, panels = _panels(samples * queries, 1 + heads, height / width, title)
    for sample, image in enumerate(images):
        shown = image if image.shape[0] in (1, 3) else image.mean(0, keepdim=True)
        low, high = shown.amin(), shown.amax()
        shown = ((shown - low) / (high - low).clamp(min=1e-12)).expand(3, -1, -1).permute(1, 2, 0).numpy()
        for query in range(queries):
            axes = panels[sample * queries + query]
            axes[0].imshow(shown)
            axes[0].set_ylabel(rows[query], fontsize=7)
            large = interpolate(maps[sample, query][None], size=(height, width), mode="bilinear")[0]
            for head in range(heads):
                axes[1 + head].imshow(shown)
                one = maps[sample, query, head]
                highest = float(one.max())  # of which the enlarged map may fall short
                over = axes[1 + head].imshow(large[head].numpy(), cmap="magma", alpha=0.65, vmin=0.0, vmax=highest)
                _bar(figure, over, axes[1 + head], one)
                _name(axes[1 + head], columns[head], one)
    panels[0, 0].set_title("image", fontsize=8)
    return figure


@plain_names()
def draw_token_maps(maps: Tensor, rows: Sequence[int], columns: Sequence[str], title: str) -> Any:
    """A Matplotlib figure: a row per sample, a column per head; queries downwards, keys to the right.

    Args:
        maps: ``[S, K, R, M]`` for K heads and R queries.
        rows: places of the queries.
        columns: names of the heads.
        title: of the figure.
    """
    figure, panels = _panels(len(maps), maps.shape[1], min(1.0, maps.shape[2] / maps.shape[3] + 0.2), title)
    for axes, sample in zip(panels, maps, strict=True):
        for panel, one, name in zip(axes, sample, columns, strict=True):
            image = panel.imshow(one.numpy(), cmap="viridis", vmin=0.0, aspect="auto", interpolation="nearest")
            _bar(figure, image, panel, one)
            _name(panel, name, one)
            places = range(0, one.shape[1], max(1, one.shape[1] // 6))
            panel.set_xticks(places, [str(place) for place in places], fontsize=6)
        step = max(1, len(rows) // 6)
        axes[0].set_yticks(range(0, len(rows), step), [str(row) for row in rows[::step]], fontsize=6)
        axes[0].set_ylabel("query", fontsize=7)
    for panel in panels[-1]:
        panel.set_xlabel("key", fontsize=7)
    return figure


def _bar(figure: Any, image: Any, axes: Any, values: Tensor) -> None:
    """The color bar of one map; none where nothing is finite, and the map is white."""
    from matplotlib.ticker import MaxNLocator

    if values.isfinite().any() and math.isfinite(image.norm.vmax):
        bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02)
        bar.locator = MaxNLocator(3)
        bar.ax.tick_params(labelsize=5, length=2)


def _name(axes: Any, name: str, values: Tensor) -> None:
    """A title that says what the colors, from 0 to a map's own largest value, stand for."""
    low, high = values.aminmax()
    axes.set_title(f"{name}\n{low:.3g} to {high:.3g}", fontsize=7)


def _panels(rows: int, columns: int, ratio: float, title: str) -> Any:
    from matplotlib.figure import Figure

    width = 2.2 * columns + 0.4
    lines = textwrap.wrap(title, int(width * _TITLE_LETTERS))
    height = (2.1 * ratio + 0.35) * rows + 0.35 + 0.15 * len(lines)
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle("\n".join(lines), fontsize=9)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.set_xticks([])
        axes.set_yticks([])
    return figure, panels
