"""What every attack shares: its input checked, the model held still, the ball it stays in, losses and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from attention_modules.mechanisms.shared.options import as_float
from lightning_tasks.robustness.tested_model import Model

GRADIENT = 3.0
"""Cost of a forward and a backward pass, in forward passes (a backward pass is about two)."""

IGNORED = -100
"""The label of pixels that do not count, as in :func:`torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True)
class Attack:
    """A function of this package.

    Args:
        function: it.
        white_box: whether it uses the model's gradient.
        passes: its cost in forward passes, from its options.
        norm: that of eps, "Linf", "L2" or "L1".
        smallest: whether it finds the smallest change, so that one run tells of every eps.
    """

    function: Callable[..., Tensor]
    white_box: bool
    passes: Callable[[Mapping[str, Any]], float]
    norm: str = "Linf"
    smallest: bool = False


ATTACKS: dict[str, Attack] = {}
Function = TypeVar("Function", bound=Callable[..., Tensor])


def register_attack(**known: Any) -> Callable[[Function], Function]:
    """Make an attack known by the name of its function to configuration files; ``known`` are fields of `Attack`."""

    def register(function: Function) -> Function:
        ATTACKS[function.__name__] = Attack(function, **known)
        return function

    return register


def _name(model: Model) -> str:
    """What messages call it: a wrapper may give the name of what it wraps."""
    return model._get_name() if isinstance(model, nn.Module) else type(model).__name__


def is_share(value: Any) -> TypeGuard[float]:
    """Whether it is a real number in [0, 1], numpy's and fractions among them; bool and nan are none."""
    return 0 <= as_float(value) <= 1


def check_eps(eps: Any) -> float:
    """The radius as a float.

    Raises:
        ValueError: if it is no number in [0, 1].
    """
    if not is_share(eps):
        raise ValueError(f"eps is {eps!r}: it must be a number in [0, 1], as the images are; for 8 of 255 give 8/255")
    return float(eps)


def check_radius(eps: Any, finite: bool = False) -> float:
    """The radius of a ball in the L1 or L2 norm as a float.

    Raises:
        ValueError: if it is no number above 0, or infinite where ``finite``.
    """
    value = as_float(eps)
    if not value > 0 or (finite and value == math.inf):
        limit = "finite" if finite else "inf for no limit"
        raise ValueError(f"eps is {eps!r}: it must be a number above 0 ({limit}), the norm of the change of an image")
    return value


def within(images: Tensor, points: Tensor, eps: float) -> Tensor:
    """The points ``[B, C, H, W]``, and in the place of those more than ``eps`` in L2 away the images."""
    near = (points - images).flatten(1).norm(dim=1) <= eps
    return torch.where(near.view(-1, 1, 1, 1), points, images)


def check_batch(images: Tensor, labels: Tensor, masks: bool = False) -> None:
    """Check that images ``[B, C, H, W]`` are floats in [0, 1] and labels ``[B]`` integers.

    Where ``masks``, labels may also be masks ``[B, H, W]``.

    Raises:
        TypeError: for images in half precision or integers (eps would be lost in rounding), or labels that are floats.
        ValueError: for other shapes, or values outside [0, 1].
    """
    if images.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"images are {images.dtype}: give float32 or float64 in [0, 1]")
    if labels.dtype != torch.int64:
        raise TypeError(f"labels are {labels.dtype}: give class indices, int64")
    shapes = [images.shape[:1], *([images.shape[:1] + images.shape[2:]] if masks else [])]
    if images.ndim != 4 or labels.shape not in shapes:
        either = "[B], or masks [B, H, W]" if masks else "[B]"
        raise ValueError(
            f"images must be [B, C, H, W] and labels {either}, got {list(images.shape)} and {list(labels.shape)}"
        )
    low, high = (images.amin().item(), images.amax().item()) if images.numel() else (0.0, 0.0)
    if not (low >= 0 and high <= 1):
        raise ValueError(f"images are in [{low:g}, {high:g}]: give them in [0, 1], and let the model normalize them")


@dataclass(frozen=True)
class LinfBall:
    """The points within ``low`` and ``high``, both ``[B, C, H, W]``."""

    low: Tensor
    high: Tensor

    @classmethod
    def around(cls, images: Tensor, radius: float | Tensor, clip: bool = True) -> LinfBall:
        """Points at most ``radius`` (a number, or ``[C, 1, 1]``) from the images, and in [0, 1] where ``clip``."""
        low, high = images - radius, images + radius
        return cls(low.clamp(min=0), high.clamp(max=1)) if clip else cls(low, high)

    def project(self, points: Tensor) -> Tensor:
        """The nearest points of the ball."""
        return torch.minimum(torch.maximum(points, self.low), self.high)

    def random(self, generator: torch.Generator) -> Tensor:
        """Points drawn evenly; the same ones on every device."""
        share = torch.rand(self.low.shape, generator=generator, dtype=self.low.dtype)
        return self.project(self.low + (self.high - self.low) * share.to(self.low.device))


@dataclass
class Best:
    """The point of the highest loss seen so far, for each image."""

    points: Tensor
    losses: Tensor

    def update(self, points: Tensor, losses: Tensor) -> None:
        """Take the points ``[B, C, H, W]`` whose losses ``[B]`` are higher."""
        better = losses > self.losses
        self.points = torch.where(better.view(-1, 1, 1, 1), points, self.points)
        self.losses = torch.where(better, losses, self.losses)


def random_signs(shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
    """-1 or 1, evenly; the same on every device."""
    return (torch.randint(0, 2, shape, generator=generator) * 2 - 1).to(like)


def detached(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Copies that autograd accepts; those made in inference mode are not. Call it in :func:`held_still`."""
    return images.detach().clone(), labels.detach().clone()


class NonFiniteLogitsError(ValueError):
    """A model gave logits, or a gradient, that are nan or infinite."""


def logits_of(model: Model, images: Tensor, labels: Tensor | None = None) -> Tensor:
    """The model's logits ``[B, classes]``; where labels are masks, ``[B, classes, H, W]``.

    Raises:
        NonFiniteLogitsError: if they are nan or infinite (minus infinity, as of classes that are left out, is allowed).
        ValueError: if they have another shape or fewer than two classes, a label is outside of the classes, or the
            model changed the images.
    """
    version = None if images.is_inference() else images._version
    logits = model(images)
    if version is not None and images._version != version:  # later passes would see what this one left
        raise ValueError(
            f"{_name(model)} changes its images in place (as x.sub_(mean) or normalize(..., inplace=True) does): "
            "compute a new tensor, as (x - mean) / std or x.clamp(0, 1)"
        )
    rest = labels.shape[1:] if labels is not None else ()
    if not isinstance(logits, Tensor) or (len(logits), *logits.shape[2:]) != (len(images), *rest) or logits.ndim < 2:
        got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        shape = f"[B, classes{', H, W' if rest else ''}]"
        raise ValueError(f"the model must return logits {shape} of {len(images)} images, got {got}")
    if logits.shape[1] < 2:
        raise ValueError(f"{_name(model)} gives {logits.shape[1]} logit per image: an attack needs at least 2 classes")
    counted = None if labels is None else labels[labels != IGNORED] if rest else labels
    if counted is not None and counted.numel() and not 0 <= counted.min() <= counted.max() < logits.shape[1]:
        raise ValueError(
            f"labels are in {counted.min().item()} to {counted.max().item()}: the model has classes 0 to "
            f"{logits.shape[1] - 1}"
        )
    wrong = (logits.isnan() | (logits == torch.inf)).flatten(1).any(1) | (logits == -torch.inf).flatten(1).all(1)
    if wrong.any():  # every comparison with nan fails: the image would count as it stands
        raise NonFiniteLogitsError(
            f"{_name(model)} gives logits that are not finite (nan or inf) for {int(wrong.sum())} of {len(images)} "
            "images; check its weights, and its precision"
        )
    return logits


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each image in nats, ``[B]``; of masks the mean over the pixels that count."""
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    losses = functional.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)
    return losses if labels.ndim == 1 else losses.flatten(1).sum(1) / (labels != IGNORED).flatten(1).sum(1).clamp(min=1)


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """Logit of the label minus the highest other one, ``[B]``; negative where the model is wrong."""
    own = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    others = logits.scatter(1, labels.unsqueeze(1), float("-inf"))
    return own - others.amax(1)


def losses_and_gradient(model: Model, points: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each image ``[B]`` and its gradient for that image ``[B, C, H, W]``.

    Nothing of the model is touched: no ``.grad`` is filled.

    Raises:
        NonFiniteLogitsError: if the model's logits or gradient are not finite.
        ValueError: if the model has no gradient for its input.
    """
    points = points.detach().requires_grad_()
    losses = points.new_zeros(0)

    def loss() -> Tensor:
        nonlocal losses
        losses = cross_entropies(logits_of(model, points, labels), labels)
        return losses.sum()

    try:
        gradient = finite_gradient(model, loss, points)
    except RuntimeError as error:
        if "Inference tensors cannot be saved" not in str(error):
            raise
        raise ValueError(
            f"{_name(model)} holds tensors made in inference mode (weights, buffers, or what it remembers from "
            "an earlier pass), through which no gradient goes: build and run it with Trainer(inference_mode=False)"
        ) from error
    return losses.detach(), gradient


_FACTORS = (2.0**14, 2.0**8, 1.0)
"""Of a loss, whose gradient may go through float16 though logits are float32; wider numbers keep every bit."""


def finite_gradient(model: Model, loss_of: Callable[[], Tensor], points: Tensor) -> Tensor:
    """The gradient of a batch's loss for its points, scaled on the way, so that float16 holds it.

    The factor is the largest of ``_FACTORS`` with which no value overflows, as a gradient scaler has it in training.
    The loss is computed anew for each.

    Raises:
        NonFiniteLogitsError: if it is not finite.
        ValueError: if there is none.
    """
    gradient: Tensor | None = None
    for factor in _FACTORS:
        loss = loss_of()
        gradient = torch.autograd.grad(loss * factor, points, allow_unused=True)[0] if loss.requires_grad else None
        if gradient is None or gradient.isfinite().all():
            break
    if gradient is None:
        raise ValueError(
            f"{_name(model)} gives no gradient for its images: its output is detached, or computed under "
            "no_grad; use an attack that needs none, square or spsa"
        )
    if not gradient.isfinite().all():
        raise NonFiniteLogitsError(
            f"{_name(model)} gives a gradient that is not finite; check its output for nan and inf"
        )
    return gradient / factor


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _positive(value: Any) -> bool:
    return 0 < as_float(value) < math.inf


_OF_AUTOATTACK = {"apgd-ce", "apgd-dlr", "apgd-t", "fab-t", "square"}
_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "steps": (lambda value: _whole(value, 1), "an integer of at least 1"),
    "restarts": (lambda value: _whole(value, 1), "an integer of at least 1"),
    "queries": (lambda value: _whole(value, 1), "an integer of at least 1"),
    "samples": (lambda value: _whole(value, 2) and value % 2 == 0, "an even integer of at least 2"),
    "step_size": (lambda value: value is None or _positive(value), "a positive number, or None for the attack's own"),
    "initial_samples": (lambda value: _whole(value, 1), "an integer of at least 1"),
    "most_samples": (lambda value: _whole(value, 1), "an integer of at least 1"),
    "searches": (lambda value: _whole(value, 1), "an integer of at least 1"),
    "confidence": (lambda value: value == 0 or _positive(value), "a number of at least 0"),
    "initial_constant": (_positive, "a positive number"),
    "sparsity": (lambda value: 0 < as_float(value) < 100, "a percentage above 0 and below 100"),
    "delta": (_positive, "a positive number"),
    "learning_rate": (_positive, "a positive number"),
    "initial_share": (lambda value: _positive(value) and value <= 1, "a number above 0 and at most 1"),
    "random_start": (lambda value: isinstance(value, bool), "True or False"),
    "attacks": (
        lambda value: isinstance(value, Sequence) and len(value) == len({*map(str, value)} & _OF_AUTOATTACK) > 0,
        "a list of apgd-ce, apgd-dlr, apgd-t, fab-t and square, each once",
    ),
    "std": (
        lambda value: isinstance(value, Sequence) and len(value) > 0 and all(_positive(each) for each in value),
        "a list of positive numbers, one per channel",
    ),
}


def check_options(**options: Any) -> None:
    """Check the values of options of an attack.

    Raises:
        ValueError: for the first that is out of its limits.
    """
    for name, value in options.items():
        allowed, what = _ALLOWED[name]
        if not allowed(value):
            cure = f"; write {int(value)}" if isinstance(value, float) and value.is_integer() else ""
            raise ValueError(f"{name}={value!r} must be {what}{cure}")
