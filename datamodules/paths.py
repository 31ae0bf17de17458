"""Where data is read and where prepared data is kept."""

import os
from pathlib import Path

DATA_VARIABLE = "ATTNSWAP_DATA"
CACHE_VARIABLE = "ATTNSWAP_CACHE"


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
