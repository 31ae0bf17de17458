"""The network as it was before the swap, kept beside the one that trains."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from attention_modules.analysis.agreement import (
    layer_output,
    let_be_seen,
    output_of,
    relative_squares,
)
from attention_modules.base import AttentionMechanism
from attention_modules.hosts.base import Swapped, acting_mechanism
from attention_modules.hosts.discovery import survey
from attention_modules.hosts.model.inputs import as_it_is, copied_arguments
from attention_modules.hosts.model.seen import SeenTokens, counting
from attention_modules.hosts.report import swapped_mechanisms
from attention_modules.hosts.torch import same_view
from attention_modules.hosts.trained import forget_made
from attention_modules.mechanisms.shared.probe import acting_map
from attention_modules.mechanisms.shared.unchanged import Draw, unchanged
from attention_modules.swap import restore_attention
from attention_modules.teacher import shared_copy
from lightning_tasks.callbacks.monitoring.observer import is_watched
from lightning_tasks.files.swaps import PLANS

Given = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a call
_SAMPLED = 1024  # numbers of each tensor by which one teacher is told from another


class Teacher:
    """A network with softmax attention, and the weights that its layers were swapped with.

    Args:
        owner: name of the callback that keeps it, for messages.
        pl_module: the module after the swap, before a checkpoint's weights are restored.
        network: name of the part of the module whose output is the model's; by default its child that holds all
            swapped layers.
        may_train: of the module, whether a Parameter of a name may be trained: of these the teacher has copies, the
            others it shares.
        maps: whether its maps are wanted too.

    Raises:
        ValueError: if nothing is swapped, ``network`` is no part that holds all swapped layers, or its weights are not
            there yet (meta device).
    """

    def __init__(
        self,
        owner: str,
        pl_module: pl.LightningModule,
        network: str | None,
        may_train: Callable[[pl.LightningModule], Callable[[str], bool]],
        maps: bool = False,
    ) -> None:
        layers = swapped_layers(pl_module)
        self.name = _network_name(owner, pl_module, network, layers)
        student = pl_module.get_submodule(self.name)
        prefix = f"{self.name}." if self.name else ""
        if hasattr(student, "_orig_mod"):
            raise ValueError(
                f"{owner}: {self.name!r} is compiled by torch.compile(...), around a network whose plain copy is "
                f"needed: compile it in place, {self.name}.compile()"
            )
        self.layers = [name.removeprefix(prefix) for name in layers]
        if any(tensor.is_meta for tensor in student.parameters()):
            raise ValueError(
                f"{owner}: the weights of {self.name!r} are on the meta device when it is swapped, so that there is "
                "no teacher to keep; load the pretrained weights before, in __init__ or configure_model"
            )
        trains = may_train(pl_module)
        own = [name for name, _ in student.named_parameters(remove_duplicate=False) if trains(prefix + name)]
        own += [name for name, _ in student.named_buffers(remove_duplicate=False)]
        self.network = shared_copy(student, own).eval()
        restore_attention(self.network)
        forget_made(self.network)
        let_be_seen(self.network, self.layers)
        for name in self.layers:  # one of somebody's own may not tell alone how its tokens lie
            taught: Any = student.get_submodule(name)
            vars(self.network.get_submodule(name)).setdefault("batch_first", taught.host.batch_first(taught))
        self._found = survey(self.network).layers
        self.maps = maps
        self.digest = _digest(self.network)

    def follow(self, student: nn.Module) -> None:
        """Bring what is not shared to the student's device, and to its dtype where it has one alone."""
        shared = {id(tensor) for tensor in (*student.parameters(), *student.buffers())}
        held = [tensor for tensor in student.parameters() if tensor.is_floating_point()]
        kinds = {tensor.dtype for tensor in held}
        for tensor in (*self.network.parameters(), *self.network.buffers()):
            if id(tensor) not in shared and held:
                dtype = held[0].dtype if len(kinds) == 1 and tensor.is_floating_point() else tensor.dtype
                tensor.data = tensor.data.to(held[0].device, dtype)

    @torch.no_grad()
    def keep_apart(self, student: nn.Module) -> None:
        """Copy what it shares with the student and what may train from now on."""
        trains = {id(one): one for one in student.parameters() if one.requires_grad}
        copies: dict[int, nn.Parameter] = {}
        for module in self.network.modules():
            for name, parameter in module._parameters.items():
                if id(parameter) in trains:
                    found = trains[id(parameter)]
                    copies.setdefault(id(parameter), nn.Parameter(found.detach().clone(), requires_grad=False))
                    module._parameters[name] = copies[id(parameter)]

    @torch.no_grad()
    def show(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], draw: Draw) -> Lesson:
        """Run it on a copy of what the student is called with, and have it begin with the same random states."""
        inputs: dict[str, Given] = {}
        outputs: dict[str, Tensor] = {}
        maps: dict[str, Tensor] = {}

        def before(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if name not in inputs:
                    inputs[name] = as_it_is((args, dict(kwargs)))

            return hook

        def after(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: object, output: Any) -> None:
                outputs.setdefault(name, layer_output(module, output).clone())  # the network may change it in place

            return hook

        def run() -> Any:
            given, named = copied_arguments((args, dict(kwargs)))
            with unchanged(self.network), draw.again(self.network):
                return self.network(*given, **named)

        def main_part(output: Any) -> Tensor:
            with suppress(TypeError):  # it is none that can be compared, nor need it be where layers are
                return output_of(output)[0]
            return torch.zeros(())

        def again() -> tuple[Tensor, dict[str, Tensor]]:
            outputs.clear()
            return main_part(run()), outputs

        seen = SeenTokens(self._found, counting(self.network, args, kwargs))
        with hooks() as add:
            for name in self.layers:
                layer = self.network.get_submodule(name)
                add(layer.register_forward_pre_hook(before(name), with_kwargs=True))
                add(layer.register_forward_hook(after(name)))
                if self.maps:
                    add(hook_map(layer, partial(maps.setdefault, name)))
            with seen.noting():
                output = run()
            first = dict(outputs)
            sharded = any(isinstance(tensor, DTensor) for tensor in self.network.parameters())
            seen.settle(main_part(output), first, None if sharded else again)  # ranks must call it alike
        return Lesson(inputs, first, output, seen, maps, draw)


class Lesson:
    """What the teacher computed of one batch.

    Args:
        inputs: what each layer was called with.
        outputs: of each layer.
        output: what the network returned.
        seen: which tokens count.
        maps: of each layer, ``[B, H, N, M]``, if they were wanted.
        draw: what it drew.
    """

    def __init__(
        self,
        inputs: dict[str, Given],
        outputs: dict[str, Tensor],
        output: Any,
        seen: SeenTokens,
        maps: dict[str, Tensor],
        draw: Draw,
    ) -> None:
        self.inputs, self.outputs, self.output = inputs, outputs, output
        self.seen, self.maps, self.draw = seen, maps, draw

    def give_inputs(self, name: str) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]:
        """A forward pre-hook (with keywords) by which a student's layer gets the teacher's input in its own's place.

        So does what else of floating tensors it is called with: the tokens that cross-attention attends to.
        """

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            taught_args, taught_kwargs = self.inputs[name]
            given, taught = _input_of(args, kwargs), _input_of(taught_args, taught_kwargs)

            def replaced(value: Any, other: Any) -> Any:
                if not isinstance(value, Tensor) or not value.is_floating_point():
                    return value
                if same_view(value, given):
                    return taught.to(given.dtype)
                alike = isinstance(other, Tensor) and other.is_floating_point() and other.shape == value.shape
                return other.to(value.dtype) if alike else value

            others = (*taught_args, *[None] * (len(args) - len(taught_args)))
            return (
                tuple(replaced(value, other) for value, other in zip(args, others, strict=False)),
                {key: replaced(value, taught_kwargs.get(key)) for key, value in kwargs.items()},
            )

        return hook

    def compare(self, name: str, layer: nn.Module, output: Any) -> tuple[Tensor, Tensor]:
        """The squares of error and size of a student's layer's output, of each sample."""
        return relative_squares(layer_output(layer, output), self.outputs[name], self.seen.of_layer_output(name))

    def compare_map(self, name: str, found: Tensor) -> tuple[Tensor, Tensor]:
        """The squares of difference and size of a student's layer's map, of each sample.

        Raises:
            ValueError: if the mechanism has maps of another shape (one per pair of heads).
        """
        wanted = self.maps[name]
        if found.shape != wanted.shape:
            raise ValueError(
                f"the maps of {name!r} are {tuple(found.shape)}, and the teacher's {tuple(wanted.shape)}: they cannot "
                "be compared"
            )
        squares = (found - wanted).square(), wanted.square()
        valid = self.seen.of_layer(name)
        if valid is not None and valid.shape == (wanted.shape[0], wanted.shape[2]):
            counts = valid[:, None, :, None]
            return tuple(each.masked_fill(~counts, 0.0).flatten(1).sum(1) for each in squares)  # type: ignore[return-value]
        return tuple(each.flatten(1).sum(1) for each in squares)  # type: ignore[return-value]

    def examine(
        self, network: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], without: dict[str, str]
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, tuple[Tensor, Tensor]]]:
        """By layer, the squares of error and size of the student's output, and map, on the teacher's input.

        Args:
            network: the student.
            args, kwargs: what it is called with, of which it is given a copy.
            without: takes the layers that have no map to compare, and why.
        """
        args, kwargs = copied_arguments((args, dict(kwargs)))
        compared: dict[str, tuple[Tensor, Tensor]] = {}
        maps: dict[str, tuple[Tensor, Tensor]] = {}

        def after(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: object, output: Any) -> None:
                compared.setdefault(name, self.compare(name, module, output))

            return hook

        def of_map(name: str, found: Tensor) -> None:
            maps.setdefault(name, self.compare_map(name, found))

        def missing(name: str, error: ValueError) -> None:
            without[name] = str(error)

        with hooks() as add:
            for name in self.inputs:
                layer = network.get_submodule(name)
                add(layer.register_forward_pre_hook(self.give_inputs(name), with_kwargs=True))
                add(layer.register_forward_hook(after(name)))
                if name in self.maps:
                    add(hook_map(layer, partial(of_map, name), partial(missing, name)))
            with unchanged(network), self.draw.again(network):
                network(*args, **kwargs)
        return compared, maps


