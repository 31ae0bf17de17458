"""Where a run ran: the code, the machine, and the versions of libraries."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from lightning_tasks.json_values import of_kind, text_of, texts_of

LIBRARIES = ("torch", "torchvision", "lightning", "timm", "transformers", "torchmetrics", "numpy", "scipy")
_PACKAGES = ("attention_modules", "attnswap", "datamodules", "lightning_tasks")
_CPU_FILE = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Environment:
    """Where a run ran.

    Args:
        commit: that of the checkout that the code is in; "" where it is installed.
        modified: whether files that git tracks there were changed.
        changes: of what in its packages is in no commit, a digest; "" where nothing is.
        hardware: the processor and its number of cores, and the CUDA devices that the process sees.
        versions: of Python and of libraries, by name.
    """

    commit: str = ""
    modified: bool = False
    hardware: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    changes: str = ""

    @property
    def code(self) -> str:
        """The code in a few words."""
        version = self.versions.get("attnswap", "unknown")
        changed = self.modified or self.changes
        return (self.commit[:10] or f"version {version}") + (
            f" with changes {self.changes}".rstrip() if changed else ""
        )

    @property
    def state(self) -> Code:
        """What :func:`take_code` takes."""
        return self.commit, self.modified, self.changes


Code = tuple[str, bool, str]
"""A commit, whether tracked files were changed, and a digest of what in the packages is in no commit."""
_taken: list[Code] = []  # by `take_code`


def take_code(code: Code) -> None:
    """Go on as a worker with the code of its parent, whose modules it has: the checkout may have another by now."""
    _taken[:] = [code]
    this_environment.cache_clear()


@lru_cache(maxsize=1)  # a process goes on with the code that it has imported
def this_environment() -> Environment:
    """That of this process, found at the first call."""
    import attention_modules  # here, as who reads records of environments needs no torch
    from lightning_tasks.runs.measurements import library_versions

    commit, modified, changes = _taken[0] if _taken else commit_of(Path(attention_modules.__file__))
    versions = {"attnswap": attention_modules.__version__, "python": platform.python_version()}
    found = {name: version for name, version in library_versions(LIBRARIES).items() if version}
    return Environment(commit, modified, _hardware(), {**versions, **found}, changes)


def commit_of(file: Path) -> Code:
    """The commit of the checkout that tracks a file of a package, "" of none, and what is not in it."""
    try:
        _git(file.parent, "ls-files", "--error-unmatch", file.name)
        commit = _git(file.parent, "rev-parse", "HEAD")
        modified = bool(_git(file.parent, "status", "--porcelain", "--untracked-files=no"))
        return commit, modified, _changes(file.parents[1])
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, or one of something else
        return "", False, ""


def _content(path: Path) -> bytes:
    """What a file holds; a mark for what is none, such as a link to nowhere."""
    try:
        return path.read_bytes()
    except OSError:
        return b"\0"


def _changes(root: Path) -> str:
    """A digest of changed and of new files in the packages; "" of none."""
    listed = (("diff", "HEAD", "--name-only", "--relative"), ("ls-files", "--others", "--exclude-standard"))
    names = "".join(_git(root, *command, "-z", "--", *_PACKAGES) for command in listed).split("\0")
    contents = [part for name in sorted({*names} - {""}) for part in (os.fsencode(name), _content(root / name))]
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:8] if contents else ""


def _git(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # several processes ask at a time, and change nothing
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, errors="surrogateescape", timeout=30, env=environment
    )
    return done.stdout.strip()


def _hardware() -> str:
    import torch

    lines = _CPU_FILE.read_text(encoding="utf-8", errors="replace").splitlines() if _CPU_FILE.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    try:
        devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    except (AssertionError, RuntimeError):  # the driver counts devices that CUDA cannot use
        devices = []
    return ", ".join([f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores", *devices])


def parse_environment(given: Any) -> Environment:
    """An environment as a record or a result has it.

    Raises:
        KeyError, TypeError, ValueError: it is damaged.
    """
    commit, modified, hardware, versions = (
        of_kind(given, dict)[key] for key in ("commit", "modified", "hardware", "versions")
    )
    of_library = texts_of(versions)
    changes = text_of(given.get("changes", ""))  # earlier records do not say
    return Environment(text_of(commit), of_kind(modified, bool), text_of(hardware), of_library, changes)


def mixed_environments(environments: Sequence[Environment]) -> list[str]:
    """A sentence for each in which environments differ: code, hardware, versions of libraries.

    Of several devices of one kind, which a process sees all or one of, the kind counts.
    """
    versions = [each.versions for each in environments if each.versions]
    names = dict.fromkeys(name for name in chain(*versions) if name != "attnswap")  # of its version the code tells
    others = [name for name in names if len({each.get(name) for each in versions}) > 1]
    found = {
        "with the code of different commits": [each.code for each in environments],
        "on different hardware": [", ".join(dict.fromkeys(each.hardware.split(", "))) for each in environments],
        "with different versions": [
            ", ".join(f"{name} {each[name]}" if name in each else f"no {name}" for name in others) for each in versions
        ],
    }
    return [
        f"the cells ran {what}: {'; '.join(different)}"
        for what, each in found.items()
        if len(different := list(dict.fromkeys(filter(None, each)))) > 1
    ]
