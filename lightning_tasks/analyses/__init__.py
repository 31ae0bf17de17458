"""`attnswap analyze NAME`: experiments that are no training run, a file each; `main(arguments)` in it runs one."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from lightning_tasks.errors import UsageError

ANALYSES = {
    "kernel-pca": "lightning_tasks.analyses.kernel_pca",
    "lipschitz": "lightning_tasks.analyses.lipschitz",
    "parallel-context": "lightning_tasks.analyses.parallel_context",
    "spectrum": "lightning_tasks.analyses.spectrum",
    "token-selection": "lightning_tasks.analyses.token_selection",
}


def main(arguments: Sequence[str]) -> None:
    """Run `attnswap analyze` with these arguments: the analysis that the first names, with the others.

    Raises:
        UsageError: no analysis of this name.
    """
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(f"usage: attnswap analyze NAME --output DIR [arguments]\n\nanalyses: {', '.join(ANALYSES)}")
        print("\n`attnswap analyze NAME --help` lists the arguments of one.")
        return
    if name not in ANALYSES:
        raise UsageError(f"unknown analysis {name!r}; the analyses are {', '.join(ANALYSES)}")
    import_module(ANALYSES[name]).main(arguments[1:])
