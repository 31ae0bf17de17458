"""A model of mmsegmentation's from its description: its own loss on crops, its own prediction of whole images."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules import AttentionSwapError, swap_attention
from attention_modules.mechanisms.shared.options import check_integer
from lightning_tasks.errors import reason
from lightning_tasks.models.mmseg_config import (
    check_types,
    config_file,
    load_mmseg,
    model_config,
    set_crop_size,
    set_num_classes,
    without_pretrained,
)
from lightning_tasks.models.segmentation import SegmentationBuilder

_ARGUMENTS = ("mmseg_config", "crop_size", "pretrained", "cfg_options")
_IGNORED = 255  # by every head of mmsegmentation's
# Embeddings of positions and classes, which mmsegmentation's own schedules spare weight decay by name.
_NO_WEIGHT_DECAY = ("pos_embed", "absolute_pos_embed", "relative_position_bias_table", "cls_token", "cls_emb")

# What of mmsegmentation's heads has a row or a channel per class, by the ends of its name (PointRend's `fcs` apart).
_CLASS_PARTS = ("_seg", "cls_emb", "cls_embed", "mask_norm", "se_layer")


class MMSegBuilder(SegmentationBuilder):
    """`{"mmseg_config": NAME_OR_PATH, ...}`: a model as mmsegmentation builds it, with its data preprocessor.

    Images come in RGB in [0, 1], and go in as the data preprocessor expects them, BGR in 0 to 255. SyncBN is BN here:
    ``Trainer(sync_batchnorm=True)`` makes it SyncBN again.

    Args:
        description: ``mmseg_config``, the name of a configuration that mmsegmentation ships, or the path of one (a file
            of Python, which is run); ``crop_size``, pixels, in place of the configuration's; ``pretrained``, whether
            the weights that it names are read (False where left out); ``cfg_options``, changes of the configuration by
            dotted path, ``{"model.backbone.num_layers": 6}``.
        inference: ``stride`` where the configuration slides windows, None for its own. Its prediction knows no
            ``windows_at_once``, ``scales`` and ``flip``.

    Raises:
        FileNotFoundError: if there is no such file.
        ModuleNotFoundError: if the extra `mmseg` is not installed.
        ValueError: for an unknown configuration (the nearest names are given) or key, and for settings of the
            prediction that it does not know.
    """

    size_key = "crop_size"

    def __init__(self, description: Mapping[str, Any], inference: Mapping[str, Any]) -> None:
        if unknown := [name for name in description if name not in _ARGUMENTS]:
            raise ValueError(f"model has the unknown key {unknown[0]!r}; it takes {', '.join(_ARGUMENTS)}")
        self.name = description["mmseg_config"]
        size = description.get("crop_size")
        if size is not None:
            check_integer("crop_size", size, 1)
        self.config = model_config(config_file(self.name), description.get("cfg_options") or {})
        self.pretrained = bool(description.get("pretrained", False))
        if not self.pretrained:
            without_pretrained(self.config)
        if size is not None:
            set_crop_size(self.config, size)
        _set_inference(self.config, inference, self.name)
        self.crop_size = size if size is not None else _square(self.config)

    def build(self, num_classes: int) -> nn.Module:
        """The network, its weights initialized, its softmax attention as ours, which makes no maps.

        Raises:
            ValueError: if mmsegmentation cannot build it, its weights cannot be had, its head has one channel for two
                classes, or there are more classes than labels beside the one that its heads leave out.
        """
        if num_classes > _IGNORED:
            raise ValueError(
                f"num_classes={num_classes}: the heads of mmsegmentation leave out the label {_IGNORED}, so that a "
                f"model of theirs takes at most {_IGNORED} classes; take a Segmenter"
            )
        load_mmseg()
        from mmengine.model import revert_sync_batchnorm
        from mmengine.registry import DefaultScope
        from mmseg.registry import MODELS

        config = copy.deepcopy(self.config)
        set_num_classes(config, num_classes)
        check_types(config)
        try:
            with DefaultScope.overwrite_default_scope("mmseg"), _quiet():
                config.type = task_class(MODELS.get(config.type))
                network: Any = revert_sync_batchnorm(MODELS.build(config))
        except (AssertionError, KeyError, TypeError, ImportError) as error:
            raise ValueError(f"mmseg_config={self.name} could not be built: {error or type(error).__name__}") from error
        try:
            with DefaultScope.overwrite_default_scope("mmseg"), _quiet():
                network.init_weights()
        except Exception as error:
            if not self.pretrained:  # else weights are read here, which can fail in any way
                raise
            raise ValueError(
                f"the weights that mmseg_config={self.name} names cannot be had ({reason(error)}): give cfg_options "
                "the path of a local file of them, or pretrained: false, with --init_from PATH for a checkpoint"
            ) from error
        if network.out_channels != num_classes:
            raise ValueError(
                f"mmseg_config={self.name} has {network.out_channels} channels for {num_classes} classes: give "
                f"cfg_options={{'model.decode_head.out_channels': {num_classes}}}"
            )
        with suppress(AttentionSwapError):  # no attention that a host knows
            swap_attention(network, "softmax")  # mmsegmentation's own makes N x N maps, and throws them away
        return network


@functools.cache
def task_class(plain: Any) -> type[nn.Module]:
    """A segmentor of mmsegmentation's, as a :class:`~lightning_tasks.models.segmentation.SegmentationNetwork`."""
    return type(plain.__name__, (_OfTask, plain), {})


def _blank(plain: Any) -> nn.Module:
    """An empty network, for unpickling to fill."""
    cls = task_class(plain)
    return cls.__new__(cls)


class _OfTask:
    """What a segmentor of mmsegmentation's is to its task, beside what it is to mmsegmentation."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """By the segmentor's own class: no import finds one that is made here."""
        return _blank, (type(self).__mro__[2],), self.__dict__

    def head_names(self: Any) -> list[str]:
        """The Parameters of its heads that have a part for each class."""
        parts = [name for name, _ in self.named_parameters() if "head" in name]
        return [name for name in parts if any(part.endswith(_CLASS_PARTS) for part in name.split("."))]

    def no_weight_decay(self: Any) -> frozenset[str]:
        """Embeddings of positions and classes, as timm's models say it."""
        names = [name for name, _ in self.named_parameters()]
        return frozenset(name for name in names if name.rpartition(".")[2] in _NO_WEIGHT_DECAY)

    def losses(self: Any, images: Tensor, masks: Tensor, ignore_index: int) -> dict[str, Tensor]:
        """The loss terms of the model's own `loss`; what else that measures (`acc_seg`) is no loss."""
        from mmengine.structures import PixelData

        if not len(images):  # every image of the batch was damaged: its data preprocessor looks at the first
            return {"loss": torch.stack([each.sum() for each in self.parameters() if each.requires_grad]).sum() * 0}
        samples = _samples(images)
        masks = masks.masked_fill(masks == ignore_index, _ignored(self))
        for sample, mask in zip(samples, masks, strict=True):
            sample.gt_sem_seg = PixelData(data=mask[None])
        found: dict[str, Any] = self(**preprocessed(self, images, samples, training=True), mode="loss")
        terms = {name: value for name, value in found.items() if "loss" in name}  # as mmengine's `parse_losses`
        return {
            name: value.mean() if isinstance(value, Tensor) else torch.stack([part.mean() for part in value]).sum()
            for name, value in terms.items()
        }

    def bands(self: Any, images: Tensor) -> Iterator[Tensor]:
        """The logits of the model's own `predict`, all rows at once: it holds them all."""
        results = self(**preprocessed(self, images, _samples(images), training=False), mode="predict")
        yield torch.stack([result.seg_logits.data for result in results])


def preprocessed(network: Any, images: Tensor, samples: list[Any], training: bool) -> dict[str, Any]:
    """What the model's data preprocessor makes of images ``[B, 3, H, W]``, RGB in [0, 1], and their samples."""
    preprocessor = network.data_preprocessor
    if preprocessor.device != images.device:  # it keeps a device of its own, which `to` of a parent does not reach
        preprocessor.to(images.device)
    data = preprocessor({"inputs": list(images.flip(1) * 255), "data_samples": samples}, training)
    return {**data, "inputs": data["inputs"].to(images.dtype)}


def _samples(images: Tensor) -> list[Any]:
    """An empty `SegDataSample` for each image, which says that it was neither scaled nor mirrored."""
    from mmseg.structures import SegDataSample

    size = tuple(images.shape[-2:])
    return [SegDataSample(metainfo={"ori_shape": size, "img_shape": size, "pad_shape": size}) for _ in images]


def _ignored(network: Any) -> int:
    """The label that the model's heads leave out."""
    heads = network.decode_head
    last: Any = heads[-1] if isinstance(heads, nn.ModuleList) else heads
    return last.ignore_index


def _set_inference(config: Any, inference: Mapping[str, Any], name: str) -> None:
    plain = {"windows_at_once": 1, "scales": [1.0], "flip": False}
    if other := [key for key, value in plain.items() if inference[key] != value]:
        raise ValueError(f"{other[0]}={inference[other[0]]}: mmsegmentation's own prediction knows none; leave it out")
    stride, windows = inference["stride"], config.get("test_cfg", {})
    if stride is None:
        return
    if windows.get("mode") != "slide":
        raise ValueError(
            f"stride={stride}: mmseg_config={name} predicts whole images; leave it out, or give cfg_options "
            "{'model.test_cfg': {'mode': 'slide', 'crop_size': [H, W], 'stride': [h, w]}}"
        )
    if not 1 <= stride <= min(windows.crop_size):
        raise ValueError(f"the stride {stride} must be at least 1, and at most the window {tuple(windows.crop_size)}")
    windows.stride = (stride, stride)


def _square(config: Any) -> int | None:
    """H = W that training images are padded to, None where they are not, or not to a square."""
    size = (config.get("data_preprocessor") or {}).get("size")
    return size[0] if size is not None and size[0] == size[1] else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the paragraph that mmengine logs for each parameter that it initializes."""
    from mmengine.logging import MMLogger

    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
