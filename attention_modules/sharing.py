"""Values of one attention layer that others read within the same forward pass.

A mechanism that asks for ``first_value`` or ``previous_value`` reads what another layer of its stack has projected in
this very pass. Nothing is kept between passes: a pass begins and ends with the forward of a module that holds the whole
stack, and what no layer has given in it is an error, never an earlier value.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

FIRST, PREVIOUS = "first_value", "previous_value"
READS = (FIRST, PREVIOUS)
# What torch.compile, FSDP1 and activation checkpointing put into the names of modules.
WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
_COMPILED = (
    "; where blocks that are compiled one by one are computed again during backward, compile the model as a whole, or "
    "checkpoint nothing"
)
_CHANGED = "if layers were copied, replaced or moved since, restore the model and swap it again"
_ONE_BY_ONE = (
    "let a module that holds the whole stack, and runs each of its layers once, be called for each input in turn"
)


class SharedValueError(RuntimeError):
    """A layer asks for another layer's values, and this forward pass has none."""


class _Pass:
    """What the layers of one stack gave in one forward pass."""

    def __init__(self, call: FrameType | None = None) -> None:
        self.task = _graph_task()
        self.thread = _thread()
        self.part = _checkpoint_frame()  # of activation checkpointing, which computes this pass again as a whole
        self.call = call  # of the module's forward; None where it cannot be asked for, or the pass ends by itself
        self.values: dict[int, Tensor] = {}
        self.readers: dict[int, list[int]] = {}  # of these values, by whose they are

    def runs(self) -> bool:
        """Whether its forward still runs: KeyboardInterrupt ends one without its hooks."""
        if self.call is None or torch.compiler.is_compiling() or self.thread != _thread():
            return True
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self.call:
            frame = frame.f_back
        return frame is not None


class SharedValues:
    """The values that the layers of one stack share, pass by pass.

    Args:
        names: the stack's layers in their order.
        readers: positions of those that read others, by the position of whose values they read.
    """

    def __init__(self, names: Sequence[str], readers: Mapping[int, Sequence[int]]) -> None:
        self.names = list(names)
        self.readers = {source: tuple(positions) for source, positions in readers.items()}
        self.passes: list[_Pass] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "passes": []}  # a copy of the model has no pass of its own yet

    def begin(self, module: nn.Module, args: object) -> None:
        """A forward of a module that holds the stack begins: a pre-hook."""
        self.drop_interrupted()
        self.passes.append(_Pass(None if torch.compiler.is_compiling() else sys._getframe(1)))

    def drop_interrupted(self) -> None:
        """Forget the passes that ended without their hooks."""
        while self.passes and not self.passes[-1].runs():
            self.passes.pop()

    def end(self, module: nn.Module, args: object, output: object) -> None:
        """That forward ends, by an error too: a hook."""
        if self.passes:
            self.passes.pop()


