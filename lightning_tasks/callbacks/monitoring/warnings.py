"""Warnings for degenerate attention, once per kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from lightning_tasks.runs.wandb_runs import alert


def warn_without_validation(trainer: pl.Trainer, callback: pl.Callback) -> None:
    """Warn, when a fit starts, that a callback which acts at validations alone will have none."""
    if not trainer.enable_validation:
        rank_zero_warn(
            f"{type(callback).__name__} acts at validations alone, and this fit has none: give it validation data, a "
            "validation_step and limit_val_batches above 0, or leave this callback out"
        )


@dataclass(frozen=True)
class Sign:
    """A statistic that shows a failure below or above a threshold."""

    statistic: str
    threshold: float
    below: bool
    words: str
    untrained: bool = True  # whether it is a sign of anything in a model that has not trained

    def shows(self, value: float) -> bool:
        """Whether a layer's value is beyond the threshold; nan is not."""
        return value < self.threshold if self.below else value > self.threshold


# How many numbers are NaN or infinite; what is computed of them is NaN, which no other sign shows.
NOT_FINITE = Sign(
    "non_finite",
    0.0,
    False,
    "activations are not finite: queries, keys or values hold NaN or infinite numbers, and what is logged or drawn of "
    "the layer is NaN; a learning rate too high, half precision that overflows and broken inputs are the usual causes",
)

# Of attention. The threshold of sinks is that of Gu et al. (ICLR 2025); the others are our choice, far from what
# healthy layers have.
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
        "apart; look at residual connections, initialization and depth",
        # Tokens of a fresh model are often alike (its position embeddings are small), and part in a few steps.
        untrained=False,
    ),
    Sign(
        "sink",
        0.3,
        False,
        "attention sink: one key takes so much of the attention of all rows, often a token that says nothing; "
        "statistics of attention then tell of it more than of the others",
    ),
    NOT_FINITE,
)
FEWEST_KEYS = 16  # a key among fewer may well take 0.3

# Of the spectrum, in words of attention, for tokens that enter with mean 0 and variance 1 and have nothing in common.
# Where logits have a standard deviation of 50, normalized entropy is about 0.02, from 64 to 1,024 keys.
SPECTRUM_SIGNS = (
    Sign(
        "logit_deviation",
        50.0,
        False,
        "entropy collapse in sight: with weights of this scale rows attend to one key only, unless normalization makes "
        "the tokens small; a lower learning rate, weight decay on W_q and W_k or LocAteR keep the scale down",
    ),
    Sign(
        "logit_deviation",
        1e-3,
        True,
        "all rows attend alike, whatever their tokens: W_qᵀ W_k is next to nothing, and attention only averages, which "
        "drives tokens to rank collapse; look at weight decay or penalties on W_q and W_k, and at initialization",
    ),
    Sign(
        "non_finite",
        0.0,
        False,
        "weights are not finite: W_q or W_k hold NaN or infinite numbers, so that the statistics of their heads are "
        "NaN, and histograms and figures leave their eigenvalues out; a learning rate too high is the usual cause",
    ),
)

# Of Principal Attention Pursuit's last pass, after rpc_diagnostics.
PURSUIT_SIGNS = (
    Sign(
        "self_probability",
        0.98,
        False,
        "entropy collapse: each token attends to itself only in the last pass, the iteration saturates, gradients "
        "vanish with it (in half precision what is left of the keys' may be rounding), and robustness to gradient "
        "attacks may be masking; take fewer iterations",
    ),
    Sign(
        "sparsity",
        0.98,
        False,
        "S took nearly all of the keys, which are too large for its threshold: what is left of them for attention is "
        "clipped, so that rows attend almost alike; a larger lam or smaller keys leave it sparse",
    ),
    NOT_FINITE,
)
IDLE_PURSUIT = Sign(
    "sparsity",
    1e-4,
    True,
    "S stayed empty in every pass, so that nothing is taken for an outlier, and the layer does what iterated symmetric "
    "attention does (as with lam: .inf); a smaller lam would fill it",
)


class CollapseWarnings:
    """Warns of each sign once, with all layers that show it then.

    Args:
        monitor: who warns.
        signs: of what.
    """

    def __init__(self, monitor: str, signs: Sequence[Sign] = SIGNS) -> None:
        self._monitor, self._signs = monitor, signs
        self._said: set[Sign] = set()

    @property
    def wanted(self) -> list[Sign]:
        """The signs not yet warned of."""
        return [sign for sign in self._signs if sign not in self._said]

    def look(self, values: Mapping[tuple[str, str], float], where: str, untrained: bool = False) -> None:
        """Warn of what `values`, by (statistic, layer), show; `where` says when they were observed.

        Where they are of a model that has not trained, what is no sign of a failure then is left for later.
        """
        for sign in self.wanted:
            if untrained and not sign.untrained:
                continue
            shown = {
                layer: value for (name, layer), value in values.items() if name == sign.statistic and sign.shows(value)
            }
            if shown:
                self._said.add(sign)
                layers = ", ".join(f"{layer} ({value:.3g})" for layer, value in shown.items())
                side = "below" if sign.below else "above"
                text = f"{where}: {sign.words}. {sign.statistic} {side} {sign.threshold:g} in {layers}; said once"
                rank_zero_warn(f"{self._monitor}, {text}")
                alert(sign.words.partition(":")[0], text)
