"""Heads that are spread over processes (tensor parallelism): each process computes those whose weights it holds.

A mechanism's Parameters then are DTensors: rows of heads are with their heads, all others are whole in each process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from attention_modules.base import AttentionMechanism, described
from attention_modules.hosts.base import AttentionLayer, AttentionSwapError

SPREAD = (
    "its weights are spread over processes by heads (tensor parallelism), and a mechanism would see those of this "
    "process alone: swap before, as lightning_tasks.callbacks.swap_now(self) does in configure_model"
)


def mesh_of(layer: nn.Module) -> Any:
    """The processes over which the heads of a layer are spread; None where each process has whole layers.

    Told by a weight that is split along its input, as that of the output projection is: `fully_shard` splits none so.
    """
    for weight in layer.parameters():
        if any(getattr(place, "dim", 0) != 0 for place in getattr(weight, "placements", ())):
            return weight.device_mesh  # type: ignore[attr-defined]
    return None


def spread_refusal(mechanism: AttentionMechanism, heads: int, key_heads: int, mesh: Any) -> str | None:
    """Why a layer's heads cannot be spread over the processes of a mesh, or not with this mechanism."""
    if mesh.ndim > 1:
        return "FSDP2 and tensor parallelism both spread its weights, and only one of them may"
    processes = mesh.size()
    for number, what in ((heads, "heads"), (key_heads, "key heads")):
        if number % processes:
            return (
                f"its {number} {what} cannot be spread over {processes} processes (tensor parallelism): take a number "
                "of processes that divides them"
            )
    if mechanism.per_head is None:
        return (
            f"{described(mechanism)} needs all {heads} heads in one process, as far as it says (per_head is None), and "
            f"each of {processes} has {heads // processes} (tensor parallelism): choose another mechanism, DDP or FSDP2"
        )
    return None


def refuse_spread(layers: Iterable[AttentionLayer]) -> None:
    """Refuse to look into layers of which each process has some heads only: their numbers would be those of others.

    Raises:
        AttentionSwapError: naming the first.
    """
    for layer in layers:
        mesh = mesh_of(layer.module)
        if mesh is not None and mesh.size() > 1:
            raise AttentionSwapError(
                f"{layer.name or 'the model'!r} has its {layer.spec.num_heads} heads in {mesh.size()} processes "
                "(tensor parallelism), and maps, spectra and penalties read whole layers: leave them out, or take "
                "one process, DDP or FSDP2"
            )


def distribute(
    module: nn.Module, mesh: Any, dims: Mapping[str, int], made: dict[int, nn.Parameter] | None = None
) -> None:
    """Make the Parameters DTensors with the values of the first process, and shared ones shared again.

    Args:
        module: whose Parameters, in place.
        mesh: the processes.
        dims: along which dimension a Parameter is split, by its name; whole in each process where it has none.
        made: those of other modules that were made before, by the identity of what they replace.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    made = {} if made is None else made
    for path, part in module.named_modules():
        for name, old in part._parameters.items():
            if old is None:
                continue
            if id(old) not in made:
                dim = dims.get(f"{path}.{name}" if path else name)
                place = Replicate() if dim is None else Shard(dim)
                made[id(old)] = new = nn.Parameter(distribute_tensor(old.detach(), mesh, [place]), old.requires_grad)
                new.__dict__.update(old.__dict__)  # marks such as `_no_weight_decay`
            part._parameters[name] = made[id(old)]


def spread(mechanism: AttentionMechanism, mesh: Any, made: dict[int, nn.Parameter]) -> None:
    """Give each process the rows of its heads; see :func:`distribute`."""
    distribute(mechanism, mesh, dict.fromkeys(mechanism.per_head or (), 0), made)


def of_these_heads(weight: Any) -> Tensor:
    """What this process's heads take of a Parameter of the mechanism, whose gradients are summed where all take it."""
    return weight.to_local() if weight.placements[0].is_shard() else in_part(weight)


def in_part(weight: Any) -> Tensor:
    """A whole Parameter of which each process computes a part of the gradient."""
    from torch.distributed.tensor import Partial, Replicate

    return weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def fan_out(x: Tensor, mesh: Any) -> Tensor:
    """What is the same in all processes, each of which computes a part of its gradient."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def sum_up(x: Tensor, mesh: Any) -> Tensor:
    """The sum of what the processes have, in each of them."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    return DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()


@contextmanager
def held_here(mechanism: nn.Module) -> Iterator[None]:
    """Have a mechanism's Parameters be plain tensors of this process's heads."""
    places = [(part, name, held) for part in mechanism.modules() for name, held in part._parameters.items()]
    places = [(part, name, held) for part, name, held in places if held is not None]
    for part, name, held in places:
        part._parameters[name] = of_these_heads(held)  # type: ignore[assignment]
    try:
        yield
    finally:
        for part, name, held in places:
            part._parameters[name] = held


def as_held(state: Mapping[str, Tensor], mechanism: nn.Module) -> dict[str, Tensor]:
    """Whole tensors of a file, spread as those of the mechanism are."""
    from torch.distributed.tensor import distribute_tensor

    held: dict[str, Any] = mechanism.state_dict()
    return {
        name: distribute_tensor(tensor.to(held[name].device), held[name].device_mesh, held[name].placements)
        if hasattr(held.get(name), "placements")
        else tensor
        for name, tensor in state.items()
    }
