"""Token selection: a prompt (and a head) learn by gradient descent which token of each input to attend to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from attention_modules.mechanisms.shared.options import check_integer
from attention_modules.prompt import FORMS, PromptAttention
from lightning_tasks.base import BaseTask, Buildable
from lightning_tasks.training.distributed import epoch_weight

Batch = tuple[Tensor, Tensor]
# Of y f, [n]; each falls as y f grows.
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "logistic": lambda x: -functional.logsigmoid(x),
    "exponential": lambda x: (-x).exp(),
    "linear": lambda x: -x,
}
LEARNABLE = ("p", "v", "w")
PRECISIONS = ("32-true", "64-true", "bf16-mixed")  # these leave float64 alone: the default and autocast do not cast it


class NormalizedGradientDescent(Optimizer):
    """x ← x - lr ∇/‖∇‖, each Parameter by its own norm; where the gradient is zero it stays.

    Args:
        params: Parameters or groups.
        lr: length of a step.

    Raises:
        ValueError: if ``lr`` is not positive and finite.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        if not 0 < lr < math.inf:
            raise ValueError(f"lr must be positive and finite, got {lr}")
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * unit(parameter.grad))
        return loss


def unit(gradient: Tensor) -> Tensor:
    """gradient / ‖gradient‖, zero where it is zero."""
    # By the largest entry first: the squares of a saturated softmax's gradient underflow.
    largest = gradient.abs().amax()
    scaled = gradient / largest.where(largest > 0, 1)
    norm = scaled.norm()
    return scaled / norm.where(norm > 0, 1)


class TokenSelectionTask(BaseTask):
    """Gradient descent on f(X) = ⟨X v, softmax(X W p)⟩ (Tarzanagh et al., NeurIPS 2023), in float64, from zero.

    Batches are ``(x [n, T, d], labels [n])``. W, and v unless it is learned, are those of the data module. Logs
    ``train/loss``; ``{val,test}/loss``, and ``{val,test}/probability``, the mean probability of the most attended
    token.

    Args:
        dim: width of the tokens; where None, that of the data module, kept in the hyper-parameters.
        learn: Parameters that learn: of "p", "v", "w"; p and a learned v start at zero.
        loss: of y f: "logistic", "exponential" or "linear" (-y f).
        form: "difference" or "plain", see :func:`~attention_modules.prompt.prompt_attention`.
        optimizer, scheduler, scheduler_interval, scheduler_monitor, param_groups: see
            :class:`~lightning_tasks.base.BaseTask`; steps of length 0.1 along the gradient by default, as in the paper,
            ``torch.optim.SGD`` for plain gradient descent.

    Raises:
        ValueError: if a name stands for nothing or a width is below 1; on building, if the width is unknown or not the
            data module's; on setup, if the trainer's precision would cast float64.

    Example:
        >>> from attnswap.tasks import TokenSelectionTask
        >>> task = TokenSelectionTask(dim=2)
    """

    def __init__(
        self,
        dim: int | None = None,
        learn: list[str] | None = None,
        loss: str = "logistic",
        form: str = "difference",
        optimizer: Buildable = NormalizedGradientDescent,
        scheduler: Buildable | None = None,
        scheduler_interval: str = "step",
        scheduler_monitor: str = "val/loss",
        param_groups: list[dict[str, Any]] | None = None,
    ) -> None:
        if isinstance(learn, str):  # "pv" would be read as its letters
            raise ValueError(
                f"learn must be a list of names, got {learn!r}: give [{', '.join(LEARNABLE)}] or some of it"
            )
        learn = ["p"] if learn is None else list(learn)
        if not learn or not set(learn) <= set(LEARNABLE):
            raise ValueError(f"learn must name some of {', '.join(LEARNABLE)}, got {learn}")
        if dim is not None:
            check_integer("dim", dim, 1)
        if loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {loss!r}")
        if form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
        super().__init__(
            dim=dim,
            learn=learn,
            loss=loss,
            form=form,
            optimizer=optimizer,
            scheduler=scheduler,
            scheduler_interval=scheduler_interval,
            scheduler_monitor=scheduler_monitor,
            param_groups=param_groups,
        )

    def build_model(self) -> nn.Module:
        """The prompt's attention, with W and v of the data module where one is attached.

        Raises:
            ValueError: if the width is unknown, or another than the data module's.
        """
        problem = getattr(getattr(self._trainer, "datamodule", None), "problem", None)
        found = None if problem is None else problem.x.shape[-1]
        dim = self.hparams["dim"] if self.hparams["dim"] is not None else found
        if dim is None:
            raise ValueError("the width is unknown: give TokenSelectionTask(dim=...), or fit with a data module")
        if found not in (None, dim):
            raise ValueError(f"dim={dim} is not the {found} of the data module; leave it out")
        self.hparams["dim"] = dim
        model = PromptAttention(dim, self.hparams["form"])
        if problem is not None:
            with torch.no_grad():
                model.w.copy_(problem.w)
                if "v" not in self.hparams["learn"]:
                    model.v.copy_(problem.v)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in self.hparams["learn"])
        return model

    def setup(self, stage: str) -> None:
        """Refuse a precision that would cast float64.

        Raises:
            ValueError: the trainer's precision is one that does not leave float64 as it is.
        """
        super().setup(stage)
        if self.trainer.precision not in PRECISIONS:
            raise ValueError(
                f"precision is {self.trainer.precision!r}: token selection needs float64, as small probabilities are "
                "zero below it; leave trainer.precision out, or give 64-true"
            )

    def forward(self, x: Tensor) -> Tensor:
        """f of each input, ``[n]``."""
        return self.model(x)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean loss over the inputs."""
        loss = self._loss(batch)
        self.log("train/loss", loss, sync_dist=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``val/loss`` and ``val/probability``."""
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``test/loss`` and ``test/probability``."""
        self._evaluate("test", batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Probability of each token, ``[n, T]``."""
        return self.model.probabilities(batch[0])

    def prediction_rows(self, prediction: Tensor, batch: Batch) -> list[dict[str, Any]]:
        """For each input the token of the highest probability, and that probability."""
        highest = prediction.max(-1)
        return [
            {"token": token, "probability": value}
            for token, value in zip(highest.indices.tolist(), highest.values.tolist(), strict=True)
        ]

    def _loss(self, batch: Batch) -> Tensor:
        x, labels = batch
        return LOSSES[self.hparams["loss"]](labels * self.model(x)).mean()

    def _evaluate(self, split: str, batch: Batch) -> None:
        probability = self.model.probabilities(batch[0]).amax(-1).mean()
        logged = {f"{split}/loss": self._loss(batch), f"{split}/probability": probability}
        self.log_dict(logged, sync_dist=True, batch_size=epoch_weight(self.trainer, len(batch[0])))
