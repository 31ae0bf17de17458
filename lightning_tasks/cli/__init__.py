"""`attnswap fit|validate|test|predict|show-batch`; what the command line says becomes a run."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_tasks.cli.fit import run  # Lightning's import takes seconds

    return run
