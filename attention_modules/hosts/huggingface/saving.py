"""What a swapped Hugging Face model writes, so that it can be loaded swapped.

``save_pretrained`` of a swapped model writes weight files that hold everything, for every loader that reads them: the
weights of the plain model, with the kept query rows in their places, as transformers may split, join and rename plain
weights between a model and its file; the tensors of mechanisms; and a mark of each swapped layer. Beside them is
``attnswap.json``, which names the mechanism of each layer, as does a section of the model card. transformers reports
tensors and marks as unexpected weights, so that a plain ``from_pretrained`` of the folder is noticed; the marks'
numbers tell whether the files belong together.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import torch
from torch import Tensor, nn

from attention_modules.hosts.base import MARK, PLAN, Swapped, acting_mechanism
from attention_modules.hosts.huggingface.card import name_swap
from attention_modules.hosts.model.attached import attach, is_of_transformers
from attention_modules.hosts.weights import wrapped_by_peft
from attention_modules.mechanism import short_name
from attention_modules.mechanisms.softmax import SoftmaxAttention
from attention_modules.sharing import READS, without_wrappers

_UPLOAD = "_upload_modified_files"


def attach_saving(model: nn.Module) -> None:
    """Have each Hugging Face model with swapped layers write its plan when it is saved; the others save as always."""
    attach(model, "save_pretrained", _save_swapped, is_of_transformers)


def plan_of(model: nn.Module) -> list[dict[str, Any]]:
    """The mechanism, its options, and whether there is a query, for each swapped layer.

    Layers with plain softmax, which a monitor may have put there, are left out unless others read their values.
    """
    acting = [(name, layer, acting_mechanism(layer.mechanism)) for name, _, layer in _swapped(model)]
    read = any(mechanism is not None and {*mechanism.needs} & {*READS} for _, _, mechanism in acting)
    plan = []
    for name, layer, mechanism in acting:
        if mechanism is not None and (read or type(mechanism) is not SoftmaxAttention):
            entry = {
                "name": name,
                "mechanism": short_name(type(mechanism)),
                "options": _as_json(mechanism.built_with),
                "query": all(part.filled(layer) for part in layer.dropped_query),
            }
            told = vars(layer).get("is_causal")
            plan.append(entry | {"is_causal": told} if isinstance(told, bool) else entry)
    return plan


def _swapped(model: nn.Module) -> Iterator[tuple[str, str, Swapped]]:
    """Each swapped layer: its name, its name with those of wrappers such as torch.compile's, and itself."""
    for name, layer in model.named_modules():
        if isinstance(layer, Swapped):
            yield without_wrappers(name), name, layer


def mark_of(plan: bytes, index: int) -> Tensor:
    """What marks the layer of this index in the plan among the weights: a digest of the plan, and the index."""
    return torch.tensor([int.from_bytes(hashlib.sha256(plan).digest()[:7], "big"), index], device="cpu")


def _as_json(options: Any) -> Any:
    """The options; None where they are no plain data, or keys would come back from the file as others."""
    try:
        json.dumps(options)
    except (TypeError, ValueError, RecursionError):
        return None
    return options if _has_names(options) else None


