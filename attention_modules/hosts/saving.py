"""What a swapped Hugging Face model writes beside its weights, so that it can be loaded swapped.

``save_pretrained`` of a swapped model also writes ``attnswap.json``, which names the mechanism of each layer, and a
mark beside each layer's weights. transformers reports these marks as unexpected weights, so that a plain
``from_pretrained`` of the folder is noticed.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_modules.hosts.base import MARK, PLAN, Swapped, acting_mechanism
from attention_modules.mechanism import short_name
from attention_modules.mechanisms.softmax import SoftmaxAttention

_ATTRIBUTE = "save_pretrained"


def attach_saving(model: nn.Module) -> None:
    """Have each Hugging Face model with swapped layers write its plan when it is saved; the others save as always."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            ours = _is_ours(vars(module).get(_ATTRIBUTE))
            if any(isinstance(child, Swapped) for child in module.modules()):
                if not ours:
                    # A partial, unlike a closure, is copied and pickled with the model.
                    module.__dict__[_ATTRIBUTE] = functools.partial(_save_swapped, module)
            elif ours:
                del module.__dict__[_ATTRIBUTE]


def _is_ours(found: object) -> bool:
    return isinstance(found, functools.partial) and found.func is _save_swapped


def plan_of(model: nn.Module) -> list[dict[str, Any]]:
    """The mechanism and its options for each swapped layer by name; layers with plain softmax are plain ones."""
    plan = []
    for name, layer in model.named_modules():
        if isinstance(layer, Swapped):
            mechanism = acting_mechanism(layer.mechanism)
            if mechanism is not None and type(mechanism) is not SoftmaxAttention:
                options = _as_json(mechanism.built_with)
                plan.append({"name": name, "mechanism": short_name(type(mechanism)), "options": options})
    return plan


def _as_json(options: Any) -> Any:
    try:
        json.dumps(options)
    except TypeError:
        return None
    return options


def _save_swapped(
    model: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``save_pretrained`` of a model with swapped layers; see the module."""
    plan = plan_of(model)
    plain = functools.partial(type(model).save_pretrained, model, save_directory, is_main_process)
    if not plan:
        if is_main_process and Path(save_directory).is_dir():
            (Path(save_directory) / PLAN).unlink(missing_ok=True)  # of an earlier model in this folder
        return plain(state_dict, *args, **kwargs)
    if getattr(model, "_hf_peft_config_loaded", False):
        _warn_of_adapters(model, plan)
        return plain(state_dict, *args, **kwargs)
    if is_main_process and not Path(save_directory).is_file():
        _write_plan(Path(save_directory), plan)
    marks = {f"{layer['name']}.mechanism.{MARK}": torch.ones(1) for layer in plan}
    _warn(model, plan)
    return plain({**(model.state_dict() if state_dict is None else state_dict), **marks}, *args, **kwargs)


def _write_plan(folder: Path, plan: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{PLAN}.partial"
    partial.write_text(json.dumps({"format": 1, "layers": plan}, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / PLAN)


def _warn(model: nn.Module, plan: list[dict[str, Any]]) -> None:
    """Say what a plain model would miss, and which options cannot be written."""
    dropped = [layer["name"] for layer in plan if model.get_submodule(layer["name"]).dropped_query]
    missing = f" The query projections of {len(dropped)} of them are not in the file." if dropped else ""
    unknown = [layer["name"] for layer in plan if layer["options"] is None]
    by_hand = (
        f" The options of {', '.join(unknown)} are no plain data and are not in {PLAN}: load_pretrained needs "
        "mechanism= for them."
        if unknown
        else ""
    )
    warnings.warn(
        f"saving {len(plan)} swapped attention layers, which are listed in {PLAN}. Load the folder with "
        f"attnswap.load_pretrained({type(model).__name__}, folder); from_pretrained builds plain attention."
        f"{missing}{by_hand}",
        stacklevel=4,
    )


def _warn_of_adapters(model: nn.Module, plan: list[dict[str, Any]]) -> None:
    """Say that what was swapped is not saved with an adapter."""
    mechanisms = [cast(Swapped, model.get_submodule(layer["name"])).mechanism for layer in plan]
    own = sum(any(True for _ in mechanism.parameters()) for mechanism in mechanisms)
    lost = f", nor are the Parameters of {own} of their mechanisms" if own else ""
    cure = ", and keep those Parameters with torch.save(model.state_dict(), path)" if own else ""
    warnings.warn(
        f"the model has an adapter, which save_pretrained then writes alone: the {len(plan)} swapped attention layers "
        f"are not recorded{lost}. Swap the plain model again before you load the adapter{cure}",
        stacklevel=4,
    )
