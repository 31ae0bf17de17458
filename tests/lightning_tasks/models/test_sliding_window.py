"""Sliding windows: what every pixel's logits are the mean of, bands, small images, scales, and memory."""

import sys

import pytest
import torch
from torch.nn import functional

from lightning_tasks.models import sliding_window
from lightning_tasks.models.sliding_window import Windows, logit_bands, multi_scale_probabilities, sliding_logits
from tests.lightning_tasks.programs import run_forked
from tests.rows import each_row


def network(images):
    """Logits of two classes that depend on the place in the window and on all of it."""
    size = images.shape[-1]
    place = torch.arange(size * size, dtype=images.dtype).view(1, 1, size, size) / size**2
    whole = images.mean((1, 2, 3), keepdim=True)
    return torch.cat([images.sum(1, keepdim=True) * place + whole, images[:, :1] - place], 1)


def naive(images, size, stride):
    """Every window by itself, summed and counted."""
    batch, _, height, width = images.shape
    total, count = torch.zeros(batch, 2, height, width), torch.zeros(height, width)
    tops, lefts = ([*range(0, side - size, stride), side - size] for side in (height, width))
    for top in tops:
        for left in lefts:
            area = (..., slice(top, top + size), slice(left, left + size))
            total[area] += network(images[area])
            count[area[1:]] += 1
    return total / count


def random_images(height, width, count=2):
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("at_once", [1, 3, 100])
@pytest.mark.parametrize(
    ("height", "width", "size", "stride"),
    [(8, 8, 8, 8), (17, 23, 8, 3), (16, 24, 8, 8), (21, 8, 8, 5), (9, 30, 8, 1), (23, 19, 8, 4), (40, 16, 16, 6)],
)
def test_overlapping_windows_are_averaged_exactly(height, width, size, stride, at_once):
    images = random_images(height, width)
    found = sliding_logits(network, images, Windows(size, stride, at_once))
    torch.testing.assert_close(found, naive(images, size, stride))


def test_bands_are_the_image_from_top_to_bottom():
    images = random_images(30, 20)
    windows = Windows(8, 3)
    bands = list(logit_bands(network, images, windows))
    assert [band.shape[-2] for band in bands] == [3] * 7 + [1, 8]
    assert torch.equal(torch.cat(bands, -2), sliding_logits(network, images, windows))


def test_long_bands_are_cut(monkeypatch):
    monkeypatch.setattr(sliding_window, "_BAND", 3)
    images = random_images(30, 20)
    bands = list(logit_bands(network, images, Windows(8, 5)))
    assert max(band.shape[-2] for band in bands) == 3
    torch.testing.assert_close(torch.cat(bands, -2), naive(images, 8, 5))


def test_windows_are_summed_in_32_bits():
    def half(images):
        return network(images).bfloat16()

    images = random_images(12, 12)
    found = sliding_logits(half, images, Windows(8, 2))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, naive(images, 8, 2), rtol=0.004, atol=0.001)


def test_scales_in_half_precision():
    images = random_images(16, 12)
    found = multi_scale_probabilities(network, images.bfloat16(), Windows(8, 4), [0.5, 1.0, 1.5], flip=True)
    expected = multi_scale_probabilities(network, images, Windows(8, 4), [0.5, 1.0, 1.5], flip=True)
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.01)


def test_gradients_go_through_windows():
    one, other = (random_images(19, 14).requires_grad_() for _ in range(2))
    weight = torch.rand(2, 2, 19, 14)
    (sliding_logits(network, one, Windows(8, 3)) * weight).sum().backward()
    (naive(other, 8, 3) * weight).sum().backward()
    torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(("height", "width"), [(5, 20), (20, 5), (3, 4)])
def test_small_images_are_filled_up_and_cut_again(height, width):
    images = random_images(height, width)
    found = sliding_logits(network, images, Windows(8, 8))
    assert found.shape == (2, 2, height, width)
    filled = images.mean((-2, -1), keepdim=True).repeat(1, 1, max(8, height), max(8, width))
    filled[..., :height, :width] = images
    torch.testing.assert_close(found, naive(filled, 8, 8)[..., :height, :width])


def test_scales_and_mirror_images_are_averaged_as_probabilities():
    images, windows = random_images(16, 12), Windows(8, 4)
    found = multi_scale_probabilities(network, images, windows, [1.0, 1.5], flip=True)
    larger = functional.interpolate(images, size=(24, 18), mode="bilinear", antialias=True)
    expected = torch.zeros(2, 2, 16, 12)
    for given in (images, larger):
        for flip in (False, True):
            logits = naive(given.flip(-1) if flip else given, 8, 4)
            logits = logits.flip(-1) if flip else logits
            expected += functional.interpolate(logits, size=(16, 12), mode="bilinear").softmax(1) / 4
    torch.testing.assert_close(found, expected)
    assert torch.allclose(found.sum(1), torch.ones(2, 16, 12))
    one = multi_scale_probabilities(network, images, windows, [1.0])
    torch.testing.assert_close(one, naive(images, 8, 4).softmax(1))


@each_row(
    ("arguments", "text"),
    [
        ((0, 1), "size of the windows is 0"),
        ((8, 0), "stride of the windows is 0"),
        ((8, 9), "the stride 9 is above the window 8: pixels would be left out"),
        ((8, 8, 0), "batch_size of the windows is 0"),
    ],
)
def test_bad_windows(arguments, text):
    with pytest.raises(ValueError, match=text):
        Windows(*arguments)


def test_bad_scales_and_images():
    with pytest.raises(ValueError, match="scales are"):
        multi_scale_probabilities(network, random_images(8, 8), Windows(8, 8), [0.0])
    with pytest.raises(ValueError, match=r"\[B, 3, H, W\], got \[3, 8, 8\]"):
        list(logit_bands(network, random_images(8, 8)[0], Windows(8, 8)))


@pytest.mark.slow
def test_a_large_image_stays_below_two_gib():
    """The tiny model, 150 classes, 2,048 x 1,024 pixels, all else at its default."""
    done = run_forked("tests.lightning_tasks.models.large_image")
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split()[-1]) * (1 if sys.platform == "darwin" else 1024)
    assert peak + 11 * 2**21 < 2 * 2**30