def hook_map(layer: Any, take: Callable[[Tensor], Any], missing: Callable[[ValueError], None] | None = None) -> Any:
    """Have ``take`` called with the map ``[B, H, N, M]`` of a swapped layer's every call; returns the hook's handle.

    The map has a gradient where it is not known as a linear function alone. ``missing``, if given, is called in place
    of an error where there is no map, or none that ``take`` takes.
    """
    mechanism = acting_mechanism(layer.mechanism)
    assert mechanism is not None

    def hook(mechanism: AttentionMechanism, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            take(acting_map(mechanism, *args, **kwargs).dense())
        except ValueError as error:
            if missing is None:
                raise
            missing(error)

    return mechanism.register_forward_pre_hook(hook, with_kwargs=True)


def swapped_layers(pl_module: pl.LightningModule) -> list[str]:
    """The names of layers that a swap was asked for, softmax among the mechanisms, in module order.

    What a monitor alone has made observable is not among them, so that watching changes nothing here either.
    """
    names = {name for plan in vars(pl_module).get(PLANS, []) for name in plan["layers"]}
    names |= swapped_mechanisms(pl_module).keys()

    def asked(module: nn.Module) -> bool:
        return isinstance(module, Swapped) and not is_watched(module)

    return [name for name, module in pl_module.named_modules() if name in names or asked(module)]


def _network_name(owner: str, pl_module: pl.LightningModule, network: str | None, layers: list[str]) -> str:
    if not layers:
        raise ValueError(
            f"{owner}: no layer is swapped, so that there is nothing to compare with what it was; list SwapAttention "
            f"before {owner}, or call swap_attention() before the fit"
        )
    parts = dict(pl_module.named_modules())
    fitting = [name for name in _around(layers) if _is_called(parts[name])]
    if not fitting:
        raise ValueError(
            f"{owner}: no part of {type(pl_module).__name__} that is called holds all swapped layers "
            f"({', '.join(layers[:3])}), and {owner} compares what one call of such a part gives: put the network into "
            "a module of its own, and call that"
        )
    if network is None:
        network = layers[0].partition(".")[0]
    if network not in parts:
        children = [name for name, _ in pl_module.named_children()]
        raise ValueError(
            f"{owner}: network={network!r} is no part of {type(pl_module).__name__}; it has {', '.join(children)}"
        )
    outside = [name for name in layers if network and not name.startswith(f"{network}.")]
    if outside or not network:
        raise ValueError(
            f"{owner}: network={network!r} must be a part of the module that holds all swapped layers"
            + (f", and {outside[0]!r} is outside" if outside else "")
        )
    if network not in fitting:
        raise ValueError(
            f"{owner}: {network!r} is a {type(parts[network]).__name__}, which is never called; name the part whose "
            f"output is the model's by network= ({', '.join(map(repr, fitting))})"
        )
    return network


def _around(layers: Sequence[str]) -> list[str]:
    """The names of modules that hold all of these layers, but for the outermost, from the outer to the inner."""
    parts = layers[0].split(".")
    around = [".".join(parts[:depth]) for depth in range(1, len(parts))]
    return [outer for outer in around if all(name.startswith(f"{outer}.") for name in layers)]


def _is_called(module: nn.Module) -> bool:
    """Whether it has a forward: an nn.ModuleList and an nn.ModuleDict have none."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _digest(network: nn.Module) -> str:
    """Told from numbers that lie evenly over each tensor: all of a large model would take minutes to read."""
    state = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // _SAMPLED)].cpu()
        numbers = some.float() if some.is_floating_point() else some.long()
        state.update(f"{name} {tuple(tensor.shape)}".encode() + numbers.numpy().tobytes())
    return state.hexdigest()


def _input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """A layer's input: the first floating tensor that it is given."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise TypeError("an attention layer is called without a floating tensor")


@contextmanager
def hooks() -> Iterator[Callable[[Any], None]]:
    """Takes handles of hooks, and removes them in the end."""
    handles: list[Any] = []
    try:
        yield handles.append
    finally:
        for handle in handles:
            handle.remove()
