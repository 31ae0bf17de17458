"""timm models by name, with swapped attention, and what they say of their input."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import timm
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from attention_modules.mechanism import Mechanism
from attention_modules.swap import swap_attention
from lightning_tasks.reason import reason

_HUB = ("hf-hub:", "hf_hub:")
_ELSEWHERE = (*_HUB, "local-dir:")


def check_model_name(name: str) -> str:
    """The same name.

    Raises:
        ValueError: if timm has no such model; the text has the nearest names.
    """
    architecture, _, tag = name.partition(".")
    if name.startswith(_ELSEWHERE) or (timm.is_model(architecture) and not tag):
        return name
    tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{architecture}.*")]
    if timm.is_model(architecture):
        if tag in tags:
            return name
        raise ValueError(f"timm has no weights {tag!r} for {architecture}; it has {', '.join(tags) or 'none'}")
    near = difflib.get_close_matches(architecture, timm.list_models(), n=3, cutoff=0.5)
    hint = f"the nearest names are {', '.join(near)}" if near else "timm.list_models() lists them"
    raise ValueError(f"timm has no model {architecture!r}; {hint}")


def build_timm_model(name: str, num_classes: int, pretrained: bool, options: Mapping[str, Any]) -> nn.Module:
    """The model that `timm.create_model` makes.

    Raises:
        ValueError: if it does not take ``options``, or what it is to start from cannot be fetched.
    """
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=num_classes, **options)
    except (TypeError, AssertionError) as error:
        given = f"model_options {dict(options)}" if options else "these settings"
        raise ValueError(f"{name} could not be built with {given}: {error or type(error).__name__}") from error
    except Exception as error:  # of the hub's client or its transport
        if not (pretrained or name.startswith(_HUB)):
            raise
        raise ValueError(
            f"{name} could not be built from published weights or settings ({reason(error)}). Check the network and "
            "$HF_HUB_OFFLINE; or start from new weights (pretrained: false), or from those of a folder (the name "
            "'local-dir:FOLDER')"
        ) from error


def swap_layers(
    model: nn.Module,
    attention: Mechanism,
    options: Mapping[str, Any],
    layers: Sequence[int] | None,
    other: Mechanism = "softmax",
    other_options: Mapping[str, Any] | None = None,
) -> None:
    """Put ``attention`` into the chosen layers and ``other`` into the rest; plain softmax stays timm's own.

    Raises:
        AttentionSwapError: as :func:`attention_modules.swap_attention`.
    """
    if layers is not None and other != "softmax":
        swap_attention(model, other, **(other_options or {}))
    if attention != "softmax" or (layers is not None and other != "softmax"):
        swap_attention(model, attention, layers=None if layers is None else list(layers), **options)


def normalisation(
    model: nn.Module, in_chans: int, mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation a channel; what is None is the model's own, averaged for one channel.

    Raises:
        ValueError: if there is not one number a channel, or a deviation is not positive.
    """
    config = resolve_model_data_config(model)
    found = []
    for name, given in (("mean", mean), ("std", std)):
        values = list(config[name] if given is None else given)
        if given is None and len(values) != in_chans:
            values = [sum(values) / len(values)] * in_chans
        if len(values) != in_chans:
            raise ValueError(f"{name} has {len(values)} values for {in_chans} channels: {values}; give one a channel")
        found.append(values)
    if min(found[1]) <= 0:
        raise ValueError(f"std must be positive, got {found[1]}")
    return found[0], found[1]


def check_image_shape(model: nn.Module, shape: Sequence[int], in_chans: int) -> None:
    """Raise a ValueError where images of ``shape`` (C, H, W) are not what the model was built for.

    The size is checked where the model has patches of a fixed number (``patch_embed`` says so).
    """
    channels, *size = shape
    if channels != in_chans:
        raise ValueError(
            f"images have {channels} channels, the model takes {in_chans}: give the data module in_chans={in_chans}, "
            f"or the task model_options={{'in_chans': {channels}}}"
        )
    patches = getattr(model, "patch_embed", None)
    expected = getattr(patches, "img_size", None)
    if expected is None or not getattr(patches, "strict_img_size", True) or tuple(size) == tuple(expected):
        return
    raise ValueError(
        f"images have {size[0]} x {size[1]} pixels, the model takes {expected[0]} x {expected[1]}: give the data "
        f"module img_size={expected[0]}, or the task model_options={{'img_size': {size[0]}}}"
    )


def check_batch(batch: Any, num_classes: int) -> None:
    """Raise a ValueError where a batch is not (images ``[B, C, H, W]``, labels ``[B]`` in 0 to num_classes - 1).

    Values are looked at on the CPU only: on a device this would wait for it.
    """
    images, labels = batch
    if images.ndim != 4 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"a batch must be (images [B, C, H, W], labels [B]), got {list(images.shape)} and {list(labels.shape)}"
        )
    if labels.dtype.is_floating_point or not images.dtype.is_floating_point:
        raise ValueError(
            f"images must be floating point in [0, 1] and labels integers, got {images.dtype} and {labels.dtype}"
        )
    if labels.device.type == "cpu" and labels.numel():
        low, high = _range(labels)
        if low < 0 or high >= num_classes:
            raise ValueError(f"labels from {low} to {high} for {num_classes} classes: give num_classes={high + 1}")


def _range(labels: Tensor) -> tuple[int, int]:
    low, high = labels.aminmax()
    return int(low), int(high)
