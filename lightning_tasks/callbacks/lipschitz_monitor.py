"""The local Lipschitz constant of attention layers, at validations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from attention_modules import AttentionMechanism
from attention_modules.analysis import LipschitzEstimate, NotFiniteError, local_lipschitz
from attention_modules.hosts import AttentionLayer
from attention_modules.hosts.layer_call import LayerCall
from attention_modules.hosts.model.inputs import continues
from attention_modules.hosts.model.seen import unplaced
from attention_modules.hosts.model.sharded import is_sharded
from attention_modules.hosts.torch import encoders_around, let_get_nested
from attention_modules.masks import seen_tokens
from attention_modules.mechanisms.shared.options import check_integer, check_number
from attention_modules.mechanisms.shared.unchanged import unobserved
from attention_modules.swap import made_observable, make_plain
from lightning_tasks.callbacks.base import Where
from lightning_tasks.callbacks.monitoring.charts import LayerCharts
from lightning_tasks.callbacks.monitoring.names import layer_label, listed
from lightning_tasks.callbacks.monitoring.observer import LayerObserver
from lightning_tasks.callbacks.monitoring.warnings import warn_without_validation
from lightning_tasks.runs.metric_names import MetricName
from lightning_tasks.training.distributed import log_joined
from lightning_tasks.training.eager import eager

_WHOLE = (
    "works only with as many tokens as the model gives it, as its position bias, rope or windows fix their number: all "
    "are looked at in place of the first {}, which takes more time and memory; `max_tokens: null` asks for that, and "
    "`exclude` leaves the layer out"
)
_UNPLACED = (
    "attends among other tokens than it is given, and which of these are padding is not known: padding counts; pad "
    "before the layer, or leave it out by `exclude`"
)
_SAME = 1e-3  # of the norm: float32 rounds, and what depends on padding is further away


class LipschitzMonitor(LayerObserver):
    """Logs the local Lipschitz constant of each layer at what it is given in the first batch of a validation.

    ``val/lipschitz/layer_00`` is the mean over the samples of ‖D_x layer‖₂ (projections, mechanism and output, at the
    layer's own input, with its own mask), ``val/lipschitz_residual/layer_00`` the largest relative residual of any of
    them; what has not converged is an estimate from below, and warned of, once a layer. Where a layer's input, output
    or Jacobian holds NaN or infinite numbers, that is warned of once, and nothing logged of it. The layer's number is
    its place among all self-attention layers of the model, whichever are chosen. A call that continues from a key-value
    cache is passed by: of a generation, the prompt is looked at. Tokens that no row sees (padding) are no part of the
    input or the output, and a sample without others is none. Definitions:
    :func:`attention_modules.analysis.local_lipschitz`.

    The sanity check of a fit tries one iteration of each layer and logs nothing, so that a layer of which this cannot
    be taken ends the fit before its first epoch (without a sanity check, at the first validation).

    A firing costs some ``3 * max_iter`` backward passes of each layer alone at most, in float32 (float64 where the
    input is), on ``num_samples`` samples of ``max_tokens`` tokens, with plain attention maps, and holds
    max_iter + 1 copies of their input. Sharded (FSDP) layers are refused.

    Args:
        every_n_validations: validations from one firing to the next; the first fires, the sanity check does not.
        num_samples: how many of the batch's samples are looked at.
        max_tokens: longer sequences are cut to the first tokens that are seen, their masks too; None for whole
            sequences. Of layers that work with one number of tokens only (position bias, rope of a grid, windows) all
            are looked at, and warned of.
        tol: relative residual at which a sample has converged.
        max_iter: the most iterations; with fewer than 8 hardly any sample is said to have converged.
        where: names of layers (a glob or several); all where None.
        layers: which of those, counted in module order.
        exclude: names (globs) to leave out.

    Raises:
        ValueError: if a number is out of its limits; when a fit or validation starts, if no layer matches, or the
            trainer has a second ``LipschitzMonitor``; when it first fires or tries, if a layer's input is no sequence
            of tokens, or it is no function of it alone, sample by sample.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import LipschitzMonitor
        >>> trainer = Trainer(callbacks=[LipschitzMonitor(num_samples=2)], logger=False)
    """

    def __init__(
        self,
        every_n_validations: int = 1,
        num_samples: int = 4,
        max_tokens: int | None = 256,
        tol: float = 1e-2,
        max_iter: int = 20,
        where: Where = None,
        layers: list[int] | None = None,
        exclude: Sequence[str] = (),
    ) -> None:
        super().__init__(where, layers, exclude)
        limits = {"every_n_validations": every_n_validations, "num_samples": num_samples, "max_iter": max_iter}
        for name, value in {**limits, "max_tokens": 1 if max_tokens is None else max_tokens}.items():
            check_integer(name, value, 1)
        if check_number("tol", tol, 0.0, 1.0) in (0, 1):
            raise ValueError(f"tol must be above 0 and below 1, got {tol!r}")
        self.every_n_validations, self.num_samples, self.max_tokens = every_n_validations, num_samples, max_tokens
        self.tol, self.max_iter = tol, max_iter
        self._validations = 0
        self._warned: set[tuple[str, str]] = set()
        self._unsaid: dict[str, dict[str, str]] = {}  # by text, what to say of each layer
        # Of a layer: one, or, where max_tokens cuts the sequence, the cut one and the whole one.
        self._calls: dict[int, list[LayerCall]] = {}
        self._found: dict[str, Tensor] = {}  # a layer's row, of the validation that runs
        self._charts = LayerCharts("LipschitzMonitor")

    @property
    def state_key(self) -> str:
        """Names its layers, so that a second monitor, of other layers, meets our refusal and not Lightning's."""
        return self._generate_state_key(where=self.where, layers=self.layers, exclude=list(self.exclude))

    def state_dict(self) -> dict[str, Any]:
        """How many validations there were, so that a resumed run goes on with its schedule."""
        return {"validations": self._validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it from a checkpoint."""
        self._validations = state_dict["validations"]

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._validations, self._warned = 0, set()  # of another run; a checkpoint is read after this
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._check(pl_module)  # refused here, before anything is written
        warn_without_validation(trainer, self)
        self._charts.restart()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._say()
        # Where it did not fire, the trainer's metrics still hold the values of an earlier validation.
        self._charts.after_validation(trainer, ("val/lipschitz",) if self._fires() else ())
        self._validations += not trainer.sanity_checking  # when it has ended: one that is cut short comes again

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._charts.log(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._check(pl_module)
        self._found = {}

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not (batch_idx or dataloader_idx) and (trainer.sanity_checking or self._fires()):
            self._open(pl_module)

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        if self._hooks is None:
            return
        calls = self._collect()
        padded = self._padded(pl_module, calls)
        for index, layer in enumerate(self._chosen(pl_module)):
            if index in calls:
                given, seen = calls.pop(index), padded.get(index)
                found = self._estimate(layer, given, seen, 1 if trainer.sanity_checking else self.max_iter)
                self._found[layer.name] = _row(found, len(given[0].x) if seen is None else int(seen.any(1).sum()))
                if found is not None and not trainer.sanity_checking:
                    self._look(layer.name, found)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not (trainer.sanity_checking or self._fires()):
            return
        layers, found = self._chosen(pl_module), self._found
        # Of all processes, of which some may have had no batch, or none in which a layer was called.
        own = torch.stack([found.get(layer.name, torch.zeros(len(_ROW))) for layer in layers]).to(pl_module.device)
        largest: Any = trainer.strategy.reduce(own[:, 0].clone(), reduce_op="max")
        sums: Any = trainer.strategy.reduce(own[:, 1:], reduce_op="sum")
        for layer, residual, (total, samples, calls, bad) in zip(layers, largest, sums.tolist(), strict=True):
            if not calls:
                text = "it was not called on its own in the first batch (or with a full cache alone), and is not logged"
                self._warn(layer.name, "uncalled", text)
            elif bad:
                text = "in the first batch its input, output or Jacobian holds NaN or infinite numbers"
                self._warn(layer.name, "finite", f"{text}, and nothing is logged of it")
            elif not samples:
                self._warn(layer.name, "sample", "it got no sample in the first batch, and nothing is logged of it")
            elif not trainer.sanity_checking:
                self._log(pl_module, layer_label(layer), total / samples, residual)

    def _check(self, pl_module: pl.LightningModule) -> None:
        self._chosen(pl_module)
        if is_sharded(pl_module):
            raise ValueError(
                "LipschitzMonitor calls layers on their own, whose weights fully_shard() spread over processes: leave "
                "it out, and run `attnswap analyze lipschitz` on a whole checkpoint"
            )

    def _fires(self) -> bool:
        return self._validations % self.every_n_validations == 0

    def _open(self, pl_module: pl.LightningModule) -> None:
        self._forget()  # what a batch that was skipped before its end left
        layers = self._chosen(pl_module)
        hooks = self._hook((layer.module, partial(self._observe, index, layer)) for index, layer in enumerate(layers))
        for encoder in encoders_around(pl_module, (layer.module for layer in layers)):
            if getattr(encoder, "use_nested_tensor", False):  # of which layers are no functions of [B, N, C]
                let_get_nested(encoder, False)
                hooks.callback(let_get_nested, encoder, True)

    def _collect(self) -> dict[int, list[LayerCall]]:
        """Unhook, and return what was seen since :meth:`_open`."""
        self._unhook()
        calls = self._calls
        self._forget()
        return calls

    def _forget(self) -> None:
        self._calls = {}

    def _observe(
        self, index: int, layer: AttentionLayer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if index not in self._calls and not continues(module, args, kwargs):
            take = partial(LayerCall.of, module, args, kwargs, layer.spec.num_heads, self.num_samples, host=layer.host)
            try:
                call = take(max_tokens=self.max_tokens)
                is_cut = call.x.shape[1] < call.tokens
                self._calls[index] = [call, take()] if is_cut else [call]
            except ValueError as error:
                raise ValueError(f"LipschitzMonitor on {layer.name!r}: {error}; leave it out with exclude") from error

    @torch.inference_mode(False)
    def _padded(self, pl_module: pl.LightningModule, calls: Mapping[int, Sequence[LayerCall]]) -> dict[int, Tensor]:
        """Which tokens some row sees, boolean ``[B, N]``, of the layers' calls in which some are seen by none."""
        found: dict[int, Tensor] = {}
        chosen = self._chosen(pl_module)
        asked = {index: whole for index, (*_, whole) in calls.items() if len(whole.x) and whole.has_masks}
        plain = [chosen[index].name for index in asked if chosen[index].mechanism is None]
        plain = made_observable(pl_module, plain)
        try:
            for index, layer in enumerate(self._chosen(pl_module)):
                if index in asked and layer.mechanism is not None:
                    with torch.no_grad(), eager(), unobserved(layer.module):
                        seen, is_placed = _seen(asked[index], layer.mechanism)
                    if not is_placed:
                        self._warn(layer.name, "padding", _UNPLACED)
                    if seen is not None and not bool(seen.all()):
                        found[index] = seen
        finally:
            make_plain(pl_module, plain)
        return found

    def _usable(self, layer: AttentionLayer, calls: Sequence[LayerCall], seen: Tensor | None) -> list[LayerCall] | None:
        """Calls of fewer tokens, unless the layer works only with as many as the model gives it."""
        *shorter, whole = calls
        if not shorter:
            return None
        try:
            with torch.no_grad(), eager(), unobserved(layer.module):
                usable = shorter if seen is None else _alone(whole, seen, self.max_tokens)
                for call in usable:
                    call(call.x)
        except ValueError:
            self._warn(layer.name, "whole", _WHOLE.format(self.max_tokens), f"{whole.tokens} tokens")
            return None
        return usable

    def _estimate(
        self, layer: AttentionLayer, calls: Sequence[LayerCall], seen: Tensor | None, max_iter: int
    ) -> LipschitzEstimate | None:
        """None where something is not finite, or there is no sample."""
        whole = calls[-1]
        if not len(whole.x) or (seen is not None and not bool(seen.any())):
            return None
        usable = self._usable(layer, calls, seen)
        cut = "" if usable is None else f" (its first {usable[0].x.shape[1]} of {whole.tokens} tokens)"
        try:
            with eager(), unobserved(layer.module):  # it calls the layer itself, and users' hooks count batches
                if usable is not None:
                    return _joined([local_lipschitz(call, call.x, tol=self.tol, max_iter=max_iter) for call in usable])
                function = whole if seen is None else whole.among(seen)
                found = local_lipschitz(function, whole.x, tol=self.tol, max_iter=max_iter)
                return found if seen is None else _joined([found], seen.any(1))
        except NotFiniteError:
            return None
        except (RuntimeError, TypeError, ValueError) as error:
            raise type(error)(f"LipschitzMonitor on {layer.name!r}{cut}: {error}") from error

    def _look(self, name: str, found: LipschitzEstimate) -> None:
        short = int((~found.converged).sum())
        if short:
            text = (
                f"not converged after {self.max_iter} iterations: the value is an estimate from below (see "
                "val/lipschitz_residual); raise max_iter or tol"
            )
            self._warn(name, "converged", text, f"{short} of {len(found.value)} samples")

    def _warn(self, name: str, kind: str, text: str, detail: str = "") -> None:
        """Have it said when the validation ends, of all layers of which it holds at once, and once of each."""
        if (name, kind) not in self._warned:
            self._warned.add((name, kind))
            self._unsaid.setdefault(text, {})[name] = detail

    def _say(self) -> None:
        unsaid, self._unsaid = self._unsaid, {}
        for text, names in unsaid.items():
            rank_zero_warn(f"LipschitzMonitor on {listed(names)}: {text}")

    def _log(self, pl_module: pl.LightningModule, label: str, mean: float, residual: Tensor) -> None:
        values = {"lipschitz": torch.as_tensor(mean, device=residual.device), "lipschitz_residual": residual}
        log_joined(pl_module, {str(MetricName(name, label, stage="val")): value for name, value in values.items()})


def _seen(call: LayerCall, mechanism: AttentionMechanism) -> tuple[Tensor | None, bool]:
    """Which tokens some row sees in a call, boolean ``[B, N]``, and whether where others lie in it is known.

    None where its mask says nothing of them.
    """
    found: list[Tensor] = []
    lost: list[Tensor] = []

    def see(mechanism: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        seen = seen_tokens(kwargs.get("attn_mask"), *args[:2])
        if seen is not None and seen.shape == call.x.shape[:2]:
            found.append(seen)
        elif seen is not None:
            lost.append(unplaced(seen, call.x))

    hook = mechanism.register_forward_pre_hook(see, with_kwargs=True)
    try:
        with suppress(RuntimeError, TypeError, ValueError):  # which the estimate meets, and names the layer
            call(call.x)
    finally:
        hook.remove()
    is_placed = bool(found) or not any(bool(each.any()) for each in lost)
    return torch.stack(found).any(0) if found else None, is_placed


def _alone(whole: LayerCall, seen: Tensor, max_tokens: int | None) -> list[LayerCall]:
    """The call on the first tokens that are seen of each sample that has some.

    Raises:
        ValueError: if without the others the layer gives something else.
    """
    out, calls = whole(whole.x), []
    for sample, tokens in enumerate(seen):
        places = tokens.nonzero().flatten()
        if len(places):
            alone, given = whole.part(sample, places), out[sample, places]
            if bool((alone(alone.x)[0] - given).norm() > _SAME * given.norm()):
                raise ValueError("positions are counted by column")
            calls.append(whole.part(sample, places[:max_tokens]))
    return calls


def _joined(found: Sequence[LipschitzEstimate], some: Tensor | slice = slice(None)) -> LipschitzEstimate:
    """The estimates of some samples as one."""
    several = ([each.value, each.residual, each.converged] for each in found)
    value, residual, converged = (torch.cat(parts)[some] for parts in zip(*several, strict=True))
    return LipschitzEstimate(value, max(each.iterations for each in found), residual, converged)


_ROW = ("largest relative residual", "sum over samples", "samples", "calls", "calls with what is not finite")


def _row(found: LipschitzEstimate | None, samples: int) -> Tensor:
    """What a process joins of a layer's call, on the CPU; ``found`` is None where there is no sample, or a bad one."""
    if found is None:
        return torch.tensor([0.0, 0.0, 0.0, 1.0, float(samples > 0)])
    relative = found.residual / found.value.clamp(min=torch.finfo(found.value.dtype).tiny)
    return torch.tensor([float(relative.max()), float(found.value.sum()), float(samples), 1.0, 0.0])
