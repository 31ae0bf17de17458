"""What a GPU takes for our mechanisms and tasks, and for what users would take in their place.

Run from the repository's root: ``python -m benchmarks.gpu PART --output FOLDER``, for the parts rpc, mechanisms, memory
and training; ``benchmarks/gpu_day.sh`` runs all. Each writes FOLDER/PART.csv, a row as soon as it is measured, and
goes on after the last row when it is given again. ``--dry`` measures tiny shapes on the CPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path

import torch

from attention_modules import AttentionMechanism, available_mechanisms
from benchmarks.common import alternate, gpu_peak_memory, gpu_seconds, machine, peak_memory
from benchmarks.contests import Contest, Images, Text
from benchmarks.mechanisms import built_for, call, inputs
from benchmarks.peers import WARM_UP, Setting, take_turns
from benchmarks.rows import OK, LeftOutError, Rows
from benchmarks.rpc import CASES, MODES, Case, attentions_of, calls

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# At the shapes of benchmarks/rpc.py the host is slower than the GPU; these keep it busy.
LARGE = (Case("ViT-B", (64, 12, 197, 64), False, 9), Case("LM 4096, causal", (4, 12, 4096, 64), True, 5))
LENGTHS = (1_024, 4_096, 16_384, 65_536)
LEARNS_A_MATRIX = ("dam", "position_bias", "scaled")  # by the number of tokens: these claim no linear memory
SLOW = 0.1  # seconds of a call
PATIENCE = 10.0  # seconds that one call of the part `memory` may take


@dataclass(frozen=True)
class Bench:
    """A device, how its time and memory are measured, and whether shapes are tiny."""

    dry: bool

    @property
    def device(self) -> str:
        """The GPU's name for torch; the CPU's in a dry run."""
        return "cpu" if self.dry else "cuda"

    def seconds(self, timed: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, float]:
        """Medians of calls that take turns; fewer turns where one takes long."""
        if self.dry:
            return alternate(timed, 1)
        longest = max(gpu_seconds(each, number=1) for each in timed.values())
        return alternate(timed, 3 if longest > SLOW else repeats, seconds_of=gpu_seconds)

    def peak(self, of: Callable[[], None]) -> float | None:
        """MiB, or None where it cannot be measured."""
        return peak_memory(of) if self.dry else gpu_peak_memory(of)

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """Shapes of attention."""
        if self.dry:
            return (Case("tiny", (1, 2, 16, 8), False, 1), Case("tiny, causal", (1, 2, 16, 8), True, 1))
        return (*CASES, *LARGE)

    @cached_property
    def names(self) -> list[str]:
        """Mechanisms beside plain attention."""
        return ["gated", "sinkhorn"] if self.dry else [name for name in available_mechanisms() if name != "softmax"]


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def rpc(rows: Rows, bench: Bench) -> None:
    """RPC with n = 4 beside n passes of the fused kernel."""
    for case in bench.cases:
        for dtype in DTYPES:
            for mode in MODES:
                key = {"shape": case.name, "B, H, N, d": str(case.shape), "dtype": dtype, "mode": mode}
                rows.measure(key, partial(_rpc_row, bench, case, dtype, mode))
        torch.compiler.reset()


def _rpc_row(bench: Bench, case: Case, dtype: str, mode: str) -> dict[str, str]:
    backward = mode != "forward"
    # The naive form holds every map: left out where these would fill the memory.
    attentions = attentions_of(case, compiled=not bench.dry)
    if case.name == "LM 4096, causal":
        del attentions["naive"]
    timed = calls(case, backward, attentions, bench.device, DTYPES[dtype])
    seconds = bench.seconds(timed, case.repeats)
    peaks = {name: bench.peak(timed[name]) for name in timed}
    found = {f"{name} ms": number(1e3 * seconds[name], ".4f") for name in timed}
    return found | {f"{name} MiB": number(peaks[name], ".1f") for name in timed}


def mechanisms(rows: Rows, bench: Bench) -> None:
    """Every mechanism beside plain attention."""
    for dtype, case, name in product(DTYPES, bench.cases, bench.names):
        key = {"shape": case.name, "B, H, N, d": str(case.shape), "dtype": dtype, "mechanism": name}
        rows.measure(key, partial(_mechanism_row, bench, case, dtype, name))


def _on(bench: Bench, name: str, case: Case, dtype: str) -> AttentionMechanism:
    return built_for(name, case).to(bench.device, DTYPES[dtype])


def _mechanism_row(bench: Bench, case: Case, dtype: str, name: str) -> dict[str, str]:
    built = {each: _on(bench, each, case, dtype) for each in ("softmax", name)}
    if case.is_causal and not built[name].row_masks:
        raise LeftOutError("not causal")
    found = {}
    for mode in MODES:
        timed: dict[str, Callable[[], None]] = {
            each: partial(
                call, module, inputs(case, module, bench.device, DTYPES[dtype]), case.is_causal, mode != "forward"
            )
            for each, module in built.items()
        }
        seconds = bench.seconds(timed, case.repeats)
        found[f"{mode} ms"] = number(1e3 * seconds[name], ".4f")
        found[f"plain, {mode} ms"] = number(1e3 * seconds["softmax"], ".4f")
    return found | {
        "MiB": number(bench.peak(timed[name]), ".1f"),
        "plain MiB": number(bench.peak(timed["softmax"]), ".1f"),
    }


def memory(rows: Rows, bench: Bench) -> None:
    """Peak memory by the number of tokens, one head of a batch of one; a length that would take long is left out."""
    names = [name for name in bench.names if name not in LEARNS_A_MATRIX]
    names = ["softmax", "rpc", *(name for name in names if name != "rpc")]
    for name, mode in product(names, MODES):
        taken = 0.0
        for tokens in (64, 128) if bench.dry else LENGTHS:
            key = {"mechanism": name, "mode": mode, "tokens": str(tokens)}
            row = rows.measure(key, partial(_memory_row, bench, name, mode, tokens, 16 * taken))
            if row["state"] != OK:
                break  # longer ones do no better
            taken = float(row["seconds"])


def _memory_row(bench: Bench, name: str, mode: str, tokens: int, expected: float) -> dict[str, str]:
    if expected > PATIENCE:
        raise LeftOutError(f"would take about {expected:.0f} s")
    case = Case("memory", (1, 1, tokens, 64), False, 1)
    module = _on(bench, name, case, "bf16")
    run = partial(call, module, inputs(case, module, bench.device, torch.bfloat16), False, mode != "forward")
    if not expected:
        run()  # the first call loads kernels
    start = time.perf_counter()
    peak = bench.peak(run)  # waits until the device is done
    return {"MiB": number(peak, ".2f"), "seconds": f"{time.perf_counter() - start:.6f}"}


def training(rows: Rows, bench: Bench) -> None:
    """Tokens and images per second of our tasks and of their peers; eager rows first, as compiling takes long."""
    for compiled in ("no",) if bench.dry else ("no", "yes"):
        for peer, contest, amount in contests(bench):
            key = {"compared": contest.name, "peer": peer, "dtype": "bf16", "compiled": compiled}
            setting = Setting(bench.device, bf16=True, compiled=compiled == "yes")
            rows.measure(key, partial(_training_row, bench, contest, amount, setting))


def contests(bench: Bench) -> Iterator[tuple[str, Contest, int]]:
    """The peer's name, the contest, and how many tokens or images a step has."""
    gpt2 = Text(12, 1_024, 50_304, 16, dim=768, heads=12)
    texts = {f"GPT-2's size, {gpt2}": gpt2, "small": Text(16, 256, 33_278, 32)}
    images = {"DeiT-tiny": Images(224, 256), "DeiT-small": Images(224, 256, "deit_small_patch16_224")}
    if bench.dry:
        texts, images = {"tiny": Text(1, 8, 50, 2)}, {"tiny": Images(32, 2)}
    for name, text in texts.items():
        words = f"language model, {text if name == 'small' else name}"
        for peer, task in (
            ("gpt2", partial(text.task, tied=True)),
            ("litgpt", partial(text.task, positions="sinusoidal")),
        ):
            yield peer, Contest(words, task, getattr(text, peer), text.batch, 30, 1.0), text.amount
    for name, image in images.items():
        words = f"{name}, {image.size} pixels, batch {image.count}"
        yield "timm", Contest(words, image.classification, image.timm, image.classified, 30, 1.0), image.amount


