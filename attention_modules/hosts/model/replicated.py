"""Models that DistributedDataParallel or FSDP1 holds: of Parameters that came after it, gradients are not joined."""

from __future__ import annotations

import gc

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


def replicated_refusal(model: nn.Module) -> str | None:
    """Why the Parameters of a model's layers cannot change, if one of these holds it from outside."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    from torch.distributed.fsdp import FullyShardedDataParallel  # not in every build of torch

    own = {id(module) for module in model.modules()}
    for each in gc.get_objects():
        holds = issubclass(type(each), (DistributedDataParallel, FullyShardedDataParallel))
        if holds and own & {id(module) for module in each.module.modules()}:
            return (
                f"{type(each).__name__} holds it, knows nothing of new Parameters, and would let them drift apart: "
                "swap before wrapping the model in it"
            )
    return None
