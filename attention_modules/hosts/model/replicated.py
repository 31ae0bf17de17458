"""Models that DistributedDataParallel holds: it joins gradients of those Parameters that were there when it began."""

from __future__ import annotations

import gc

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


def replicated_refusal(model: nn.Module) -> str | None:
    """Why the Parameters of a model's layers cannot change, if DistributedDataParallel holds it from outside."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    own = {id(module) for module in model.modules()}
    for each in gc.get_objects():
        if issubclass(type(each), DistributedDataParallel) and own & {id(module) for module in each.module.modules()}:
            return (
                "DistributedDataParallel holds it, knows nothing of new Parameters, and would let them drift apart: "
                "swap before wrapping the model in it"
            )
    return None
