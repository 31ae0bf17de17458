"""The Parameters of a swapped model as its hosts lay them out."""

from __future__ import annotations

from torch import Tensor, nn

from attention_modules.hosts.base import Swapped
from attention_modules.mechanism import AttentionMechanism


def plain_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every Parameter by name, as :func:`~attention_modules.restore_attention` would leave it; the model stays.

    Mechanisms' own tensors are left out, and kept query rows stand before the current keys and values. Two models that
    differ in their attention alone start from the same weights exactly where these are equal.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Swapped)}
    mechanisms = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, AttentionMechanism))
    plain: dict[str, Tensor] = {
        name: parameter.detach() for name, parameter in model.named_parameters() if not name.startswith(mechanisms)
    }
    for name, layer in layers.items():
        for part in layer.dropped_query:
            key = part.key(f"{name}." if name else "")
            rows = part.rows_in(layer)
            if rows is not None and part.filled(layer):
                plain[key] = part.join(rows.to(plain[key]), plain[key]) if key in plain else rows
    return plain
