"""Models that drop tokens between their embedding and their layers: there a column is no position."""

from __future__ import annotations

from torch import nn


def dropped_refusal(model: nn.Module) -> str | None:
    """Why a mechanism that counts columns has no place in a model, if it drops tokens."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind.startswith("PatchDropout") and getattr(module, "prob", 0.0) > 0:
            return f"{name} drops tokens in training, and the mechanism counts columns: build it with patch_drop_rate=0"
        if kind.endswith("MAEEmbeddings"):
            return f"{name or kind} drops and shuffles tokens, and the mechanism counts columns: take one that does not"
    return None
