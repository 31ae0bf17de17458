"""A stand-in for mmcv's compiled operators, so that mmsegmentation can be imported beside mmcv-lite."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from torch import nn

_NAME = "mmcv._ext"


class MissingOps(ModuleType):
    """A module that has every operator, each of which raises when it is called."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> NoReturn:
            wanted = " in ".join(_calling_modules()) or "no module of a model"
            raise NotImplementedError(
                f"mmcv's compiled operator {name!r} is not here (mmcv-lite has none), and {wanted} wants it: choose a "
                "model without it, or install the full mmcv, built for this torch"
            )

        return missing


def provide_ops() -> None:
    """Put the stand-in under the name of the compiled operators, where mmcv has none."""
    if _NAME in sys.modules or importlib.util.find_spec(_NAME) is not None:
        return
    stand_in = MissingOps(_NAME)
    stand_in.__spec__ = ModuleSpec(_NAME, None)  # asked for by `mmcv.utils.check_ops_exist`
    sys.modules[_NAME] = stand_in


def _calling_modules() -> Iterator[str]:
    """Classes of the modules that are being called, from the innermost outwards."""
    seen: list[nn.Module] = []
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and not any(module is other for other in seen):
            seen.append(module)
            yield type(module).__name__
        frame = frame.f_back  # type: ignore[assignment]
