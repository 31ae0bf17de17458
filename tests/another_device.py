"""The CPU as if it were another device: without float64 as MPS, or one that reading a number would make wait.

Inside `AnotherDevice` every tensor that was there before says that it lies on that device. What is made without
`device=`, or brought back by `.cpu()`, lies on the host; the two do not mix, as on a machine with an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map


class WaitsForDeviceError(AssertionError):
    """A number of the device is read, or copied from or to it: the host waits until the device is done."""


class OnHost(Tensor):
    """What lies on the host while the other device is there."""


_HOST = torch.device("cpu")
_READS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.nonzero,
    Tensor.equal,
    Tensor.allclose,
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__index__,
    Tensor.__contains__,
    torch.nonzero,
    torch.equal,
    torch.allclose,
    torch.masked_select,
    Tensor.masked_select,
    torch.unique,
    Tensor.unique,
}
_FACTORIES_FROM_DATA = (torch.tensor, torch.as_tensor, torch.from_numpy)


class AnotherDevice(TorchFunctionMode):
    """Every tensor lies on a device of another type; what it cannot do raises.

    Args:
        kind: the type that tensors say.
        float64: whether the device has it.
        may_wait: whether numbers may be read from the device.
    """

    def __init__(self, kind: str, *, float64: bool, may_wait: bool) -> None:
        super().__init__()
        self.device, self.float64, self.may_wait = torch.device(kind), float64, may_wait

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return self._where(args[0])
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return self._where(args[0]).type == "cuda"
        if func in _READS:
            self._may_wait(func, any(self._is_here(each) for each in tensors))
        if func is Tensor.__getitem__ and self._is_here(args[0]):
            self._may_wait(func, any(map(self._selects, args[1] if isinstance(args[1], tuple) else (args[1],))))
        if func is Tensor.__setitem__ and self._is_here(args[0]):  # a number is copied to one place
            self._may_wait(func, not isinstance(args[2], Tensor) and args[0][args[1]].ndim == 0)
        asked = self._asked(func, args, kwargs)
        args, kwargs = tree_map(self._real, (args, kwargs))
        found = func(*args, **kwargs)
        if not any(isinstance(each, Tensor) for each in tree_leaves(found)):
            return found
        on_host = self._result_on_host(func, asked, tensors)
        return tree_map(lambda each: self._placed(each, on_host) if isinstance(each, Tensor) else each, found)

    def _where(self, tensor: Tensor) -> torch.device:
        return self.device if self._is_here(tensor) else _HOST

    @staticmethod
    def _is_here(tensor: Tensor) -> bool:
        return not isinstance(tensor, OnHost)

    def _may_wait(self, func: Callable[..., Any], waits: bool) -> None:
        if waits and not self.may_wait:
            raise WaitsForDeviceError(f"{getattr(func, '__name__', func)} waits for the device")

    def _selects(self, index: Any) -> bool:
        """Whether an index is copied to the device, or its number of places read from there."""
        return isinstance(index, list) or (
            isinstance(index, Tensor) and (index.dtype in (torch.bool, torch.uint8) or not self._is_here(index))
        )

    def _asked(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> torch.device | None:
        """The device that a call names, by itself or as that of another tensor."""
        if func is Tensor.cpu:
            return _HOST
        names = [kwargs.get("device"), *(args[1:2] if func is Tensor.to else ())]
        for each in names:
            if isinstance(each, Tensor):
                return self._where(each)
            if isinstance(each, (str, torch.device)):
                return torch.device(each)
        return None

    def _real(self, each: Any) -> Any:
        return _HOST if isinstance(each, torch.device) and each.type == self.device.type else each

    def _result_on_host(self, func: Callable[..., Any], asked: torch.device | None, tensors: list[Tensor]) -> bool:
        if asked is not None:
            to_host = asked.type != self.device.type
            copied = func in _FACTORIES_FROM_DATA or any(self._is_here(each) == to_host for each in tensors)
            self._may_wait(func, copied and not (to_host and not tensors))
            return to_host
        if func is Tensor.copy_:
            return not self._is_here(tensors[0])
        wide = [each for each in tensors if each.ndim]
        if any(map(self._is_here, wide)) and not all(map(self._is_here, wide)):
            raise RuntimeError(f"{getattr(func, '__name__', func)}: tensors lie on {self.device} and on the host")
        return not any(map(self._is_here, tensors))

    def _placed(self, tensor: Tensor, on_host: bool) -> Tensor:
        if not on_host and tensor.dtype == torch.float64 and not self.float64:
            raise TypeError(f"{self.device} has no float64")
        if on_host == (not self._is_here(tensor)):
            return tensor
        return tensor.as_subclass(OnHost if on_host else Tensor)
