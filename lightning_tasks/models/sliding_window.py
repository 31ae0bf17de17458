"""Logits of images of any size from a network for one size: windows that overlap are averaged, a band at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Network = Callable[[Tensor], Tensor]
_BAND = 32  # rows


@dataclass(frozen=True)
class Windows:
    """How an image is cut into windows.

    Args:
        size: H = W of a window in pixels.
        stride: pixels from one window to the next; the last window of a row or column ends with the image.
        batch_size: windows that go through the network together.

    Raises:
        ValueError: if a number is below 1, or the stride above the size (pixels would be left out).
    """

    size: int
    stride: int
    batch_size: int = 1

    def __post_init__(self) -> None:
        for name in ("size", "stride", "batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} of the windows is {value!r}: give an integer of at least 1")
        if self.stride > self.size:
            raise ValueError(f"the stride {self.stride} is above the window {self.size}: pixels would be left out")

    def starts(self, length: int) -> list[int]:
        """First pixels of the windows over a side of ``length`` pixels, at least ``size``."""
        return [*range(0, length - self.size, self.stride), length - self.size]


@dataclass(frozen=True)
class Prediction:
    """How whole images are predicted.

    Args:
        windows: how they are cut.
        scales: factors that images are scaled by; class probabilities are averaged over them.
        flip: whether mirror images count too.
    """

    windows: Windows
    scales: tuple[float, ...] = (1.0,)
    flip: bool = False

    def bands(self, network: Network, images: Tensor) -> Iterator[Tensor]:
        """Logits ``[B, K, rows, W]`` from the top; with several scales or mirror images log-probabilities, at once."""
        if self.scales == (1.0,) and not self.flip:
            yield from logit_bands(network, images, self.windows)
        else:
            yield multi_scale_probabilities(network, images, self.windows, self.scales, self.flip).clamp(1e-12).log()


def logit_bands(network: Network, images: Tensor, windows: Windows) -> Iterator[Tensor]:
    """Logits ``[B, K, rows, W]`` of bands of an image, from the top to the bottom.

    Every pixel's logits are the mean over the windows that hold it. Images smaller than a window are filled up with
    the mean color at the right and below. The logits of no more rows than a window's are held at once, and of one
    band: ``B K size W`` floats and a part, whatever the height.

    Args:
        network: images ``[b, 3, size, size]`` to logits ``[b, K, size, size]``.
        images: ``[B, 3, H, W]``.
        windows: the cut.

    Raises:
        ValueError: if images are not ``[B, 3, H, W]``.
    """
    if images.ndim != 4:
        raise ValueError(f"images must be [B, 3, H, W], got {list(images.shape)}")
    height, width = images.shape[-2:]
    images = _filled_up(images, windows.size)
    tops, lefts = windows.starts(images.shape[-2]), windows.starts(images.shape[-1])
    counts = images.new_zeros(images.shape[-1])
    for left in lefts:
        counts[left : left + windows.size] += 1
    sums: Tensor | None = None  # [B, K, size, W]: logits of the rows from `top` on
    rows = images.new_zeros(windows.size)  # how many rows of windows each of them is in
    for place, top in enumerate(tops):
        sums = _add_windows(network, images[..., top : top + windows.size, :], lefts, windows, sums)
        rows += 1
        done = tops[place + 1] - top if place + 1 < len(tops) else min(windows.size, height - top)
        for first in range(0, done, _BAND):
            part = slice(first, min(first + _BAND, done))
            yield (sums[..., part, :] / (rows[part, None] * counts))[..., :width]
        _shift(sums, done, -2)
        _shift(rows, done, -1)


def sliding_logits(network: Network, images: Tensor, windows: Windows) -> Tensor:
    """Logits ``[B, K, H, W]`` of images ``[B, 3, H, W]``; see :func:`logit_bands`, which never holds all of them."""
    result: Tensor | None = None
    top = 0
    for band in logit_bands(network, images, windows):
        if result is None:
            result = band.new_empty(*band.shape[:2], *images.shape[-2:])
        result[..., top : top + band.shape[-2], :] = band
        top += band.shape[-2]
    assert result is not None  # an image has a band
    return result


def multi_scale_probabilities(
    network: Network, images: Tensor, windows: Windows, scales: Sequence[float], flip: bool = False
) -> Tensor:
    """Class probabilities ``[B, K, H, W]``: the mean over scaled (and mirrored) images of the softmax of their logits.

    It holds two maps of the size of the result, and those of the largest scale.

    Args:
        network, images, windows: see :func:`logit_bands`.
        scales: factors on height and width.
        flip: whether mirror images count too.

    Raises:
        ValueError: if there is no scale, or one that is not positive.
    """
    if not scales or min(scales) <= 0:
        raise ValueError(f"scales are {list(scales)}: give at least one, all above 0")
    total: Tensor | None = None
    size = images.shape[-2:]
    for scale in scales:
        scaled = images
        if scale != 1:
            sides = [max(1, round(scale * side)) for side in size]
            # In 32 bits: on a CPU there is no antialiasing in fewer.
            scaled = functional.interpolate(images.float(), size=sides, mode="bilinear", antialias=True).to(images)
        for mirrored in (False, True) if flip else (False,):
            logits = sliding_logits(network, scaled.flip(-1) if mirrored else scaled, windows)
            logits = logits.flip(-1) if mirrored else logits
            if logits.shape[-2:] != size:
                logits = functional.interpolate(logits, size=size, mode="bilinear")
            probabilities = logits.softmax(1)
            total = probabilities if total is None else total.add_(probabilities)
    assert total is not None  # there is a scale
    return total / (len(scales) * (2 if flip else 1))


def _add_windows(
    network: Network, strip: Tensor, lefts: Sequence[int], windows: Windows, sums: Tensor | None
) -> Tensor:
    """Sums ``[B, K, size, W]``, float32, plus the logits of the windows in a strip of images ``[B, 3, size, W]``."""
    cut = [(sample, left) for left in lefts for sample in range(len(strip))]
    for first in range(0, len(cut), windows.batch_size):
        part = cut[first : first + windows.batch_size]
        logits = network(torch.stack([strip[sample, :, :, left : left + windows.size] for sample, left in part]))
        if sums is None:
            shape = (len(strip), logits.shape[1], *strip.shape[-2:])
            sums = logits.new_zeros(shape, dtype=torch.float32)
        for (sample, left), found in zip(part, logits, strict=True):
            sums[sample, :, :, left : left + windows.size] += found
    assert sums is not None  # a strip has a window
    return sums


def _shift(buffer: Tensor, rows: int, dim: int) -> None:
    """Move a buffer up by some rows, in place and without a copy of it; zeros come in from below."""
    size = buffer.shape[dim]
    for first in range(0, size - rows, rows):
        rest = min(rows, size - rows - first)
        buffer.narrow(dim, first, rest).copy_(buffer.narrow(dim, first + rows, rest))
    buffer.narrow(dim, size - rows, rows).zero_()


def _filled_up(images: Tensor, size: int) -> Tensor:
    """Images of at least ``size`` pixels a side."""
    below, right = (max(0, size - side) for side in images.shape[-2:])
    if not below and not right:
        return images
    filled = images.mean((-2, -1), keepdim=True).repeat(1, 1, images.shape[-2] + below, images.shape[-1] + right)
    filled[..., : images.shape[-2], : images.shape[-1]] = images
    return filled
