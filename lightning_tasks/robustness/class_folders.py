"""Folders of images by class name (ImageNet-A, -R, -O): which classes of a model they hold, and the images."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from attnswap.datamodules.shared.images import ImageDataset, Images

_WNID = re.compile(r"n\d{8}")


def imagenet_wnids() -> list[str]:
    """The 1,000 wnids of ImageNet-1k in the order of the classes, from timm."""
    from timm.data import ImageNetInfo

    return ImageNetInfo("imagenet-1k").label_names()


def found_folder(what: str, folder: str) -> str:
    """The folder itself where it is there, else the one of this name where data sets are.

    Raises:
        ValueError: if neither is there; the text begins with ``what``.
    """
    from attnswap.datamodules.shared.paths import data_root

    places = [Path(folder), *([] if Path(folder).is_absolute() else [data_root() / folder])]
    for place in places:
        if place.is_dir():
            return str(place)
    raise ValueError(f"{what}: no folder {' or '.join(map(str, places))}; is $ATTNSWAP_DATA where data sets are?")


def class_names(root: str | Path) -> list[str]:
    """The names of the class folders in ``root``, sorted.

    Raises:
        ValueError: if it is no folder, or holds none.
    """
    from attnswap.datamodules.shared.paths import class_folders

    return class_folders(root)


def class_subset(root: str | Path, wnids: Sequence[str]) -> list[int]:
    """The classes that the folders in ``root`` stand for, as indices into ``wnids``, in the order of the folders.

    ImageNet-A, -R and -O have 200 each; predictions are made among these (logits restricted to them), as the
    releases of those data sets do.

    Args:
        root: a folder with one folder per class.
        wnids: the model's class names, in the order of its logits.

    Raises:
        ValueError: if it is no such folder, or a name is not among the wnids.
    """
    places = {wnid: index for index, wnid in enumerate(wnids)}
    names = class_names(root)
    if unknown := [name for name in names if name not in places]:
        raise ValueError(
            f"{root} has {len(unknown)} folders that name no class of the model's {len(places)}, {unknown[0]!r} first; "
            "give the wnids in the order of the model's logits"
        )
    return [places[name] for name in names]


def read_wnids(path: str | Path) -> list[str]:
    """The first word of each line of a file, the class names in the order of the model's logits.

    Raises:
        ValueError: if one is there twice, or there is none.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    names = [line.split()[0] for line in lines if line.strip()]
    wnids = [match[0] for line in lines if (match := _WNID.search(line))]
    names = wnids if len(wnids) == len(names) else names  # the wnid may stand anywhere in its line
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{path} must hold one class name a line, none twice, in the order of the model's logits")
    return names


def folder_images(
    root: str | Path,
    size: tuple[int, int],
    channels: int = 3,
    names: Sequence[str] | None = None,
    transform: Mapping[str, Any] | None = None,
) -> ImageDataset:
    """The images of a folder, uint8 ``[C, H, W]``, and their labels: timm's evaluation transform, not normalized.

    An image that cannot be read is None, and counted. Sub-folders of a class count too.

    Args:
        root: a folder with one folder per class; labels are the places of the folders in alphabetical order.
        size: height and width.
        channels: 3 or 1.
        names: of the folders that count; all where None.
        transform: arguments of `timm.data.create_transform`; its defaults where None (bilinear, the central 0.875).

    Raises:
        ValueError: if it is no such folder, a class has no image, or none of the images can be read.
    """
    from attnswap.datamodules.shared.images import FileImages, ImageDataset
    from attnswap.datamodules.shared.paths import class_images
    from timm.data import create_transform

    names = class_names(root) if names is None else names
    files = FileImages(*class_images(Path(root), names, f"{Path(root).name}: files"))
    chosen = create_transform((3, *size), normalize=False, **(transform or {}))
    images = ImageDataset(files, chosen, channels, is_random=False)
    if all(images[index] is None for index in range(len(images))):  # found now, not after hours of other rows
        images.warn_of_skipped()
    return images


def files_digest(images: Images, root: str | Path) -> str:
    """Changes with the name, the class or the content of any of the images, files below ``root``."""
    digest = hashlib.sha256()
    for index in tqdm(range(len(images)), desc=f"{Path(root).name}: contents", disable=None):
        path = Path(images.name(index))
        try:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:  # it will be left out, as any that cannot be read
            content = type(error).__name__
        digest.update(f"{path.relative_to(root).as_posix()}\0{content}\0".encode())
    return digest.hexdigest()
