"""The base of our callbacks, which both Lightning packages accept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import LBFGS, Optimizer

try:
    from pytorch_lightning import Callback as _StandaloneCallback
except ImportError:
    _BASES: tuple[type, ...] = (pl.Callback,)
else:
    _BASES = (pl.Callback, _StandaloneCallback)
Where = str | list[str] | None
StepArguments = tuple[tuple[Any, ...], dict[str, Any]]
_CURES = {
    "FSDPStrategy": "FSDP1 flattens parameters; use ModelParallelStrategy (FSDP2) or DDP",
    "DeepSpeedStrategy": "DeepSpeed keeps gradients in its own buffers; use DDP",
}


class Callback(*_BASES):  # type: ignore[misc]
    """A callback for the trainers and command lines of ``lightning`` and of ``pytorch_lightning`` alike.

    The two are separate class trees, each of which refuses the other's callbacks; this class belongs to both where
    both are installed.

    Example:
        >>> from attnswap.callbacks import Callback
        >>> class PrintLoss(Callback):  # for the trainers of both trees
        ...     def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        ...         print(outputs["loss"].item())
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[PrintLoss()], logger=False)
    """


def whole(tensor: Tensor) -> Tensor:
    """A tensor that FSDP2 has sharded, gathered (every process must call this), differentiably; others as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def reshard(module: nn.Module) -> None:
    """Have FSDP2 free the whole weights that an evaluation may have left, so that modules hold what is trained."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def check_alone(trainer: pl.Trainer, kind: type) -> None:
    """Check that the trainer has no second callback of a class, or of one derived from it; nor the same one twice.

    Args:
        trainer: whose callbacks these are.
        kind: the class: that which writes and logs under these names, not one that a user derives from it.

    Raises:
        ValueError: if it has; the text says how the options of one that a recipe brings are changed.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # not declared there
    count = sum(isinstance(each, kind) for each in callbacks)
    if count > 1:
        raise ValueError(
            f"the trainer has {count} callbacks {kind.__name__}, which would log the same names and write the same "
            "files, if any: keep one, with the options of both. Where a recipe has it already, change its options "
            "there: in a copy of the recipe, or with --config RECIPE --config FILE, where trainer.callbacks in FILE is "
            f"the whole list and replaces that of RECIPE (--trainer.callbacks+={kind.__name__} adds to the list, and "
            "--trainer.callbacks.init_args... changes its last callback only)"
        )


def listed_before(trainer: pl.Trainer, callback: pl.Callback) -> list[pl.Callback]:
    """The callbacks that the trainer calls before one; none where another callback holds it."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # not declared there
    return callbacks[: callbacks.index(callback)] if callback in callbacks else []


def kinds_of(thing: object) -> set[str]:
    """The names of the classes that something is of, which are the same in either Lightning package."""
    return {kind.__name__ for kind in type(thing).__mro__}


def is_strategy(trainer: pl.Trainer, *names: str) -> bool:
    """Whether the trainer's strategy is of a class of one of these names."""
    return not kinds_of(trainer.strategy).isdisjoint(names)


def refuse_flat_shards(trainer: pl.Trainer, what: str) -> None:
    """Refuse FSDP1, DeepSpeed and tensor parallelism by name; ``what`` is as ``"LocAteR cannot add to gradients"``.

    Raises:
        ValueError: under one of them, with the strategy to use.
    """
    for name, cure in _CURES.items():
        if is_strategy(trainer, name):
            raise ValueError(f"{what} here: {cure}")
    mesh = getattr(trainer.strategy, "_device_mesh", None)
    processes = 1 if mesh is None else mesh["tensor_parallel"].size()
    if processes > 1:
        raise ValueError(
            f"{what} here: with tensor_parallel_size={processes} a process has some heads only; set it to 1 (FSDP2), "
            "or use DDP"
        )


def refuse_line_search(trainer: pl.Trainer, name: str) -> None:
    """Refuse LBFGS with a line search: it compares losses, and a callback's penalty is in their gradients alone.

    Raises:
        ValueError: if an optimizer of the trainer is one.
    """
    for group in (group for each in trainer.optimizers if isinstance(each, LBFGS) for group in each.param_groups):
        if group["line_search_fn"] is not None:
            raise ValueError(
                f"{name}: LBFGS with line_search_fn={group['line_search_fn']!r} compares losses, which do not hold "
                "what this callback adds to their gradients: set line_search_fn=None, or take another optimizer"
            )


def unfreezes_later(trainer: pl.Trainer) -> bool:
    """Whether a callback of the trainer trains layers later that are frozen at the start (Lightning's finetuning)."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # not declared there
    return any("BaseFinetuning" in kinds_of(callback) for callback in callbacks)


def calls_step_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks of its steps are called: by those that called ``Optimizer.__init__``, which sees to that."""
    kept = vars(optimizer).get("_optimizer_step_pre_hooks")
    return bool(getattr(type(optimizer).step, "hooked", False)) and type(kept) is OrderedDict


def gives_up_gradients(pl_module: pl.LightningModule) -> bool:
    """Whether gradients are gone behind ``on_before_zero_grad``: one's own ``optimizer_zero_grad`` may keep them."""
    return type(pl_module).optimizer_zero_grad.__qualname__ == "LightningModule.optimizer_zero_grad"


def behind_closure(args: tuple[Any, ...], kwargs: dict[str, Any], act: Callable[[], object]) -> StepArguments:
    """Call ``act()`` in a step when gradients are there: behind the closure that computes them, or else at once.

    Args:
        args, kwargs: what a pre-hook of the optimizer's steps was called with.
        act: what is called, once for each call of the closure.

    Returns:
        What the pre-hook returns.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        act()
        return args, kwargs

    def then_act(*given: Any, **named: Any) -> Any:
        loss = closure(*given, **named)
        act()
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": then_act}
    return (args[0], then_act, *args[2:]), kwargs


def refuse_own_processes(trainer: pl.Trainer, name: str, cure: str) -> None:
    """Refuse to train in processes whose weights come back to a module that the callback ``name`` never changed.

    Raises:
        ValueError: for ``ddp_spawn``, ``ddp_fork`` and ``ddp_notebook``.
    """
    launcher: Any = getattr(trainer.strategy, "launcher", None)
    if "_MultiProcessingLauncher" in kinds_of(launcher):
        raise ValueError(
            f"{name}: strategy {getattr(launcher, '_start_method', '')!r} trains in processes of its own and gives "
            f'their weights to the module of the main process, which {name} has not changed. Use strategy="ddp"{cure}'
        )


def check_step_hooks(owner: str, optimizers: Iterable[Optimizer]) -> None:
    """Check that hooks of their steps would be called.

    Raises:
        ValueError: if one calls none.
    """
    for optimizer in optimizers:
        if not calls_step_hooks(optimizer):
            raise ValueError(
                f"{owner} acts before or after a step, and {type(optimizer).__name__}.step() calls no hooks of steps: "
                "give an optimizer that calls torch.optim.Optimizer.__init__(), as those of torch and timm do"
            )


def held_parameters(optimizers: Iterable[Optimizer]) -> dict[int, nn.Parameter]:
    """The Parameters that optimizers train, by their identity."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {id(parameter): parameter for group in groups for parameter in group["params"]}
