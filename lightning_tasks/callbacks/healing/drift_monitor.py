"""How far a swapped model is from what it was, at each validation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any
from weakref import ReferenceType, ref

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.nn import functional as F

from attention_modules.analysis.agreement import (
    counted,
    kl_divergence,
    other_problem,
    output_of,
    relative_squares,
    same_class,
    wide,
)
from attention_modules.hosts import attention_layers
from attention_modules.hosts.discovery import survey
from attention_modules.hosts.model.inputs import as_it_is, continues, copied_arguments
from attention_modules.mechanisms.shared.options import check_flag
from attention_modules.mechanisms.shared.unchanged import Draw
from lightning_tasks.callbacks.base import Callback, check_alone, refuse_flat_shards
from lightning_tasks.callbacks.healing.teacher import Lesson, Teacher, swapped_layers
from lightning_tasks.callbacks.monitoring.names import layer_label, listed
from lightning_tasks.callbacks.monitoring.own_hook import unwatched
from lightning_tasks.callbacks.monitoring.warnings import warn_without_validation
from lightning_tasks.files.swaps import PLANS, saved_plans
from lightning_tasks.training.configure_hook import after_configure_model, forget_actions
from lightning_tasks.training.distributed import EpochSums, log_joined
from lightning_tasks.training.eager import eager


class DriftMonitor(Callback):
    """Logs, at each validation, how far the swapped model is from the model with the attention and weights it had.

    The model with the attention that it had is the teacher, kept with a copy of its weights when a trainer with this
    callback first starts: what trained the swapped model before that has trained the teacher too. On the first
    batch of each validation (also of ``trainer.validate``) it is shown what the model is first called with. A call
    that continues from a key-value cache is passed by, as the teacher has other keys: of a generation, the prompt
    counts.
    ``val/drift/relative_error/layer_00`` is ‖student - teacher‖ / ‖teacher‖ of a layer's output where the student's
    layer is given the teacher's input, ``mean`` the mean of the layers; ``val/drift/output_error`` the same of the
    network's output, and ``val/drift/cosine`` the mean cosine between the two. Where the output is logits,
    ``val/drift/kl`` is KL(teacher ‖ student) in nats and ``val/drift/same_class`` the share of positions whose largest
    logit is of one class. Tokens that the masks of the layers hide from all (padding, say) count nowhere. The two
    passes that it costs are in eval mode, begin with the random states of that call, and change nothing. Forward hooks
    of yours on the model see its second pass.

    Args:
        network: name of the part of the module whose output is the model's (the first argument of a loss); by default
            the child that holds all swapped layers.
        logits: whether that output is logits of classes that exclude each other; by default, where it is named so
            (``output.logits``), unless ``config.problem_type`` of the network says something else.
        maps: also log ``val/drift/map_error/layer_00``, ‖student - teacher‖ / ‖teacher‖ of the maps that act
            (:func:`attnswap.attention_maps`), where the student's layer is given the teacher's input, and their mean.
            Each map is held whole, of one layer at a time for the student, and of all for the teacher. Layers without
            one of the teacher's shape are named by a warning.

    Raises:
        ValueError: when a trainer starts, if nothing is swapped, ``network`` does not hold all swapped layers or is
            never called (as a ``ModuleList``), there is a second such callback, or the strategy is FSDP1 or DeepSpeed;
            on resuming, if the teacher is another one than the checkpoint's, or the checkpoint tells of no swap.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import DriftMonitor, SwapAttention
        >>> trainer = Trainer(callbacks=[SwapAttention("sink"), DriftMonitor()], logger=False)
    """

    def __init__(self, network: str | None = None, logits: bool | None = None, maps: bool = False) -> None:
        super().__init__()
        self.maps = check_flag("maps", maps)
        self.network = network
        self.logits = None if logits is None else check_flag("logits", logits)
        self.teacher: Teacher | None = None
        self._module: ReferenceType[pl.LightningModule] | None = None  # whose teacher it is
        self._seeing = ExitStack()
        self._seen: tuple[tuple[Any, ...], dict[str, Any], Draw, Any] | None = None
        self._continued = False  # whether a call was passed by, as it began with a full cache
        self._sums = EpochSums()
        self._told = False  # of layers without a map
        self._is_new = False  # whether the teacher was kept for the run that begins

    def state_dict(self) -> dict[str, Any]:
        return {"teacher": self.teacher.digest if self.teacher else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["teacher"]
        self._is_new = False
        if self.teacher is not None and saved not in (None, self.teacher.digest):
            raise ValueError(
                f"{type(self).__name__}: the checkpoint was made beside another teacher: the module that is built now "
                "has other weights, before the checkpoint's are loaded, than it had then; build it with the same "
                "pretrained weights and seed, and give --init_from again where the run began with it"
            )

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if not self._is_new or self.state_key in checkpoint["callbacks"]:
            return
        names = checkpoint.get("state_dict")  # strategies that spread weights have none there
        swapped = vars(pl_module).get(PLANS) or _mechanisms(dict(pl_module.named_parameters()))
        if names is None or saved_plans(checkpoint) or _mechanisms(names) or not swapped:  # or by hand, unmarked
            self._warn_of_later_weights(trainer)
            return
        raise ValueError(
            f"{type(self).__name__} compares with the model as it was when it was swapped, and the weights of "
            f"{str(trainer.ckpt_path)!r}, which tells of no swap, come later: load them before the swap "
            "(InitFromCheckpoint before SwapAttention, --init_from), without ckpt_path"
        )

    def _warn_of_later_weights(self, trainer: pl.Trainer) -> None:
        if self._is_new and trainer.ckpt_path is not None:
            self._is_new = False
            rank_zero_warn(
                f"{type(self).__name__}: the checkpoint was made without it, so that the teacher is the module as it "
                "is built now, before the checkpoint's weights are loaded"
            )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_alone(trainer, DriftMonitor)
        refuse_flat_shards(trainer, f"{type(self).__name__} cannot compare layers")
        self._forget()
        self._sums = EpochSums()
        if stage in ("fit", "validate") and (self._module is None or self._module() is not pl_module):
            self.teacher, self._is_new = None, True
            after_configure_model(pl_module, self, self._keep_teacher)

    def _keep_teacher(self, pl_module: pl.LightningModule) -> None:
        if self.teacher is None:
            self.teacher = Teacher(type(self).__name__, pl_module, self.network, self._may_train, self.maps)
            self._module = ref(pl_module)

    def _may_train(self, pl_module: pl.LightningModule) -> Callable[[str], bool]:
        """Which Parameters, by their names, the fit may change: all, as callbacks unfreeze in mid-training."""
        return lambda name: True

    def _check_teacher(self, pl_module: pl.LightningModule) -> Teacher:
        """The teacher, where it stands.

        Raises:
            ValueError: if layers were swapped after it was kept.
        """
        owner = type(self).__name__
        if self.teacher is None:
            raise ValueError(f"{owner}: it has no teacher; do not add it to a trainer that runs already")
        prefix = f"{self.teacher.name}."
        if later := [
            name for name in swapped_layers(pl_module) if name.removeprefix(prefix) not in self.teacher.layers
        ]:
            raise ValueError(f"{owner}: {later[0]!r} was swapped after it; list SwapAttention before {owner}")
        self.teacher.follow(pl_module.get_submodule(self.teacher.name))
        return self.teacher

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._check_teacher(pl_module)
        warn_without_validation(trainer, self)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._check_teacher(pl_module)
            self._warn_of_later_weights(trainer)  # Lightning tells callbacks of no file that has weights alone

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx or dataloader_idx or trainer.sanity_checking or self.teacher is None:
            return
        self._forget()

        given: list[tuple[tuple[Any, ...], dict[str, Any], Draw]] = []  # before the call, which fills caches

        def keep_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given.clear()
            if self._seen is None and continues(module, args, kwargs):
                self._continued = True
            elif self._seen is None:
                given.append((*copied_arguments((args, kwargs)), Draw(module)))

        def keep_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if given:
                self._seen = (*given.pop(), as_it_is(output))  # a step may change its output in place

        self._seeing.enter_context(eager())
        network = pl_module.get_submodule(self.teacher.name)
        add = self._seeing.callback
        add(network.register_forward_pre_hook(keep_arguments, with_kwargs=True, prepend=True).remove)
        add(network.register_forward_hook(keep_output).remove)

    @torch.no_grad()
    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx or dataloader_idx or trainer.sanity_checking or self.teacher is None:
            return
        seen, teacher = self._seen, self.teacher
        if seen is None and self._continued:
            raise ValueError(
                f"{type(self).__name__}: each call of {teacher.name!r} in validation_step continues from a key-value "
                "cache, of whose tokens the teacher has other keys: begin with an empty cache, or without one "
                "(use_cache=False), on the first batch"
            )
        if seen is None:
            raise ValueError(
                f"{type(self).__name__}: validation_step does not call {teacher.name!r}, whose output is compared; "
                "name the part that it calls by network="
            )
        args, kwargs, draw, output = seen
        network = pl_module.get_submodule(teacher.name)
        with eager(), unwatched(), trainer.precision_plugin.val_step_context():
            self._forget()
            lesson = teacher.show(args, kwargs, draw)
            without: dict[str, str] = {}
            compared, maps = lesson.examine(network, args, kwargs, without)
        if without and not self._told:
            self._told = True
            rank_zero_warn(f"{type(self).__name__} compares no map of {listed(without)}")
        for what, by_layer in (("relative_error", compared), ("map_error", maps if self.maps else {})):
            for name, (error, size) in by_layer.items():
                self._sums.add(_line(what, name), error.sum(), size.sum())
        self._add_output(output, lesson)

    def _add_output(self, output: Any, lesson: Lesson) -> None:
        given, named = output_of(output)
        wanted, _ = output_of(lesson.output)
        valid = lesson.seen.of_output
        error, size = relative_squares(given, wanted, valid)
        self._sums.add("output_error", error.sum(), size.sum())
        given, wanted = (counted(part, valid) for part in (given, wanted))
        cosine = F.cosine_similarity(wide(given), wide(wanted), dim=-1)
        count = torch.tensor(cosine.numel(), device=cosine.device)
        self._sums.add("cosine", cosine.sum(), count)
        is_logits = self.logits
        if is_logits is None and self.teacher is not None:
            is_logits = named and other_problem(self.teacher.network) is None
        if is_logits:
            self._sums.add("kl", kl_divergence(given, wanted).sum(), count)
            self._sums.add("same_class", same_class(given, wanted).sum(), count)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or self.teacher is None:
            return
        kinds = ("relative_error", "map_error") if self.maps else ("relative_error",)
        lines = [_line(what, name) for what in kinds for name in self.teacher.layers]
        means = self._sums.join(trainer, [*lines, "output_error", "cosine", "kl", "same_class"], pl_module.device)
        squares = {name: value.sqrt() for name, value in means.items() if name in (*lines, "output_error")}
        named = self._labels(pl_module)
        logged = {named.get(name, name): value for name, value in {**means, **squares}.items()}
        for what in kinds:
            if shown := [squares[line] for line in lines if line in squares and line.startswith(f"{what}/")]:
                logged[f"{what}/mean"] = torch.stack(shown).mean()
        log_joined(pl_module, {f"val/drift/{name}": value for name, value in logged.items()})

    def _labels(self, pl_module: pl.LightningModule) -> dict[str, str]:
        """By the line of each compared layer, its name in logs: its place among all self-attention layers."""
        teacher = self._check_teacher(pl_module)
        selves = any(not layer.cross for layer in survey(pl_module).layers)
        places = {layer.name: layer_label(layer) for layer in attention_layers(pl_module)} if selves else {}
        names = {name: places.get(f"{teacher.name}.{name}", name) for name in teacher.layers}
        kinds = ("relative_error", "map_error")
        return {_line(what, name): f"{what}/{label}" for what in kinds for name, label in names.items()}

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._forget()
        self._is_new = False
        forget_actions(pl_module, self)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "")

    def _forget(self) -> None:
        self._seeing.close()
        self._seen, self._continued = None, False


def _mechanisms(names: Iterable[str]) -> bool:
    return any("mechanism" in name.split(".") for name in names)


def _line(what: str, layer: str) -> str:
    return f"{what}/{layer}"
