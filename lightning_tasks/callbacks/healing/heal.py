"""Adapting a pretrained model to a swapped attention, in stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from attention_modules import AttentionMechanism
from attention_modules.analysis.agreement import counted, kl_divergence, other_problem, output_of, relative_squares
from attention_modules.hosts.base import acting_mechanism
from attention_modules.hosts.model.inputs import continues
from attention_modules.mechanisms.shared.unchanged import Draw
from lightning_tasks.callbacks.base import check_step_hooks, is_strategy
from lightning_tasks.callbacks.healing.anneal import Anneal
from lightning_tasks.callbacks.healing.drift_monitor import DriftMonitor
from lightning_tasks.callbacks.healing.stages import OF_LAYERS, Stage, stage_at, stages_of
from lightning_tasks.callbacks.healing.teacher import Lesson, Teacher, hook_map, swapped_layers
from lightning_tasks.training.eager import eager


class Heal(DriftMonitor):
    """Adapts a pretrained model to the mechanism that was put into it, in stages, after the model as it was.

    Each stage has a loss, some Parameters that train, and a number of optimizer steps:

    - ``match="maps"``: Σ over swapped layers of ‖student - teacher‖² / ‖teacher‖² of the maps that act
      (:func:`attnswap.attention_maps`), its mean over samples, where the student's layer is given the teacher's input
      (as stage 1 of MOHAWK); the maps are held whole;
    - ``match="layers"``: Σ over swapped layers of ‖student - teacher‖² / ‖teacher‖² of the layer's output for a
      sample, its mean over samples, where the student's layer is given the teacher's input (as stage 2 of MOHAWK, and
      attention transfer of LoLCATs);
    - ``match="output"``: the same of the network's output;
    - ``match="logits"``: T² KL(softmax(teacher / T) ‖ softmax(student / T)), its mean over positions; of one logit that
      of a sigmoid;
    - ``match="task"``: the module's own loss, as without this callback.

    They take the place of the loss that ``training_step`` returns; what the module logs there stays its own. Where maps
    or layers are matched, that and what monitors of training see is of layers that are given the teacher's inputs. The
    teacher is as :class:`DriftMonitor` says, whose figures are logged too; it shares the weights that no stage trains.
    ``heal/loss`` (of the stage) and ``heal/stage`` (from 0) are logged as well. A resumed run goes on in the stage of
    its step, beside the same teacher.

    The optimizer is the module's, over all stages; give it the learning rate of the last stage, and others
    ``lr_scale``. For LoRA, make the module's network a peft model after the swap, and let stage "task" train "all".

    Args:
        stages: mappings with ``match`` and any of ``steps`` (optimizer steps; the last stage may leave it out),
            ``train`` ("new", the Parameters of mechanisms; "attention", all of the swapped layers; "all"; globs),
            ``temperature``, ``task_weight`` (of the module's own loss, added to "output" or "logits"), ``lr_scale``.
        anneal: numbers that the mechanism was built with, each with its first and last value, and over how many steps,
            such as ``{"lam": [0.0, 0.8], "steps": 500}``; the last value must be the option's own.
        network: as :class:`DriftMonitor`.
        logits: as :class:`DriftMonitor`; True where a stage matches logits.

    Raises:
        TypeError, ValueError: if a stage or a number is not as said; when a trainer starts, as :class:`DriftMonitor`,
            if the module optimizes by hand, ``train`` leaves nothing to train, an optimizer calls no hooks of steps
            where ``lr_scale`` is given, or the strategy is DDP and does not look for unused Parameters; in a training
            step, if the network is not called or continues from a key-value cache, or layers are matched and it is
            called twice.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import Heal, SwapAttention
        >>> heal = Heal([{"match": "layers", "steps": 200}, {"match": "task"}])
        >>> trainer = Trainer(callbacks=[SwapAttention("sink"), heal], logger=False)
    """

    def __init__(
        self,
        stages: Sequence[Mapping[str, Any]],
        anneal: Mapping[str, Any] | None = None,
        network: str | None = None,
        logits: bool | None = None,
    ) -> None:
        super().__init__(network, logits)
        self.stages = stages_of(stages)
        self.maps = any(stage.match == "maps" for stage in self.stages)
        self.anneal = None if anneal is None else Anneal.of(anneal)
        if any(stage.match == "logits" for stage in self.stages):
            self.logits = True
        self._stage: int | None = None  # that which runs
        self._trainable: dict[str, nn.Parameter] = {}  # as the fit found them
        self._undo = ExitStack()  # of the fit
        self._open = ExitStack()  # of a training step
        self._in_backward = False
        self._lessons: list[tuple[Lesson, Any]] = []  # each with what the student's network gave
        self._squares: list[Tensor] = []  # of the layers' errors over their sizes

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "stages": [vars(stage) for stage in self.stages]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if state_dict["stages"] != [vars(stage) for stage in self.stages]:
            rank_zero_warn("Heal: the checkpoint was made with other stages; from its step on these are followed")

    def _may_train(self, pl_module: pl.LightningModule) -> Callable[[str], bool]:
        layers = swapped_layers(pl_module)
        names = [name for name, parameter in pl_module.named_parameters() if parameter.requires_grad]
        chosen = set().union(*(stage.chosen(names, layers) for stage in self.stages))
        ids = {id(parameter) for name, parameter in pl_module.named_parameters() if name in chosen}
        every = dict(pl_module.named_parameters(remove_duplicate=False))
        return lambda name: id(every[name]) in ids

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._check_teacher(pl_module)
        if not pl_module.automatic_optimization:
            raise ValueError("Heal puts its loss in place of what training_step returns: optimize automatically")
        looks = getattr(trainer.strategy, "_ddp_kwargs", {}).get("find_unused_parameters")
        if is_strategy(trainer, "DDPStrategy") and not looks and self._leaves_some_unused:
            raise ValueError(
                "Heal trains other Parameters in each stage, and DDP must look which: give "
                'strategy="ddp_find_unused_parameters_true"'
            )
        kind = other_problem(self._teacher.network)
        if kind and any(stage.match == "logits" for stage in self.stages):
            raise ValueError(f"Heal: match='logits' takes one softmax of classes, this is {kind}: match 'output'")
        if self.anneal is not None:
            self.anneal.check(self._mechanisms(pl_module))

    @property
    def _leaves_some_unused(self) -> bool:
        return len(self.stages) > 1 or (self.stages[0].match, self.stages[0].train) != ("task", "all")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()
        self._trainable = {name: one for name, one in pl_module.named_parameters() if one.requires_grad}
        self._check_optimizers(trainer, pl_module)
        if any(stage.lr_scale != 1 for stage in self.stages):
            check_step_hooks("Heal", trainer.optimizers)
        self._undo.callback(self._keep_teacher_apart, pl_module)
        for parameter in self._trainable.values():
            self._undo.callback(parameter.requires_grad_, True)
        self._undo.callback(_put_back, pl_module, vars(pl_module).get("training_step"))
        previous = pl_module.training_step
        step = partial(self._training_step, pl_module, previous)
        step.__wrapped__ = previous  # type: ignore[attr-defined]  # whose arguments Lightning asks for
        pl_module.training_step = step  # type: ignore[method-assign]
        for optimizer in trainer.optimizers if any(stage.lr_scale != 1 for stage in self.stages) else []:
            rates: list[Any] = []
            before = optimizer.register_step_pre_hook(partial(self._scale_rates, rates))
            after = optimizer.register_step_post_hook(partial(_return_rates, rates))
            self._undo.callback(before.remove)
            self._undo.callback(after.remove)
            self._undo.callback(_return_rates, rates, optimizer)  # of a step that an error ended

    def _check_optimizers(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a stage that would train nothing, as no optimizer holds its Parameters.

        Raises:
            ValueError: naming the stage and one of its Parameters.
        """
        held = {id(one) for each in trainer.optimizers for group in each.param_groups for one in group["params"]}
        if not any(id(one) in held for one in pl_module.parameters()):
            return  # a strategy's optimizers hold Parameters of their own
        layers = swapped_layers(pl_module)
        for number, stage in enumerate(self.stages):
            chosen = stage.chosen([*self._trainable], layers)
            if chosen and not any(id(self._trainable[name]) in held for name in chosen):
                raise ValueError(
                    f"Heal: stage {number} trains {len(chosen)} Parameters, such as {min(chosen)!r}, and no optimizer "
                    "holds any of them: give them to the optimizer in configure_optimizers"
                )

    def _keep_teacher_apart(self, pl_module: pl.LightningModule) -> None:
        if self.teacher is not None:
            self.teacher.keep_apart(pl_module.get_submodule(self.teacher.name))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._close_step()
        number = stage_at(self.stages, trainer.global_step)
        if number != self._stage:
            self._begin(pl_module, number)
        pl_module.log("heal/stage", float(number))
        if self.anneal is not None:
            for name, value in self.anneal.apply([*self._mechanisms(pl_module).values()], trainer.global_step).items():
                pl_module.log(f"heal/{name}", value)

    def _begin(self, pl_module: pl.LightningModule, number: int) -> None:
        stage = self.stages[number]
        chosen = stage.chosen([*self._trainable], swapped_layers(pl_module))
        for name, parameter in self._trainable.items():
            parameter.requires_grad_(name in chosen)
            if name not in chosen:
                parameter.grad = None
        self._stage = number
        rank_zero_info(f"Heal: stage {number} ({stage.match}) trains {len(chosen)} Parameters")

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._in_backward = True  # activation checkpointing runs layers again in there

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close_step()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._keep_teacher_apart(pl_module)  # from what a callback has unfrozen

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._close_step()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.anneal is not None and trainer.global_step < self.anneal.steps:
            rank_zero_warn(
                f"Heal: the fit ended at step {trainer.global_step}, before the last of {self.anneal.steps} steps of "
                "anneal=: the mechanism is not yet what a checkpoint is loaded with"
            )
        elif self.anneal is not None:  # which the last step's batch, where it has just as many, did not begin with
            self.anneal.apply([*self._mechanisms(pl_module).values()], trainer.global_step)
        self._stop()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._stop()

    def _mechanisms(self, pl_module: pl.LightningModule) -> dict[str, AttentionMechanism]:
        found = {name: acting_mechanism(pl_module.get_submodule(name).mechanism) for name in swapped_layers(pl_module)}
        return {name: mechanism for name, mechanism in found.items() if mechanism is not None}

    def _training_step(
        self, pl_module: pl.LightningModule, previous: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The module's own step, with this stage's loss in place of its own."""
        if not pl_module.trainer.training:  # a validation_step may call it too
            return previous(*args, **kwargs)
        stage = self.stages[self._stage or 0]
        if stage.match != "task":
            self._watch(pl_module, stage)
        returned = previous(*args, **kwargs)
        own = returned.get("loss") if isinstance(returned, Mapping) else returned
        if not isinstance(own, Tensor):
            return returned
        loss = own if stage.match == "task" else self._loss(pl_module, stage, own)
        # In every stage, as Lightning writes what is logged no more again and again until the epoch ends.
        pl_module.log("heal/loss", loss.detach())
        if loss is own:
            return returned
        return {**returned, "loss": loss} if isinstance(returned, Mapping) else loss

    def _watch(self, pl_module: pl.LightningModule, stage: Stage) -> None:
        """Show the teacher what the student's network is called with, until the backward pass has ended."""
        teacher = self._teacher
        network = pl_module.get_submodule(teacher.name)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._in_backward:
                return
            if stage.match in OF_LAYERS:
                if self._lessons:
                    raise ValueError(
                        f"Heal: training_step calls the network twice, and stage {stage.match!r} matches the layers of "
                        "one call; match 'output' or 'logits'"
                    )
                if not torch.is_grad_enabled():
                    raise ValueError(
                        "Heal: the network runs without gradients (reentrant activation checkpointing, or no_grad); "
                        "checkpoint with use_reentrant=False"
                    )
            if continues(module, args, kwargs):
                raise ValueError(
                    "Heal: training_step calls the network with a key-value cache that holds tokens, of which the "
                    "teacher has other keys: pass whole sequences, with use_cache=False"
                )
            self._lessons.append((teacher.show(args, kwargs, Draw(network)), None))

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if stage.match not in OF_LAYERS and not self._in_backward and self._lessons:
                # Of its own, as a step may change it in place.
                self._lessons[-1] = self._lessons[-1][0], output_of(output)[0].clone()

        def compare(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            share = _share(*self._lessons[0][0].compare(name, module, output))
            if not self._in_backward:
                self._squares.append(share)

        def compare_map(name: str, found: Tensor) -> None:
            if not found.requires_grad:
                raise ValueError(
                    f"Heal: the map of {name!r} has no gradient, as its mechanism is known as a linear function alone, "
                    "or nothing that trains makes it; match 'layers' there"
                )
            share = _share(*self._lessons[0][0].compare_map(name, found))
            if not self._in_backward:
                self._squares.append(share)

        def give(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._check_called()
            return self._lessons[0][0].give_inputs(name)(module, args, kwargs)

        add = self._open.callback
        self._open.enter_context(eager())
        add(network.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
        add(network.register_forward_hook(after).remove)
        if stage.match in OF_LAYERS:
            for name in teacher.layers:
                layer = network.get_submodule(name)
                add(layer.register_forward_pre_hook(partial(give, name), with_kwargs=True).remove)
                if stage.match == "layers":
                    add(layer.register_forward_hook(partial(compare, name)).remove)
                else:
                    add(hook_map(layer, partial(compare_map, name)).remove)

    def _loss(self, pl_module: pl.LightningModule, stage: Stage, own: Tensor) -> Tensor:
        self._check_called()
        if stage.match in OF_LAYERS:
            if len(self._squares) != len(self._teacher.layers):
                raise ValueError(
                    f"Heal: {len(self._squares)} calls of {len(self._teacher.layers)} swapped layers in a training "
                    "step: each must be called once"
                )
            loss = torch.stack(self._squares).sum()
            # FSDP2 gathers weights as gradients come to the outputs of its modules, where this loss does not begin.
            sharded = any(isinstance(part, FSDPModule) for part in pl_module.modules())
            return loss + 0.0 * own if sharded else loss
        losses = []
        for lesson, output in self._lessons:
            given, wanted = output, output_of(lesson.output)[0]
            valid = lesson.seen.of_output
            if stage.match == "logits":
                given, wanted = (counted(part, valid) for part in (given, wanted))
                losses.append(kl_divergence(given, wanted, stage.temperature).mean() * stage.temperature**2)
            else:
                losses.append(_share(*relative_squares(given, wanted, valid)))
        loss = torch.stack(losses).mean()
        return loss + stage.task_weight * own if stage.task_weight else loss

    def _check_called(self) -> None:
        if not self._lessons:
            raise ValueError(
                f"Heal: training_step does not call {self._teacher.name!r}, whose output is matched; name the part "
                "that it calls by network="
            )

    @property
    def _teacher(self) -> Teacher:
        assert self.teacher is not None  # on_fit_start has looked
        return self.teacher

    def _scale_rates(self, rates: list[Any], optimizer: torch.optim.Optimizer, *_: object) -> None:
        scale = self.stages[self._stage or 0].lr_scale
        rates[:] = [group["lr"] for group in optimizer.param_groups] if scale != 1 else []
        for group, rate in zip(optimizer.param_groups, rates, strict=False):
            group["lr"] = rate * scale

    def _close_step(self) -> None:
        self._open.close()
        self._in_backward = False
        self._lessons, self._squares = [], []

    def _stop(self) -> None:
        """Leave the module, its Parameters and its optimizers as the fit found them."""
        self._close_step()
        self._undo.close()
        self._trainable, self._stage = {}, None


def _share(error: Tensor, size: Tensor) -> Tensor:
    """The mean over samples of squares of errors over squares of sizes."""
    return (error / size.clamp(min=torch.finfo(size.dtype).tiny)).mean()


def _put_back(pl_module: pl.LightningModule, step: Any) -> None:
    if step is None:
        vars(pl_module).pop("training_step", None)
    else:
        pl_module.training_step = step  # type: ignore[method-assign]


def _return_rates(rates: list[Any], optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        group["lr"] = rate
    rates.clear()
