"""What is measured of an image classifier: clean, attacked, corrupted, on shifted data, and out of distribution."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from attention_modules.mechanisms.shared.held_options import other_options
from lightning_tasks.robustness.attacks.auto import LIBRARY, autoattack_library, autoattack_note, run_autoattack
from lightning_tasks.robustness.attacks.common import ATTACKS, GRADIENT, NonFiniteLogitsError, check_batch, logits_of
from lightning_tasks.robustness.attacks.table import AttackSetting
from lightning_tasks.robustness.corruptions import LIBRARIES, SMALLEST, CorruptedImages, require_library, too_small
from lightning_tasks.robustness.detection import ood_library
from lightning_tasks.robustness.evaluation import Batch, Plan
from lightning_tasks.robustness.other_data import other_data
from lightning_tasks.robustness.settings import RobustnessSettings
from lightning_tasks.robustness.subject import Subject, share_right
from lightning_tasks.robustness.tested_model import InPrecision, gradient_note, held_still, mechanisms_of
from lightning_tasks.runs.measurements import Advance, Measurement, library_versions
from lightning_tasks.runs.robustness import Row


def clean_measurement(subject: Subject) -> Measurement[Row]:
    """Accuracy on the images as they are."""

    def measure(advance: Advance) -> list[Row]:
        logits = subject.logits(subject.images, advance)
        return [Row("clean", "", "", **share_right(logits.argmax(1) == subject.labels))]

    return Measurement({"test": "clean"}, 1.0, measure, [("clean", "", "", "accuracy")])


def gradient_measurement(subject: Subject, own: bool) -> Measurement[Row]:
    """Mean L1 and L2 norm of the input gradient, at the model's own predictions where ``own``, else at the labels."""
    at = "own prediction" if own else ""

    def measure(advance: Advance) -> list[Row]:
        norms = zip(("l1", "l2"), subject.gradient_norms(own), strict=True)
        advance(1)
        return [Row("input gradient", "", at, name, norm, len(subject.labels)) for name, norm in norms]

    lines = [("input gradient", "", at, norm) for norm in ("l1", "l2")]
    return Measurement({"test": "input gradient", "at": at}, GRADIENT, measure, lines)


def attack_measurement(
    subject: Subject,
    setting: AttackSetting,
    eps: tuple[str, float],
    source: Callable[[], nn.Module] | None = None,
    source_digest: str = "",
) -> Measurement[Row]:
    """Accuracy under an attack; ``source`` gives the twin of a transfer attack, the model itself where None."""
    text, radius = eps

    def measure(advance: Advance) -> list[Row]:
        options = dict(setting.options)
        twin = subject.model if source is None else source()
        if setting.on_source is not None:
            options |= {"source": twin, "attack": ATTACKS[setting.on_source].function}
        right, note, by_gradient = [], "", ATTACKS[setting.on_source or setting.name].white_box
        for first, images, labels in subject.batches():
            if setting.seeded:
                options["seed"] = subject.seed + first
            with other_options(mechanisms_of(twin), setting.mechanism):
                note = gradient_note(twin) if by_gradient else ""
                attacked = setting.attack.function(subject.model, images, labels, eps=radius, **options)
            with held_still(subject.model, gradients=False):
                right.append(logits_of(subject.model, attacked).argmax(1) == labels)
            advance(len(images) / len(subject.images))
        norms = (math.nan, math.nan)
        if setting.attack.white_box:
            norms = subject.gradient_norms(setting.at_own_prediction)
            note = note or gradient_note(subject.model, norms[0])
        found = share_right(torch.cat(right))
        return [Row("attack", setting.label, text, **found, gradient_l1=norms[0], gradient_l2=norms[1], note=note)]

    what: dict[str, Any] = {"test": "attack", "name": setting.label, "eps": text, "radius": radius}
    what |= {"kind": setting.kind, "options": setting.options, "source": source_digest}
    what |= {"mechanism": dict(setting.mechanism)} if setting.mechanism else {}
    what |= {"versions": library_versions([LIBRARY])} if setting.on_source == "autoattack" else {}
    return Measurement(what, setting.passes, measure, [("attack", setting.label, text, "accuracy")])


