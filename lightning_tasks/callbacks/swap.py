"""Swapping attention in a LightningModule that has never heard of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from attention_modules.hosts import AttentionSwapError
from attention_modules.hosts.base import acting_mechanism, plain_type
from attention_modules.hosts.discovery import left_apart, select, survey
from attention_modules.hosts.sdpa import declare_host
from attention_modules.hosts.sdpa.record import Record, knowing, own_record
from attention_modules.mechanism import (
    AttentionMechanism,
    AttentionSpec,
    build_mechanism,
    check_options,
    short_name,
)
from attention_modules.swap import SwapReport, swap_attention
from lightning_tasks.callbacks.base import Callback, Where, kinds_of, refuse_own_processes
from lightning_tasks.callbacks.cli_optimizer import followed_by_cli_optimizer
from lightning_tasks.files.swaps import (
    PLAIN,
    PLANS,
    SWAPPED,
    Plan,
    acting_plans,
    built_later,
    note_plan,
    resolve_mechanism,
    saved_plans,
)
from lightning_tasks.files.weights import refuse_other_layout
from lightning_tasks.runs.loggers import loggers_named
from lightning_tasks.training.configure_hook import after_configure_model, forget_actions
from lightning_tasks.training.hparams import import_path, plain_data
from lightning_tasks.training.kept_layers import Layers, check_swapped_layers, to_swap
from lightning_tasks.training.limits import check_layer_choice
from lightning_tasks.training.mechanisms import plain_name


class SwapAttention(Callback):
    """Puts a mechanism into the module's attention layers, after it is built and before anything reads it.

    The swap happens in this callback's ``setup`` where the layers are there already, so that the module's own ``setup``
    can compile them; else, or for layers that are built later, at the end of ``configure_model``: before weights are
    restored, optimizers built and layers sharded. It is carried out once for a module, however often trainers fit,
    validate and test it. The plan is kept in checkpoints, from which
    :func:`lightning_tasks.load_swapped` rebuilds the swapped module, and logged among the hyper-parameters of CSV, W&B
    and TensorBoard logs. List it before callbacks that copy the module.

    Args:
        mechanism: short name, class, function of (q, k, v, ...) as :func:`~attention_modules.swap_attention` takes it,
            or the import path of either.
        options: the mechanism's own arguments, as plain data, for configuration files.
        where: names of layers (a glob or several); all self-attention where None.
        layers: which of those, counted in module order within each network of the module; or ``{"keep_every": 4}``,
            where the last of every four keeps its attention, and with ``"ranking"``, a ``drift.csv`` of ``attnswap
            drift``, as many of those whose swap costs most.
        exclude: names (globs) to leave out.
        declare: classes of your own, each as the arguments of :func:`attnswap.declare_host`, with the import path of
            the class as ``kind``.
        **mechanism_options: the mechanism's own arguments, as ``swap_attention`` takes them, in place of ``options``.

    Raises:
        ValueError: if the mechanism is unknown, an option of ours is out of its limits or ``layers`` are no integers;
            when a trainer starts, if nothing matches, a layer cannot take the mechanism, another ``SwapAttention``
            chose the same layer, a weight-averaging callback copied the module before, the strategy trains in spawned
            or forked processes, or is DeepSpeed's stage 3 where the mechanism drops the query, or ``layers=`` counted
            before the module's ``setup`` built more.
        TypeError: if the mechanism cannot be imported by name, or does not take these options, or they are not plain
            data.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import SwapAttention
        >>> trainer = Trainer(callbacks=[SwapAttention("rpc", iterations=4, layers=[0])], logger=False)
    """

    def __init__(
        self,
        mechanism: str | type[AttentionMechanism] | Callable[..., Tensor],
        options: dict[str, Any] | None = None,
        where: Where = None,
        layers: Layers = None,
        exclude: Sequence[str] = (),
        declare: list[dict[str, Any]] | None = None,
        **mechanism_options: Any,
    ) -> None:
        super().__init__()
        for declaration in declare or ():
            declare_host(**declaration)
        mechanism = plain_name(mechanism)
        self._class = resolve_mechanism(mechanism)
        self.mechanism = mechanism if isinstance(mechanism, str) else import_path(mechanism)
        options = {} if options is None else options
        if twice := sorted(set(mechanism_options) & set(options)):
            raise TypeError(f"{', '.join(twice)} stands in options and as a keyword; give it once")
        check_options(self._class, options)
        options = {**options, **mechanism_options}
        check_options(self._class, options)
        _check_values(self._class, options)
        self.options = plain_data(options, "options", specs=False)
        self.where, _, self.exclude = check_layer_choice(where, None, exclude)
        self.layers = check_swapped_layers(layers, self.mechanism)
        self.report: SwapReport | None = None
        self._plan: Plan | None = None
        self._trains = False
        self._counted: set[str] = set()  # the attention layers that were there when the plan was carried out

    @property
    def state_key(self) -> str:
        return self._generate_state_key(where=self.where, layers=self.layers, exclude=self.exclude)

    def state_dict(self) -> dict[str, Any]:
        return {"plan": self._plan}

    def _is_as(self, plan: Plan) -> bool:
        """Whether a checkpoint's plan, whose mechanism may be spelled in another way, puts the same there."""
        spelled = {self.mechanism, short_name(self._class), import_path(self._class)}
        return plan["mechanism"] in spelled and plan["options"] == self.options

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        refuse_other_layout(trainer, pl_module, checkpoint)
        callbacks: list[Any] = list(trainer.callbacks)  # type: ignore[attr-defined]
        swaps = [each for each in callbacks if isinstance(each, SwapAttention)]
        if swaps[0] is self:  # once for all
            _warn_of_other_swaps(swaps, checkpoint, self._trains)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._check_averaging(trainer, pl_module)
        if not self._class.uses_query and getattr(trainer.strategy, "zero_stage_3", False):
            raise ValueError(
                f"SwapAttention: {self.mechanism!r} drops the query projection, whose weights DeepSpeed (stage 3) "
                "spread over processes when the module was built; use DDP, or DeepSpeed's stage 2"
            )
        self._trains = stage == "fit"
        if not built_later(pl_module) or self._finds_layers(pl_module):
            self._swap(pl_module)  # later callbacks may copy the module in their setup, and its own may compile it
        after_configure_model(pl_module, self, self._swap)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep plans of what acts, where a restore or another swap has followed."""
        if self._plan is None or self._holds(pl_module, self._plan) or "callbacks" not in checkpoint:
            return
        planned = {_uncompiled(name) for name in self._plan["layers"]}
        checkpoint["callbacks"][self.state_key] = {"plan": None}
        for index, plan in enumerate(acting_plans(pl_module)):
            layers = [name for name in plan["layers"] if _uncompiled(name) in planned]
            if layers:
                key = f"{self.state_key}{f' {index}' if index else ''}"
                checkpoint["callbacks"][key] = {"plan": {**self._plan, **plan, "layers": layers}}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        log_acting(trainer, pl_module)
        if any(getattr(each, "save_weights_only", False) for each in trainer.checkpoint_callbacks):
            rank_zero_warn(
                "a ModelCheckpoint with save_weights_only=True keeps no plan of a swap: load_swapped cannot rebuild "
                "the module"
            )
        for logger in loggers_named(trainer, "TensorBoardLogger"):  # shows what is logged first, and nothing later
            logger.log_hyperparams({**_logged_hparams(trainer, pl_module), SWAPPED: acting_plans(pl_module)})

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn where a network was swapped that does not train, as a swap leaves out one that is frozen before."""
        callbacks: list[Any] = list(trainer.callbacks)  # type: ignore[attr-defined]
        if self._plan is None or not self._holds(pl_module, self._plan) or short_name(self._class) in PLAIN:
            return
        if any("BaseFinetuning" in kinds_of(each) for each in callbacks):  # which let it train later
            return
        found = survey(pl_module)
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        trained = {id(each) for group in groups for each in group["params"] if each.requires_grad}
        held = {network.name: [*found.modules[network.name].parameters()] for network in found.networks}
        frozen = {name: all(id(each) not in trained for each in own) and bool(own) for name, own in held.items()}
        found.networks = [replace(network, frozen=frozen[network.name]) for network in found.networks]
        swapped = [layer for layer in found.layers if _uncompiled(layer.name) in self._plan["layers"]]
        apart = {found.network_of(name).name for name in left_apart(found, self.where, swapped)}
        if apart and not all(frozen.values()):  # as where a strategy has optimizers of its own
            rank_zero_warn(
                f"SwapAttention swapped {', '.join(map(repr, sorted(apart)))}, too, whose weights do not train now "
                "(frozen after the swap, or in no optimizer of the trainer), and which gives something else now: "
                "freeze it in __init__, leave it out (exclude), or name it in where="
            )

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        log_acting(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._trains:
            log_acting(trainer, pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        forget_actions(pl_module, self)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        forget_actions(pl_module, self)

    def _check_averaging(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        callbacks: list[Any] = list(trainer.callbacks)  # type: ignore[attr-defined]
        for position, callback in enumerate(callbacks):
            kinds, name = kinds_of(callback), type(callback).__name__
            takes = kinds & {"WeightAveraging", "StochasticWeightAveraging", "ModelPruning"}
            if takes and position < callbacks.index(self):
                raise ValueError(
                    f"{name} is listed before SwapAttention, so it would take the module with its old attention; list "
                    f"SwapAttention before {name}"
                )
            if "StochasticWeightAveraging" in kinds and built_later(pl_module):
                raise ValueError(
                    f"{name} copies the module before its setup and configure_model have run, hence before "
                    "SwapAttention; use WeightAveraging or EMAWeightAveraging, or build the network in __init__ and "
                    "override neither"
                )

    def _chosen(self, pl_module: pl.LightningModule) -> list[str]:
        """Names of the layers that are swapped, cross-attention among them."""
        some = self.layers if isinstance(self.layers, dict) else None
        matched, _ = select(survey(pl_module), self.where, None if some else self.layers, self.exclude, frozen=False)
        names = [layer.name for layer in matched]
        return to_swap(names, some) if some else names

    def _finds_layers(self, pl_module: pl.LightningModule) -> bool:
        try:
            return bool(self._chosen(pl_module))
        except ValueError:
            return False  # not built yet, or wrong: which shows when all is built

    def _swap(self, pl_module: pl.LightningModule) -> None:
        """Carry out the plan, unless the module shows that it was."""
        done = vars(pl_module).setdefault(PLANS, [])
        wanted = {"mechanism": self.mechanism, "options": self.options, "selection": self.state_key}
        present = {_uncompiled(name) for layer in survey(pl_module).layers for name in layer.names}
        for plan in done:
            if {key: plan[key] for key in wanted} == wanted and self._holds(pl_module, plan):
                if plan is self._plan and present > self._counted:
                    self._check_count(present - self._counted)
                    done.remove(plan)
                    break  # the module's setup built more
                self._plan, self._counted = plan, present
                return
        if self._trains:
            cure = "; or, in a notebook, call swap_attention(module, ...) before fit() and leave this callback out"
            refuse_own_processes(pl_module.trainer, "SwapAttention", cure)
        _refuse_compiled(pl_module)
        chosen: dict[str, Any] = {"where": self.where, "layers": self.layers, "exclude": self.exclude}
        shown = None if self._finds_layers(pl_module) else own_record(pl_module)
        with knowing(shown or Record()), followed_by_cli_optimizer(pl_module):
            self._check_overlap(pl_module)
            if isinstance(self.layers, dict):
                chosen = {"where": self._chosen(pl_module)}
            self.report = swap_attention(pl_module, self._class, **chosen, **self.options)
        self._plan, self._counted = {**wanted, "layers": [row.name for row in self.report]}, present
        note_plan(pl_module, self._plan)
        rank_zero_info(str(self.report))

    def _holds(self, pl_module: pl.LightningModule, plan: Mapping[str, Any]) -> bool:
        """Whether what a plan put in place is there: another may have followed."""
        modules = {_uncompiled(name): module for name, module in pl_module.named_modules()}
        held = (acting_mechanism(getattr(modules.get(name), "mechanism", None)) for name in plan["layers"])
        return all(
            each is not None and plain_type(each) is self._class and each.built_with in (None, plan["options"])
            for each in held
        )

    def _check_count(self, added: set[str]) -> None:
        """Positions mean the same before and after the module's ``setup``.

        Raises:
            ValueError: if ``layers`` counts and it built attention layers that come between.
        """
        if self.layers is not None:
            raise ValueError(
                f"layers={self.layers} was counted among the attention layers that __init__ built, and the module's "
                f"setup or configure_model built {', '.join(sorted(added))} after it; name the layers by where="
            )

    def _check_overlap(self, pl_module: pl.LightningModule) -> None:
        chosen = set(self._chosen(pl_module))
        for callback in pl_module.trainer.callbacks:  # type: ignore[attr-defined]
            if callback is self or not isinstance(callback, SwapAttention) or callback._plan is None:
                continue
            shared = sorted(chosen & set(callback._plan["layers"]))
            if shared:
                raise ValueError(
                    f"two SwapAttention callbacks, {callback.mechanism!r} and {self.mechanism!r}, choose "
                    f"{', '.join(shared)}; give them where=, layers= or exclude= that do not overlap"
                )


def log_acting(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Log what acts in which layers now, beside the module's hyper-parameters, by which a report knows the run."""
    plans = acting_plans(pl_module)
    for logger in (*loggers_named(trainer, "CSVLogger"), *loggers_named(trainer, "WandbLogger")):
        logger.log_hyperparams({SWAPPED: plans})


def _warn_of_other_swaps(swaps: Sequence[SwapAttention], checkpoint: dict[str, Any], trains: bool) -> None:
    """Warn where layers have other mechanisms or options than ``SwapAttention`` had put there for the checkpoint."""
    now = {layer: swap for swap in swaps if swap._plan is not None for layer in swap._plan["layers"]}
    saved = {layer: plan for plan in saved_plans(checkpoint) for layer in plan["layers"]}
    found: dict[tuple[str, str], list[str]] = {}
    for layer in {**saved, **now}:
        plan, swap = saved.get(layer), now.get(layer)
        if plan is not None and swap is not None and swap._is_as(plan):
            continue
        had = "none" if plan is None else f"{plan['mechanism']} {plan['options'] or ''}".strip()
        has = "none" if swap is None else f"{swap.mechanism} {swap.options or ''}".strip()
        if {had, has} - {"none", *PLAIN}:  # softmax attention is what a layer has without a swap
            found.setdefault((had, has), []).append(layer)
    if found:
        texts = [
            f"{had} in {', '.join(layers)}, where SwapAttention has {has} now" for (had, has), layers in found.items()
        ]
        cure = "; to train on with this one, start a new run from the weights (load_swapped, or --init_from)"
        rank_zero_warn(
            f"the checkpoint records another swap by SwapAttention: {'; '.join(texts)}{cure if trains else ''}"
        )


def _refuse_compiled(pl_module: pl.LightningModule) -> None:
    """Name the cure that a module has which builds and compiles its network in one hook.

    Raises:
        AttentionSwapError: if a part of the module is compiled.
    """
    for name, module in pl_module.named_modules():
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise AttentionSwapError(
                f"{name or 'the module'} was compiled before SwapAttention could swap: build the network in __init__, "
                "or call lightning_tasks.callbacks.swap_now(self) after building and before compiling it"
            )


def _logged_hparams(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
    """The hyper-parameters of module and data module that Lightning is about to log."""
    sources = [part for part in (pl_module, trainer.datamodule) if getattr(part, "_log_hyperparams", False)]  # type: ignore[attr-defined]
    return {name: value for part in sources for name, value in part.hparams_initial.items() if name != "_class_path"}


def _uncompiled(name: str) -> str:
    """A module's name without the wrappers that torch.compile puts between."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _check_values(cls: type[AttentionMechanism], options: dict[str, Any]) -> None:
    """Have one of our mechanisms check its options before any layer is there; others may depend on theirs.

    Raises:
        TypeError, ValueError: from the mechanism.
    """
    if cls.__module__.partition(".")[0] == AttentionMechanism.__module__.partition(".")[0]:
        spec = AttentionSpec(dim=8, num_heads=2, head_dim=4, num_tokens=4)
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            build_mechanism(cls, spec, **options)
