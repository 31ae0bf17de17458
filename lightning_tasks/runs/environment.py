"""Where runs ran, and whether they are of the same code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Environment:
    """Where a run ran.

    Args:
        commit: that of the checkout that the code is in; "" where it is installed.
        modified: whether files that git tracks there were changed.
        hardware: the processor and its number of cores, and the CUDA devices that the process sees.
        versions: of Python and of libraries, by name.
    """

    commit: str = ""
    modified: bool = False
    hardware: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def code(self) -> str:
        """The code in a few words."""
        version = self.versions.get("attnswap", "unknown")
        return (self.commit[:10] or f"version {version}") + (" with changes" if self.modified else "")


def mixed_code(environments: Sequence[Environment]) -> list[str]:
    """A sentence where results are of different code; nothing where they are of the same."""
    codes = list(dict.fromkeys(each.code for each in environments))
    return [f"the cells ran with the code of different commits: {', '.join(codes)}"] if len(codes) > 1 else []
