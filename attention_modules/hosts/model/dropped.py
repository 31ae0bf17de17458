"""What makes the tokens of a network: where it drops some, or cuts an image otherwise, a column is no position."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from attention_modules.hosts.base import Swapped


def dropped_refusals(modules: Mapping[str, nn.Module], layers: Sequence[str]) -> dict[str, str]:
    """Why a mechanism that counts columns has no place in layers, of those that are given a part of the tokens.

    Args:
        modules: of a model, by name.
        layers: names of all attention layers among them.
    """
    reasons = {name: _drops(name, module) for name, module in modules.items()}
    shaped = {name: taken for name, module in modules.items() if (taken := _shapes(module)) is not None}
    around = {
        name for name in shaped for other in shaped if other != name and other.startswith(f"{name}." * bool(name))
    }
    for name in shaped.keys() - around:
        reasons[name] = (
            f"{name or type(modules[name]).__name__} takes images of shapes of their own ({shaped[name]}), and the "
            "mechanism counts columns: choose one that counts none"
        )
    return {layer: why for name, why in reasons.items() if why is not None for layer in _fed_by(name, layers)}


def _drops(name: str, module: nn.Module) -> str | None:
    kind, name = type(module).__name__, name or type(module).__name__
    if kind.startswith("PatchDropout") and getattr(module, "prob", 0.0) > 0:
        return f"{name} drops tokens in training, and the mechanism counts columns: build it with patch_drop_rate=0"
    if kind.endswith(("MAEEmbeddings", "VideoMAEDecoder", "VJEPA2PredictorEmbeddings")):
        return f"{name} drops and shuffles tokens, and the mechanism counts columns: take one that does not"
    return None


def _shapes(module: nn.Module) -> str | None:
    """The argument by which a module is told the shape of each image."""
    try:
        taken = inspect.signature(type(module).forward).parameters.keys()
    except (TypeError, ValueError):  # of what is no function of Python
        return None
    if "grid_thw" in taken:
        return "grid_thw"
    return "spatial_shapes" if {"spatial_shapes", "pixel_values"} <= taken else None


def watch_grids(model: nn.Module, modules: Mapping[str, nn.Module], layers: Sequence[str]) -> None:
    """Have what cuts images check their grid, where a layer that it feeds counts columns.

    Args:
        model: whose checks are set anew.
        modules: of it, by name.
        layers: names of all attention layers among them.
    """
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if _is_check(hook)]:
                del hooks[key]
    for name, owner in modules.items():
        for child, part in owner.named_children():
            part = getattr(part, "base_layer", part)  # within an adapter, which may be merged
            if (grid := _grid(owner, child, part)) is None:
                continue
            fed = [modules[layer] for layer in _fed_by(f"{name}.{child}", layers)]
            counts = (type(each.mechanism) for each in fed if isinstance(each, Swapped) and _counts(each))
            if (mechanism := next(counts, None)) is not None:
                part.register_forward_hook(partial(_check_grid, mechanism.__name__, grid))
                owner.register_forward_pre_hook(partial(_check_part, mechanism.__name__, child))


def _fed_by(name: str, layers: Sequence[str]) -> list[str]:
    """The layers in the innermost module that holds some beside the one of this name."""
    parts = name.split(".")
    around = ["".join(f"{part}." for part in parts[:depth]) for depth in range(len(parts), -1, -1)]
    held = ([layer for layer in layers if layer.startswith(prefix)] for prefix in around)
    return next(filter(None, held), [])


def _counts(layer: Swapped) -> bool:
    return layer.mechanism.counts_columns or layer.mechanism.counts_distances


def _grid(owner: Any, child: str, part: Any) -> tuple[int, ...] | None:
    """How many patches an image has in each direction, where the owner of what cuts it says for what size it is."""
    by_config = getattr(getattr(owner, "config", None), "image_size", None)
    size = getattr(owner, "img_size", getattr(owner, "image_size", by_config))
    given = [size, size] if isinstance(size, int) else [*size] if isinstance(size, (list, tuple)) else []
    if len(given) != 2:
        return None
    of_pixels = getattr(owner, "patch_size", None) in (1, (1, 1), [1, 1])
    cuts = isinstance(part, (nn.Conv2d, nn.Conv3d)) and (of_pixels or max(part.stride[-2:]) > 1)
    known = getattr(owner, "grid_size", None)
    if isinstance(known, Sequence) and len(known) == 2 and (cuts or child in ("proj", "backbone")):  # timm's stems
        return tuple(known)
    if not cuts:
        return None
    around = [0, 0] if isinstance(part.padding, str) else part.padding[-2:]
    sizes = zip(given, around, part.kernel_size[-2:], part.stride[-2:], strict=True)
    return tuple((pixels + 2 * pad - width) // step + 1 for pixels, pad, width, step in sizes)


def _is_check(hook: object) -> bool:
    return isinstance(hook, partial) and hook.func in (_check_grid, _check_part)


def _check_part(mechanism: str, child: str, owner: nn.Module, given: object) -> None:
    """Refuse images where nothing checks their grid any more.

    Raises:
        RuntimeError: if what cut them was replaced.
    """
    part = owner._modules.get(child)
    inside = [] if part is None else part.modules()  # also within an adapter
    if not any(_is_check(hook) for module in inside for hook in module._forward_hooks.values()):
        raise RuntimeError(
            f"{mechanism} counts columns, and {child!r} of {type(owner).__name__} was replaced after the swap, so that "
            "images may have another grid: replace it in the plain model, and swap that"
        )


def _check_grid(mechanism: str, grid: tuple[int, ...], part: nn.Module, given: object, patches: Any) -> None:
    """Refuse as many patches in other places; another number is refused by the layers.

    Raises:
        RuntimeError: if the grid is another one of as many patches.
    """
    patches = patches[-1] if isinstance(patches, (list, tuple)) else patches  # of a stem with several scales
    now = tuple(patches.shape[-2:]) if isinstance(patches, Tensor) and patches.ndim > 3 else grid
    if now != grid and math.prod(now) == math.prod(grid):
        raise RuntimeError(
            f"{mechanism} counts columns, which are patches in {grid[0]} rows of {grid[1]}, and this image has "
            f"{now[0]} rows of {now[1]}: give images of that shape, or choose another mechanism"
        )
