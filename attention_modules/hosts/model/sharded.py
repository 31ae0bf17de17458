"""What may be swapped in a model whose Parameters ``fully_shard`` (FSDP2) holds: what leaves them as they are."""

from __future__ import annotations

from torch import nn

from attention_modules.hosts.base import Swapped
from attention_modules.mechanism import AttentionMechanism


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` holds Parameters of the model."""
    return any(kind.__name__ == "FSDPModule" for module in model.modules() for kind in type(module).__mro__)


def sharded_refusal(layer: nn.Module, built: AttentionMechanism | None) -> str | None:
    """Why a sharded layer cannot take a mechanism, or lose its own (None): either would change its Parameters."""
    mechanisms = [layer.mechanism] if isinstance(layer, Swapped) else []
    mechanisms += [built] if built is not None else []
    if all(each.uses_query and not list(each.parameters()) for each in mechanisms):
        return None
    names = " and ".join(type(each).__name__ for each in mechanisms)
    return (
        f"fully_shard() holds its Parameters, which {names} would make others: swap before fully_shard() (in "
        "configure_model of a LightningModule, lightning_tasks.callbacks.swap_now(self) has the callbacks do so)"
    )
