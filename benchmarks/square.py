"""Our Square beside the library's: what each leaves of the same images, and what three of the library's rules do.

A further difference is not tried: the library draws one square a query for all images, ours one for each image.

Run from the repository's root: ``python -m benchmarks.square CHECKPOINT``, with the extra ``robustness``, CIFAR-10
under ``$ATTNSWAP_DATA`` and a checkpoint of an ``ImageClassificationTask`` on it, as of
``attnswap fit rpc/cifar10_vit``.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from attnswap.datamodules import CIFAR10DataModule
from torch import Tensor

from benchmarks.common import write_results
from lightning_tasks import ImageClassificationTask
from lightning_tasks.robustness.attacks.auto import autoattack_library, run_autoattack

OURS = importlib.import_module("lightning_tasks.robustness.attacks.square")
square_share = OURS.square_share
Attack = Callable[..., Tensor]


def inner(length: int, side: int, batch: int, generator: torch.Generator) -> Tensor:
    """As `_inside`, with the library's places: the last one is never drawn, so that squares end before the border."""
    first = torch.randint(0, max(length - side, 1), (batch, 1), generator=generator)
    places = torch.arange(length)
    return (places >= first) & (places < first + side)


def as_of_ten_thousand(initial_share: float, query: int, queries: int) -> float:
    """As `square_share`, with the published schedule as it is, whatever the number of queries."""
    return square_share(initial_share, query, 10_000)


LIBRARY = {
    "schedule": ("square_share", as_of_ten_thousand),
    "places": ("_inside", inner),
    "draws": ("_REDRAWS", 1),  # a square once, even if it changes nothing
}


def ours(*given: Any, rules: Sequence[str] = (), **options: Any) -> Tensor:
    """Our Square with some rules of the library."""
    with ExitStack() as stack:
        for rule in rules:
            stack.enter_context(patch.object(OURS, *LIBRARY[rule]))
        return OURS.square(*given, **options)


def library(*given: Any, **options: Any) -> Tensor:
    """The library's Square, as AutoAttack's standard version has it."""
    return run_autoattack(*given, attacks=["square"], **options).images


ATTACKS: dict[str, Attack] = {
    "ours": ours,
    **{f"ours, {rule} of the library": partial(ours, rules=[rule]) for rule in LIBRARY},
    "ours, all three": partial(ours, rules=[*LIBRARY]),
    "pyautoattack": library,
}


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.square", description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--made_by", default="attnswap fit rpc/cifar10_vit", help="what made the checkpoint, as a note")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--eps", type=float, default=1.0, help="of 255")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds of the search")
    parser.add_argument("--name", default="square", help="of the files in benchmarks/results")
    options = parser.parse_args(arguments)
    for name in ("images", "seeds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, and must be at least 1")
    autoattack_library()  # its search comes last, and the extra is to be missed first
    model = ImageClassificationTask.load_from_checkpoint(options.checkpoint, map_location="cpu").eval()
    data = CIFAR10DataModule(batch_size=options.images, num_workers=0)
    data.prepare_data()
    data.setup("test")
    images, labels = next(iter(data.test_dataloader()))
    standing: dict[str, list[Tensor]] = {}
    for name, attack in ATTACKS.items():
        for seed in range(options.seeds):
            points = attack(model, images, labels, eps=options.eps / 255, queries=options.queries, seed=seed)
            with torch.no_grad():
                standing.setdefault(name, []).append(model(points).argmax(1) == labels)
            print(f"{name}, seed {seed}: {standing[name][-1].sum()} of {len(labels)}", file=sys.stderr, flush=True)
    first = torch.stack(standing["pyautoattack"])
    rows = []
    for name, found in standing.items():
        each = torch.stack(found)
        rows.append(
            {
                "Square": name,
                "left, %, by seed": ", ".join(f"{100 * share:.1f}" for share in each.double().mean(1).tolist()),
                "mean": f"{100 * each.double().mean():.1f}",
                "to pyautoattack, points": f"{100 * (each.double().mean() - first.double().mean()):+.1f}",
            }
        )
    given = {name: f"{getattr(options, name):g}" for name in ("images", "queries", "eps", "seeds")}
    texts = {name: getattr(options, name) for name in ("made_by", "name")}
    given |= {name: shlex.quote(text) for name, text in texts.items() if text != parser.get_default(name)}
    command = " ".join(
        ["python -m benchmarks.square CHECKPOINT", *(f"--{name} {text}" for name, text in given.items())]
    )
    title = f"Square at {options.eps:g}/255, {options.queries:,} queries, {len(labels)} test images of CIFAR-10"
    with torch.no_grad():
        clean = (model(images).argmax(1) == labels).double().mean()
    notes = f"The checkpoint is that of `{options.made_by}`, which is right on {100 * clean:.1f}% of these images."
    print(write_results(options.name, title, command, rows, notes))


if __name__ == "__main__":
    main()
