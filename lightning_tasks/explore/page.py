"""The page of `attnswap explore`: data, template, script and style in one file that needs no network."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules.analysis.model_maps import Inputs, Layers
from lightning_tasks.errors import UsageError
from lightning_tasks.explore.collect import Shown, collect
from lightning_tasks.figures.attention import no_rasters, patch_grid
from lightning_tasks.runs.environment import this_environment
from lightning_tasks.runs.safe_files import written_whole

_HERE = Path(__file__).parent
_LARGEST_PICTURE = 448  # pixels of a side
_ESCAPED = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}  # no text ends a script's element


@dataclass(frozen=True)
class Explorer:
    """A page of attention maps; a notebook shows it below its cell.

    Args:
        html: the whole page, without need of a network.
    """

    html: str

    def save(self, path: str | Path) -> Path:
        """Write the page, whole or not at all.

        Raises:
            UsageError: if the path is a folder, or lies in none.
        """
        path = check_output(Path(path))
        with written_whole(path) as partial:  # names of files may be no Unicode
            partial.write_text(self.html, encoding="utf-8", errors="backslashreplace")
        return path

    def _repr_html_(self) -> str:
        """A frame with the page, whose style and scripts stay inside."""
        return (
            '<iframe sandbox="allow-scripts" title="attention maps" style="width: 100%; height: 60rem; border: 0" '
            f'srcdoc="{html.escape(self.html)}"></iframe>'
        )


def check_output(path: Path) -> Path:
    """The path itself, if a page can be written there.

    Raises:
        UsageError: if it is a folder, or lies in none.
    """
    if path.is_dir():
        raise UsageError(f"--output {path} is a folder: give a file, as {path / 'explore.html'}")
    if not path.parent.is_dir():
        raise UsageError(f"--output {path}: give a file in a folder that is there")
    return path


def explore(
    models: nn.Module | Mapping[str, nn.Module],
    inputs: Inputs,
    *,
    images: Tensor | None = None,
    tokens: Sequence[Sequence[str]] | None = None,
    source_tokens: Sequence[Sequence[str]] | None = None,
    layers: Layers | None = None,
    rows: Sequence[int] | None = None,
) -> Explorer:
    """A page of every attention map of a model, or of two to four side by side, with their differences.

    The maps are those of :func:`attnswap.attention_maps`: what acts on the values, whatever the mechanism. Values are
    off by at most 1/256 of their head's range, and where none is negative, by 1/128 of their row's largest. No model is
    changed.

    Args:
        models: one, or up to four by the names that the page gives them.
        inputs: what each is called with: a tensor, a sequence of positional arguments, or a mapping of keywords.
        images: pictures of image models, ``[B, 1 or 3, H, W]`` in [0, 1]; where None, inputs ``[B, C, H, W]``, each
            scaled to its own range.
        tokens: of text models, the tokens of each input; numbers where None.
        source_tokens: of encoder-decoder models, the tokens of each input that the encoder is given.
        layers: as :func:`attnswap.attention_maps` takes them; cross-attention is shown where a pattern names it.
        rows: numbers of the queries that are shown; where None all, or as many as fit, evenly from the first to the
            last.

    Returns:
        The page: a notebook shows it, ``save("explore.html")`` writes it.

    Raises:
        UsageError: if there are more than four models, a mechanism has no map, the page would be too large, or pictures
            or tokens do not fit.
        AttentionSwapError: if no layer matches, or a model is wrapped.

    Example:
        >>> import attnswap, copy, torch
        >>> plain = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
        >>> models = {"before": plain, "after": attnswap.swapped(copy.deepcopy(plain), "sigmoid")}
        >>> page = attnswap.explore(models, torch.randn(1, 3, 16), tokens=[["A", "red", "fox"]])
        >>> page.html.startswith("<!DOCTYPE html>")
        True
    """
    named = models if isinstance(models, Mapping) else {type(models).__name__: models}
    if images is None and isinstance(inputs, Tensor) and inputs.ndim == 4:
        low, high = inputs.amin((1, 2, 3), True), inputs.amax((1, 2, 3), True)
        images = (inputs - low) / (high - low).clamp(min=1e-12)
    shown = [Shown(str(name), model, inputs) for name, model in named.items()]
    return explore_shown(shown, images, tokens, source_tokens, layers, rows)


def explore_shown(
    shown: Sequence[Shown],
    images: Tensor | None = None,
    tokens: Sequence[Sequence[str]] | None = None,
    source_tokens: Sequence[Sequence[str]] | None = None,
    layers: Layers | None = None,
    rows: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    made_by: str = "attnswap.explore(...)",
    title: str = "",
) -> Explorer:
    """As :func:`explore`, of models with inputs of their own; ``title`` comes before the models' names."""
    given = {"images": images, "tokens": tokens, "source_tokens": source_tokens, "names": names}
    counts = {name: len(each) for name, each in given.items() if each is not None}
    if len(set(counts.values())) > 1 or 0 in counts.values():
        raise UsageError(f"{counts} must be equally many, one for each input, and at least one")
    models, blobs = collect(shown, next(iter(counts.values()), None), layers, rows)
    sizes, others = set[int](), set[int]()
    for each, model in zip(shown, models, strict=True):
        no_raster = no_rasters(each.model, [layer["name"] for layer in model["layers"]])
        for layer in model["layers"]:
            (others if layer["name"] in no_raster else sizes).update((layer["queries"], layer["keys"]))
    sizes -= others
    grids = {} if images is None else {size: patch_grid(size, *images.shape[-2:]) for size in sizes}
    samples = [
        {
            "name": names[index] if names else f"input {index + 1}",
            "image": None if images is None else _picture(images[index]),
            "tokens": None if tokens is None else [str(token) for token in tokens[index]],
            "source": None if source_tokens is None else [str(token) for token in source_tokens[index]],
        }
        for index in range(len(blobs[0]))
    ]
    return Explorer(_render({"models": models, "inputs": samples, "grids": grids}, blobs, made_by, title))


def _picture(image: Tensor) -> str:
    """An image ``[1 or 3, H, W]`` in [0, 1] as the address of a JPEG that is a part of the page."""
    from PIL import Image

    if image.ndim != 3 or image.shape[0] not in (1, 3):
        raise UsageError(f"images must be [B, 1 or 3, H, W], got {[1, *image.shape]}")
    pixels = (image.detach().float().cpu().nan_to_num().clamp(0, 1) * 255).round().to(torch.uint8)
    picture = Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).numpy())
    picture.thumbnail((_LARGEST_PICTURE, _LARGEST_PICTURE))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def _render(data: dict[str, Any], blobs: Sequence[Sequence[str]], made_by: str, title: str) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    ran = this_environment()
    return environment.get_template("page.html.j2").render(
        models=data["models"],
        patches=bool(data["grids"]),
        blobs=[[Markup(blob) for blob in of_model] for of_model in blobs],
        data=Markup(json.dumps(data, allow_nan=False).translate(_ESCAPED)),
        script=Markup(script),
        digest=base64.b64encode(sha256(script.encode()).digest()).decode("ascii"),
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        made_by=made_by,
        title=title,
        code=ran.code,
        versions=ran.versions,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )
