"""What a checkpoint must share with the module that resumes from it."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from attention_modules.hosts.base import IN_CHECKPOINT, Swapped
from attention_modules.layers import SelfAttention
from lightning_tasks.files.checkpoint_io import refuse_damaged

_PREFIX = "model."
_POSITIONS = "pos_embed"


def read_checkpoint(
    path: str | Path, weights_only: bool = True, cure: str = "take a file of its state_dict alone"
) -> dict[str, Any]:
    """The content of a checkpoint file, on the CPU: tensors and plain data, and no code that is run by reading it.

    What the hyper-parameters *name* would be imported and called later: see `lightning_tasks.files.stored`.

    Args:
        path: the file.
        weights_only: whether to refuse other objects than tensors and plain data.
        cure: what the error advises for a file that holds other objects and is trusted.

    Raises:
        FileNotFoundError: no such file.
        ValueError: if the file is no checkpoint, is cut short or damaged, or holds code.
    """
    refuse_damaged(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=weights_only)
    except Exception as error:  # a file of another kind can fail in any way
        if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise ValueError(
                f"{path} holds {found[1]}, which is neither tensor nor plain data: building it could run a program, "
                f"and it was not built; where you trust the file, {cure}"
            ) from error
        raise ValueError(
            f"{path} cannot be read as a checkpoint: it is another kind of file, is cut short, or holds more than "
            "tensors and plain data; give a whole .ckpt file, or, where you trust one with other objects in it, a file "
            "of its state_dict alone"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, and a checkpoint is a dict; give a .ckpt file")
    return content


def refuse_other_layout(trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
    """Refuse to resume a fit in which attention has other Parameters than in the checkpoint.

    Weights of swapped layers load in either layout; the optimizer's state belongs to the Parameters as they were.
    Layers that were built with their mechanism load in its layout alone.

    Raises:
        ValueError: if a swapped layer's Parameters differ and the checkpoint holds the state of an optimizer, or those
            of a layer that was built with its mechanism differ.
    """
    resumes = trainer.state.fn == "fit" and bool(checkpoint.get("optimizer_states"))
    saved = checkpoint.get("state_dict", {})
    for name, layer in pl_module.named_modules():
        if isinstance(layer, Swapped):
            if resumes:
                _refuse_swapped(name, layer, _state_of(name, saved))
        elif isinstance(layer, SelfAttention):
            _refuse_built(name, layer, _state_of(name, saved))


_AS_BEFORE = "the attention that it was trained with"
WEIGHTS_ONLY = (
    "take its weights only: --init_from in place of --ckpt_path (from Python: the callback "
    "lightning_tasks.callbacks.init_from.InitFromCheckpoint)"
)


def _refuse_swapped(name: str, layer: Any, before: dict[str, Tensor]) -> None:
    trained = {key: value for key, value in layer.named_parameters() if value.requires_grad or key in before}
    gone = set(before) - set(layer.state_dict())
    other = [key for key, value in trained.items() if key not in before or before[key].shape != value.shape]
    if before and (gone or other):
        changed = ", ".join(sorted({*gone, *other}))
        raise ValueError(
            f"the checkpoint cannot be resumed: {name!r} now has {type(layer.mechanism).__name__}, and the "
            f"optimizer's state is one of other Parameters (not as they were: {changed}). "
            f"Resume with {_AS_BEFORE}, or {WEIGHTS_ONLY}"
        )


def _refuse_built(name: str, layer: SelfAttention, before: dict[str, Tensor]) -> None:
    proj = before.get("proj.weight")
    if proj is None or proj.shape != layer.proj.weight.shape:  # another model altogether: torch says what differs
        return
    changed = _unlike(layer, before)
    if changed:
        adopted = plain_weights_for(layer, before)
        cure = f", or {WEIGHTS_ONLY}" if not _unlike(layer, adopted) else ""
        raise ValueError(
            f"the checkpoint does not fit: {name!r} is built with {type(layer.mechanism).__name__}, and was trained "
            f"with attention of other Parameters (not as they were: {', '.join(changed)}). "
            f"Use {_AS_BEFORE}{cure}"
        )


def _unlike(layer: nn.Module, before: dict[str, Tensor]) -> list[str]:
    """Keys of the state that are not in both, or of another shape."""
    now = layer.state_dict()
    return sorted(
        key
        for key in now.keys() | before.keys()
        if key not in now or key not in before or now[key].shape != before[key].shape
    )


def plain_weights_for(layer: SelfAttention, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of plain attention as a layer that is built with another mechanism takes it; any other as it is.

    Where the mechanism uses no query, the query's rows are left out; its own tensors keep the layer's values.
    """
    adopted = dict(state)
    width = layer.num_heads * layer.head_dim
    for key in ("qkv.weight", "qkv.bias"):
        if not layer.mechanism.uses_query and key in state and len(state[key]) == 3 * width:
            adopted[key] = state[key][width:]
    if not any(key.startswith("mechanism.") for key in state):
        adopted |= {key: value for key, value in layer.state_dict().items() if key.startswith("mechanism.")}
    return adopted


