"""The base of our callbacks, which both Lightning packages accept."""

from __future__ import annotations

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

try:
    from pytorch_lightning import Callback as _StandaloneCallback
except ImportError:
    _BASES: tuple[type, ...] = (pl.Callback,)
else:
    _BASES = (pl.Callback, _StandaloneCallback)

Where = str | list[str] | None


class Callback(*_BASES):  # type: ignore[misc]
    """A callback for the trainers and command lines of ``lightning`` and of ``pytorch_lightning`` alike.

    The two are separate class trees, each of which refuses the other's callbacks; this class belongs to both where
    both are installed.
    """


def whole(tensor: Tensor) -> Tensor:
    """A tensor that FSDP2 has sharded, gathered (every process must call this), differentiably; others as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def reshard(module: nn.Module) -> None:
    """Have FSDP2 free the whole weights that an evaluation may have left, so that modules hold what is trained."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
