"""Running many measurements: one after another, with a time estimate, each kept as soon as it is done."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, get_type_hints

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from tqdm import tqdm

from attention_modules import __version__
from lightning_tasks.files.digests import update_digest
from lightning_tasks.files.sources import sources_of
from lightning_tasks.json_values import number_of, of_kind, text_of
from lightning_tasks.runs.safe_files import refuse_foreign

_LIBRARIES = (
    *("torch", "torchvision", "timm", "transformers", "torchmetrics", "numpy", "pillow"),
    *("mmsegmentation", "mmengine", "mmcv", "mmcv-lite"),
)
_SHOWN = ("test", "name", "eps", "severity", "at", "share", "layer", "length", "input")
_MOST_BYTES = 1 << 32  # of the rows of all runs of a recipe
_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), range, slice),
    *(Tensor, torch.dtype, torch.device, np.ndarray, np.generic),
)
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} to go{postfix}"

Advance = Callable[[float], None]
"""Tell the progress bar that a share (of 1) of a measurement is done."""


class Timed(Protocol):
    """A row: a frozen dataclass of plain values, one of which is the time it took."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def seconds(self) -> float:
        """Time of its measurement."""


R = TypeVar("R", bound=Timed)


@dataclass(frozen=True)
class Measurement(Generic[R]):
    """Rows to measure.

    Args:
        what: the settings that they depend on, plain data; they make up the key under which the rows are kept.
        passes: about how many forward passes over all samples it takes.
        measure: does it.
        lines: what names its rows, before they are measured; empty where nobody needs it.
    """

    what: Mapping[str, Any]
    passes: float
    measure: Callable[[Advance], list[R]]
    lines: Sequence[tuple[str, str, str, str]] = ()


class RowStore(Generic[R]):
    """Rows that are done, one measurement per line of a file that is only ever appended to.

    Args:
        path: the file; it is made with the first rows.
        row: their class.

    Raises:
        UsageError: the file is a link out of its folder, no plain file, or too large to be read.
    """

    def __init__(self, path: Path, row: type[R]) -> None:
        self.path = path
        self._done: dict[str, list[R]] = {}
        if path.exists() or path.is_symlink():
            refuse_foreign(path, path.parent, _MOST_BYTES)
        lines = path.read_bytes().splitlines() if path.is_file() else []
        for number, line in enumerate(lines, start=1):
            try:
                content = json.loads(line)
                self._done[content["key"]] = [_row_of(row, each) for each in content["rows"]]
            except (ValueError, KeyError, TypeError, RecursionError):  # a run that was killed while it wrote
                rank_zero_warn(
                    f"{path}, line {number}, is cut short or of another version, or has values of other types: "
                    "measured again"
                )

    def rows(self, key: str) -> list[R] | None:
        """The rows under a key, None where there are none."""
        return self._done.get(key)

    def add(self, key: str, rows: Sequence[R]) -> None:
        """Keep rows; they are on the disk when this returns."""
        self._done[key] = list(rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"key": key, "rows": [asdict(row) for row in rows]})
        with self.path.open("a+b") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():  # a line that was cut short must not swallow this one
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else f"\n{line}"
            file.write(f"{line}\n".encode())
            file.flush()
            os.fsync(file.fileno())


def _row_of(kind: type[R], content: Mapping[str, Any]) -> R:
    """The row of these fields.

    Raises:
        TypeError: one is missing, unknown, or of another type than the class says.
        ValueError: a text in it cannot be written, or a whole number is too large for a float.
    """
    types = get_type_hints(kind)
    if strange := of_kind(content, dict).keys() - types.keys():
        raise TypeError(f"{min(strange)} is no field of a row")
    return kind(**{name: _of_type(types[name], value) for name, value in content.items()})


def _of_type(kind: Any, value: Any) -> Any:
    if kind is float:
        return number_of(value)
    return text_of(value) if kind is str else of_kind(value, kind)


