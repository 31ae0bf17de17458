"""Images from outside of a model's classes: of a folder, of some of its classes, or the test images of a data set."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_tasks.robustness.class_folders import (
    class_names,
    files_digest,
    folder_images,
    found_folder,
    imagenet_wnids,
)

if TYPE_CHECKING:
    from attnswap.datamodules.shared.images import ImageDataset

DATA = ("cifar10", "digits")
"""Data sets of `attnswap.datamodules` whose test images can be outside."""

# Places among the 1,000 classes of ImageNet-1k, first and last, chosen by hand and widely: what shows one of the
# classes, a near relative of it, or another vehicle. Some that one may add are not among them, as results were made
# with this list: 444 bicycle-built-for-two, 450 bobsled, 466 bullet train, 475 car mirror, 537 dogsled, 547 electric
# locomotive, 561 forklift, 802 snowmobile, 820 steam locomotive.
_CIFAR10 = (
    *((7, 24), (80, 100), (127, 146)),  # birds
    (30, 32),  # frogs
    (151, 293),  # dogs, wolves, foxes, hyenas, cats
    *((339, 340), (345, 355)),  # horses, and what has hooves as deer have
    *((403, 405), (407, 408), (436, 436), (449, 449), (468, 468), (472, 472), (479, 479), (484, 484), (510, 511)),
    *((517, 517), (536, 536), (554, 555), (565, 565), (569, 569), (573, 573), (575, 576), (581, 581), (586, 586)),
    *((595, 595), (603, 603), (609, 609), (612, 612), (621, 621), (625, 625), (627, 628), (654, 654), (656, 656)),
    *((660, 661), (665, 665), (670, 671), (675, 675), (690, 690), (705, 705), (717, 717), (724, 724), (730, 730)),
    *((734, 734), (751, 751), (757, 757), (779, 780), (803, 803), (812, 812), (814, 814), (817, 817), (829, 829)),
    *((833, 833), (847, 847), (856, 856), (864, 864), (866, 867), (870, 871), (874, 874), (880, 880), (895, 895)),
    *((908, 908), (913, 914)),
)
OVERLAPS = {"cifar10": _CIFAR10}
"""Classes of ImageNet-1k that are no outside of a data set, as places of the first and the last."""


def overlapping_wnids(name: str) -> list[str]:
    """The wnids of ImageNet-1k that show, or nearly show, a class of a data set in ``OVERLAPS``."""
    wnids = imagenet_wnids()
    return [wnid for first, last in OVERLAPS[name] for wnid in wnids[first : last + 1]]


@dataclass(frozen=True)
class Outside:
    """Where images from outside come from: ``folder`` or ``data``.

    Args:
        folder: with one folder of images per class; looked for in the working folder, then where data sets are.
        classes: those of its folders that count, all where empty.
        without: a key of ``OVERLAPS``, whose wnids do not count.
        data: one of ``DATA``, whose test images count.
    """

    folder: str = ""
    classes: tuple[str, ...] = ()
    without: str = ""
    data: str = ""

    @classmethod
    def read(cls, name: str, given: str | Mapping[str, Any]) -> Outside:
        """From a folder, or a mapping of our fields.

        Raises:
            ValueError: for what is unknown, or not there.
        """
        fields = dict(given) if isinstance(given, Mapping) else {"folder": given}
        known = [each for each in cls.__dataclass_fields__]
        if unknown := [each for each in fields if each not in known]:
            raise ValueError(f"ood {name!r} has {unknown[0]!r}: it takes a folder, or a mapping of {', '.join(known)}")
        if ("folder" in fields) == ("data" in fields):
            raise ValueError(f"ood {name!r} is {given!r}: give it either a folder, or data ({' or '.join(DATA)})")
        if "data" in fields:
            if len(fields) > 1 or fields["data"] not in DATA:
                raise ValueError(f"ood {name!r} is {given!r}: data is {' or '.join(DATA)}, and takes no other key")
            return cls(data=fields["data"])
        if fields.get("without", "") not in ("", *OVERLAPS):
            raise ValueError(f"ood {name!r} is without {fields['without']!r}: known is {', '.join(OVERLAPS)}")
        found = cls(
            found_folder(f"ood {name!r}", str(fields["folder"])),
            tuple(fields.get("classes", ())),
            fields.get("without", ""),
        )
        found.names()
        return found

    def names(self) -> list[str]:
        """The folders of classes that count.

        Raises:
            ValueError: one that is named is not there, or none is left.
        """
        there = class_names(self.folder)
        if missing := [each for each in self.classes if each not in there]:
            raise ValueError(f"{self.folder} has no folder {missing[0]!r}, which classes names; it has {there[:5]}")
        taken = set(overlapping_wnids(self.without)) if self.without else set()
        left = [each for each in self.classes or there if each not in taken]
        if not left:
            raise ValueError(f"{self.folder} has no class that is outside of {self.without}")
        return left

    def images(
        self, height: int, width: int, channels: int, transform: Mapping[str, Any] | None = None
    ) -> tuple[ImageDataset, str]:
        """The images, uint8 ``[C, H, W]`` by the transform of an evaluation, and a digest of their contents.

        Those of a folder by ``transform`` (see :func:`.folder_images`); those of a data set by its own.

        Raises:
            ValueError: if a class has no image, none can be read, or a data set is asked for with H other than W.
            FileNotFoundError: if a data set is not there.
        """
        if not self.data:
            images = folder_images(self.folder, (height, width), channels, self.names(), transform)
            return images, files_digest(images.images, self.folder)
        from attnswap.datamodules import CIFAR10DataModule, DigitsDataModule

        if height != width:
            raise ValueError(f"the images of {self.data} are square, and the model takes {height} x {width}")
        modules: dict[str, Any] = {"cifar10": CIFAR10DataModule, "digits": DigitsDataModule}
        module = modules[self.data](img_size=height, in_chans=channels, num_workers=0)
        images = module.dataset("test", training=False, multiple_of=1)
        digest = hashlib.sha256()
        for place in range(len(images.images)):
            digest.update(images.images.read(place).tobytes())
        return images, digest.hexdigest()
