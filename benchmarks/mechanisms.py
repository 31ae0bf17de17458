"""Time and memory of every mechanism beside plain attention, alone and inside a training step of DeiT-tiny.

Run from the repository's root: ``python -m benchmarks.mechanisms`` (about 13 minutes on two cores).
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from functools import partial

import timm
import torch
from torch import Tensor, nn

from attention_modules import AttentionMechanism, AttentionSpec, available_mechanisms, build_mechanism, swap_attention
from benchmarks.common import alternate, peak_memory, write_results
from benchmarks.rpc import CASES, Case

OPTIONS: dict[str, dict[str, object]] = {"scaled": {"variant": "scalar"}, "rpc": {"iterations": 4}}
AT_ONCE = 4  # mechanisms that take turns with plain attention, so that a drifting machine drifts for both
STEP = (16, 15)  # images of a training step, and how often it is timed


def inputs(
    case: Case, mechanism: AttentionMechanism, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Queries, keys, values, and what else the mechanism needs, that ask for gradients."""
    batch, heads, tokens, width = case.shape
    shapes = {name: case.shape for name in ("q", "k", "v", *mechanism.needs)}
    generator = torch.Generator().manual_seed(0)
    given = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if "x" in given:
        given["x"] = torch.randn(batch, tokens, heads * width, generator=generator)
    return {name: x.to(device, dtype).requires_grad_() for name, x in given.items()}


def built_for(name: str, case: Case) -> AttentionMechanism:
    """The mechanism for a shape, in training mode."""
    _, heads, tokens, width = case.shape
    spec = AttentionSpec(heads * width, heads, width, num_tokens=tokens)
    return build_mechanism(name, spec, **OPTIONS.get(name, {})).train()


def call(mechanism: AttentionMechanism, given: dict[str, Tensor], is_causal: bool, backward: bool) -> None:
    """Forward, or forward and backward."""
    if not backward:
        with torch.no_grad():
            mechanism(**given, is_causal=is_causal)
        return
    out = mechanism(**given, is_causal=is_causal)
    wanted = [*given.values(), *mechanism.parameters()]
    torch.autograd.grad(out.sum(), wanted, allow_unused=True)


def measure(case: Case, names: list[str]) -> dict[str, tuple[str, str, str]]:
    """By mechanism, the ratios of forward and of both to plain attention, and the peak of both in MiB."""
    built = {name: built_for(name, case) for name in names}
    built = {name: each for name, each in built.items() if each.row_masks or not case.is_causal}
    plain = built_for("softmax", case)
    found: dict[str, tuple[str, str, str]] = {}
    waiting = list(built)
    while waiting:
        group, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
        ratios: dict[str, list[str]] = {name: [] for name in group}
        for backward in (False, True):
            calls: dict[str, Callable[[], None]] = {
                name: partial(call, each, inputs(case, each), case.is_causal, backward)
                for name, each in [("plain attention", plain), *((name, built[name]) for name in group)]
            }
            seconds = alternate(calls, case.repeats, cpu_time=False)
            for name in group:
                ratios[name].append(f"{seconds[name] / seconds['plain attention']:.2f}")
        for name in group:
            peak = peak_memory(partial(call, built[name], inputs(case, built[name]), case.is_causal, True))
            found[name] = (*ratios[name], "not measured" if peak is None else f"{peak:.0f}")
            print(case.name, name, *found[name], flush=True)
        gc.collect()
    return found


def step_of(name: str) -> Callable[[], None]:
    """A training step of DeiT-tiny with a mechanism in every layer."""
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", num_classes=1000).train()
    swap_attention(model, name, **OPTIONS.get(name, {}))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    images, labels = torch.randn(STEP[0], 3, 224, 224), torch.randint(1000, (STEP[0],))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def steps(names: list[str]) -> dict[str, str]:
    """By mechanism, the ratio of a training step to that with plain attention."""
    found = {}
    waiting = list(names)
    while waiting:
        group, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
        seconds = alternate({name: step_of(name) for name in ("softmax", *group)}, STEP[1], cpu_time=False)
        for name in group:
            found[name] = f"{seconds[name] / seconds['softmax']:.2f}"
            print("step", name, found[name], flush=True)
        gc.collect()
    return found


def main(args: list[str] | None = None) -> None:
    """Measure, print and write ``benchmarks/results/mechanisms.md`` and ``.csv``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--only", nargs="+", choices=available_mechanisms(), help="these alone; writes no file")
    options = parser.parse_args(args)
    torch.set_num_threads(options.threads)
    given = sys.argv[1:] if args is None else args
    names = options.only or [name for name in available_mechanisms() if name != "softmax"]
    rows: dict[str, dict[str, object]] = {name: {"mechanism": name} for name in names}
    ratios = steps(names)
    for name in names:
        rows[name]["step of DeiT-tiny"] = ratios[name]
    for case in CASES:
        found = measure(case, names)
        for name in names:
            columns = ("forward", "both", "MiB")
            values = found.get(name, ("not causal",) * 3)
            rows[name] |= {f"{case.name} {column}": value for column, value in zip(columns, values, strict=True)}
        if options.only is None:  # after each shape: an interrupted run keeps what it has
            shapes = "; ".join(f"{each.name} {each.shape}" for each in CASES)
            notes = (
                "Ratios of median times to plain attention (scaled_dot_product_attention), float32, "
                f"{options.threads} threads, the calls of a group of {AT_ONCE} taking turns with it in one process. "
                f"Step: forward, backward and AdamW on {STEP[0]} images, the mechanism in all 12 layers. Shapes "
                f"(B, H, N, d): {shapes}. Both: forward and backward. MiB: rise of resident memory during one call of "
                "both. rpc makes 4 passes; scaled is its scalar form."
            )
            command = " ".join(["python -m benchmarks.mechanisms", *given])
            write_results("mechanisms", "Mechanisms beside plain attention", command, list(rows.values()), notes)


if __name__ == "__main__":
    main()
