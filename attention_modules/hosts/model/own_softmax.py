"""Layers that compute a softmax of their own, beside the call in which a mechanism acts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from attention_modules.hosts.model.twins import Plan
from attention_modules.hosts.sdpa.calls import Site, calls_of
from attention_modules.hosts.sdpa.layer import SDPAHost
from attention_modules.mechanisms.softmax import SoftmaxAttention


def warn_of_own_softmax(plan: Plan, stacklevel: int) -> None:
    """Say once of layers whose code shows a softmax, too, that no mechanism acts there."""
    acting = (layer for layer, built in plan if type(built) is not SoftmaxAttention)
    kinds = {getattr(layer.module, "plain_class", type(layer.module)): layer for layer in acting}
    for kind, layer in kinds.items():
        found = calls_of(layer.module) if isinstance(layer.host, SDPAHost) else None
        sure = [] if found is None else [site for site in found.sites if site.sure and site.reached]
        # Not what returns before the call is reached.
        own = [] if found is None else [site for site in found.softmax if not (site.ends and _before(site, sure))]
        if own and sure:
            warnings.warn(
                f"{kind.__name__} also computes a softmax of its own ({own[0]}), which stays as it is: if it is an "
                "attention map that the layer returns, it is not the mechanism's; take attention_maps()",
                stacklevel=stacklevel + 1,
            )


def _before(site: Site, others: Sequence[Site]) -> bool:
    return any(site.file == other.file and site.line < other.line for other in others)