def autoattack_measurement(subject: Subject, setting: AttackSetting, eps: tuple[str, float]) -> Measurement[Row]:
    """Accuracy after each attack of AutoAttack, and the worst case, with what its checks say."""
    text, radius = eps

    def measure(advance: Advance) -> list[Row]:
        options = {"batch_size": subject.batch_size, "seed": subject.seed, "advance": advance, **setting.options}
        images, labels = subject.images.to(subject.device), subject.labels.to(subject.device)
        found = run_autoattack(subject.model, images, labels, eps=radius, **options)
        first, second = subject.gradient_norms(own=False)

        def row(name: str, right: Tensor, note: str = "") -> Row:
            return Row("attack", name, text, **share_right(right), gradient_l1=first, gradient_l2=second, note=note)

        after = {name: found.standing[name] for name in setting.options["attacks"]}
        flags = [*found.flags, *filter(None, [gradient_note(subject.model)])]
        worst = row(setting.label, [*after.values()][-1], autoattack_note(flags, setting.options))
        return [worst, *(row(f"{setting.label} after {name}", right) for name, right in after.items())]

    what = {"test": "attack", "name": setting.label, "eps": text, "radius": radius}
    what |= {"kind": setting.kind, "options": setting.options}
    names = [setting.label, *(f"{setting.label} after {name}" for name in setting.options["attacks"])]
    lines = [("attack", name, text, "accuracy") for name in names]
    return Measurement({**what, "versions": library_versions([LIBRARY])}, setting.passes, measure, lines)


