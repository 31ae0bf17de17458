"""What a robustness table is to hold: the arguments of `RobustnessEvaluation`, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attention_modules.mechanisms.shared.options import check_integer, check_number
from lightning_tasks.robustness.attacks.table import AttackSetting, read_attacks, read_eps
from lightning_tasks.robustness.class_folders import class_names, found_folder
from lightning_tasks.robustness.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, SEVERITIES, check_corruption
from lightning_tasks.robustness.detection import check_scores
from lightning_tasks.robustness.outside import Outside
from lightning_tasks.robustness.released_corruptions import released_folder
from lightning_tasks.robustness.scores import ALEXNET, Baseline, read_baseline
from lightning_tasks.runs.metric_names import robustness_name


@dataclass(frozen=True)
class RobustnessSettings:
    """The arguments of :class:`~lightning_tasks.callbacks.RobustnessEvaluation`, which says what each of them means.

    Args:
        corrupted: each corruption with each severity.
        baselines: what mCE is relative to.
    """

    num_images: int | None
    attacks: Sequence[AttackSetting]
    eps: Sequence[tuple[str, float]]
    corrupted: Sequence[tuple[str, int]]
    baselines: Sequence[Baseline]
    imagenet_c: str | None
    shifts: dict[str, str]
    ood: dict[str, Outside]
    ood_scores: Sequence[str] | None
    ood_fit_images: int | None
    wnids: str | None
    word_swap: float | None
    word_swap_token: int
    word_swap_keep: Sequence[int]
    batch_size: int
    num_workers: int
    seed: int


def read_settings(
    *,
    num_images: int | None,
    attacks: Sequence[str | dict[str, Any]] | None,
    eps: Sequence[str | float] | None,
    corruptions: Sequence[str] | Literal["common", "all"],
    severities: Sequence[int] | None,
    baseline: str | Sequence[str] | None,
    imagenet_c: str | None,
    shifts: dict[str, str] | None,
    ood: dict[str, Any] | None,
    ood_scores: Sequence[str] | None,
    ood_fit_images: int | None,
    wnids: str | None,
    word_swap: float | None,
    word_swap_token: int,
    word_swap_keep: Sequence[int] | None,
    batch_size: int,
    num_workers: int,
    seed: int,
) -> RobustnessSettings:
    """The settings, with what was left out filled in.

    Raises:
        ValueError: for what is unknown, out of its limits, or a file that is not there.
    """
    if num_images is not None:
        check_integer("num_images", num_images, 1)
    check_integer("batch_size", batch_size, 1)
    for name, value in (("num_workers", num_workers), ("seed", seed), ("word_swap_token", word_swap_token)):
        check_integer(name, value, 0)
    for value in word_swap_keep or ():
        check_integer("an id of word_swap_keep", value, 0)
    for name, given in (("attacks", attacks), ("eps", eps)):
        if isinstance(given, str):
            raise ValueError(f"{name} must be a list, got {given!r}: give [{given!r}]")
    chosen = read_attacks(["fgsm", "pgd"] if attacks is None else list(attacks))
    radii = [read_eps(each) for each in (["1/255", "4/255"] if eps is None else eps)]
    if any(not each.eps for each in chosen) and not radii:
        raise ValueError("eps is empty, and attacks need a radius: give eps=['4/255'], say, or attacks=[] for none")
    known = corruptions in ("common", "all") if isinstance(corruptions, str) else _are_names(corruptions)
    if not known:
        raise ValueError(f"corruptions must be 'common', 'all' or a list of names, empty for none; got {corruptions!r}")
    if isinstance(corruptions, str):
        corruptions = [*CORRUPTIONS, *(EXTRA_CORRUPTIONS if corruptions == "all" else ())]
    levels = list(SEVERITIES if severities is None else severities)
    if corruptions and not levels:
        raise ValueError("severities is empty, and corruptions need one: give severities=[3], say, or corruptions=[]")
    corrupted = [(name, severity) for name in corruptions for severity in levels]
    for each in corrupted:
        check_corruption(*each)
    for name, given in (("eps", [text for text, _ in radii]), ("corruptions", corruptions), ("severities", levels)):
        if twice := _twice(given):  # it would count twice in means
            raise ValueError(f"{name} has {twice[0]!r} twice: give each once")
    for names in ([setting.label for setting in chosen], ["clean", "mean corruption", *(shifts or {})]):
        if twice := _twice([robustness_name(name) for name in names]):  # the later would be logged over the first
            raise ValueError(f"two rows would be logged as {twice[0]!r}: give the attack or the shift another name")
    named = [baseline] if isinstance(baseline, str) else baseline or ()
    if not _are_names(named):
        raise ValueError(f"baseline must be a run's table (its path), {ALEXNET!r}, or a list of both, got {baseline!r}")
    if len({each == ALEXNET for each in named}) < len(named):
        raise ValueError(f"baseline is {named}: give at most one run's table, and {ALEXNET!r}")
    baselines = [read_baseline(each, corrupted) for each in named]
    if imagenet_c is not None:
        if not isinstance(imagenet_c, (str, Path)):
            raise ValueError(f"imagenet_c must be the path of a folder, got {imagenet_c!r}")
        if not corrupted:
            raise ValueError("imagenet_c is given, and corruptions is empty: give corruptions='common', say")
        imagenet_c = found_folder("imagenet_c", str(imagenet_c))
        for each in corrupted:
            released_folder(imagenet_c, *each)
    shifted = {name: found_folder(f"shifts {name!r}", root) for name, root in (shifts or {}).items()}
    for root in shifted.values():
        class_names(root)
    outside = {name: Outside.read(name, given) for name, given in (ood or {}).items()}
    if ood_scores is not None:
        check_scores(ood_scores)
        if not outside:
            raise ValueError(f"ood_scores is {list(ood_scores)}, and ood names nothing that is to be told: give ood")
    if ood_fit_images is not None:
        check_integer("ood_fit_images", ood_fit_images, 1)
    for setting in chosen:
        if setting.source is not None and not Path(setting.source).is_file():
            raise ValueError(f"the attack 'transfer' has source {setting.source!r}: no such file")
    if word_swap is not None:
        check_number("word_swap, the share of words that are swapped,", word_swap, 0.0, 1.0)
    return RobustnessSettings(
        num_images=num_images,
        attacks=chosen,
        eps=radii,
        corrupted=corrupted,
        baselines=baselines,
        imagenet_c=imagenet_c,
        shifts=shifted,
        ood=outside,
        ood_scores=None if ood_scores is None else tuple(ood_scores),
        ood_fit_images=ood_fit_images,
        wnids=wnids,
        word_swap=None if word_swap is None else float(word_swap),
        word_swap_token=word_swap_token,
        word_swap_keep=[1] if word_swap_keep is None else list(word_swap_keep),
        batch_size=batch_size,
        num_workers=num_workers,
        seed=seed,
    )


def _twice(given: Sequence[Any]) -> list[Any]:
    return [each for place, each in enumerate(given) if each in given[:place]]


def _are_names(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, bytes) and all(isinstance(each, str) for each in value)
