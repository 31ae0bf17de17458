"""Optimizers, parameter groups and schedules from plain data."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from attention_modules.mechanism import did_you_mean
from lightning_tasks.errors import reason
from lightning_tasks.training.hparams import Spec, import_object
from lightning_tasks.training.kinds import checked_build, checked_spec

_TIMM_SCHEDULE = "create_scheduler_v2"


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], rules: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Optimizer groups: one a rule, in order, after one with all that no rule matches.

    Args:
        named: parameters by name.
        rules: each ``{"match": GLOB, option: value, ...}``; a parameter belongs to the first rule that matches its
            name, and gets that rule's optimizer options, e.g. ``{"match": "*norm*", "weight_decay": 0.0}``.

    Raises:
        ValueError: if a rule has no "match", or a rule gets no parameter.
    """
    for rule in rules:
        if "match" not in rule:
            raise ValueError(f"a rule of param_groups needs the key 'match' (a glob of names), got {dict(rule)}")
    groups: list[dict[str, Any]] = [{**rule, "params": []} for rule in rules]
    rest: list[nn.Parameter] = []
    for name, parameter in named:
        group = next((group for group in groups if fnmatchcase(name, group["match"])), None)
        (rest if group is None else group["params"]).append(parameter)
    for group in groups:
        pattern = group.pop("match")
        if not group["params"]:
            raise ValueError(f"param_groups: {pattern!r} matches no parameter that an earlier rule left")
    return [{"params": rest}, *groups] if rest else groups


def model_groups(
    model: nn.Module, optimizer: Spec, layer_decay: float | None = None, scheduler: Spec | None = None
) -> list[dict[str, Any]]:
    """timm's optimizer groups: no weight decay on Parameters of one axis and what the model names, and a rate a layer.

    A group's learning rate is the optimizer's times layer_decay^(layers above it); the schedule keeps these ratios.

    Args:
        model: a timm model, also a swapped or compiled one; its frozen parameters are left out.
        optimizer: plain data of the optimizer, for its rate and weight decay.
        layer_decay: factor from one layer to the one below, or None for one rate.
        scheduler: plain data of the schedule.

    Raises:
        ValueError: if ``layer_decay`` is not in (0, 1], or the schedule has one rate for all groups (one floor: a
            warning).
    """
    from timm.optim import param_groups_layer_decay, param_groups_weight_decay

    model = getattr(model, "_orig_mod", model)
    names: Any = getattr(model, "no_weight_decay", None)
    kept = names() if names is not None else ()
    weight_decay = _argument(optimizer, "weight_decay", None)
    given = _SOME_DECAY if weight_decay is None else weight_decay
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise ValueError(f"layer_decay must be above 0 and at most 1, got {layer_decay!r}")
    rate = _argument(optimizer, "lr", None)
    if layer_decay is not None and rate is None:
        raise ValueError(f"layer_decay needs a learning rate to scale; give {optimizer['class_path']} the argument lr")
    made = (
        param_groups_weight_decay if layer_decay is None else partial(param_groups_layer_decay, layer_decay=layer_decay)
    )
    groups = made(model, given, no_weight_decay_list=kept)
    if weight_decay is None:
        standing = ("weight_decay", _SOME_DECAY)
        groups = [{key: value for key, value in group.items() if (key, value) != standing} for group in groups]
    if layer_decay is None or (scheduler is not None and _is_timms(scheduler)):  # which scales floor and warm-up too
        return groups
    if layer_decay < 1 and scheduler is not None:
        _refuse_one_rate(scheduler)
    # Schedules of torch know nothing of timm's `lr_scale`.
    return [{"lr": rate * group.pop("lr_scale"), **group} for group in groups]


_SOME_DECAY = 1.0  # stands for a weight decay that only the optimizer knows


def _is_timms(scheduler: Spec) -> bool:
    return str(getattr(import_object(scheduler["class_path"]), "__module__", "")).startswith("timm.")


def _refuse_one_rate(scheduler: Spec) -> None:
    for spec in (scheduler, *_inner_schedules(scheduler)):
        name, given = spec["class_path"].rsplit(".", 1)[-1], spec["init_args"]
        cure = f"timm.scheduler.{_TIMM_SCHEDULE} scales them"
        if name in ("OneCycleLR", "CyclicLR"):
            raise ValueError(f"layer_decay gives each layer a rate, and {name} with {given} has one for all: {cure}")
        floor = given.get("eta_min") or (name == "ReduceLROnPlateau" and given.get("min_lr"))
        if floor and not isinstance(floor, list):
            rank_zero_warn(f"layer_decay: {name} has one floor of {floor} for the rates of all layers: {cure}")


def _argument(spec: Spec, name: str, default: Any) -> Any:
    """What an argument will be when ``spec`` is built."""
    if name in spec["init_args"]:
        return spec["init_args"][name]
    parameter = inspect.signature(import_object(spec["class_path"])).parameters.get(name)
    return default if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default