@dataclass(eq=False)
class Link:
    """A layer's place among those that share values."""

    shared: SharedValues
    position: int

    def exchange(self, needs: Collection[str], v: Tensor) -> dict[str, Tensor | None]:
        """Give this layer's values where others read them, and take what its mechanism reads.

        Args:
            needs: of the mechanism.
            v: this layer's values ``[B, H, M, d]``.

        Returns:
            Those of ``first_value`` and ``previous_value`` that are needed, in the precision and on the device of
            ``v``; None in the stack's first layer.

        Raises:
            SharedValueError: if the other layer did not run in this pass, or gave values of another shape; if a value
                would be read twice, or is replaced before all have read it: it may be that of another input.
        """
        sources = {name: 0 if name == FIRST else self.position - 1 for name in READS if name in needs}
        if self.position == 0:
            self._give(v)
            return dict.fromkeys(sources)
        taken = {source: self._take(source, v) for source in dict.fromkeys(sources.values())}
        self._give(v)
        return {name: taken[source] for name, source in sources.items()}

    def given(self) -> dict[int, Tensor] | None:
        """What the layers of the stack have given so far in the pass that runs, by their positions; else None."""
        found = self._running()
        return None if found is None else dict(found.values)

    @contextmanager
    def held(self, values: Mapping[int, Tensor]) -> Iterator[None]:
        """A pass in which other layers gave these values: for a call of this layer alone."""
        held = _Pass()
        held.values.update({at: value for at, value in values.items() if at != self.position})
        self.shared.passes.append(held)
        try:
            yield
        finally:
            self.shared.passes.remove(held)

    def _give(self, v: Tensor) -> None:
        expected = self.shared.readers.get(self.position, ())
        found = self._running() if expected else None
        if found is None:
            if expected and _graph_task() != -1 and _checkpoint_frame() is None:
                raise SharedValueError(
                    f"{self._name(self.position)} is computed again during backward, after {self._name(expected[0])} "
                    "has read values of its first run, which have no gradient: checkpoint with use_reentrant=False, "
                    "and PyTorch 2.8 or newer, or checkpoint nothing"
                )
            return
        if self.position in found.values:
            for reader in expected:
                if reader not in found.readers[self.position]:
                    raise SharedValueError(
                        f"{self._name(self.position)} runs a second time in this forward pass before "
                        f"{self._name(reader)} has read what it gave the first time: {_ONE_BY_ONE}"
                    )
        found.values[self.position] = v
        found.readers[self.position] = []

    def _take(self, source: int, v: Tensor) -> Tensor:
        found = self._running()
        if found is None and _graph_task() != -1:
            value = self._recalled(source)
        elif found is None:
            raise SharedValueError(
                f"{self._name(self.position)} reads the values of {self._name(source)}, and no module that holds both "
                f"was called: call the model itself, not its blocks one by one; {_CHANGED}{_COMPILED}"
            )
        elif source in found.values:
            value = found.values[source]
            readers = found.readers.setdefault(source, [])
            if self.position in readers:
                raise SharedValueError(
                    f"{self._name(self.position)} runs a second time in this forward pass, and would read once more "
                    f"what {self._name(source)} gave, perhaps of another input: {_ONE_BY_ONE}"
                )
            readers.append(self.position)
            self._remember(source, value, found.part)
        else:
            raise SharedValueError(
                f"{self._name(self.position)} reads the values of {self._name(source)}, which has not run in this "
                f"forward pass: run the model from its beginning, with all its layers; {_CHANGED}"
            )
        if value.shape != v.shape:
            raise SharedValueError(
                f"{self._name(self.position)} has values of shape {tuple(v.shape)} and reads those of "
                f"{self._name(source)}, of shape {tuple(value.shape)}: where a key-value cache keeps only a window of "
                "one of them, pass use_cache=False; else leave it out of the swap"
            )
        return value.to(v)  # autocast may be off in one layer, and layers may lie on several devices

    def _name(self, position: int) -> str:
        return repr(self.shared.names[position])

    def _running(self) -> _Pass | None:
        """The pass that runs; None outside one, and where backward computes a part of an earlier one again."""
        passes = self.shared.passes
        self.shared.drop_interrupted()
        if not passes or passes[-1].task != _graph_task():
            return None
        thread = _thread()
        if thread and passes[-1].thread not in (0, thread):
            raise SharedValueError(
                f"{self._name(self.position)} shares values with other layers, and two threads run the model at once: "
                "give each thread a copy of it"
            )
        return passes[-1]

    def _remember(self, source: int, value: Tensor, part: Any) -> None:
        """Leave what was read with the part of the pass that activation checkpointing will compute again."""
        frame = _checkpoint_frame()
        if frame is not part:
            kept = vars(frame).setdefault("attnswap_values", {})
            if kept.setdefault((self.shared, self.position, source), value) is not value:
                raise SharedValueError(
                    f"{self._name(self.position)} runs twice in one part of the model that activation checkpointing "
                    "computes again, with other values each time: checkpoint smaller parts"
                )

    def _recalled(self, source: int) -> Tensor:
        frame = _checkpoint_frame()
        value = (
            None if frame is None else vars(frame).get("attnswap_values", {}).get((self.shared, self.position, source))
        )
        if value is None:
            cure = (
                "checkpoint with use_reentrant=False, and PyTorch 2.8 or newer, or checkpoint nothing"
                if frame is None
                else "one checkpoint lies inside another, whose first pass left them elsewhere: checkpoint either the "
                f"blocks or what holds them{_COMPILED}"
            )
            raise SharedValueError(
                f"{self._name(self.position)} is computed again during backward, where the values of "
                f"{self._name(source)} are gone: {cure}"
            )
        return value


def from_the_layer(layer: Any, needs: Collection[str], x: Tensor, v: Tensor) -> dict[str, Tensor | None]:
    """What a layer's mechanism is given beside the arguments of SDPA, as its ``needs`` say.

    Args:
        layer: the layer, whose ``link`` connects it with others.
        needs: of its mechanism.
        x: what its queries were made of, ``[B, N, C]``.
        v: its values ``[B, H, M, d]``.

    Raises:
        SharedValueError: if it reads another layer's values, and is connected with none, or the other has not run.
    """
    link: Link | None = layer.link
    if link is None and not needs:
        return {}
    given: dict[str, Tensor | None] = {"x": x} if "x" in needs else {}
    if link is not None:
        given.update(link.exchange(needs, v))
    elif any(need in READS for need in needs):
        raise SharedValueError(
            f"{type(layer.mechanism).__name__} reads the values of other layers, and this {type(layer).__name__} is "
            "connected with none: call attention_modules.connect_layers(model) once the model is built"
        )
    return given