def _has_names(value: Any) -> bool:
    """Whether the keys of all mappings in plain data are strings."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_names(each) for key, each in value.items())
    return not isinstance(value, (list, tuple)) or all(map(_has_names, value))


def _save_swapped(
    model: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``save_pretrained`` of a model with swapped layers; see the module.

    Raises:
        ValueError: if peft's layers are around weights, a quantizer writes the weights by itself, weights beside query
            rows are offloaded, or a state dict that is given lacks a tensor of a mechanism.
    """
    plan = plan_of(model)
    plain = functools.partial(type(model).save_pretrained, model, save_directory, is_main_process)
    if not plan or state_dict == {}:  # as the Trainer gives where DeepSpeed saves the weights
        if is_main_process and Path(save_directory).is_dir():
            (Path(save_directory) / PLAN).unlink(missing_ok=True)  # of an earlier model in this folder
            write_card(model, save_directory)
        return plain(state_dict, *args, **kwargs)
    if getattr(model, "_hf_peft_config_loaded", False):
        _warn_of_adapters(model, plan)
        return plain(state_dict, *args, **kwargs)
    if not is_main_process:
        return plain(state_dict, *args, **kwargs)  # writes nothing, and may have been given nothing
    if adapted := next((name for name, module in model.named_modules() if wrapped_by_peft(module)), None):
        raise ValueError(
            f"peft has put a layer around {adapted!r}, whose weights would be saved under names that from_pretrained "
            "does not find: call merge_and_unload() of the peft model (unload() drops the adapter), and save what it "
            "returns; the peft model's own save_pretrained writes the adapter alone"
        )
    if quantizer := getattr(model, "hf_quantizer", None):
        raise ValueError(
            f"{type(quantizer).__name__} writes the weights of this quantized model by itself, and not what was "
            "swapped: call restore_attention() to save the plain model, or keep the weights with "
            "torch.save(model.state_dict(), path)"
        )
    for name, _, layer in _swapped(model):
        if layer.dropped_query and any(each.is_meta for each in layer.parameters()):
            raise ValueError(
                f"weights of {name!r} are offloaded, beside which its query rows would not be found: call "
                "accelerate.hooks.remove_hook_from_module(model, recurse=True), save, and dispatch again"
            )
    weights = _in_plain_layout(dict(model.state_dict() if state_dict is None else state_dict), model)
    content = (json.dumps({"format": 3, "layers": plan}, indent=2) + "\n").encode()
    if not Path(save_directory).is_file():
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        _write(Path(save_directory) / PLAN, content)
    marks = {f"{layer['name']}.mechanism.{MARK}": mark_of(content, index) for index, layer in enumerate(plan)}
    _warn(model, plan)
    upload = getattr(model, _UPLOAD, None)
    if upload is not None:
        model.__dict__[_UPLOAD] = functools.partial(_upload_plan_too, model, upload)
    try:
        saved = plain({**weights, **marks}, *args, **kwargs)
        write_card(model, save_directory)
        return saved
    finally:
        model.__dict__.pop(_UPLOAD, None)


def write_card(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Have the model card of a folder name what is swapped in the model, if anything."""
    if Path(folder).is_dir():
        name_swap(Path(folder), type(model).__name__, plan_of(model), _write)


def _upload_plan_too(
    model: nn.Module, upload: Any, folder: Any, repo: Any, stamps: dict[str, float], *args: Any, **kwargs: Any
) -> Any:
    """``push_to_hub=True`` uploads what is newer than `stamps`, which are taken after the plan was written."""
    write_card(model, folder)  # which was made anew
    return upload(folder, repo, {name: at for name, at in stamps.items() if name != PLAN}, *args, **kwargs)


def _in_plain_layout(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A state dict with the weights of the plain model, and the tensors of mechanisms, each with memory of its own.

    Raises:
        ValueError: if the state dict lacks a tensor of a mechanism.
    """
    for name, wrapped, layer in _swapped(model):
        for key in layer.mechanism.state_dict():
            names = f"{name}.mechanism.{key}", f"{wrapped}.mechanism.{key}"
            found = next((each for each in names if each in state), None)
            if found is None:
                raise ValueError(
                    f"state_dict has no {names[0]!r}, which is of the swapped layer {name!r}: give all tensors"
                )
            # A copy, as mechanisms may share a Parameter; where it stood, as processes gather spread ones in order.
            state[names[0]] = (state[found] if found == names[0] else state.pop(found)).detach().clone()
        for part in layer.dropped_query:
            rows = part.rows_in(layer) if part.filled(layer) else None
            there = next((each for each in (part.key(f"{name}."), part.key(f"{wrapped}.")) if each in state), None)
            if there is None and rows is not None:
                beside = (each for at, each in state.items() if at.startswith((f"{name}.", f"{wrapped}.")))
                like = next((each for each in beside if each.is_floating_point()), rows)
                state[part.key(f"{name}.")] = rows.to(like)
            elif there is not None and state[there].shape[part.dim] != part.full:  # else the projection was replaced
                rest = state[there]
                state[there] = part.join(
                    rest.new_zeros(part.rows_beside(rest)) if rows is None else rows.to(rest), rest
                )
    return state


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, also where others write it at the same time."""
    partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")
    try:
        with partial.open("xb") as file:  # no link that somebody put there
            file.write(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


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
    saved = "modules_to_save"  # an attribute of peft's, around what an adapter holds
    own = sum(any(True for _ in each.parameters()) and not hasattr(each, saved) for each in mechanisms)
    lost = f", nor are the Parameters of {own} of their mechanisms" if own else ""
    cure = ", and keep those Parameters with torch.save(model.state_dict(), path)" if own else ""
    warnings.warn(
        f"the model has an adapter, which save_pretrained then writes alone: the {len(plan)} swapped attention layers "
        f"are not recorded{lost}. Swap the plain model again before you load the adapter{cure}",
        stacklevel=4,
    )
