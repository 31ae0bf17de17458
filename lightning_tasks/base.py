"""What every task shares: a model that is built late, and an optimizer and a schedule from plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

import torch
from lightning.fabric.utilities.cloud_io import _load
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric

from attention_modules.mechanisms.shared.options import check_flag
from lightning_tasks.files.names import allowed_names
from lightning_tasks.files.other_settings import refuse_other_settings
from lightning_tasks.files.resume import go_on, keep_state, kept_state
from lightning_tasks.files.stored import check_checkpoint
from lightning_tasks.files.swaps import warn_of_other_attention, without_marks
from lightning_tasks.files.weights import read_checkpoint, refuse_other_layout
from lightning_tasks.training.configure_hook import swap_now
from lightning_tasks.training.hparams import import_object, plain_data
from lightning_tasks.training.optimization import (
    build_optimizer,
    build_scheduler,
    optimizer_spec,
    parameter_groups,
    schedule_length,
    scheduler_spec,
    step_timm,
)
from lightning_tasks.training.sharding import shard

if TYPE_CHECKING:
    from typing_extensions import Self
# A class or function by dotted path (or bare name), as {"class_path": ..., "init_args": {...}}, or itself.
Buildable = str | dict[str, Any] | Callable[..., Any]
_HALF = (torch.float16, torch.bfloat16)
_EARLY = {"StochasticWeightAveraging", "ModelPruning", "BaseFinetuning"}


class _BuildFirst(Callback):
    """Builds a task's network in the first setup, when the data are there."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(pl_module, BaseTask):
            return
        with trainer.strategy.tensor_init_context(), trainer.precision_plugin.module_init_context():
            pl_module.configure_model()