def _state_of(name: str, state: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a model's state that belong to one of its modules, by the module's own keys."""
    prefix = f"{name}." if name else ""
    tensors = {key: x for key, x in state.items() if isinstance(x, Tensor) and not key.endswith(IN_CHECKPOINT)}
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def adopt_plain_weights(model: nn.Module, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """A model's state with :func:`plain_weights_for` where that makes it fit, and the names of these layers."""
    adopted, names = copy.copy(state), []  # with the versions that torch keeps beside the tensors
    for name, layer in model.named_modules():
        if not isinstance(layer, SelfAttention) or isinstance(layer, Swapped):
            continue
        own = _state_of(name, adopted)
        fitting = plain_weights_for(layer, own)
        if own and _unlike(layer, own) and not _unlike(layer, fitting):
            adopted.update({f"{name}.{key}" if name else key: value for key, value in fitting.items()})
            names.append(name)
    return adopted, names


def load_backbone(network: nn.Module, path: str) -> None:
    """Fill ``network.backbone`` from the checkpoint of an image classifier; its head is left out.

    Position embeddings are resized to the backbone's grid. Swap first: the backbone then takes weights of a plain and
    of a swapped classifier.

    Args:
        network: it has a `backbone`, a timm model.
        path: a Lightning checkpoint whose weights stand under `model.`.

    Raises:
        FileNotFoundError: no file at ``path``.
        ValueError: if the weights do not fit, or the backbone is none of timm's.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"backbone_checkpoint={path}: no such file; give the path of a .ckpt file")
    content = read_checkpoint(path)
    weights = {
        name.removeprefix(_PREFIX): value
        for name, value in content.get("state_dict", content).items()
        if name.startswith(_PREFIX) and not name.startswith(f"{_PREFIX}head")
    }
    backbone: Any = network.backbone
    if not hasattr(backbone, "num_prefix_tokens"):
        raise ValueError(
            f"backbone_checkpoint={path} goes into a timm backbone, and this one is a {type(backbone).__name__}; a "
            "model of mmsegmentation's takes `pretrained: true`, or --init_from PATH"
        )
    own = backbone.state_dict().get(_POSITIONS)
    if own is not None and _POSITIONS in weights and weights[_POSITIONS].shape != own.shape:
        from timm.layers import resample_abs_pos_embed  # importing timm takes a second, and tasks on text go without

        rows, columns = backbone.patch_embed.grid_size
        weights[_POSITIONS] = resample_abs_pos_embed(
            weights[_POSITIONS],
            new_size=[rows, columns],
            num_prefix_tokens=own.shape[1] - rows * columns,  # some models give class tokens no position
        )
    try:
        backbone.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(
            f"backbone_checkpoint={path}: its weights do not fit the backbone; give the model and the attention that "
            f"they were trained with. {error}"
        ) from error
