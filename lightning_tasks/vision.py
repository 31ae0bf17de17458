"""What tasks on images share: the classes, attention in chosen layers, timm's groups of parameters."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_tasks.base import BaseTask, Buildable
from lightning_tasks.training.kept_layers import Layers, check_swapped_layers
from lightning_tasks.training.mechanisms import attention_spec, mechanism_from, named, swap_layers
from lightning_tasks.training.optimization import model_groups


class VisionTask(BaseTask):
    """A task whose network has a part for each class, and attention layers that can be swapped.

    Subclasses implement :meth:`build_model`, which calls :meth:`resolve_classes` and :meth:`swap`, and the steps.

    Args:
        num_classes: number of classes; where None, that of the data module, kept in the hyper-parameters.
        mechanism: that of the attention layers, as :func:`~attention_modules.swap_attention` takes it: short
            name, class, function, import path, or ``{class_path, init_args}``.
        options: its options by name.
        layers: which layers get it, counted in module order; all where None; ``{"keep_every": 4}`` for three of
            four, as :class:`~attnswap.callbacks.SwapAttention` says.
        other_attention: the mechanism of the other layers, with its defaults.
        hparams: further hyper-parameters, and the arguments of :class:`~lightning_tasks.base.BaseTask`.

    Raises:
        TypeError: if something cannot be stored in a checkpoint; the text names the cure.
        ValueError: if there are fewer than two classes, or a mechanism is unknown.
    """

    _stored_class_names: Sequence[str] = ()

    def __init__(
        self,
        *,
        num_classes: int | None,
        mechanism: Buildable,
        options: dict[str, Any] | None,
        layers: Layers,
        other_attention: Buildable,
        **hparams: Any,
    ) -> None:
        if num_classes is not None and num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, got {num_classes}")
        super().__init__(
            num_classes=num_classes,
            mechanism=attention_spec(mechanism, options),
            options=options,
            layers=check_swapped_layers(layers, named(mechanism)),
            other_attention=attention_spec(other_attention),
            **hparams,
        )

    @property
    def datamodule(self) -> Any:
        """The data module of the trainer, None where there is none."""
        return getattr(self._trainer, "datamodule", None)

    def resolve_classes(self) -> int:
        """The number of classes, the data module's where none was set; the hyper-parameters keep it.

        Raises:
            ValueError: if it is unknown, or the data has more classes.
        """
        self.hparams["num_classes"] = class_count(type(self).__name__, self.hparams["num_classes"], self.datamodule)
        return self.hparams["num_classes"]

    def swap(self, network: nn.Module) -> None:
        """Put ``mechanism`` into the chosen layers of a network, and ``other_attention`` into the rest.

        Raises:
            AttentionSwapError: as :func:`attention_modules.swap_attention`.
        """
        attention, options = mechanism_from(self.hparams["mechanism"], self.hparams["options"])
        other, other_options = mechanism_from(self.hparams["other_attention"], None)
        swap_layers(network, attention, options, self.hparams["layers"], other, other_options)

    def setup(self, stage: str) -> None:
        """Silence Lightning's warning that the module overrides the hook in which it checks its batches."""
        warnings.filterwarnings("ignore", "You have overridden `on_before_batch_transfer` in `LightningModule`")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the names of the classes too, so that images can be predicted where the data is not."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["class_names"] = list(map(str, self.class_names))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read the names of the classes; those of the data module come first, where there is one that has them."""
        super().on_load_checkpoint(checkpoint)
        names = checkpoint.get("class_names")
        self._stored_class_names = tuple(map(str, names)) if isinstance(names, list) else ()

    @property
    def class_names(self) -> Sequence[str]:
        """Names of the classes: the data module's, or those that a checkpoint has, or their numbers."""
        names = list(getattr(self.datamodule, "class_names", None) or self._stored_class_names)
        return [*names, *map(str, range(len(names), self.hparams["num_classes"]))]

    def optimizer_groups(self) -> list[dict[str, Any]]:
        """timm's groups of the model's parameters, and the task's own; or those that ``param_groups`` asks for."""
        if self.hparams["param_groups"] is not None:
            return super().optimizer_groups()
        decay, schedule = self.hparams.get("layer_decay"), self.hparams["scheduler"]
        groups = model_groups(self.model, self.hparams["optimizer"], decay, schedule)
        of_model = {id(parameter) for parameter in self.model.parameters()}
        own = [each for each in self.parameters() if each.requires_grad and id(each) not in of_model]
        return [*groups, {"params": own}] if own else groups


def class_count(task: str, given: int | None, datamodule: Any) -> int:
    """The number that was given to a task, or else the data module's.

    Raises:
        ValueError: if neither is known, or the data has more classes than were given.
    """
    found = getattr(datamodule, "num_classes", None)
    if given is None and found is None:
        raise ValueError(
            f"the number of classes is unknown: give {task}(num_classes=...), or fit with a data module that has "
            f"num_classes after setup (got {type(datamodule).__name__})"
        )
    if given is not None and found is not None and found > given:
        raise ValueError(
            f"num_classes={given} is below the {found} classes of the data module; leave it out, or give {found}"
        )
    return given or int(found)  # type: ignore[arg-type]
