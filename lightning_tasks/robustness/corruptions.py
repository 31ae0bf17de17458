"""The corruptions of ImageNet-C, as the library `imagecorruptions-imaug` computes them, reproducible by seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_tasks.robustness.attacks.common import check_batch
from lightning_tasks.runs.robustness import CORRUPTIONS as CORRUPTIONS

EXTRA_CORRUPTIONS = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
"""The four that ImageNet-C keeps for validation."""
SEVERITIES = (1, 2, 3, 4, 5)
SMALLEST = 32
"""Pixels a side, below which the library refuses."""

LIBRARIES = (
    *("imagecorruptions-imaug", "numba", "numpy", "opencv-python", "opencv-python-headless"),
    *("pillow", "scikit-image", "scipy"),
)
"""What the figures of a corruption depend on: the library and what it computes with."""

# These draw from generators of their own, which numpy's global seed does not reach.
_TAKES_SEED = ("impulse_noise", "glass_blur")
_GRAY = (0.299, 0.587, 0.114)  # ITU-R 601, what PIL and the library use


def check_corruption(name: str, severity: int) -> None:
    """Raises ValueError for an unknown corruption or a severity other than 1 to 5."""
    known = (*CORRUPTIONS, *EXTRA_CORRUPTIONS)
    if name not in known:
        raise ValueError(f"corruption {name!r} is unknown; known are {', '.join(known)}")
    if isinstance(severity, bool) or severity not in SEVERITIES:
        raise ValueError(f"severity is {severity!r}: give one of 1 to 5")


def corruption_library() -> ModuleType:
    """The library.

    Raises:
        ImportError: it is not installed, or cannot be loaded; the text says what to install.
    """
    try:
        import imagecorruptions
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the corruptions need imagecorruptions-imaug: pip install 'attnswap[robustness]'", name=error.name
        ) from error
    except ImportError as error:  # opencv-python links to libraries of a desktop
        raise ImportError(
            f"imagecorruptions-imaug is installed and cannot be loaded ({error}); where libGL.so.1 is missing, install "
            "it (Debian: libgl1), or put opencv-python-headless in the place of opencv-python"
        ) from error
    return imagecorruptions


def corrupt(images: Tensor, name: str, severity: int, *, seed: int = 0, first_index: int = 0) -> Tensor:
    """Images with one of the 15 + 4 corruptions of ImageNet-C (Hendrycks and Dietterich, ICLR 2019).

    Values are rounded to 256 levels first, as in an image file. What is drawn depends on the seed, the corruption, the
    severity and the index of the image alone, not on its batch. The strengths are those made for 224 x 224 pixels;
    CIFAR-10-C has weaker ones of its own. An image of one channel is corrupted in color and made grayscale again.

    Args:
        images: ``[B, 3 or 1, H, W]`` in [0, 1], at least 32 x 32.
        name: one of ``CORRUPTIONS`` and ``EXTRA_CORRUPTIONS``.
        severity: 1 to 5.
        seed: of all that is drawn; numpy's global random state stays as it was.
        first_index: index of the first image in its data set.

    Returns:
        ``[B, C, H, W]``, on the device and in the dtype of the images.

    Raises:
        ImportError: without the extra `robustness`.
        ValueError: for an unknown corruption or severity, images out of range or smaller than 32 x 32.
    """
    check_corruption(name, severity)
    check_batch(images, torch.zeros(len(images), dtype=torch.int64))
    _, channels, height, width = images.shape
    if channels not in (1, 3):
        raise ValueError(f"{name} needs images of 3 channels, or 1, got {channels}")
    if min(height, width) < SMALLEST:
        raise ValueError(
            f"{name} needs images of at least {SMALLEST} x {SMALLEST} pixels, got {height} x {width}; "
            "all corruptions of the library do: leave them out, or give larger images"
        )
    library = corruption_library()
    levels = (images.detach() * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()  # [B, H, W, C]
    result = np.empty((*levels.shape[:3], 3), dtype=np.uint8)
    for index, image in enumerate(levels):
        drawn = _seed_of(seed, name, severity, first_index + index)
        options = {"seed": drawn} if name in _TAKES_SEED else {}
        with _numpy_seeded(drawn):
            result[index] = library.corrupt(np.ascontiguousarray(image), severity, name, **options)
    corrupted = torch.from_numpy(result).permute(0, 3, 1, 2).to(images) / 255
    if channels == 1:
        corrupted = (corrupted * corrupted.new_tensor(_GRAY).view(3, 1, 1)).sum(1, keepdim=True).clamp(max=1)
    return corrupted


def require_library(shape: Sequence[int]) -> None:
    """See before anything is measured that the library is there, where images ``[B, C, H, W]`` are large enough for it.

    Raises:
        ImportError: as :func:`corruption_library`.
    """
    if min(shape[2:]) >= SMALLEST:
        corruption_library()


def too_small(image: Tensor) -> str:
    """Why nothing can corrupt an image ``[C, H, W]`` of fewer pixels a side than ``SMALLEST``."""
    return f"images are {image.shape[1]} x {image.shape[2]}, the corruptions need {SMALLEST} x {SMALLEST}"


class CorruptedImages(Dataset):
    """Images ``[C, H, W]`` by index, each corrupted when it is asked for: loader processes share the work.

    Args:
        images, name, severity, seed: see :func:`corrupt`.
    """

    def __init__(self, images: Tensor | Sequence[Tensor], name: str, severity: int, seed: int = 0) -> None:
        check_corruption(name, severity)
        self.images, self.name, self.severity, self.seed = images, name, severity, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return corrupt(self.images[index][None], self.name, self.severity, seed=self.seed, first_index=index)[0]


def _seed_of(seed: int, name: str, severity: int, index: int) -> int:
    place = (*CORRUPTIONS, *EXTRA_CORRUPTIONS).index(name)
    return int(np.random.SeedSequence([seed, place, severity, index]).generate_state(1)[0])


@contextmanager
def _numpy_seeded(seed: int) -> Iterator[None]:
    """Numpy's global random state, which the library draws from, seeded; then as it was."""
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(state)  # noqa: NPY002
