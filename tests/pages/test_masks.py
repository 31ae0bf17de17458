"""Figures of masks that a page has beside its tables."""

import numpy as np
import pytest
from PIL import Image

from docs.pages.errors import PageError
from docs.pages.figures import masks_of
from docs.pages.raw import Raw

NAMES = ["sky", "road"]


def arrays():
    generator = np.random.default_rng(0)
    image = generator.integers(256, size=(2, 3, 6, 8), dtype=np.uint8)
    return {
        "image": image,
        **{name: generator.integers(2, size=(2, 6, 8), dtype=np.uint8) for name in ("truth", "rpc")},
    }


def test_masks_are_drawn_and_a_changed_pixel_changes_the_digest(tmp_path):
    kept = arrays()
    np.savez_compressed(tmp_path / "masks.npz", **kept)
    figure = masks_of(Raw(tmp_path, ".").arrays("masks.npz"), NAMES)
    assert figure.digest == masks_of(kept, NAMES).digest
    figure.draw(tmp_path / "masks.png")
    drawn = np.asarray(Image.open(tmp_path / "masks.png").convert("RGB"))
    assert drawn.std() > 10
    for name in kept:
        changed = arrays()
        changed[name].flat[0] ^= 1
        assert masks_of(changed, NAMES).digest != figure.digest
    assert masks_of(kept, NAMES[::-1]).digest != figure.digest


@pytest.mark.parametrize("damage", ["cut", "text", "pickle", "empty"])
def test_damaged_arrays_are_named(tmp_path, damage):
    path = tmp_path / "masks.npz"
    np.savez_compressed(path, **arrays())
    if damage == "pickle":
        np.savez_compressed(path, image=np.array([{"code": "runs"}], dtype=object))
    else:
        path.write_bytes({"cut": path.read_bytes()[:200], "text": b"masks", "empty": b""}[damage])
    with pytest.raises(PageError, match=r"masks\.npz is damaged"):
        Raw(tmp_path, ".").arrays("masks.npz")
    with pytest.raises(PageError, match="is missing"):
        Raw(tmp_path, ".").arrays("other.npz")
