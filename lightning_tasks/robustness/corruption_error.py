"""The mean corruption error, against a baseline, and its relative form."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_tasks.robustness.corruptions import CORRUPTIONS

Errors = Mapping[tuple[str, int], float]
"""Error rate in [0, 1] by (corruption, severity)."""


def mean_corruption_error(errors: Errors, baseline: Errors) -> float:
    """mCE: the mean over corruptions of Σ errors / Σ baseline errors, both over severities; 1 is the baseline.

    Hendrycks and Dietterich (ICLR 2019), who multiply by 100 and take AlexNet as the baseline. It is taken over those
    of the fifteen corruptions, and the severities, that ``errors`` has.

    Args:
        errors: of the model.
        baseline: of the baseline, for at least the same corruptions and severities.

    Raises:
        ValueError: if the baseline lacks one, has no error at all for one, or there is none of the fifteen.
    """
    return _mean_ratio(errors, baseline, 0.0, 0.0, relative=False)


def relative_mean_corruption_error(errors: Errors, clean: float, baseline: Errors, baseline_clean: float) -> float:
    """Relative mCE: as :func:`mean_corruption_error`, of how much each error rate exceeds that on clean images.

    Args:
        errors: of the model.
        clean: its error rate on clean images.
        baseline, baseline_clean: the same of the baseline.

    Raises:
        ValueError: as :func:`mean_corruption_error`, or if a corruption does not harm the baseline at all.
    """
    return _mean_ratio(errors, baseline, clean, baseline_clean, relative=True)


def _mean_ratio(errors: Errors, baseline: Errors, clean: float, baseline_clean: float, relative: bool) -> float:
    names = [name for name in CORRUPTIONS if any(name == known for known, _ in errors)]
    if not names:
        raise ValueError("the mean corruption error needs at least one of the fifteen corruptions")
    ratios = []
    for name in names:
        keys = [key for key in errors if key[0] == name]
        if missing := [key for key in keys if key not in baseline]:
            raise ValueError(
                f"the baseline has no {name} at severity {', '.join(str(severity) for _, severity in missing)}; "
                "measure it with the same corruptions and severities"
            )
        above = sum(baseline[key] - baseline_clean for key in keys)
        if above <= 0:
            exceeds = " above that on clean images" if relative else ""
            raise ValueError(f"the baseline has no error{exceeds} under {name}: a ratio to it means nothing")
        ratios.append(sum(errors[key] - clean for key in keys) / above)
    return sum(ratios) / len(ratios)