def library_versions(names: Sequence[str]) -> dict[str, str]:
    """The version of each of these distributions; "" where it is not installed."""
    return {name: _version(name) for name in names}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def fingerprint(module: torch.nn.Module, settings: Any, *data: Tensor) -> str:
    """Changes with weights and buffers, layers and their options, plain settings, data, and versions of libraries.

    It changes with the files of classes that are in no installed library, and of what these import, and with public
    attributes of modules too: numbers, texts, truths, tensors, and what holds nothing else.
    """
    digest = hashlib.sha256(json.dumps([__version__, library_versions(_LIBRARIES), platform.python_version()]).encode())
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for part in module.modules() for kind in type(part).__mro__}
    plain = [(name, _plain_attributes(part)) for name, part in module.named_modules()]
    for text in (type(module).__qualname__, repr(module), repr(settings), repr(sources_of(sorted(kinds))), repr(plain)):
        digest.update(re.sub(r" at 0x[0-9a-f]+", "", text).encode() + b"\0")
    tensors = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    tensors |= dict(module.named_buffers())  # those that no checkpoint holds, such as a normalization, count too
    for name, tensor in [*tensors.items(), *((str(place), tensor) for place, tensor in enumerate(data))]:
        content = tensor.detach().cpu().contiguous()
        digest.update(f"{name}\0{tuple(content.shape)}\0{content.dtype}\0".encode())
        digest.update(content.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _plain_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Texts of numbers and digests of tensors, nested as the public attributes are that hold nothing else."""
    public = ((name, value) for name, value in sorted(vars(module).items()) if name[0] != "_")
    return tree_map(_text, {name: value for name, value in public if _is_plain(value)})  # type: ignore[no-any-return]


def _is_plain(value: Any) -> bool:
    try:
        leaves = tree_leaves(value)
        parts = (part for leaf in leaves for part in (leaf if isinstance(leaf, (set, frozenset)) else (leaf,)))
        return all(isinstance(part, _PLAIN) for part in parts)
    except RecursionError:  # of a list that holds itself
        return False


def _text(leaf: Any) -> str:
    if isinstance(leaf, (Tensor, np.ndarray, np.generic)):
        digest = hashlib.sha256(repr((leaf.dtype, tuple(leaf.shape))).encode())
        if isinstance(leaf, Tensor):
            update_digest(digest, leaf)
        else:
            digest.update(repr(leaf.tolist()).encode() if leaf.dtype.hasobject else leaf.tobytes())
        return digest.hexdigest()
    if isinstance(leaf, (set, frozenset)):
        return repr(sorted(map(_text, leaf)))
    return hex(leaf) if isinstance(leaf, int) else repr(leaf)


def measurement_key(identity: str, what: Mapping[str, Any]) -> str:
    """The key of a measurement of a model and data that have the fingerprint ``identity``."""
    return hashlib.sha256(json.dumps([identity, what], sort_keys=True, default=repr).encode()).hexdigest()


def run_suite(
    measurements: Sequence[Measurement[R]],
    identity: str,
    store: RowStore[R],
    seconds_a_pass: float,
    show: bool,
    on_rows: Callable[[list[R]], None],
    title: str = "robustness",
    between: Callable[[], None] = lambda: None,
) -> list[R]:
    """All rows in order: those in the store, the others measured, and stored one measurement after the other.

    A measurement that gives no rows is not stored: the next run tries it again.

    Args:
        measurements: what to measure.
        identity: :func:`fingerprint` of the model and the data.
        store: where rows are kept.
        seconds_a_pass: time of one forward pass over all samples, for the estimate.
        show: whether to draw a progress bar.
        on_rows: called with all rows so far after each measurement.
        title: what messages and the progress bar call it.
        between: called often, also within a measurement: what it raises ends the suite, and done rows are kept.
    """
    keys = [measurement_key(identity, each.what) for each in measurements]
    todo = sum(each.passes for key, each in zip(keys, measurements, strict=True) if store.rows(key) is None)
    count = sum(store.rows(key) is None for key in keys)
    rank_zero_info(
        f"{title}: {count} of {len(keys)} measurements to do, {len(keys) - count} done before; "
        f"about {duration(todo * seconds_a_pass)}"
    )
    rows: list[R] = []
    hidden = None if show and count else True  # None: where stderr is no terminal
    with tqdm(total=todo, bar_format=_BAR, disable=hidden, file=sys.stderr, desc=title) as bar:
        for key, each in zip(keys, measurements, strict=True):
            done = store.rows(key)
            if done is None:
                bar.set_postfix_str(" ".join(str(each.what[key]) for key in _SHOWN if key in each.what))
                started = time.monotonic()
                done = each.measure(_advance(bar, each.passes, between))
                done = [replace(row, seconds=round(time.monotonic() - started, 2)) for row in done]
                if done:
                    store.add(key, done)
            rows += done
            on_rows(rows)
            between()
    return rows


def _advance(bar: Any, passes: float, between: Callable[[], None]) -> Advance:
    def advance(share: float) -> None:
        between()
        bar.update(min(share * passes, bar.total - bar.n))  # sums of shares are rounded

    return advance


def duration(seconds: float) -> str:
    """A time for people: "40 s", "12 min", "3.5 h"; nan where it is not known."""
    if math.isnan(seconds):
        return "a time not known"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
