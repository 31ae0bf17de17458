"""What a swapped Hugging Face model writes beside its weights, so that it can be loaded swapped.

``save_pretrained`` of a swapped model writes the weights of the plain model, with the kept query rows in their places,
as transformers may split, join and rename plain weights between a model and its file. Beside them are
``attnswap.json``, which names the mechanism of each layer, ``attnswap.safetensors`` with the tensors of mechanisms, and
in the weights a mark of each swapped layer. transformers reports the marks as unexpected weights, so that a plain
``from_pretrained`` of the folder is noticed; their number tells whether the files belong together.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_modules.hosts.base import MARK, PLAN, TENSORS, Swapped, acting_mechanism
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
    """The mechanism, its options, and whether there is a query, for each swapped layer; plain softmax is left out."""
    plan = []
    for name, layer in model.named_modules():
        if isinstance(layer, Swapped):
            mechanism = acting_mechanism(layer.mechanism)
            if mechanism is not None and type(mechanism) is not SoftmaxAttention:
                plan.append(
                    {
                        "name": name,
                        "mechanism": short_name(type(mechanism)),
                        "options": _as_json(mechanism.built_with),
                        "query": all(part.filled(layer) for part in layer.dropped_query),
                    }
                )
    return plan


def seal(names: Iterable[str], tensors: bytes) -> Tensor:
    """The number that marks the weights of a folder: of the swapped layers' names and of the mechanisms' tensors."""
    digest = hashlib.sha256("\n".join(sorted(names)).encode() + b"\0" + tensors).digest()
    return torch.tensor([int.from_bytes(digest[:7], "big")])


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
            for name in (PLAN, TENSORS):  # of an earlier model in this folder
                (Path(save_directory) / name).unlink(missing_ok=True)
        return plain(state_dict, *args, **kwargs)
    if getattr(model, "_hf_peft_config_loaded", False):
        _warn_of_adapters(model, plan)
        return plain(state_dict, *args, **kwargs)
    names = [layer["name"] for layer in plan]
    weights, own = _divide(dict(model.state_dict() if state_dict is None else state_dict), model, names)
    tensors = save({key: tensor.detach().cpu().clone() for key, tensor in own.items()}) if own else b""
    if is_main_process and not Path(save_directory).is_file():
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        if tensors:
            _write(folder / TENSORS, tensors)
        else:
            (folder / TENSORS).unlink(missing_ok=True)
        _write(folder / PLAN, (json.dumps({"format": 2, "layers": plan}, indent=2) + "\n").encode())
    mark = seal(names, tensors)
    _warn(model, plan)
    return plain({**weights, **{f"{name}.mechanism.{MARK}": mark.clone() for name in names}}, *args, **kwargs)


def _divide(
    state: dict[str, Tensor], model: nn.Module, names: Iterable[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A state dict as the weights of the plain model, and the tensors of these layers' mechanisms.

    Raises:
        ValueError: if the state dict lacks a tensor of a mechanism.
    """
    own = {}
    for name in names:
        layer: Any = model.get_submodule(name)
        for key in (f"{name}.mechanism.{key}" for key in layer.mechanism.state_dict()):
            if key not in state:
                raise ValueError(f"state_dict has no {key!r}, which is of the swapped layer {name!r}: give all tensors")
            own[key] = state.pop(key)
        for part in layer.dropped_query:
            key, rows = part.key(f"{name}."), part.rows_in(layer) if part.filled(layer) else None
            rest = state.get(key)
            if rest is not None:
                state[key] = part.join(rest.new_zeros(part.rows_beside(rest)) if rows is None else rows.to(rest), rest)
            elif rows is not None:
                state[key] = rows
    return state, own


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def _warn(model: nn.Module, plan: list[dict[str, Any]]) -> None:
    """Say how the folder is loaded, and which options cannot be written."""
    unknown = [layer["name"] for layer in plan if layer["options"] is None]
    by_hand = (
        f" The options of {', '.join(unknown)} are no plain data and are not in {PLAN}: load_pretrained needs "
        "mechanism= for them."
        if unknown
        else ""
    )
    warnings.warn(
        f"saving {len(plan)} swapped attention layers, which are listed in {PLAN}. Load the folder with "
        f"attnswap.load_pretrained({type(model).__name__}, folder); from_pretrained builds plain attention.{by_hand}",
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
