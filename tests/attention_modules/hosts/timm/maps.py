"""Maps of timm's attention layers beside those that the layers write out without fused kernels.

``python -m tests.attention_modules.hosts.timm.maps`` adds the column to docs/timm_models.csv: each kind of layer of a
model, at its true size, as the model calls it (few tokens where nothing fixes their number).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attention_modules.analysis import attention_maps
from tests.attention_modules.hosts.timm.exercise import Call, calls, inputs, real
from tests.attention_modules.hosts.timm.models import Row, on_meta, read, write


class _Layer(nn.Module):
    """A layer with what it is called with."""

    def __init__(self, layer: nn.Module, call: Call) -> None:
        super().__init__()
        self.layer = layer
        self.args, self.kwargs = inputs(call)

    def forward(self) -> Any:
        return self.layer(*self.args, **self.kwargs)


class _Softmax(TorchFunctionMode):
    """Keeps what softmax gives."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.softmax, Tensor.softmax, F.softmax, torch.nn.functional.softmax):
            self.found.append(out)
        return out


@contextlib.contextmanager
def _written_out(layer: nn.Module) -> Iterator[None]:
    """Have a layer write the softmax out, also where it asks timm each time."""
    for part in layer.modules():
        if "fused_attn" in part.__dict__:
            part.fused_attn = False
    yield


def difference(call: Call) -> float:
    """How far a layer's map is from the one that it mixes values with when it writes the softmax out."""
    torch.manual_seed(0)
    layer = real(call.layer)
    model = _Layer(layer, call).eval()
    (mine,) = attention_maps(model, ()).values()
    dropped: list[Tensor] = []
    if isinstance(getattr(layer, "attn_drop", None), nn.Module):
        layer.attn_drop.register_forward_pre_hook(lambda _, args: dropped.append(args[0]))
    with torch.no_grad(), _written_out(layer), _Softmax() as softmax:
        model()
    found = [_as_ours(each, mine.shape) for each in (*dropped, *softmax.found[-1:])]
    fitting = [each for each in found if each.shape == mine.shape]
    if not fitting:
        raise ValueError(f"maps {[tuple(each.shape) for each in found]} beside ours {tuple(mine.shape)}")
    return float((fitting[0] - mine).abs().max())


def _as_ours(found: Tensor, ours: torch.Size) -> Tensor:
    """A map of timm's with windows as samples.

    Hiera's and NesT's are ``[B, H, windows, N, M]``, Twins' ``[B, windows, H, N, M]``; others may be ``[B * H, N, M]``.

    Axes are named and moved, never only reshaped, which would take any layout of as many numbers.
    """
    if found.dim() == 5:
        return (found.transpose(1, 2) if found.shape[1] == ours[1] else found).flatten(0, 1)
    return found.unflatten(0, (-1, ours[1])) if found.dim() == 3 and found.shape[0] % ours[1] == 0 else found


def maps_of(row: Row, done: dict[str, float | str]) -> str:
    """The largest difference of a model's layers, as "1e-07", or why there is none; ``done`` holds kinds of layers."""
    try:
        found = calls(on_meta(row.model))
        for key, call in found.items():
            if key not in done:
                try:
                    done[key] = difference(call)
                except Exception as error:
                    done[key] = f"{type(error).__name__}: {str(error)[:120]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    reasons = [value for key in found if isinstance(value := done[key], str)]
    return reasons[0] if reasons else f"{max(value for key in found if not isinstance(value := done[key], str)):.0e}"


def main(asked: list[str]) -> None:
    rows, done = read(), {}
    for place, row in enumerate(rows):
        if row.takes("softmax") and not row.by_name and (not asked or row.model in asked):
            rows[place] = replace(row, maps=maps_of(row, done))
            print(row.model, rows[place].maps, flush=True)
    write(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
