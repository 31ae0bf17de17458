"""σReparam for the projections of attention layers."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from attention_modules.hosts import attention_layers
from attention_modules.mechanisms.shared.options import check_flag, check_number
from attention_modules.stabilizers.sigma import (
    linear_weights,
    power_step,
    projections,
    renew_averaged,
    reparametrizations,
    sigma_reparametrize_all,
)
from lightning_tasks.callbacks.base import (
    Callback,
    Where,
    check_alone,
    held_parameters,
    is_strategy,
    kinds_of,
    refuse_flat_shards,
    refuse_own_processes,
)
from lightning_tasks.callbacks.cli_optimizer import followed_by_cli_optimizer
from lightning_tasks.files.swaps import overrides
from lightning_tasks.training.configure_hook import after_configure_model, forget_actions
from lightning_tasks.training.limits import check_layer_choice


class SigmaReparam(Callback):
    """Trains the projections of attention layers as Ŵ = (γ / σ(W)) W, which bounds the growth of logits.

    σReparam (Zhai et al., Stabilizing Transformer Training by Preventing Attention Entropy Collapse, ICML 2023): σ(W)
    is the largest singular value, γ a learned scalar. u and v of σ = uᵀ W v come from an SVD when the model is built,
    and take one step of the power iteration before each training batch, also one whose step ``NonFiniteGuard`` skips;
    those of frozen weights rest. Those of an average of weights are made anew where it is
    evaluated. A fused projection of queries, keys and values
    has one σ, and so have weights that are one Parameter. σ, γ, u and v are float32 in a model of half precision. They
    are put on by :mod:`torch.nn.utils.parametrize` at the end of ``configure_model``, before checkpoints are read and
    optimizers built, in every stage; hosts, ``LocAteR`` and ``SpectrumMonitor`` read Ŵ.

    State dicts hold ``...parametrizations.weight.original`` and γ, u and v beside it in place of ``...weight``, and a
    resumed run ends bitwise identical. A checkpoint of the plain model still loads, strictly: its weights become W,
    with their own γ, u and v. For the way back,
    :func:`attention_modules.stabilizers.sigma.plain_state` makes a state dict of the plain layout, and
    :func:`~attention_modules.stabilizers.sigma.remove_sigma_reparam` a plain model. List ``SwapAttention`` before it: a
    mechanism without a query cannot split a weight that is computed.

    Args:
        gamma: γ at the start: ``"sigma"`` for σ(W), so that the model is unchanged up to rounding, or a number.
        all_linear: also every linear layer of the model outside attention, the head included, as in the paper.
        where: names of layers (a glob or several); all where None.
        layers: which of those, counted in module order.
        exclude: names (globs) to leave out, with ``all_linear`` of linear layers too.

    Raises:
        ValueError: if ``gamma`` is neither ``"sigma"`` nor a positive number, or ``all_linear`` no bool; when a trainer
            starts, if it has a second ``SigmaReparam``, the strategy is FSDP1, FSDP2, DeepSpeed or one that spawns or
            forks processes, or a callback averages weights of a copy without it; when the model is configured, if no
            layer matches, or a weight is zero, not finite, quantized, wrapped by peft, or shared with what is not
            chosen.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import SigmaReparam
        >>> trainer = Trainer(callbacks=[SigmaReparam()], logger=False)
    """

    def __init__(
        self,
        gamma: float | Literal["sigma"] = "sigma",
        all_linear: bool = False,
        where: Where = None,
        layers: list[int] | None = None,
        exclude: Sequence[str] = (),
    ) -> None:
        super().__init__()
        own = isinstance(gamma, str) and gamma == "sigma"
        self.gamma = "sigma" if own else check_number("gamma, if not 'sigma',", gamma, 0.0)
        if not self.gamma:
            raise ValueError("gamma must be above 0, got 0: the weights would be zero")
        self.all_linear = check_flag("all_linear", all_linear)
        self.where, self.layers, self.exclude = check_layer_choice(where, layers, exclude)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_alone(trainer, SigmaReparam)
        refuse_flat_shards(trainer, "SigmaReparam cannot read weights")
        if is_strategy(trainer, "ModelParallelStrategy"):
            raise ValueError("SigmaReparam cannot take singular vectors of weights that FSDP2 shards: use DDP")
        built = not (overrides(pl_module, "setup") or overrides(pl_module, "configure_model"))
        if stage == "fit":
            refuse_own_processes(trainer, "SigmaReparam", "")
            self._check_averaging(trainer, built)
        if built:
            self._reparametrize(pl_module)  # later callbacks may copy the module in their setup
        after_configure_model(pl_module, self, self._reparametrize)

    def _check_averaging(self, trainer: pl.Trainer, built: bool) -> None:
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # not declared there
        for place, callback in enumerate(callbacks):
            averages = kinds_of(callback) & {"WeightAveraging", "StochasticWeightAveraging"}
            if averages and (place < callbacks.index(self) or not built):
                name = type(callback).__name__
                raise ValueError(
                    f"{name} would average a copy of the module without σReparam: list SigmaReparam before {name}, and "
                    "build the network in __init__, without setup or configure_model"
                )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        held = held_parameters(trainer.optimizers)
        weights: Any = [(module, tensor) for module, tensor, _ in reparametrizations(pl_module)]
        lists = [module.parametrizations[tensor] for module, tensor in weights]
        if lost := [each for each in lists if each.original.requires_grad and id(each.original) not in held]:
            rank_zero_warn(
                f"SigmaReparam: no optimizer holds {len(lost)} of the {len(lists)} weights, which stay as they are: "
                "train them, or name their layers in exclude="
            )
        if idle := [each for each in lists if id(each.original) in held and id(each[0].gamma) not in held]:
            rank_zero_warn(
                f"SigmaReparam: the optimizers hold {len(idle)} weights and not the γ of these, which then stay as "
                "they are: build the optimizer in configure_optimizers(), of all Parameters that the module has then"
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        power_step(pl_module)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Of an average of weights, which stands in the module's place meanwhile, u and v are made anew."""
        if batch_idx == 0:
            renew_averaged(pl_module)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        renew_averaged(pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        forget_actions(pl_module, self)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        forget_actions(pl_module, self)

    def _reparametrize(self, pl_module: pl.LightningModule) -> None:
        """Put it onto the chosen weights that do not have it yet."""
        outside = _linear_outside(pl_module) if self.all_linear else []
        layers = attention_layers(pl_module, self.where, self.layers, self._exclude_attention(pl_module, outside))
        wanted: list[tuple[nn.Module, str]] = [weight for layer in layers for weight in projections(layer)]
        wanted += [(module, tensor) for name, module, tensor in outside if not self._leaves_out(name, module)]
        done = {(id(module), tensor) for module, tensor, _ in reparametrizations(pl_module)}
        new = [(module, tensor) for module, tensor in wanted if (id(module), tensor) not in done]
        start = None if self.gamma == "sigma" else float(self.gamma)
        with followed_by_cli_optimizer(pl_module):
            sigma_reparametrize_all(pl_module, new, start)
        if new:
            rank_zero_info(f"SigmaReparam: {len(new)} weights in {len(layers)} attention layers and around them")

    def _leaves_out(self, name: str, module: nn.Module) -> bool:
        if callable(self.exclude):
            return bool(self.exclude(name, module))
        return _matches([name], self.exclude)

    def _exclude_attention(self, pl_module: pl.LightningModule, outside: list[tuple[str, nn.Module, str]]) -> Any:
        """``exclude`` without the patterns of linear layers alone, which match no attention layer."""
        if callable(self.exclude) or not outside:
            return self.exclude
        attention = [layer.name for layer in attention_layers(pl_module)]
        linear = [name for name, _, _ in outside]
        return [one for one in self.exclude if _matches(attention, [one]) or not _matches(linear, [one])]


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _linear_outside(pl_module: pl.LightningModule) -> list[tuple[str, nn.Module, str]]:
    """The weights of linear layers outside attention: the layer's name, itself, and the weight's name in it."""
    inside = {id(part) for layer in attention_layers(pl_module) for part in layer.module.modules()}
    names = {id(module): name for name, module in pl_module.named_modules()}
    weights = linear_weights(pl_module)
    return [(names[id(module)], module, tensor) for module, tensor in weights if id(module) not in inside]
