"""The tables and the summary of `attnswap analyze token-selection`, without torch: pages are made of them too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

SUMMARY = "summary.md"
# Of NAME.csv and NAME_paths.csv. `optimality` is that of the tokens that the first run of the problem selects.
COLUMNS = ("seed", "run", "optimality", "step", "correlation_p", "correlation_v", "probability", "norm_p")
PATH_COLUMNS = ("seed", "parameter", "run", "along", "across")
REGULARIZED = "regularisation path"
UNSOLVED = "all"  # in the place of a run, of a problem for which nothing was measured
HEADS = ("experiment", "seed", "run", "optimality", "correlation of p", "of v", "probability", "norm of p")


def line(experiment: str, problem: str, run: str, optimality: str, measured: Mapping[str, float] | None = None) -> str:
    """A row of the summary; `measured` is what the last row of the run has, None where nothing was measured."""
    cells = [experiment, problem, run, optimality]
    if measured is not None:
        head = measured["correlation_v"]
        cells += [f"{measured['correlation_p']:.4f}", "" if math.isnan(head) else f"{head:.4f}"]
        cells += [f"{measured['probability']:.4f}", f"{measured['norm_p']:.1f}"]
    return _row(cells)


def summary(lines: Sequence[str], steps: int) -> str:
    """The rows under their heads, as Markdown."""
    return "\n".join(
        [
            f"After {steps} steps (0.1 along the gradient where nothing else is said) from zero, in the released",
            "problems from their own starts, float64 where nothing else is said. Correlation: cosine to the max-margin",
            "direction of the tokens that the first run of the problem selects. Optimality is that of this selection.",
            "Probability: the least one of a selected token. Norm: ‖p‖, which grows by at most 0.1 per step.",
            "Regularisation path: ‖p‖ = 100, and ‖v‖ = 100 in joint. Seed: of our problems; or which released one.",
            "",
            _row(HEADS),
            "|---" * len(HEADS) + "|",
            *lines,
            "",
        ]
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join([*cells, *[''] * (len(HEADS) - len(cells))])} |"
