"""Words for many layers at once: one warning in place of one a layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning.pytorch.utilities import rank_zero_warn

from attention_modules.hosts import AttentionLayer

MOST_NAMES = 4


def listed(layers: Mapping[str, str]) -> str:
    """The first layers' names, each with what is to be said of it ("" for nothing), and how many more there are."""
    shown = [f"{name!r} ({detail})" if detail else repr(name) for name, detail in layers.items()]
    more = f" and {len(shown) - MOST_NAMES} more" if len(shown) > MOST_NAMES else ""
    return ", ".join(shown[:MOST_NAMES]) + more


def warn_of_caveats(monitor: str, layers: Iterable[AttentionLayer]) -> None:
    """Warn, once a reason, of the layers whose spectrum is not that of their logits."""
    by_reason: dict[str, dict[str, str]] = {}
    for layer in layers:
        if layer.spectrum_caveat is not None:
            by_reason.setdefault(layer.spectrum_caveat, {})[layer.name] = ""
    for reason, names in by_reason.items():
        rank_zero_warn(f"{monitor} on {listed(names)}: {reason}")
