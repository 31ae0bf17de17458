"""Folders of images by class name (ImageNet-A, -R, -O): which classes of a model they hold, and the images."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_WNID = re.compile(r"n\d{8}")


def imagenet_wnids() -> list[str]:
    """The 1,000 wnids of ImageNet-1k in the order of the classes, from timm."""
    from timm.data import ImageNetInfo

    return ImageNetInfo("imagenet-1k").label_names()


def class_folders(root: str | Path) -> list[str]:
    """The names of the folders in ``root``, sorted.

    Raises:
        ValueError: if it is no folder, or holds none.
    """
    names = sorted(entry.name for entry in Path(root).iterdir() if entry.is_dir()) if Path(root).is_dir() else []
    if not names:
        raise ValueError(f"{root} must be a folder with one folder of images a class, named by its wnid")
    return names


def class_subset(root: str | Path, wnids: Sequence[str]) -> list[int]:
    """The classes that the folders in ``root`` stand for, as indices into ``wnids``, in the order of the folders.

    ImageNet-A, -R and -O have 200 each; predictions are made among these (logits restricted to them), as the
    releases of those data sets do.

    Args:
        root: a folder with one folder a class.
        wnids: the model's class names, in the order of its logits.

    Raises:
        ValueError: if it is no such folder, or a name is not among the wnids.
    """
    places = {wnid: index for index, wnid in enumerate(wnids)}
    names = class_folders(root)
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


def folder_images(root: str | Path, size: tuple[int, int], channels: int = 3) -> Any:
    """An ``ImageFolder`` of images ``[C, H, W]`` in [0, 1]: timm's evaluation transform, without normalisation.

    Args:
        root: a folder with one folder a class; labels are the places of the folders in alphabetical order.
        size: height and width.
        channels: 3 or 1.

    Raises:
        ValueError: if it is no such folder.
    """
    from timm.data import create_transform
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    class_folders(root)
    transform = create_transform((3, *size), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    clip = transforms.Lambda(_clip)
    grey = [transforms.Grayscale()] if channels == 1 else []
    return ImageFolder(str(root), transforms.Compose([transform, clip, *grey]))


def _clip(image: Any) -> Any:
    return image.clamp(0, 1)


def folder_digest(root: str | Path) -> str:
    """Changes with the name or size of any file under ``root``."""
    digest = hashlib.sha256()
    for path in sorted(path for path in Path(root).rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode())
    return digest.hexdigest()