def _graph_task() -> int:
    """Which backward runs, -1 for none."""
    return -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()


def _thread() -> int:
    """The thread that runs; 0 in compiled code, which cannot ask."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def _checkpoint_frame() -> Any:
    """The innermost part that non-reentrant activation checkpointing runs or runs again, as its own object; or None.

    PyTorch has no public name for it. Where its private ones change, None is found, and the second run is an error.
    """
    if torch.compiler.is_compiling():
        return None
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = None if top is None else top(True)
    if hooks is None:
        return None
    for cell in getattr(inspect.unwrap(hooks[0]), "__closure__", None) or ():
        held = cell.cell_contents
        held = held() if isinstance(held, weakref.ref) else held
        if type(held).__name__ == "_CheckpointFrame":
            return held
    return None


def as_before(module: object, answer: bool) -> bool:
    """The answer; in a part of the model that activation checkpointing computes again, that of the first time."""
    frame = None if torch.compiler.is_compiling() else _checkpoint_frame()
    return answer if frame is None else vars(frame).setdefault("attnswap_answers", {}).setdefault(id(module), answer)


def without_wrappers(name: str) -> str:
    """A module's name without those of wrappers around single layers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def stacks(names: Sequence[str]) -> dict[str, list[str]]:
    """Names of attention layers by the stack that they lie in, as "blocks.*.attn", in their order.

    The names of a stack differ in one number alone. Where several numbers do, it is the last of them: members of an
    ensemble, or stages of a network, have a stack each. So have the parallel attentions of timm's blocks, ``attns``.
    """
    alike: dict[tuple[str, ...], list[tuple[list[str], str]]] = {}
    for name in names:
        parts = without_wrappers(name).split(".")
        numbers = [part.isdecimal() and before != "attns" for before, part in zip(["", *parts], parts, strict=False)]
        kind = tuple("*" if number else part for number, part in zip(numbers, parts, strict=True))
        alike.setdefault(kind, []).append((parts, name))
    found: dict[str, list[str]] = {}
    for group in alike.values():
        levels = zip(*(parts for parts, _ in group), strict=True)
        differing = [at for at, level in enumerate(levels) if len(set(level)) > 1]
        for parts, name in group:
            stack = ["*" if at in differing[-1:] else part for at, part in enumerate(parts)]
            found.setdefault(".".join(stack), []).append(name)
    return found


def read_by(needs: Mapping[str, Collection[str]], names: Sequence[str]) -> dict[str, set[str]]:
    """For each layer of a stack that reads others, which ones.

    Args:
        needs: of the mechanism in each layer, by the layer's name.
        names: of the stack, in order.
    """
    found: dict[str, set[str]] = {}
    for position, name in enumerate(names[1:], 1):
        sources = {FIRST: names[0], PREVIOUS: names[position - 1]}
        found[name] = {sources[need] for need in READS if need in needs.get(name, ())}
    return {name: sources for name, sources in found.items() if sources}


def _holders(model: nn.Module, names: Sequence[str]) -> Iterator[nn.Module]:
    """The modules from ``model`` down that hold all the layers, and can be called."""
    parts = [name.split(".")[:-1] for name in names]
    common: list[str] = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    for depth in range(len(common) + 1):
        module = model.get_submodule(".".join(common[:depth]))
        if type(module).forward is not nn.Module.forward:  # nor a list of modules; timm's FeatureDictNet has one
            yield module


def connect(model: nn.Module, layers: Mapping[str, Any], needs: Mapping[str, Collection[str]]) -> None:
    """Let the layers of a model share values where their mechanisms read each other's; take old connections out.

    Args:
        model: what holds them.
        layers: every self-attention layer, by name, in order.
        needs: what the mechanism of each layer that has one needs.
    """
    disconnect(model, layers)
    for names in stacks(list(layers)).values():
        reads = read_by(needs, names)
        asking = [name for name in names if any(need in READS for need in needs.get(name, ()))]
        if not asking:
            continue
        readers: dict[int, list[int]] = {}
        for name, sources in reads.items():
            for source in sources:
                readers.setdefault(names.index(source), []).append(names.index(name))
        shared = SharedValues(names, readers)
        for position, name in enumerate(names):
            if name in needs:
                layers[name].link = Link(shared, position)
        for holder in _holders(model, names) if reads else ():
            holder.register_forward_pre_hook(shared.begin)
            holder.register_forward_hook(shared.end, always_call=True)


def disconnect(model: nn.Module, layers: Mapping[str, Any]) -> None:
    """Take out what :func:`connect` put in."""
    for layer in layers.values():
        layer.__dict__.pop("link", None)
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(_owner(hook), SharedValues)]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)


def _owner(hook: object) -> object:
    return getattr(hook, "__self__", None)