def schedule_length(spec: Spec, interval: str, trainer: Any) -> dict[str, Any]:
    """Arguments of timm's ``create_scheduler_v2`` that follow from the run; none for any other schedule.

    Raises:
        ValueError: if the run has no end, or epochs of no known length.
    """
    if spec["class_path"].rsplit(".", 1)[-1] != _TIMM_SCHEDULE:
        return {}
    if trainer.max_epochs == -1 and trainer.max_steps == -1:
        raise ValueError(f"{_TIMM_SCHEDULE} needs the end of the run: give trainer.max_epochs or trainer.max_steps")
    trainer.fit_loop.setup_data()
    updates, batches = trainer.estimated_stepping_batches, trainer.num_training_batches
    if not trainer.limit_train_batches:  # Lightning then counts infinitely many batches
        updates, batches = 1, 1
    if math.isinf(batches):
        if updates == -1 or interval == "epoch":
            raise ValueError(
                f"{_TIMM_SCHEDULE} needs the length of an epoch, and the training data have none: give "
                "trainer.limit_train_batches, or trainer.max_steps with scheduler_interval='step'"
            )
        return {"num_epochs": 1, "updates_per_epoch": updates, "step_on_epochs": False}
    an_epoch = max(1, math.ceil(batches / trainer.accumulate_grad_batches))
    return {"num_epochs": updates / an_epoch, "updates_per_epoch": an_epoch, "step_on_epochs": interval == "epoch"}


def step_timm(scheduler: Any, interval: str, updates: int, epochs: int) -> None:
    """Bring a schedule of timm to where the run is, after ``updates`` steps and ``epochs`` epochs.

    Raises:
        ValueError: if it counts in the other unit, and would never move.
    """
    if scheduler.t_in_epochs != (interval == "epoch"):
        unit = "epoch" if scheduler.t_in_epochs else "step"
        raise ValueError(f"the schedule counts in {unit}s: give scheduler_interval={unit!r}, or t_in_epochs=... to it")
    if scheduler.t_in_epochs:
        scheduler.step(epochs)
    else:
        scheduler.step_update(updates)


def build_optimizer(spec: Spec, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer over groups of parameters.

    Raises:
        TypeError, ValueError: if it does not take its arguments, or their values; the text shows them.
    """
    if spec["class_path"].endswith("create_optimizer_v2") and spec["init_args"].get("layer_decay") is not None:
        raise ValueError("create_optimizer_v2 is given groups, and reads no layer_decay: give the task layer_decay")
    built: Optimizer = _built(spec, "optimizer", groups)
    known = built.defaults.keys() | {"params", "lr_scale", "param_names", "weight_decay"}  # of timm's groups
    for option in sorted({name for group in groups for name in group} - known if built.defaults else ()):
        rank_zero_warn(
            f"param_groups: {type(built).__name__} has no option {option!r} of its own, and may not read it."
            f"{did_you_mean(option, known)}"
        )
    return built


def _built(spec: Spec, place: str, *args: Any, **extra: Any) -> Any:
    """As :func:`checked_build`; what torch and timm say of values that they refuse is a refusal of ours."""
    try:
        return checked_build(spec, place, *args, **extra)
    except TypeError:
        raise
    except Exception as error:  # a value of another kind can fail in any way
        text = str(error) if isinstance(error, ValueError) else reason(error)
        raise ValueError(f"{spec['class_path']} could not be built with {spec['init_args']}: {text}") from error


def build_scheduler(spec: Spec, optimizer: Optimizer, **length: Any) -> Any:
    """A schedule on ``optimizer``; entries under "schedulers" (SequentialLR, ChainedScheduler) are built first.

    ``length`` is what :func:`schedule_length` says of the run; the schedule's own arguments go before it.
    """
    arguments = {key: value for key, value in spec["init_args"].items() if key != "optimizer"}  # a parser's blank
    if "schedulers" in arguments:
        arguments["schedulers"] = [build_scheduler(entry, optimizer) for entry in _inner_schedules(spec)]
    built = _built({**spec, "init_args": {**length, **arguments}}, "scheduler", optimizer=optimizer)
    built = built[0] if isinstance(built, tuple) else built  # create_scheduler_v2 adds the number of epochs
    if type(built).__name__ == "PlateauLRScheduler":
        raise ValueError(
            "timm's plateau schedule keeps no count of bad epochs in checkpoints, so a resumed run would differ: take "
            "ReduceLROnPlateau with scheduler_interval='epoch' and scheduler_monitor"
        )
    return built


def optimizer_spec(value: Any) -> Spec:
    """Plain data of an optimizer; bare names are those of :mod:`torch.optim`. Raises as :func:`checked_spec`."""
    return checked_spec(value, torch.optim, place="optimizer")


def scheduler_spec(value: Any) -> Spec | None:
    """Plain data of a schedule or None, with those inside it checked.

    Bare names are those of :mod:`torch.optim.lr_scheduler`. Raises as :func:`checked_spec`.
    """
    if value is None:
        return None
    spec = checked_spec(value, lr_scheduler, place="scheduler")
    _inner_schedules(spec)
    return spec


def _inner_schedules(spec: Spec) -> list[Spec]:
    """Plain data of the schedules that one is made of, at any depth."""
    entries = spec["init_args"].get("schedulers") or []
    if not isinstance(entries, list):
        raise TypeError(f"schedulers of {spec['class_path']} must be a list, got {entries!r}")
    inner = [
        checked_spec(entry, lr_scheduler, place=f"scheduler.schedulers[{index}]") for index, entry in enumerate(entries)
    ]
    for each in inner:
        _inner_schedules(each)
    return inner
