"""AutoAttack, as its authors' library computes it: four attacks in sequence, each on the images that still stand."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from attention_modules.precision import to_float64
from lightning_tasks.robustness.attacks.common import (
    GRADIENT,
    check_batch,
    check_eps,
    check_options,
    detached,
    logits_of,
    register_attack,
)
from lightning_tasks.robustness.tested_model import Model, held_still, networks_of
from lightning_tasks.runs.measurements import Advance

LIBRARY = "pyautoattack"
STANDARD = ("apgd-ce", "apgd-t", "fab-t", "square")
_LOGGER = "auto-attack"
_TARGETS, _STEPS = 9, 100
# Forward passes over all images if none fell; a quarter of them stands, say.
_STANDING = 0.25
_PASSES = {
    "apgd-ce": GRADIENT * _STEPS,
    "apgd-dlr": GRADIENT * _STEPS,
    "apgd-t": GRADIENT * _STEPS * _TARGETS,
    "fab-t": (GRADIENT + 2) * _STEPS * _TARGETS,
}
# What the library's checks say, by words of theirs.
_FLAGS = {
    "randomized defense": "the output is random",
    "probability distribution": "the output is a softmax",
    "zero gradient": "some gradients are zero",
    "dynamic defense": "gradients are taken in the forward pass",
    "Square Attack has decreased": "Square lowers the accuracy of the others",
}


@dataclass(frozen=True)
class Survivors:
    """What AutoAttack leaves.

    Args:
        images: the attacked images ``[B, C, H, W]``; those that stand, and those that were wrong from the first, as
            they were.
        standing: for "clean" and then for each attack, which images are right after it and all before it, ``[B]``.
        flags: what speaks against the figures, in words; an adaptive attack is due where there are any.
    """

    images: Tensor
    standing: Mapping[str, Tensor]
    flags: Sequence[str]

    @property
    def accuracies(self) -> dict[str, float]:
        """The share that stands, clean and after each attack."""
        return {name: to_float64(right).mean().item() for name, right in self.standing.items()}


@register_attack(
    white_box=True,
    passes=lambda options: _STANDING * sum(_PASSES.get(each, options["queries"]) for each in options["attacks"]),
)
def autoattack(
    model: Model,
    images: Tensor,
    labels: Tensor,
    *,
    eps: float,
    attacks: Sequence[str] = STANDARD,
    queries: int = 5000,
    seed: int = 0,
) -> Tensor:
    """The images of :func:`run_autoattack`, whose arguments and errors it has."""
    return run_autoattack(model, images, labels, eps=eps, attacks=attacks, queries=queries, seed=seed).images


def run_autoattack(
    model: Model,
    images: Tensor,
    labels: Tensor,
    *,
    eps: float,
    attacks: Sequence[str] = STANDARD,
    queries: int = 5000,
    batch_size: int = 100,
    seed: int = 0,
    advance: Advance = lambda share: None,
) -> Survivors:
    """The standard version of AutoAttack in the L-inf ball (Croce and Hein, ICML 2020), by its library pyautoattack.

    APGD on the cross-entropy (100 steps), targeted APGD on the DLR loss and targeted FAB (100 steps for each of 9
    classes), Square (5,000 queries). An image counts as right if it stands against all of them.

    Args:
        model, images, labels, eps: see :func:`~lightning_tasks.robustness.fgsm`; of at least 4 classes.
        attacks: in their order, of "apgd-ce", "apgd-dlr", "apgd-t", "fab-t" and "square".
        queries: of Square.
        batch_size: images at a time.
        seed: of each attack on each batch.
        advance: told the share that is done, after each attack.

    Raises:
        ImportError: without the extra `robustness`.
        ValueError: if ``eps``, the images, the labels or an option are out of range, or the model has fewer classes.
        TypeError: for other dtypes than float32, float64 among them.

    Example:
        >>> import torch
        >>> from lightning_tasks.robustness.attacks.auto import run_autoattack
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4))
        >>> found = run_autoattack(
        ...     model, torch.rand(2, 3, 2, 2), torch.tensor([0, 1]), eps=4 / 255, attacks=["apgd-ce"]
        ... )
        >>> [*found.accuracies]
        ['clean', 'apgd-ce']
    """
    eps = check_eps(eps)
    check_batch(images, labels)
    if images.dtype != torch.float32:
        raise TypeError(f"images are {images.dtype}: {LIBRARY} computes in float32; give float32, and a model of it")
    check_options(attacks=attacks, queries=queries)
    library = autoattack_library()
    with held_still(model, gradients=True), _parameters_fixed(model), torch.random.fork_rng(_devices()):
        images, labels = detached(images, labels)
        with torch.no_grad():
            pairs = zip(images.split(batch_size), labels.split(batch_size), strict=True)
            parts = [logits_of(model, *pair) for pair in pairs]
        classes = parts[0].shape[1] if parts else 0
        if classes < 4:
            raise ValueError(f"AutoAttack needs a model of at least 4 classes (its DLR loss), got {classes}")
        right = torch.cat(parts).argmax(1) == labels
        standing, flags, attacked = {"clean": right.clone()}, [], images.clone()
        idle: list[str] = []  # attacks that no image was left for, and whose checks did not run

        def logits(points: Tensor) -> Tensor:
            found = logits_of(model, points)
            return found.float() if found.dtype.itemsize < 4 else found

        for name in attacks:
            places = right.nonzero().squeeze(1)
            idle += [] if len(places) else [name]
            if len(places):
                with _warnings_of_library() as said, _no_trace_is_lost(), torch.enable_grad():
                    run = library.AutoAttack(
                        logits, attacks=[name], version="custom", eps=eps, seed=seed, device=images.device
                    )
                    _as_standard(run, classes, queries)
                    points, _ = run.run_standard_evaluation(images[places], labels[places], batch_size=batch_size)
                flags += [_flag(text) for text in said]
                attacked[places] = points
                with torch.no_grad():
                    parts = [logits(each) for each in points.split(batch_size)]
                right[places] = torch.cat(parts).argmax(1) == labels[places]
            standing[name] = right.clone()
            advance(1 / len(attacks))
        flags += [f"no image was left for {', '.join(idle)}"] if idle else []
        found = Survivors(attacked, standing, ())
        with _warnings_of_library() as said:
            library.checks.check_square_sr(found.accuracies, logger=logging.getLogger(_LOGGER))
        return Survivors(attacked, standing, [*dict.fromkeys((*flags, *map(_flag, said)))])


def autoattack_library() -> Any:
    """The library.

    Raises:
        ImportError: without the extra `robustness`.
    """
    try:
        import pyautoattack
        import pyautoattack.checks
    except ModuleNotFoundError as error:
        raise ImportError(f"AutoAttack needs {LIBRARY}: pip install 'attnswap[robustness]'", name=error.name) from error
    return pyautoattack


def autoattack_note(flags: Sequence[str], options: Mapping[str, Any]) -> str:
    """What the table says beside the worst case."""
    queries = f" ({options['queries']:,} queries)" if "square" in options["attacks"] else ""
    return (
        f"worst case of {', '.join(options['attacks'])}{queries}; L-inf; {LIBRARY} {version(LIBRARY)}; flags: "
        f"{'; '.join(flags) or 'none'}"
    )


def _as_standard(run: Any, classes: int, queries: int) -> None:
    """The settings of version "standard", which fixes the attacks, too."""
    run.apgd.n_restarts = run.fab.n_restarts = run.apgd_targeted.n_restarts = 1
    run.apgd_targeted.n_target_classes = run.fab.n_target_classes = min(_TARGETS, classes - 1)
    run.square.n_queries = queries


def _flag(text: str) -> str:
    return next((flag for words, flag in _FLAGS.items() if words in text), text)


@contextmanager
def _parameters_fixed(model: Model) -> Iterator[None]:
    """Parameters that take no gradient: FAB calls ``backward``, which would fill theirs."""
    trained = [each for network in networks_of(model) for each in network.parameters() if each.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad = False
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad = True


@contextmanager
def _warnings_of_library() -> Iterator[list[str]]:
    """What the library's checks warn of, in place of the log."""
    said: list[str] = []
    logger, handler = logging.getLogger(_LOGGER), logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    propagated, disabled = logger.propagate, logger.disabled
    logger.propagate = logger.disabled = False
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.propagate, logger.disabled = propagated, disabled


@contextmanager
def _no_trace_is_lost() -> Iterator[None]:
    """The library looks for gradients in the forward pass with a trace function, and counts on from model to model."""
    trace, counted = sys.gettrace(), sys.modules[f"{LIBRARY}.checks"].funcs
    counted.update(dict.fromkeys(counted, 0))
    try:
        yield
    finally:
        sys.settrace(trace)


def _devices() -> list[int]:
    """The CUDA devices, all of which the library seeds; none before CUDA is used, which asking would begin."""
    return [*range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
