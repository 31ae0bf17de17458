"""timm models by name, with swapped attention, and what they say of their input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import timm
from timm.data import resolve_model_data_config
from timm.models import get_model_input_config
from torch import Tensor, nn

import lightning_tasks.models.fan  # noqa: F401 timm then knows its names
from attention_modules.mechanism import nearest
from lightning_tasks.errors import reason

_ELSEWHERE = ("hf-hub:", "hf_hub:", "local-dir:")


def check_model_name(name: str) -> str:
    """The same name.

    Raises:
        ValueError: if timm has no such model; the text has the nearest names.
    """
    if not isinstance(name, str):
        raise ValueError(f"a backbone or model is the name of a timm model, such as vit_tiny_patch16_224, got {name!r}")
    architecture, _, tag = name.partition(".")
    if name.startswith(_ELSEWHERE) or (timm.is_model(architecture) and not tag):
        return name
    tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{architecture}.*")]
    if timm.is_model(architecture):
        if tag in tags:
            return name
        raise ValueError(f"timm has no weights {tag!r} for {architecture}; it has {', '.join(tags) or 'none'}")
    near = nearest(architecture, timm.list_models(), beginnings=True)
    hint = f"the nearest names are {', '.join(near)}" if near else "timm.list_models() lists them"
    raise ValueError(f"timm has no model {architecture!r}; {hint}")


def build_timm_model(
    name: str, num_classes: int, pretrained: bool, options: Mapping[str, Any], *, key: str = "model_options"
) -> nn.Module:
    """The model that `timm.create_model` makes; errors call its options ``key``.

    Raises:
        ValueError: if it does not take ``options``, or its weights cannot be had or do not fit.
    """
    given = f"{key} {dict(options)}" if options else "these settings"
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=num_classes, **options)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"{name} could not be built with {given}: {error or type(error).__name__}") from error
    except Exception as error:  # a download can fail in any way
        if not pretrained and not name.startswith(_ELSEWHERE):
            raise
        source = _source(name, options)
        if source and isinstance(error, RuntimeError):  # read, but of another shape
            raise ValueError(
                f"the pretrained weights of {name} do not fit the model with {given}: leave out of {key} what "
                f"changes its layers, or give pretrained: false. {shorten(reason(error), 300)}"
            ) from error
        problem = f"cannot be had from {source} ({reason(error)})" if source else "do not exist"
        raise ValueError(
            f"the pretrained weights of {name} {problem}. Give a local file of them by "
            f"{key}={{'pretrained_cfg_overlay': {{'file': PATH}}}}, or pretrained: false, with --init_from PATH for a "
            f"checkpoint{', or see that this machine reaches the network' if source else ''}"
        ) from error


def _source(name: str, options: Mapping[str, Any]) -> str:
    if name.startswith(_ELSEWHERE):
        return name
    known = timm.models.get_pretrained_cfg(name, allow_unregistered=True)
    places = {**(known.to_dict() if known else {}), **(options.get("pretrained_cfg_overlay") or {})}
    if places.get("file"):
        return f"the file {places['file']}"
    if places.get("hf_hub_id"):
        return f"the Hugging Face hub ({places['hf_hub_id']})"
    return str(places.get("url") or "")


def head_names(model: nn.Module) -> list[str]:
    """Names of the layers of a timm model whose shape follows from the number of classes."""
    names = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    return [names] if isinstance(names, str) else list(names)


def normalization(
    model: nn.Module, in_chans: int, mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation a channel; what is None is the model's own, averaged for one channel.

    Raises:
        ValueError: if there is not one number per channel, or a deviation is not positive.
    """
    config = resolve_model_data_config(model)
    found = []
    for name, given in (("mean", mean), ("std", std)):
        values = list(config[name] if given is None else given)
        if given is None and len(values) != in_chans:
            values = [sum(values) / len(values)] * in_chans
        if len(values) != in_chans:
            raise ValueError(f"{name} has {len(values)} values for {in_chans} channels: {values}; give one per channel")
        found.append(values)
    if min(found[1]) <= 0:
        raise ValueError(f"std must be positive, got {found[1]}")
    return found[0], found[1]


@dataclass(frozen=True)
class InputLimits:
    """What images a model takes: its name, C, and (H, W), None where it takes several sizes."""

    name: str
    channels: int
    size: tuple[int, int] | None

    @classmethod
    def of(cls, model: nn.Module, name: str, options: Mapping[str, Any]) -> InputLimits:
        """What timm says of a model that it built as ``name`` with ``options``."""
        config = get_model_input_config(model)
        channels, *size = config["input_size"]
        return cls(name, int(options.get("in_chans", channels)), tuple(size) if config["fixed_input_size"] else None)

    def check(self, shape: Sequence[int]) -> None:
        """Raise a ValueError where images of ``shape`` (C, H, W) are not what the model was built for."""
        channels, *size = shape
        if channels != self.channels:
            raise ValueError(
                f"images have {channels} channels, the model {self.name} takes {self.channels}: give the data module "
                f"in_chans={self.channels}, or the task model_options={{'in_chans': {channels}}}"
            )
        if self.size is not None and tuple(size) != self.size:
            raise ValueError(
                f"images have {size[0]} x {size[1]} pixels, the model {self.name} takes {self.size[0]} x "
                f"{self.size[1]}: give the data module img_size={self.size[0]}, or the task "
                f"model_options={{'img_size': {size[0]}}}"
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
            cure = f"give num_classes={high + 1}" if low >= 0 else "labels count from 0; leave out those below"
            raise ValueError(f"labels from {low} to {high} for {num_classes} classes: {cure}")


def _range(labels: Tensor) -> tuple[int, int]:
    low, high = labels.aminmax()
    return int(low), int(high)