def _training_row(bench: Bench, contest: Contest, amount: int, setting: Setting) -> dict[str, str]:
    rounds = 2 if bench.dry else contest.rounds
    turns, task, model = take_turns(contest, rounds, setting)
    first = WARM_UP + (0 if bench.dry else 5)  # kernels are chosen and memory is asked for in the first steps
    ours, theirs = ([taken[0] for taken in each[first:]] for each in (turns.ours, turns.theirs))
    ratios = [b / a for a, b in zip(ours, theirs, strict=False)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    sizes = [sum(each.numel() for each in of.parameters() if each.requires_grad) for of in (task, model)]
    return {
        "parameters": str(sizes[0]),
        "their parameters": str(sizes[1]),
        "a second": f"{amount / statistics.median(ours):.1f}",
        "theirs a second": f"{amount / statistics.median(theirs):.1f}",
        "ratio": f"{middle:.4f}",
        "lower quartile": f"{low:.4f}",
        "upper quartile": f"{high:.4f}",
        "rounds": str(len(ratios)),
    }


LOGGED = (
    "train/loss",
    "val/loss",
    "val/perplexity",
    "locater/penalty",
    "val/attention/entropy/mean",
    "val/attention/effective_support/mean",
    "qk_spectrum/scale/mean",
    "qk_spectrum/mean/mean",
    "qk_spectrum/variance/mean",
)


def locater(runs: Path, path: Path) -> None:
    """Write what the runs below a folder logged, one folder for each: run, step, metric, value."""
    values: dict[tuple[str, int, str], str] = {}
    for log in sorted(runs.glob("*/**/metrics.csv")):
        with log.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                for name in LOGGED:
                    if row.get(name):
                        values[log.relative_to(runs).parts[0], int(row["step"]), name] = row[name]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("run", "step", "metric", "value"))
        writer.writerows((*key, value) for key, value in sorted(values.items()))