def smallest_measurement(subject: Subject, setting: AttackSetting) -> Measurement[Row]:
    """Accuracy at each eps under an attack that finds the smallest change, and the median of its L2 norm."""

    def measure(advance: Advance) -> list[Row]:
        options, lengths = dict(setting.options), []
        for first, images, labels in subject.batches():
            drawn = {"seed": subject.seed + first} if setting.seeded else {}
            attacked = setting.attack.function(subject.model, images, labels, **options, **drawn)
            with held_still(subject.model, gradients=False):
                stands = logits_of(subject.model, attacked).argmax(1) == labels
            length = (attacked - images).flatten(1).norm(dim=1)
            lengths.append(torch.where(stands, math.inf, length).cpu())
            advance(len(images) / len(subject.images))
        norms, note = (math.nan, math.nan), ""
        if setting.attack.white_box:
            norms = subject.gradient_norms(own=False)
            note = gradient_note(subject.model, norms[0])
        needed = torch.cat(lengths)
        median = needed.sort().values[(len(needed) - 1) // 2].item()
        rows = [Row("attack", setting.label, text, **share_right(needed > eps)) for text, eps in setting.eps]
        rows.append(Row("attack", setting.label, "", "median_l2", median, len(needed)))
        return [replace(row, gradient_l1=norms[0], gradient_l2=norms[1], note=note) for row in rows]

    what = {"test": "attack", "name": setting.label, "radii": setting.eps, "kind": setting.kind}
    lines = [("attack", setting.label, text, "accuracy") for text, _ in setting.eps]
    lines.append(("attack", setting.label, "", "median_l2"))
    return Measurement({**what, "options": setting.options}, setting.passes, measure, lines)


def corruption_measurement(subject: Subject, name: str, severity: int) -> Measurement[Row]:
    """Accuracy under a corruption."""

    def measure(advance: Advance) -> list[Row]:
        corrupted = CorruptedImages(subject.images, name, severity, subject.seed)
        right = subject.logits(corrupted, advance).argmax(1) == subject.labels
        return [Row("corruption", name, str(severity), **share_right(right))]

    what = {"test": "corruption", "name": name, "severity": severity, "versions": library_versions(LIBRARIES)}
    # To corrupt an image on the CPU takes about as long as a pass or two of a small model.
    return Measurement(what, 3.0, measure, [("corruption", name, str(severity), "accuracy")])


class ImageKind:
    """Images in [0, 1] to logits: see :class:`~lightning_tasks.robustness.evaluation.Kind`."""

    def check(self, asked: RobustnessSettings) -> None:
        """Nothing to refuse."""

    def first(self, asked: RobustnessSettings, batch: Batch, room: int | None) -> Batch:
        check_batch(*batch)
        if asked.corrupted and asked.imagenet_c is None:
            require_library(batch[0].shape)
        if any("autoattack" in (setting.name, setting.on_source) for setting in asked.attacks):
            autoattack_library()
        if asked.ood_scores is not None:
            ood_library()
        return batch[0][:room], batch[1][:room]

    def plan(self, asked: RobustnessSettings, model: nn.Module, task: Any, trainer: Any, seen: list[Batch]) -> Plan:
        images, labels = (torch.cat(parts) for parts in zip(*seen, strict=True))
        subject = Subject(model, images, labels, task.device, asked.batch_size, asked.num_workers, asked.seed)
        measurements = [clean_measurement(subject), *_attacks(asked, subject, task, trainer)]
        unmeasured = []
        computed = asked.corrupted if asked.imagenet_c is None else ()
        if min(images.shape[2:]) >= SMALLEST:
            measurements += [corruption_measurement(subject, *which) for which in computed]
        elif computed:
            why = too_small(images[0])
            rank_zero_warn(f"no corruption is measured: {why}")
            unmeasured = [Row("mean corruption", "", "", "accuracy", math.nan, note=why)]
        measurements += other_data(asked, subject, trainer)
        _warn_of_few_classes(subject)

        def one_pass() -> None:
            subject.logits(images[: asked.batch_size])

        return Plan(measurements, one_pass, len(images), asked.batch_size, [images, labels], unmeasured)


def _attacks(asked: RobustnessSettings, subject: Subject, task: Any, trainer: Any) -> list[Measurement[Row]]:
    white_box = {setting.at_own_prediction for setting in asked.attacks if setting.attack.white_box}
    measurements = [gradient_measurement(subject, own) for own in sorted(white_box)]
    for setting in asked.attacks:
        if setting.name == "autoattack":
            measurements += [autoattack_measurement(subject, setting, eps) for eps in setting.eps or asked.eps]
            continue
        if setting.attack.smallest:
            measurements.append(smallest_measurement(subject, setting))
            continue
        source, digest = None, ""
        if setting.source is None:
            with other_options(mechanisms_of(subject.model), setting.mechanism):
                pass  # what it refuses, it refuses before anything is measured
        else:
            digest = hashlib.sha256(Path(setting.source).read_bytes()).hexdigest()
            source = cache(lambda path=setting.source: _twin(path, task, trainer))
        radii = setting.eps or asked.eps
        measurements += [attack_measurement(subject, setting, eps, source, digest) for eps in radii]
    return measurements


def _twin(path: str, task: Any, trainer: Any) -> nn.Module:
    """The module in a checkpoint, swapped as it was there, where the tested one is.

    Its class is the one that the checkpoint names, else that of the tested module.
    """
    from lightning_tasks.files.load import load_module

    return InPrecision(load_module(path, type(task)).to(task.device).eval().requires_grad_(False), trainer)


def _warn_of_few_classes(subject: Subject) -> None:
    try:
        classes = subject.logits(subject.images[:1]).shape[1]
    except NonFiniteLogitsError:  # which the measurements say
        return
    seen = len(subject.labels.unique())
    if seen < min(classes, len(subject.labels)) / 4:
        rank_zero_warn(
            f"the first {len(subject.labels)} test images are of {seen} of {classes} classes only: where the loader "
            "goes through them class by class, set num_images: null, or give the test set in a mixed, fixed order"
        )
