"""The corruptions: the library's own, reproducible, and refused by name where the library refuses; mCE by hand."""

import itertools
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_tasks.robustness.corruptions import (
    CORRUPTIONS,
    EXTRA_CORRUPTIONS,
    CorruptedImages,
    check_corruption,
    corrupt,
    corruption_library,
)
from lightning_tasks.robustness.scores import corruption_errors, mean_corruption_error, relative_mean_corruption_error
from lightning_tasks.runs.robustness import Row
from tests.rows import each_row

EVERY = (*CORRUPTIONS, *EXTRA_CORRUPTIONS)
NEEDS = "imagecorruptions-imaug is not installed (extra `robustness`)"


@pytest.fixture
def library():
    return pytest.importorskip("imagecorruptions", reason=NEEDS)


def images(count=3, size=32, channels=3):
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(5))


def test_the_names_are_the_library_s(library):
    assert list(CORRUPTIONS) == library.get_corruption_names("common")
    assert list(EXTRA_CORRUPTIONS) == library.get_corruption_names("validation")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "glass_blur" else ()) for name in EVERY]
)
def test_every_corruption_at_every_severity_is_reproducible(library, name):
    clean, previous = images(2), None
    for severity in range(1, 6):
        np.random.seed(severity)  # noqa: NPY002
        corrupted = corrupt(clean, name, severity, seed=7)
        np.random.seed(100 + severity)  # noqa: NPY002
        assert torch.equal(corrupted, corrupt(clean, name, severity, seed=7))
        assert corrupted.shape == clean.shape
        assert corrupted.dtype == clean.dtype
        assert corrupted.min() >= 0
        assert corrupted.max() <= 1
        assert not torch.equal(corrupted, clean)
        assert previous is None or not torch.equal(corrupted, previous)
        previous = corrupted


@pytest.mark.parametrize("name", ["gaussian_noise", "impulse_noise", "glass_blur", "frost", "spatter"])
def test_another_seed_draws_other_noise(library, name):
    assert not torch.equal(corrupt(images(), name, 3, seed=1), corrupt(images(), name, 3, seed=2))


@pytest.mark.parametrize("name", ["gaussian_noise", "glass_blur"])
def test_the_batch_of_an_image_does_not_matter(library, name):
    whole = corrupt(images(3), name, 4)
    assert torch.equal(whole[1:], corrupt(images(3)[1:], name, 4, first_index=1))
    loader = DataLoader(CorruptedImages(images(3), name, 4), batch_size=2)
    assert torch.equal(whole, torch.cat(list(loader)))
    same = images(1).expand(2, -1, -1, -1)
    assert not torch.equal(*corrupt(same, name, 4))  # each image draws its own


def test_it_is_what_the_library_makes_of_the_image(library):
    clean = images(1)
    levels = (clean[0] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    expected = library.corrupt(levels, 3, "contrast")
    assert np.array_equal((corrupt(clean, "contrast", 3)[0].permute(1, 2, 0) * 255).round().numpy(), expected)


def test_the_global_random_states_stay_as_they_were(library):
    np.random.seed(3)  # noqa: NPY002
    states = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    corrupt(images(), "gaussian_noise", 2)
    assert np.array_equal(np.random.get_state()[1], states[0])  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize("name", ["brightness", "frost", "gaussian_noise"])
def test_grayscale_images_stay_grayscale(library, name):
    corrupted = corrupt(images(channels=1), name, 3)
    assert corrupted.shape == (3, 1, 32, 32)
    assert 0 <= corrupted.min() <= corrupted.max() <= 1


@each_row(("size", "name"), itertools.product([28, 8], EVERY))
def test_small_images_are_refused_by_name(name, size):
    with pytest.raises(ValueError, match=rf"{name} needs images of at least 32 x 32 pixels, got {size} x {size}"):
        corrupt(images(size=size), name, 1)


def test_the_library_itself_refuses_them(library):
    with pytest.raises(AttributeError, match="at least 32"):
        library.corrupt(np.zeros((28, 28, 3), dtype=np.uint8), 1, "fog")


@each_row(
    ("name", "severity", "says"),
    [
        ("blur", 1, "'blur' is unknown; known are gaussian_noise"),
        ("fog", 0, "severity is 0"),
        ("fog", 6, "severity is 6"),
        ("fog", True, "severity is True"),
    ],
)
def test_what_does_not_exist_is_named(name, severity, says):
    for call in (
        lambda: check_corruption(name, severity),
        lambda: corrupt(images(), name, severity),
        lambda: CorruptedImages(images(), name, severity),
    ):
        with pytest.raises(ValueError, match=says):
            call()


def test_other_numbers_of_channels_and_values_out_of_range_are_named():
    with pytest.raises(ValueError, match="3 channels, or 1, got 4"):
        corrupt(images(channels=4), "fog", 1)
    with pytest.raises(ValueError, match=r"give them in \[0, 1\]"):
        corrupt(images() * 255, "fog", 1)


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)
    with pytest.raises(ModuleNotFoundError, match=r"attnswap\[robustness\]"):
        corruption_library()


def test_a_library_that_cannot_be_loaded_says_what_is_missing(monkeypatch, tmp_path):
    (tmp_path / "imagecorruptions.py").write_text("raise ImportError('libGL.so.1: no such file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imagecorruptions", raising=False)
    with pytest.raises(ImportError, match=r"libGL\.so\.1: no such file.*opencv-python-headless"):
        corruption_library()


# -- errors against a baseline -----------------------------------------------------------------------------------------

OWN = {("fog", 1): 0.2, ("fog", 2): 0.4, ("snow", 1): 0.3, ("snow", 2): 0.3, ("saturate", 1): 0.9}
BASE = {("fog", 1): 0.5, ("fog", 2): 0.7, ("snow", 1): 0.4, ("snow", 2): 0.8, ("saturate", 1): 0.1}


def test_mean_corruption_errors_by_hand():
    assert mean_corruption_error(OWN, BASE) == pytest.approx((0.6 / 1.2 + 0.6 / 1.2) / 2)  # saturate is no part of it
    relative = relative_mean_corruption_error(OWN, 0.1, BASE, 0.2)
    assert relative == pytest.approx((0.4 / 0.8 + 0.4 / 0.8) / 2)
    assert mean_corruption_error(BASE, BASE) == 1
    assert relative_mean_corruption_error(BASE, 0.3, BASE, 0.3) == pytest.approx(1)


def test_a_baseline_that_cannot_serve_is_named():
    with pytest.raises(ValueError, match="no snow at severity 2"):
        mean_corruption_error(OWN, {key: value for key, value in BASE.items() if key != ("snow", 2)})
    with pytest.raises(ValueError, match="no error under fog"):
        mean_corruption_error({("fog", 1): 0.1}, {("fog", 1): 0.0})
    with pytest.raises(ValueError, match="no error above that on clean images under fog"):
        relative_mean_corruption_error({("fog", 1): 0.1}, 0.1, {("fog", 1): 0.2}, 0.2)
    masks = [Row("clean", "", "", "accuracy", 0.9), Row("corruption", "fog", "1", "mIoU", 0.5)]
    with pytest.raises(ValueError, match="the table's corruptions have mIoU"):
        corruption_errors(masks)
    with pytest.raises(ValueError, match="at least one of the fifteen"):
        mean_corruption_error({("saturate", 1): 0.1}, BASE)