PARTS: dict[str, Callable[[Rows, Bench], None]] = {
    "rpc": rpc,
    "mechanisms": mechanisms,
    "memory": memory,
    "training": training,
}


def about() -> dict[str, str]:
    """What the numbers were measured with."""
    found = {"machine": machine(), "system": platform.platform(), "GPU": "none"}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"GPU": properties.name, "GPU memory": f"{properties.total_memory / 2**30:.0f} GiB"}
        found["CUDA"] = str(torch.version.cuda)
    for package in ("attnswap", "lightning", "timm", "transformers", "litgpt", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def main(args: list[str] | None = None) -> None:
    """Measure a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "locater", "about"], help="what to measure or write")
    parser.add_argument("--output", type=Path, required=True, help="folder for the rows")
    parser.add_argument("--runs", type=Path, help="of the part locater: the folder of its runs")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU")
    options = parser.parse_args(args)
    if options.part in PARTS and not options.dry and not torch.cuda.is_available():
        parser.error("no CUDA device was found; --dry measures tiny shapes on the CPU")
    options.output.mkdir(parents=True, exist_ok=True)
    if options.part == "about":
        text = json.dumps(about(), indent=1)
        (options.output / "about.json").write_text(text + "\n", encoding="utf-8")
        return
    if options.part == "locater":
        if options.runs is None:
            parser.error("the part locater needs --runs FOLDER")
        locater(options.runs, options.output / "locater.csv")
        return
    PARTS[options.part](Rows(options.output / f"{options.part}.csv"), Bench(options.dry))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the row under way is then measured another time
    main()