class BaseTask(LightningModule):
    """A LightningModule that builds ``self.model`` in ``configure_model`` and keeps its hyper-parameters as plain data.

    Subclasses implement :meth:`build_model` and the steps, and hand their own arguments on as ``hparams``.

    Args:
        optimizer: name, class, ``functools.partial`` or ``{class_path, init_args}``.
        scheduler: likewise, or None for a constant learning rate; it is called with ``optimizer=``. Schedules of timm
            work too; ``timm.scheduler.create_scheduler_v2`` gets the length of the run where it is not given.
        scheduler_interval: "step" or "epoch".
        scheduler_monitor: metric that ``ReduceLROnPlateau`` watches.
        param_groups: rules ``{"match": GLOB, option: value}``, as ``optimization.parameter_groups`` reads them.
        hparams: further hyper-parameters, stored as plain data.

    Raises:
        TypeError: if something cannot be stored in a checkpoint (a lambda, a local class); the text names the cure.
        ValueError: if a name or path stands for nothing.

    Example:
        >>> from attnswap.tasks import BaseTask, LanguageModelingTask
        >>> task = LanguageModelingTask(vocab_size=100, optimizer={"class_path": "SGD", "init_args": {"lr": 0.1}})
        >>> isinstance(task, BaseTask), task.hparams["optimizer"]["class_path"]
        (True, 'torch.optim.SGD')
    """

    metric_names: ClassVar[tuple[str, ...]] = ()
    """Of the task's metrics that each epoch counts anew, which are ``train_NAME``, ``val_NAME`` and ``test_NAME``."""

    def __init__(
        self,
        *,
        optimizer: Buildable = "AdamW",
        scheduler: Buildable | None = None,
        scheduler_interval: str = "step",
        scheduler_monitor: str = "val/loss",
        param_groups: list[dict[str, Any]] | None = None,
        **hparams: Any,
    ) -> None:
        super().__init__()
        hparams.pop("_class_path", None)  # of a subclass that hands on all that a checkpoint has
        if scheduler_interval not in ("step", "epoch"):
            raise ValueError(f"scheduler_interval must be 'step' or 'epoch', got {scheduler_interval!r}")
        stored = {
            **hparams,
            "optimizer": optimizer_spec(optimizer),
            "scheduler": scheduler_spec(scheduler),
            "scheduler_interval": scheduler_interval,
            "scheduler_monitor": scheduler_monitor,
            "param_groups": param_groups,
        }
        self.save_hyperparameters({name: plain_data(value, name) for name, value in stored.items()})
        self.model: Any = None
        self._kept: dict[str, Any] = {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BaseTask:
        """Keep metrics in float32: running sums in bfloat16 ("bf16-true") stop growing."""
        super()._apply(fn, recurse)
        for module in self.modules():
            if isinstance(module, Metric) and module.dtype in _HALF:
                module._apply(_in_32_bits)
        return self

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        trust_checkpoint: bool = False,
        **kwargs: Any,
    ) -> Self:
        """As Lightning's; what the file names is checked before it is imported, and its text is never parsed.

        Args:
            checkpoint_path: the file.
            map_location, hparams_file, strict: as Lightning's, as are further keywords.
            weights_only: False for a file that may run any code; True where left out, for a URL too.
            trust_checkpoint: whether what the file names may be imported and called wherever it comes from, see
                :func:`~lightning_tasks.load_swapped`.

        Raises:
            ValueError: if the file cannot be read, or names what it may not.
        """
        check_flag("trust_checkpoint", trust_checkpoint)
        if weights_only is False:
            return super().load_from_checkpoint(checkpoint_path, map_location, hparams_file, strict, False, **kwargs)
        content = _content(checkpoint_path)
        allowed = None if trust_checkpoint else allowed_names(cls, kwargs)
        check_checkpoint(content, allowed, str(checkpoint_path), hparams_file)
        path = content.get("hyper_parameters", {}).get("_class_path")
        named = cls if path is None else import_object(path)
        if not (isinstance(named, type) and issubclass(named, cls)):
            raise ValueError(f"{checkpoint_path} holds a {path}, which is no {cls.__name__}")
        kwargs["_instantiator"] = None  # Lightning's would read text of the file anew, as YAML and as names
        load = super(BaseTask, named).load_from_checkpoint
        return load(checkpoint_path, map_location, hparams_file, strict, True, **kwargs)

    def build_model(self) -> nn.Module:
        """The model, from ``self.hparams`` (and ``self.trainer.datamodule`` where one is attached)."""
        raise NotImplementedError(f"{type(self).__name__} must implement build_model()")

    def configure_model(self) -> None:
        """Build ``self.model`` once; Lightning calls this before a run and when it loads a checkpoint.

        Under ``ModelParallelStrategy`` (``strategy/fsdp2``) callbacks swap attention now, and the blocks are sharded;
        with ``tensor_parallel_size`` above 1 the heads are.
        """
        if self.model is None:
            self.model = self.build_model()
            if self._device_mesh is not None:
                swap_now(self)
                shard(self.model, self._device_mesh)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's; builds ``self.model`` first: Lightning brings weights from processes of its own in this way."""
        if self.model is None and self._device_mesh is None and any(name.startswith("model.") for name in state_dict):
            self.configure_model()
        reparametrized = {name for name in state_dict if ".parametrizations." in name and name.endswith(".0.gamma")}
        if strict and (missing := reparametrized - self.state_dict().keys()):
            raise ValueError(
                f"the state is of a run with SigmaReparam ({len(missing)} weights are held in parts here, and whole in "
                "the module): give --trainer.callbacks+=attnswap.callbacks.SigmaReparam with the options of that run, "
                "or read the checkpoint by attnswap.load_swapped"
            )
        return super().load_state_dict(state_dict, strict, assign)

    def configure_callbacks(self) -> Any:
        """Build early where a callback of Lightning's copies or reads the network in its setup, before it is there."""
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        kinds = {kind.__name__ for callback in callbacks for kind in type(callback).__mro__}
        known = type(self).setup.__module__.partition(".")[0] in ("lightning", "lightning_tasks")
        early = _EARLY if known else _EARLY - {"BaseFinetuning"}  # a setup of one's own may come before build_model
        if kinds & early and self.model is None and not isinstance(callbacks[0], _BuildFirst):
            callbacks.insert(0, _BuildFirst())
        return super().configure_callbacks()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the random states, so that a resumed run draws the dropout that the uninterrupted one would have."""
        keep_state(self._trainer, self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read the random states, for the fit that resumes from here, and open again an epoch that was cut short.

        Raises:
            ValueError: if a fit resumes with attention whose Parameters the optimizer's state does not fit, or with
                other settings of optimizer and schedule than the checkpoint's, which Lightning would restore unsaid.
        """
        if self._trainer is not None:
            refuse_other_layout(self._trainer, self, checkpoint)
            refuse_other_settings(self._trainer, self, checkpoint)
            warn_of_other_attention(self, checkpoint)
            without_marks(checkpoint.get("state_dict", {}))
        self._kept = kept_state(checkpoint)

    def on_fit_start(self) -> None:
        """Go on with this process's random state in the checkpoint that is resumed, and at its place in the data."""
        go_on(self.trainer, self, self._kept)
        self._kept = {}

    def on_train_epoch_start(self) -> None:
        """Count anew, also after an epoch that was broken off."""
        self._reset_metrics("train")

    def on_validation_epoch_start(self) -> None:
        """Count anew, also after an epoch that was broken off."""
        self._reset_metrics("val")

    def on_test_epoch_start(self) -> None:
        """Count anew, also after an epoch that was broken off."""
        self._reset_metrics("test")

    def _reset_metrics(self, stage: str) -> None:
        for name in self.metric_names:
            if hasattr(self, f"{stage}_{name}"):
                getattr(self, f"{stage}_{name}").reset()

    def configure_optimizers(self) -> Any:
        """The optimizer over all parameters of the task, and its schedule."""
        optimizer = build_optimizer(self.hparams["optimizer"], self.optimizer_groups())
        spec, interval = self.hparams["scheduler"], self.hparams["scheduler_interval"]
        if spec is None:
            return {"optimizer": optimizer}
        length = schedule_length(spec, interval, self._trainer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": build_scheduler(spec, optimizer, **length),
                "interval": interval,
                "monitor": self.hparams["scheduler_monitor"],
            },
        }

    def optimizer_groups(self) -> list[dict[str, Any]]:
        """All parameters of the task, in the groups that ``param_groups`` asks for."""
        return parameter_groups(self.named_parameters(), self.hparams["param_groups"] or ())

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a schedule of torch as Lightning does, one of timm by the number of steps or epochs so far."""
        if hasattr(scheduler, "step_update"):
            run, interval = self.trainer, self.hparams["scheduler_interval"]
            step_timm(scheduler, interval, run.global_step, run.current_epoch + 1)
        else:
            super().lr_scheduler_step(scheduler, metric)


def _content(file: str | Path | IO[bytes]) -> dict[str, Any]:
    if isinstance(file, (str, Path)):
        return _load(file, "cpu", weights_only=True) if "://" in str(file) else read_checkpoint(file)
    content = torch.load(file, map_location="cpu", weights_only=True)
    file.seek(0)
    return content


def _in_32_bits(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor
