"""The loss of interpolated maps, in bands, against cross-entropy of the whole interpolated map."""

import pytest
import torch
from torch.nn import functional

from benchmarks.common import peak_memory
from lightning_tasks.models import Segmenter, pixel_loss
from lightning_tasks.models.pixel_loss import upsampled_cross_entropy
from lightning_tasks.models.segmenter_builder import SegmenterBuilder

INFERENCE = {"stride": None, "windows_at_once": 1, "scales": [1.0], "flip": False}


def whole(logits, masks, ignore_index=255):
    large = functional.interpolate(logits.permute(0, 3, 1, 2), size=masks.shape[1:], mode="bilinear")
    total = functional.cross_entropy(large, masks, ignore_index=ignore_index, reduction="sum")
    return total / (masks != ignore_index).sum().clamp(min=1)


def maps(batch=2, height=4, width=3, classes=5, factor=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(batch, height, width, classes, generator=generator, dtype=dtype)
    masks = torch.randint(classes, (batch, height * factor, width * factor), generator=generator)
    masks[:, 2:3] = 255
    masks[0, :, 1] = 255
    return logits.requires_grad_(), masks


@pytest.mark.parametrize("pixels", [1, 100, 1 << 14])
@pytest.mark.parametrize(("height", "width", "factor"), [(4, 3, 8), (1, 1, 4), (3, 2, 7), (5, 4, 1), (2, 2, 2)])
def test_loss_and_gradient_are_those_of_the_whole_map(height, width, factor, pixels, monkeypatch):
    monkeypatch.setattr(pixel_loss, "_PIXELS", pixels)
    logits, masks = maps(height=height, width=width, factor=factor)
    found, wanted = upsampled_cross_entropy(logits, masks, 255), whole(logits, masks)
    torch.testing.assert_close(found, wanted)
    for scale in (1.0, -2.5):
        (ours,), (theirs,) = (torch.autograd.grad(scale * loss, logits, retain_graph=True) for loss in (found, wanted))
        torch.testing.assert_close(ours, theirs)


def test_nothing_that_counts_is_a_loss_of_0_and_nan_stays_nan():
    logits, masks = maps()
    nothing = upsampled_cross_entropy(logits, torch.full_like(masks, 255), 255)
    nothing.backward()
    assert nothing == 0
    assert not logits.grad.any()
    broken = logits.detach().clone()
    broken[0, 2, 1, 3] = torch.nan
    assert upsampled_cross_entropy(broken, masks, 255).isnan()
    empty = upsampled_cross_entropy(logits[:0], masks[:0], 255)
    assert empty == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_interpolated_in_32(dtype):
    logits, masks = maps(dtype=torch.float32)
    short = logits.detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = upsampled_cross_entropy(short, masks, 255)
    loss.backward()
    torch.testing.assert_close(loss, whole(short.float(), masks))
    assert loss.dtype == torch.float32
    assert short.grad.dtype == dtype


def test_masks_that_do_not_fit_are_refused():
    logits, masks = maps()
    with pytest.raises(ValueError, match="H a multiple of 4"):
        upsampled_cross_entropy(logits, masks[:, :-1], 255)
    with pytest.raises(ValueError, match="need masks"):
        upsampled_cross_entropy(logits, masks[:1], 255)


@pytest.mark.parametrize("decoder", ["mask_transformer", "linear"])
def test_a_segmenter_s_loss_is_that_of_its_logits(decoder):
    torch.manual_seed(0)
    options = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    description = {"backbone": "deit_tiny_patch16_224", "img_size": 32, "decoder": decoder, "decoder_heads": 2}
    builder = SegmenterBuilder({**description, "backbone_options": options}, INFERENCE)
    network = builder.build(5).double()
    assert isinstance(network, Segmenter)
    images, masks = torch.rand(2, 3, 32, 32).double(), torch.randint(5, (2, 32, 32))
    logits = network(images)
    assert logits.is_contiguous()  # else softmax copies them
    (found,) = network.losses(images, masks, 255).values()
    wanted = functional.cross_entropy(logits, masks)
    torch.testing.assert_close(found, wanted)
    ours, theirs = (
        torch.autograd.grad(loss, list(network.parameters()), retain_graph=True) for loss in (found, wanted)
    )
    torch.testing.assert_close(ours, theirs)


def test_the_logits_of_all_pixels_never_exist_together():
    logits, masks = maps(batch=1, height=16, width=16, classes=64, factor=16, dtype=torch.float32)
    peak = peak_memory(lambda: upsampled_cross_entropy(logits, masks, 255).backward())
    if peak is None:
        pytest.skip("Linux' memory counters are missing")
    assert peak < 0.9 * 64 * masks.numel() * 4 / 2**20  # one map of all pixels; the whole form holds three and more
