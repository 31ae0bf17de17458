"""Plans of swaps, which checkpoints keep and from which a swapped module is rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from attention_modules.function import is_attention_function
from attention_modules.hosts.base import IN_CHECKPOINT
from attention_modules.hosts.report import swapped_mechanisms
from attention_modules.mechanism import AttentionMechanism, mechanism_class, short_name
from attention_modules.swap import swap_attention
from lightning_tasks.training.hparams import import_object, plain_data
from lightning_tasks.training.kinds import check_kind

Plan = dict[str, Any]
SWAPPED = "swapped_attention"  # among the hyper-parameters that are logged
PLAIN = ("softmax", "attention_modules.mechanisms.softmax.SoftmaxAttention")
_OF_TASKS = ("mechanism", "options", "layers", "other_attention", "lora")
PLANS = "_attnswap_plans"  # on the LightningModule: plans carried out, with what they put where


def saved_plans(checkpoint: dict[str, Any]) -> list[Plan]:
    """The plans in a checkpoint, of :class:`SwapAttention` and its subclasses, in the order of the callbacks."""
    states = [state for state in checkpoint.get("callbacks", {}).values() if isinstance(state, dict)]
    plans = [state["plan"] for state in states if isinstance(state.get("plan"), dict)]
    kinds = {"mechanism": str, "options": dict, "selection": str, "layers": list}
    return [plan for plan in plans if all(isinstance(plan.get(key), kind) for key, kind in kinds.items())]


def note_plan(pl_module: pl.LightningModule, plan: Plan) -> None:
    """Note that a plan was carried out in a module, whose checkpoints mark the swapped layers from now on."""
    vars(pl_module).setdefault(PLANS, []).append(plan)
    previous = vars(pl_module).get("on_save_checkpoint")
    if not (isinstance(previous, partial) and previous.func is _save_then_mark):
        # Lightning calls it last: callbacks that average weights put other ones into the checkpoint.
        pl_module.on_save_checkpoint = partial(_save_then_mark, pl_module, previous)  # type: ignore[method-assign]


def _save_then_mark(
    pl_module: pl.LightningModule, previous: Callable[[dict[str, Any]], None] | None, checkpoint: dict[str, Any]
) -> None:
    if previous is None:
        type(pl_module).on_save_checkpoint(pl_module, checkpoint)
    else:
        previous(checkpoint)
    _mark_layers(pl_module, checkpoint.get("state_dict", {}))


def _mark_layers(pl_module: pl.LightningModule, state: dict[str, Any]) -> None:
    """Add a key for each layer that would load into plain attention unsaid, as it has all its tensors alone."""
    for name, mechanism in swapped_mechanisms(pl_module).items():
        prefix = f"{name}." if name else ""
        own = {key.removeprefix(prefix) for key in state if key.startswith(prefix)}
        fits = mechanism.uses_query and own and not any(key.startswith("mechanism.") for key in own)
        if fits and short_name(type(mechanism)) not in PLAIN:
            state[f"{prefix}mechanism.{IN_CHECKPOINT}"] = torch.zeros(1)


def without_marks(state: dict[str, Any]) -> None:
    """Take out what a module with plans added, where plain attention may take the weights."""
    for key in [key for key in state if isinstance(key, str) and key.endswith(f"mechanism.{IN_CHECKPOINT}")]:
        del state[key]


def warn_of_other_attention(pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
    """Warn where a checkpoint is used with attention that it was not trained with, though its weights fit.

    It may be meant: a test with fewer passes of RPC-Attention, say.
    """
    saved, given = checkpoint.get("hyper_parameters") or {}, pl_module.hparams
    changed = [
        f"{key} {saved[key]!r}, and is used with {given[key]!r}"
        for key in _OF_TASKS
        if key in saved and key in given and (saved[key] or None) != (given[key] or None)
    ]
    if changed:
        rank_zero_warn(
            f"the checkpoint was trained with {'; with '.join(changed)}: leave it out of the configuration, so that "
            "the checkpoint brings its own, or give the config.yaml of its run"
        )
    present = {name.replace("_orig_mod.", "") for name in swapped_mechanisms(pl_module)}  # of torch.compile
    plans = [plan for plan in saved_plans(checkpoint) if plan["mechanism"] not in PLAIN]
    layers = [(plan["mechanism"], layer) for plan in plans for layer in plan["layers"]]
    lost = [f"{name} in {layer}" for name, layer in layers if layer.replace("_orig_mod.", "") not in present]
    if lost:
        rank_zero_warn(
            f"the checkpoint was trained with SwapAttention ({', '.join(lost)}), and these layers have softmax "
            "attention now: add the same SwapAttention to the trainer's callbacks, or load the module by load_swapped"
        )


def carry_out(pl_module: pl.LightningModule, plan: Plan) -> None:
    """Swap as a checkpoint's plan says."""
    swap_attention(pl_module, resolve_mechanism(plan["mechanism"]), where=plan["layers"], **plan["options"])
    note_plan(pl_module, plan)


def acting_plans(model: nn.Module) -> list[Plan]:
    """What acts in the layers of a model, one plan for each mechanism with its options; none for plain softmax."""
    plans: list[Plan] = []
    for name, mechanism in swapped_mechanisms(model).items():
        options = {key: _loggable(value) for key, value in (mechanism.built_with or {}).items()}
        plan = {"mechanism": short_name(type(mechanism)), "options": options}
        same = next((other for other in plans if all(other[key] == plan[key] for key in plan)), None)
        if same is None:
            plans.append({**plan, "layers": [name]})
        else:
            same["layers"].append(name)
    return plans


def _loggable(value: object) -> Any:
    try:
        return plain_data(value, specs=False)
    except TypeError:
        return repr(value)


def resolve_mechanism(mechanism: object) -> type[AttentionMechanism]:
    """The class of a short name, a class, a function, or an import path of these."""
    if isinstance(mechanism, str) and "." in mechanism:
        path, mechanism = mechanism, import_object(mechanism)
        check_kind(mechanism, "mechanism", path)
    if not isinstance(mechanism, (str, type)) and not is_attention_function(mechanism):
        raise TypeError(
            f"mechanism must be a short name, a class, a function of (q, k, v, ...) or its import path, got "
            f"{mechanism!r}, which a checkpoint cannot hold; write a subclass of AttentionMechanism, and give its "
            "arguments as options="
        )
    return mechanism_class(mechanism)


def overrides(pl_module: pl.LightningModule, method: str) -> bool:
    """Whether the module's class has a method of its own in place of Lightning's, of either package."""
    core = ("lightning.pytorch.core.", "pytorch_lightning.core.")
    return not getattr(type(pl_module), method).__module__.startswith(core)


def built_later(pl_module: pl.LightningModule) -> bool:
    """Whether the network may be incomplete when callbacks are set up."""
    return overrides(pl_module, "setup") or overrides(pl_module, "configure_model")
