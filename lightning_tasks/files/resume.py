"""The random state of each process, for a run that goes on where another stopped."""

from __future__ import annotations

import inspect
import random
import struct
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, distributed

from lightning_tasks.files.weights import WEIGHTS_ONLY
from lightning_tasks.training.hparams import import_object


def random_state(device: torch.device) -> list[Tensor]:
    """The states of torch, for the processor and for ``device`` where it is a GPU, of this process."""
    own = [torch.get_rng_state()]
    if device.type == "cuda":
        own.append(torch.cuda.get_rng_state(device))
    return own


def _of_python() -> Tensor:
    """What `random` and `numpy.random` draw from, as integers: a checkpoint's tensors are read without unpickling."""
    _, words, gauss = random.getstate()
    own = [*words, gauss is not None, _bits(gauss or 0.0)]
    found = np.random.get_state(legacy=False)  # noqa: NPY002 - what transforms draw from
    if found["bit_generator"] == "MT19937":
        own += [found["has_gauss"], _bits(found["gauss"]), found["state"]["pos"], *found["state"]["key"].tolist()]
    return torch.tensor(own)


def _set_python(state: Tensor) -> None:
    values = state.tolist()
    random.setstate((3, tuple(values[:625]), _number(values[626]) if values[625] else None))
    if of_numpy := values[627:]:
        has, gauss, place, *key = of_numpy
        np.random.set_state(("MT19937", np.array(key, np.uint32), place, has, _number(gauss)))  # noqa: NPY002


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def gather_random_states(device: torch.device) -> list[list[Tensor]]:
    """By rank: the states of torch, for the processor and for ``device`` where it is a GPU, of Python and of NumPy.

    Each process uses one device, so what it has as the state of the others is not what they draw from. All processes
    must call this.
    """
    own = [*random_state(device), _of_python()]
    if not (distributed.is_available() and distributed.is_initialized()):
        return [own]
    states: list[list[Tensor]] = [[] for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(states, own)
    return states


def set_random_state(states: list[list[Tensor]], rank: int, device: torch.device) -> None:
    """Go on from ``states[rank]``; a rank that had no process before keeps the state that it has."""
    if rank >= len(states):
        return
    cpu, *devices = states[rank]
    if devices and devices[-1].dtype == torch.int64:  # not in checkpoints of earlier versions
        _set_python(devices.pop())
    torch.set_rng_state(cpu.cpu())
    if device.type == "cuda" and devices:
        torch.cuda.set_rng_state(devices[0].cpu(), device)


def keep_state(trainer: pl.Trainer | None, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
    """Keep in a checkpoint what :func:`go_on` goes on with; all processes must call this."""
    checkpoint.setdefault("random_states", gather_random_states(pl_module.device))
    if trainer is not None and (lost := _gathered(trainer, pl_module)):
        checkpoint["lost_gradients"] = lost
    if trainer is not None and _of_kind(trainer, "BaseFinetuning"):
        checkpoint["finetuning"] = {
            "trains": {name: each.requires_grad for name, each in pl_module.named_parameters()},
            "tracks": {name: bool(each.track_running_stats) for name, each in _norms(pl_module)},
        }


def _gathered(trainer: pl.Trainer, pl_module: pl.LightningModule) -> int:
    """How many batches a step has gathered gradients of, which is not taken yet."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    is_open = pl_module.automatic_optimization and not progress.is_last_batch
    return int(progress.current.processed % trainer.accumulate_grad_batches) if is_open else 0


def _norms(pl_module: pl.LightningModule) -> list[tuple[str, Any]]:
    return [(name, each) for name, each in pl_module.named_modules() if hasattr(each, "track_running_stats")]


def kept_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`keep_state` kept in a checkpoint.

    Raises:
        ValueError: for an entry that it never writes.
    """
    kept = {name: checkpoint[name] for name in _IS_KEPT if name in checkpoint}
    for name, value in kept.items():
        if not _IS_KEPT[name](value):
            raise ValueError(f"the checkpoint's {name} are none that attnswap saves, but {value!r:.80}: {WEIGHTS_ONLY}")
    return kept


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(each, kind) for each in values)


_IS_KEPT: dict[str, Callable[[Any], bool]] = {
    "random_states": lambda value: _are(list, value) and all(each and _are(Tensor, each) for each in value),
    "finetuning": lambda value: (
        isinstance(value, dict)
        and value.keys() == {"trains", "tracks"}
        and _are(dict, [*value.values()])
        and all(_are(bool, [*each.values()]) for each in value.values())
    ),
    "lost_gradients": lambda value: isinstance(value, int),
}


def _of_kind(trainer: pl.Trainer, name: str) -> list[Any]:
    """The callbacks of a class of Lightning's, of either package."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # not declared there
    return [each for each in callbacks if name in (kind.__name__ for kind in type(each).__mro__)]


def go_on(trainer: pl.Trainer, pl_module: pl.LightningModule, kept: Mapping[str, Any]) -> None:
    """Begin a resumed fit with the random state of this process, and at its place in the data.

    Where ``configure_optimizers`` reads ``trainer.estimated_stepping_batches``, Lightning makes the loaders before it
    reads the checkpoint, and would not tell them their place afterwards; later hooks may read it, too. Here the loaders
    are made anew at the last moment. A fit that `max_steps` alone ends would resume at the end of an epoch with a step
    that belongs to no epoch. At the end of an epoch that it resumes, Lightning would leave `ReduceLROnPlateau` out.
    Behind the last batch of an epoch it would leave out the hooks at the start of the next; within an epoch
    `GradientAccumulationScheduler` would not act, and `BaseFinetuning` freezes what it had let train.

    Args:
        trainer: of the fit.
        pl_module: its module.
        kept: what :func:`kept_state` gives.
    """
    loop = trainer.fit_loop
    of_epoch = loop.epoch_loop

    def advance(*arguments: Any) -> None:
        del of_epoch.advance  # type: ignore[method-assign]
        loop._restarting = False
        of_epoch.advance(*arguments)

    def begin() -> None:
        del loop.on_advance_start  # type: ignore[method-assign]
        current: Any = loop.epoch_progress.current
        if loop.restarted_mid_epoch and current.processed == current.started:  # the epoch is over; the next one begins
            loop.reset_restart_stage()
        if loop.restarted_mid_epoch:
            for scheduler in _of_kind(trainer, "GradientAccumulationScheduler"):
                scheduler.on_train_epoch_start(trainer, pl_module)
            if lost := kept.get("lost_gradients"):
                rank_zero_warn(
                    f"the checkpoint was saved behind {lost} of the batches that a step accumulates, and lacks their "
                    "gradients, so that this run will differ from one that was not stopped: save where steps end "
                    "(every_n_train_steps, or val_check_interval a multiple of accumulate_grad_batches)"
                )
        loop.on_advance_start()

    def run() -> None:
        del loop.run  # type: ignore[method-assign]
        if (before := kept.get("finetuning")) is not None and _of_kind(trainer, "BaseFinetuning"):
            for name, parameter in pl_module.named_parameters():
                parameter.requires_grad_(before["trains"].get(name, parameter.requires_grad))
            for name, norm in _norms(pl_module):
                norm.track_running_stats = before["tracks"].get(name, norm.track_running_stats)
        loop._combined_loader = None
        epoch: Any = loop.epoch_progress.current
        if epoch.ready == epoch.started == epoch.processed:
            loop._restarting = of_epoch.restarting = False
        of_epoch.advance = advance  # type: ignore[method-assign, assignment]
        loop.on_advance_start = begin  # type: ignore[method-assign]
        loop.run()

    loop.run = run  # type: ignore[method-assign]
    if (states := kept.get("random_states")) is not None:
        set_random_state(states, trainer.global_rank, pl_module.device)


def reopen_cut_epoch(checkpoint: dict[str, Any]) -> None:
    """Make a fit that resumes finish the epoch that `max_steps` cut short, and give one that was about to start whole.

    Lightning counts the first as processed, so it would give the rest of its steps the data of the next one. Of a
    checkpoint that is saved in `on_train_epoch_start` it has the batches of the epoch before, and leaves out those of
    the new one.
    """
    fit = checkpoint.get("loops", {}).get("fit_loop", {})
    batches = fit.get("epoch_loop.batch_progress", {})
    epochs = fit.get("epoch_progress", {})
    if not batches or not batches["current"]["ready"]:
        return
    if batches["is_last_batch"]:
        for count in (epochs["total"], epochs["current"]):
            if count["started"] == count["completed"]:
                count["ready"] = count["completed"]
        return
    for count in (epochs["total"], epochs["current"]):
        if count["completed"] == count["started"]:  # saved when the fit was over
            count["completed"] -= 1
        if count["processed"] > count["completed"]:
            count["processed"] -= 1


_SETTINGS = ("optimizer", "scheduler", "scheduler_interval", "param_groups", "layer_decay")
RESUME_CURE = f"Resume with the settings of the checkpoint, or {WEIGHTS_ONLY}"


def refuse_other_settings(trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Mapping[str, Any]) -> None:
    """Refuse to resume a fit whose hyper-parameters ask for another optimizer or schedule than the checkpoint's.

    Raises:
        ValueError: the text names each setting, as it was and as it is now.
    """
    if trainer.state.fn != "fit" or not checkpoint.get("optimizer_states"):
        return
    stored, now = checkpoint.get("hyper_parameters", {}), pl_module.hparams
    changed = [
        line
        for name in _SETTINGS
        if name in stored and name in now
        for line in _differences(name, stored[name], now[name])
    ]
    if changed:
        raise ValueError(
            f"the checkpoint's optimizer cannot be resumed with other settings: {'; '.join(changed)}. {RESUME_CURE}"
        )


def _differences(name: str, before: Any, now: Any) -> list[str]:
    """What differs between two values of a setting, as "name is A in the checkpoint and B now"."""
    if _is_spec(before) and _is_spec(now) and before["class_path"] == now["class_path"]:
        one, other = _arguments(before), _arguments(now)
        pairs = [(f"{name}.{key}", one.get(key), other.get(key)) for key in sorted(one.keys() | other.keys())]
    else:
        pairs = [(name, before, now)]
    return [f"{what} is {_text(a)} in the checkpoint and {_text(b)} now" for what, a, b in pairs if a != b]


def _is_spec(value: Any) -> bool:
    return isinstance(value, Mapping) and "class_path" in value


def _arguments(spec: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a class, those that are left at their defaults too."""
    parameters = inspect.signature(import_object(spec["class_path"])).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    arguments = {**defaults, **(spec.get("init_args") or {})}
    arguments.pop("optimizer", None)  # a parser's blank among those of a schedule
    return {name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()}


def _text(value: Any) -> str:
    if not _is_spec(value):
        return repr(value)
    arguments = ", ".join(f"{name}={given!r}" for name, given in (value.get("init_args") or {}).items())
    return f"{value['class_path']}({arguments})"
