"""Whether losses and gradients are finite, and which batch they are of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

_NAMED = 8


class NonFiniteError(RuntimeError):
    """Training was stopped at a loss or gradient that is NaN or infinite."""


@dataclass
class Sample:
    """A training batch and what was drawn and found with it.

    Args:
        step, epoch, batch_idx: where it is in the run.
        batch: as the module got it.
        random_states: those of the processor and the device before it was used.
        losses: of its backward passes, scalars as they were given to them.
    """

    step: int
    epoch: int
    batch_idx: int
    batch: Any
    random_states: list[Tensor]
    losses: list[Tensor] = field(default_factory=list)


class Flags:
    """Which losses and gradients are not finite; made without waiting for the device, which :meth:`read` may do.

    On a CUDA device the answer is copied to the host behind what the device has to do; read later, it is there.

    Args:
        losses: scalars.
        parameters: those whose gradients are looked at; what has none is left out.
        shared: whether each process holds a part of the gradients only; all must make their flags together then.
    """

    def __init__(self, losses: Sequence[Tensor], parameters: Sequence[nn.Parameter], shared: bool) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.grad is not None]
        self._losses = len(losses)
        self._shared = shared
        gradients = [local_part(parameter.grad) for parameter in self.parameters]  # type: ignore[arg-type]
        self._flags, self._copied = self._to_host(_not_finite(losses, gradients, shared))

    @staticmethod
    def _to_host(flags: Tensor) -> tuple[Tensor, Any]:
        if flags.device.type != "cuda":
            return flags, None
        host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
        host.copy_(flags, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(flags.device))
        return host, copied

    def read(self) -> tuple[bool, list[nn.Parameter]]:
        """Whether a loss is not finite, and the parameters whose gradient is not."""
        if self._copied is not None:
            self._copied.synchronize()
        flags = self._flags.tolist()
        bad = flags[self._losses :]
        found = [parameter for parameter, is_bad in zip(self.parameters, bad, strict=True) if is_bad]
        if self._copied is None and not self._shared:
            found = [parameter for parameter in found if _is_not_finite(parameter.grad)]
        return any(flags[: self._losses]), found


def _is_not_finite(gradient: Tensor | None) -> bool:
    """Looked at number by number: the norm of finite ones above 1e19 is infinite in float32."""
    return gradient is None or not local_part(gradient).isfinite().all()


def local_part(tensor: Tensor) -> Tensor:
    """The numbers of a gradient or parameter that this process has."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _not_finite(losses: Sequence[Tensor], gradients: Sequence[Tensor], shared: bool) -> Tensor:
    """A flag for each of both, ``[losses + gradients]``."""
    values = [*losses, *gradients]
    if not values:
        return torch.zeros(0, dtype=torch.bool)
    dtype = reduce(torch.promote_types, {value.dtype for value in values}, torch.float32)
    # Norms in one fused pass: half of what `isfinite` of each reads and writes, and a twentieth of its time.
    norms = torch._foreach_norm(list(gradients), 2, dtype=dtype) if gradients else ()
    device = values[-1].device
    bad = torch.stack([value.to(device, dtype) for value in (*losses, *norms)]).isfinite().logical_not()
    if shared and distributed.is_initialized():
        # The losses are this process's own: only what all hold a part of is decided together.
        parts = bad[len(losses) :].int()
        distributed.all_reduce(parts, distributed.ReduceOp.MAX)
        bad = torch.cat([bad[: len(losses)], parts.bool()])
    return bad


def dataset_indices(loader: Any, batch_idx: int) -> list[int] | None:
    """The indices in its data set of the batch that a loader gives as ``batch_idx`` in this epoch.

    None where the order cannot be drawn again: it must follow from the sampler's epoch alone, as that of
    ``SequentialSampler``, ``DistributedSampler`` and our data modules does. That of ``shuffle=True`` does not.
    """
    if not isinstance(loader, DataLoader) or not isinstance(loader.batch_sampler, BatchSampler):
        return None
    if loader.batch_sampler.sampler is not loader.sampler or not _follows_epoch(loader.sampler):
        return None
    found = next(islice(iter(loader.batch_sampler), batch_idx, None), None)
    return None if found is None else [int(index) for index in found]


def _follows_epoch(sampler: Any) -> bool:
    # Lightning puts a sampler of the user's into a data set of this name, behind a DistributedSampler.
    inner = getattr(sampler.dataset, "_sampler", None) if isinstance(sampler, DistributedSampler) else None
    if inner is not None:
        return _follows_epoch(inner)
    return isinstance(sampler, SequentialSampler) or hasattr(sampler, "set_epoch")


def plain(value: Any) -> Any:
    """Tensors on the CPU in dicts and lists, which ``torch.load(weights_only=True)`` reads; else what it prints as."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone().as_subclass(Tensor)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value.copy())
    if isinstance(value, Mapping):
        return {key if isinstance(key, (str, int)) else str(key): plain(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value if value is None or isinstance(value, (str, bool, int, float)) else repr(value)


def save_sample(path: Path, sample: Sample, indices: list[int] | None, losses: list[float], names: list[str]) -> None:
    """Write a batch and what is known of it, as :func:`plain` data."""
    content = {
        "step": sample.step,
        "epoch": sample.epoch,
        "batch_idx": sample.batch_idx,
        "indices": indices,
        "losses": losses,
        "parameters": names,
        "batch": plain(sample.batch),
        "random_states": [state.cpu() for state in sample.random_states],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


def listed(items: Sequence[Any]) -> str:
    """The first few of a list, and how many there are."""
    more = f", ... ({len(items)} in all)" if len(items) > _NAMED else ""
    return ", ".join(map(str, items[:_NAMED])) + more


def described(losses: Sequence[float], names: Sequence[str], count: int) -> str:
    """What is not finite, in a clause; of ``count`` parameters with a gradient those of ``names``."""
    bad = [value for value in losses if not math.isfinite(value)]
    said = [f"the loss is {bad[0]}"] if bad else [f"the loss is {losses[0]:.6g}"] if losses else []
    if names:
        said.append(f"the gradient of {len(names)} of {count} parameters is not finite: {listed(names)}")
    return ", and ".join(said)
