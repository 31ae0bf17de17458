"""Where data is read and where prepared data is kept."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS
from tqdm import tqdm

DATA_VARIABLE = "ATTNSWAP_DATA"
CACHE_VARIABLE = "ATTNSWAP_CACHE"
_NAMED = 3


def user_cache() -> Path:
    """The user's cache folder for this package: `$XDG_CACHE_HOME/attnswap`, else `~/.cache/attnswap`."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "attnswap"


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder with data sets: `root`, else `$ATTNSWAP_DATA`, else the user's cache folder.

    Raises:
        NotADirectoryError: the path exists and is not a folder.
    """
    return _folder(root or os.environ.get(DATA_VARIABLE) or user_cache() / "data", "root", DATA_VARIABLE)


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder for prepared data: `cache_dir`, else `$ATTNSWAP_CACHE`, else the user's cache folder.

    Raises:
        NotADirectoryError: the path exists and is not a folder.
    """
    return _folder(
        cache_dir or os.environ.get(CACHE_VARIABLE) or user_cache() / "prepared", "cache_dir", CACHE_VARIABLE
    )


def _folder(path: str | os.PathLike[str], argument: str, variable: str) -> Path:
    folder = Path(path).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder: give one as {argument}=... or in ${variable}")
    return folder


def class_folders(root: str | os.PathLike[str]) -> list[str]:
    """The names of the folders in `root`, sorted; hidden ones are left out.

    Raises:
        ValueError: it is no folder, or holds none.
    """
    entries = os.scandir(root) if os.path.isdir(root) else ()
    names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise ValueError(f"{root} must be a folder with one folder of images per class: it has no class folders")
    return names


def class_images(root: Path, names: Sequence[str], description: str) -> tuple[list[str], list[int]]:
    """The image files of each class, those in sub-folders too, and their labels: the places of the names.

    Files that are no images by their names, and images outside of the class folders, are left out and counted in
    a warning; hidden files are left out.

    Raises:
        OSError: a folder cannot be listed.
        ValueError: a class has no image, or a link leads back to a folder that it lies in.
    """
    paths: list[str] = []
    labels: list[int] = []
    dropped = sorted(entry.path for entry in os.scandir(root) if entry.is_file() and _is_image(entry.name))
    for label, name in enumerate(tqdm(names, desc=description, disable=None)):
        files = files_below(root / name)
        found = [path for path in files if _is_image(path)]
        if not found:
            raise ValueError(f"{root / name} has no image ({', '.join(IMG_EXTENSIONS)}): every class needs one")
        dropped += [path for path in files if not _is_image(path)]
        paths += found
        labels += [label] * len(found)
    if dropped:
        warnings.warn(
            f"{root}: {len(dropped):,} files are left out, as they lie outside of the class folders or are no images "
            f"by their names ({', '.join(IMG_EXTENSIONS)}): {', '.join(dropped[:_NAMED])}",
            stacklevel=2,
        )
    return paths, labels


def files_below(folder: Path) -> list[str]:
    """The files of a folder at any depth, sorted folder by folder; links are followed, hidden ones are left out.

    Raises:
        OSError: it, or a folder in it, cannot be listed.
        ValueError: a link leads back to a folder that it lies in.
    """

    def refuse(error: OSError) -> None:
        raise error

    files: list[str] = []
    within = {str(folder): frozenset((os.path.realpath(folder),))}  # by folder, it and all that it lies in, resolved
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        above = within.pop(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (os.path.join(place, name) for name in folders):
            real = os.path.realpath(path)
            if real in above:
                raise ValueError(f"{path} is a link to {real}, a folder that it lies in: remove the link")
            within[path] = above | {real}
        files += [os.path.join(place, name) for name in sorted(names) if not name.startswith(".")]
    return files


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMG_EXTENSIONS)
