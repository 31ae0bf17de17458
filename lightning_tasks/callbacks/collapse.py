"""Words for numbers of attention that show a layer gone wrong: each kind once a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning.pytorch.utilities import rank_zero_warn


@dataclass(frozen=True)
class Sign:
    """A statistic that shows a failure below or above a threshold."""

    statistic: str
    threshold: float
    below: bool
    words: str

    def shows(self, value: float) -> bool:
        """Whether a layer's value is beyond the threshold; nan is not."""
        return value < self.threshold if self.below else value > self.threshold


# The threshold of sinks is that of Gu et al. (ICLR 2025); the others are our choice, far from what healthy layers have.
SIGNS = (
    Sign(
        "normalised_entropy",
        0.02,
        True,
        "entropy collapse: rows attend to one key only, and hardly a gradient passes their softmax; a lower learning "
        "rate, more warm-up or a norm on q and k are the usual cures",
    ),
    Sign(
        "token_similarity",
        0.98,
        False,
        "rank collapse: the tokens that enter the layer point almost the same way, so that attention cannot tell them "
        "apart; look at residual connections, initialisation and depth",
    ),
    Sign(
        "sink",
        0.3,
        False,
        "attention sink: one key takes so much of the attention of all rows, often a token that says nothing; "
        "statistics of attention then tell of it more than of the others",
    ),
)
FEWEST_KEYS = 16  # a key among fewer may well take 0.3


class CollapseWarnings:
    """Warns of each of `SIGNS` once, with all layers that show it then."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    @property
    def wanted(self) -> list[Sign]:
        """The signs not yet warned of."""
        return [sign for sign in SIGNS if sign.statistic not in self._said]

    def look(self, values: Mapping[tuple[str, str], float], where: str) -> None:
        """Warn of what `values`, by (statistic, layer), show; `where` says when they were observed."""
        for sign in self.wanted:
            shown = {
                layer: value for (name, layer), value in values.items() if name == sign.statistic and sign.shows(value)
            }
            if shown:
                self._said.add(sign.statistic)
                layers = ", ".join(f"{layer} ({value:.3g})" for layer, value in shown.items())
                side = "below" if sign.below else "above"
                rank_zero_warn(
                    f"AttentionMonitor, {where}: {sign.words}. {sign.statistic} {side} {sign.threshold:g} in {layers}; "
                    "said once"
                )
