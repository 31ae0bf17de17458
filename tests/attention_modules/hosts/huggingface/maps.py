"""The maps of tiny models of transformers beside those that its eager implementation gives."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules.analysis import attention_maps
from attention_modules.hosts.discovery import survey
from tests.attention_modules.hosts.huggingface.tiny import NotBuilt, classes_of, run, running

MODELS = 3
EAGER = "eager_attention_forward"  # how the names of eager implementations end


def maps_of(folder: str) -> str:
    """The largest difference of a map in a folder, as "1e-07", or why there is none.

    Layers of which eager gives no map are named behind the number, so that the folder does not count as compared.
    """
    callers, kinds = classes_of(folder)
    wanted, seen, worst, reasons = {each.__name__ for each in callers}, set(), 0.0, []
    missing: set[str] = set()
    for kind in kinds:
        if len(reasons) >= MODELS or (seen and not wanted - seen):
            break
        try:
            model, inputs = running(kind)
            found = compared(model, inputs)
        except NotBuilt:
            continue
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        for name, difference in found.items():
            kind_of = type(model.get_submodule(name)).__name__
            seen.add(kind_of)
            if difference is None:
                missing.add(kind_of)
            else:
                worst = max(worst, difference) if difference == difference else float("nan")
    if not seen:
        return "; ".join(reasons) or "no layer is called"
    return f"{worst:.0e}" + (f"; no eager map of {', '.join(sorted(missing))}" if missing else "")


def compared(model: Any, inputs: dict[str, Any]) -> dict[str, float | None]:
    """How far each layer's map is from the eager one, at rows that see a key and tokens that are no padding.

    None where eager gives no map of a layer that was called.
    """
    with contextlib.suppress(AttributeError):
        model.config.use_cache = False
    try:
        torch.manual_seed(0)
        maps = attention_maps(model, inputs, layers=[layer.name for layer in survey(model).layers])
    except RuntimeError:  # cross-attention that a swap refuses at the call
        torch.manual_seed(0)
        maps = attention_maps(model, inputs)
    model.set_attn_implementation("eager")
    with torch.no_grad(), eager_maps(model) as given:
        run(model, inputs)
    mask = inputs.get("attention_mask")
    found: dict[str, float | None] = {}
    for name, mine in maps.items():
        theirs = given.get(id(model.get_submodule(name)))
        if theirs is None:
            found[name] = None
            continue
        if theirs.shape != mine.shape:
            found[name] = float("inf")
            continue
        miss = (mine - theirs).abs().masked_fill((mine == 0).all(-1, keepdim=True), 0.0)
        if mask is not None and mask.shape == (miss.shape[0], miss.shape[2]):
            miss = miss[mask.bool().unsqueeze(1).expand(miss.shape[:3])]
        found[name] = float(miss.max()) if miss.numel() else 0.0
    return found


@contextmanager
def eager_maps(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """The last map that the eager implementation gives each layer, by the layer's identity."""
    given: dict[int, Tensor] = {}
    places = {kind.__module__ for part in model.modules() for kind in type(part).__mro__}
    before = {
        (place, name): function
        for place in places
        for name, function in vars(sys.modules[place]).items()
        if name.endswith(EAGER) and callable(function)
    }

    def recorder(function: Any) -> Any:
        def record(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            out = function(module, *args, **kwargs)
            if out[1] is not None:
                given[id(module)] = out[1]
            return out

        return record

    for (place, name), function in before.items():
        setattr(sys.modules[place], name, recorder(function))
    try:
        yield given
    finally:
        for (place, name), function in before.items():
            setattr(sys.modules[place], name, function)
