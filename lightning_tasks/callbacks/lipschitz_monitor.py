"""The local Lipschitz constant of attention layers, at validations."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from attention_modules.analysis import LipschitzEstimate, local_lipschitz
from attention_modules.hosts import AttentionLayer, attention_layers
from lightning_tasks.callbacks.base import Callback, Where
from lightning_tasks.callbacks.limits import check_integer, check_number
from lightning_tasks.callbacks.steps import layer_label

# Arguments that hold keys and values of earlier tokens: a second call would add to them.
_CACHES = ("past_key_value", "past_key_values", "layer_past", "cache")


class LipschitzMonitor(Callback):
    """Logs the local Lipschitz constant of each layer at what it is given in the first batch of a validation.

    ``val/lipschitz/layer_00`` is the mean over the samples of ‖D_x layer‖₂ (projections, mechanism and output, at the
    layer's own input, with its own mask), ``val/lipschitz_residual/layer_00`` the largest relative residual of any of
    them; what has not converged is an estimate from below, and warned of once a layer. Definitions:
    :func:`attention_modules.analysis.local_lipschitz`.

    A firing costs some ``3 * max_iter`` backward passes of each layer alone at most, in float32 (float64 where the
    input is), on ``num_samples`` samples of ``max_tokens`` tokens, with plain attention maps, and holds
    max_iter + 1 copies of their input. Sharded (FSDP) layers are not supported.

    Args:
        every_n_validations: validations from one firing to the next; the first fires, the sanity check does not.
        num_samples: how many of the batch's samples are looked at.
        max_tokens: longer sequences are cut to their first tokens, their masks too; None for whole sequences, as
            layers with a position bias or windows need them.
        tol: relative residual at which a sample has converged.
        max_iter: the most iterations.
        where: names of layers (a glob or several); all where None.
        layers: which of those, counted in module order.
        exclude: names (globs) to leave out.

    Raises:
        ValueError: if a number is out of its limits; when a fit or validation starts, if no layer matches; when it
            fires, if a layer's input is not finite or no sequence of tokens.
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
        super().__init__()
        limits = {"every_n_validations": every_n_validations, "num_samples": num_samples, "max_iter": max_iter}
        for name, value in {**limits, "max_tokens": 1 if max_tokens is None else max_tokens}.items():
            check_integer(name, value, 1)
        if check_number("tol", tol, minimum=0.0) == 0:
            raise ValueError(f"tol must be above 0, got {tol!r}")
        self.every_n_validations, self.num_samples, self.max_tokens = every_n_validations, num_samples, max_tokens
        self.tol, self.max_iter = tol, max_iter
        self.where, self.layers, self.exclude = where, layers, exclude
        self._validations = 0
        self._warned: set[str] = set()
        self._hooks: ExitStack | None = None
        self._calls: dict[int, _Call] = {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._chosen(pl_module)  # refused here, before anything is written

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._chosen(pl_module)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx or dataloader_idx or trainer.sanity_checking:
            return
        self._validations += 1
        if (self._validations - 1) % self.every_n_validations == 0:
            self._open(pl_module)

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        if self._hooks is None:
            return
        calls = self._close()
        for index, layer in enumerate(self._chosen(pl_module)):
            if index in calls:
                self._log(pl_module, layer_label(index), self._estimate(layer, calls.pop(index)))
            else:
                self._warn(layer.name, "it was not called on its own in the first batch, and is not logged")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close()

    def _chosen(self, pl_module: pl.LightningModule) -> list[AttentionLayer]:
        return attention_layers(pl_module, self.where, self.layers, self.exclude)

    def _open(self, pl_module: pl.LightningModule) -> None:
        self._close()
        self._hooks = ExitStack()
        for index, layer in enumerate(self._chosen(pl_module)):
            hook = partial(self._observe, index, layer)
            self._hooks.callback(layer.module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        self._hooks.enter_context(_eager())

    def _close(self) -> dict[int, _Call]:
        """Unhook; what was seen since :meth:`_open`."""
        if self._hooks is not None:
            self._hooks.close()
        calls, self._hooks, self._calls = self._calls, None, {}
        return calls

    def _observe(
        self, index: int, layer: AttentionLayer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if index not in self._calls:
            self._calls[index] = _Call.of(layer, args, kwargs, self.num_samples, self.max_tokens)

    def _estimate(self, layer: AttentionLayer, call: _Call) -> LipschitzEstimate:
        try:
            with _eager():
                found = local_lipschitz(call, call.x, tol=self.tol, max_iter=self.max_iter)
        except (RuntimeError, TypeError, ValueError) as error:
            cut = f" (its first {call.x.shape[1]} of {call.tokens} tokens)" if call.x.shape[1] < call.tokens else ""
            raise type(error)(f"LipschitzMonitor on {layer.name!r}{cut}: {error}") from error
        short = int((~found.converged).sum())
        if short:
            self._warn(
                layer.name,
                f"{short} of {len(found.value)} samples have not converged after {found.iterations} iterations: the "
                "value is an estimate from below (see val/lipschitz_residual); raise max_iter or tol",
            )
        return found

    def _warn(self, name: str, text: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            rank_zero_warn(f"LipschitzMonitor on {name!r}: {text}")

    def _log(self, pl_module: pl.LightningModule, label: str, found: LipschitzEstimate) -> None:
        relative = found.residual / found.value.clamp(min=torch.finfo(found.value.dtype).tiny)
        values = {"lipschitz": found.value.mean(), "lipschitz_residual": relative.max()}
        for name, value in values.items():
            pl_module.log(
                f"val/{name}/{label}", value.float(), on_step=False, on_epoch=True, sync_dist=True, batch_size=1
            )


@contextmanager
def _eager() -> Iterator[None]:
    """Compiled code sees no hook that came later, and has no second derivative."""
    if "torch._dynamo" in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


class _Hole:
    """Where the layer's input stands among its arguments."""


_HOLE = _Hole()


@dataclass
class _Call:
    """A layer's call on some samples and tokens, as a function of its input ``[B, N, C]`` alone."""

    layer: AttentionLayer
    x: Tensor
    tokens: int  # before the cut
    args: list[Any]
    kwargs: dict[str, Any]

    @classmethod
    def of(
        cls,
        layer: AttentionLayer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_samples: int,
        max_tokens: int | None,
    ) -> _Call:
        """Copies of the arguments, cut.

        Raises:
            ValueError: if none of them is a sequence of tokens.
        """
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if given is None or given.dim() != 3 or not given.is_floating_point():
            shape = None if given is None else tuple(given.shape)
            raise ValueError(
                f"LipschitzMonitor takes layers whose input is [batch, tokens, features]; {layer.name!r} was given "
                f"{shape}: leave it out with exclude"
            )
        x = given if _batch_first(layer) else given.transpose(0, 1)
        batch, tokens, _ = x.shape
        samples, kept = min(batch, num_samples), min(tokens, max_tokens or tokens)
        dtype = torch.promote_types(x.dtype, torch.float32)

        def cut(name: str, value: Any) -> Any:
            if value is given:
                return _HOLE
            if name in _CACHES:
                return None
            if isinstance(value, (tuple, list)):
                return type(value)(cut(name, part) for part in value)
            if not isinstance(value, Tensor):
                return value
            value = _cut_mask(name, value, (batch, samples), (tokens, kept), layer.spec.num_heads)
            return _own(value.to(dtype) if value.is_floating_point() else value)

        names = {name: cut(name, value) for name, value in kwargs.items()}
        return cls(layer, _own(x[:samples, :kept].to(dtype)), tokens, [cut("", value) for value in args], names)

    def __call__(self, x: Tensor) -> Tensor:
        inner = x if _batch_first(self.layer) else x.transpose(0, 1)
        module = self.layer.module
        state = {
            name: tensor.detach().to(x.dtype) if tensor.is_floating_point() else tensor
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }
        args = tuple(inner if value is _HOLE else value for value in self.args)
        kwargs = {name: inner if value is _HOLE else value for name, value in self.kwargs.items()}
        out = torch.func.functional_call(module, state, args, kwargs)
        out = out[0] if isinstance(out, (tuple, list)) else out
        return out if _batch_first(self.layer) else out.transpose(0, 1)


def _batch_first(layer: AttentionLayer) -> bool:
    return bool(getattr(layer.module, "batch_first", True))


def _own(value: Tensor) -> Tensor:
    """A copy that gradients may be taken through; validation runs in inference mode."""
    with torch.inference_mode(False):
        return value.detach().clone()


def _cut_mask(name: str, value: Tensor, samples: tuple[int, int], tokens: tuple[int, int], heads: int) -> Tensor:
    """A mask or the like, ``[N, N]``, ``[B, N]``, ``[B * H, N, N]`` or ``[B, ..., N, N]``, for fewer of both."""
    batch, batch_kept = samples
    length, kept = tokens
    square = value.dim() == 2 and value.shape == (length, length) and "padding" not in name
    if value.dim() > 1 and not square:
        if value.shape[0] == batch:
            value = value[:batch_kept]
        elif value.dim() == 3 and value.shape[0] == batch * heads:
            value = value[: batch_kept * heads]
    for dim in (-2, -1):
        inner = value.dim() >= -dim and (square or value.dim() + dim > 0)
        if inner and value.shape[dim] == length:
            value = value.narrow(dim, 0, kept)
    return value
