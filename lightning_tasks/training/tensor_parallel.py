"""Tensor parallelism of a network: each process computes some heads and some hidden features of every layer.

All Parameters become DTensors, so that optimizers, clipping and checkpoints know what is whole. In a forward pass they
are plain tensors of this process. What goes into attention and feed-forward networks is the same in all processes; what
comes out is summed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from attention_modules.hosts.model.heads import distribute, fan_out, in_part, of_these_heads, spread_refusal, sum_up

Local = Callable[[Any], Tensor]


def spread_heads(model: nn.Module, mesh: Any) -> None:
    """Spread a network that says how (``tensor_parallel``) over the processes of a mesh.

    Each gets the first one's weights, and its random state at each change between training and evaluation, as dropout
    of what all have must be the same.

    Args:
        model: the network. Its ``tensor_parallel`` has names (globs) of modules, and "heads" for a ``SelfAttention``,
            "columns" and "rows" for the linear layers before and after what is between.
        mesh: of one dimension.

    Raises:
        ValueError: if it does not say how, or heads or features cannot be spread so. Nothing is changed then.
    """
    plan = getattr(model, "tensor_parallel", None)
    if plan is None:
        raise ValueError(
            f"tensor_parallel_size={mesh.size()} of ModelParallelStrategy needs a model that says how it is spread, as "
            f"TransformerLM does, and {type(model).__name__} does not: set it to 1, and data_parallel_size to the "
            "number of processes (FSDP2)"
        )
    chosen = [
        (name, module, role)
        for name, module in model.named_modules()
        for pattern, role in plan.items()
        if fnmatchcase(name, pattern)
    ]
    for name, module, role in chosen:
        if reason := _refusal(module, role, mesh):
            raise ValueError(f"cannot spread {name!r} over processes: {reason}")
    dims: dict[str, int] = {}
    local: dict[str, Local] = {}
    for name, module, role in chosen:
        _PARTS[role](name, module, mesh, dims, local)
    distribute(model, mesh, dims)
    held = _Held(model, local, mesh)
    model.register_forward_pre_hook(held.enter)
    model.register_forward_hook(held.leave, always_call=True)


def _refusal(module: Any, role: str, mesh: Any) -> str | None:
    if role == "heads":
        return spread_refusal(module.mechanism, module.num_heads, module.num_heads, mesh)
    features = module.out_features if role == "columns" else module.in_features
    if features % mesh.size():
        return (
            f"its {features} hidden features are no multiple of {mesh.size()} processes: choose another mlp_dim, or "
            "another tensor_parallel_size"
        )
    return None


def _heads(name: str, layer: Any, mesh: Any, dims: dict[str, int], local: dict[str, Local]) -> None:
    own = partial(_own_rows, parts=2 + layer.mechanism.uses_query)
    for key, _ in layer.qkv.named_parameters(f"{name}.qkv"):
        dims[key], local[key] = 0, own
    for key, _ in layer.mechanism.named_parameters():
        place = f"{name}.mechanism.{key}"
        local[place] = of_these_heads
        if key in layer.mechanism.per_head:
            dims[place] = 0
    layer.register_forward_pre_hook(partial(_share_input, mesh=mesh))
    _rows(f"{name}.proj", layer.proj, mesh, dims, local)


def _columns(name: str, linear: nn.Module, mesh: Any, dims: dict[str, int], local: dict[str, Local]) -> None:
    dims |= {key: 0 for key, _ in linear.named_parameters(name)}
    linear.register_forward_pre_hook(partial(_share_input, mesh=mesh))


def _rows(name: str, linear: nn.Module, mesh: Any, dims: dict[str, int], local: dict[str, Local]) -> None:
    dims[f"{name}.weight"], local[f"{name}.bias"] = 1, _of_first
    linear.register_forward_hook(partial(_sum_output, mesh=mesh))


_PARTS: dict[str, Callable[..., None]] = {"heads": _heads, "columns": _columns, "rows": _rows}


def _own_rows(weight: Any, parts: int) -> Tensor:
    """The rows of this process's heads of each of ``parts`` (q, k and v), of which each process stores others."""
    mesh = weight.device_mesh
    return in_part(weight).unflatten(0, (parts, mesh.size(), -1))[:, mesh.get_local_rank()].flatten(0, 1)


def _of_first(bias: Any) -> Tensor:
    """The bias in one process, zeros in the others, as their outputs are summed."""
    return in_part(bias) * float(bias.device_mesh.get_local_rank() == 0)


def _share_input(module: nn.Module, args: tuple[Any, ...], mesh: Any) -> tuple[Any, ...]:
    return fan_out(args[0], mesh), *args[1:]


def _sum_output(module: nn.Module, args: tuple[Any, ...], output: Tensor, mesh: Any) -> Tensor:
    return sum_up(output, mesh)


class _Held:
    """Hooks of a network by which its Parameters are this process's plain tensors while it runs."""

    def __init__(self, model: nn.Module, local: dict[str, Local], mesh: Any) -> None:
        self.places = [
            (module, name, local.get(f"{path}.{name}" if path else name, _whole_or_own))
            for path, module in model.named_modules()
            for name, held in module._parameters.items()
            if held is not None
        ]
        self.mesh = mesh
        self.kept: list[tuple[nn.Module, str, nn.Parameter | None]] = []
        self.training: bool | None = None

    def enter(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if self.training is not model.training:
            self._agree(args)
            self.training = model.training
        self.kept = [(module, name, module._parameters[name]) for module, name, _ in self.places]
        for module, name, local in self.places:
            module._parameters[name] = local(module._parameters[name])  # type: ignore[assignment]

    def leave(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for module, name, held in self.kept:
            module._parameters[name] = held
        self.kept = []

    def _agree(self, args: tuple[Any, ...]) -> None:
        """Take the first process's random state, and check that all have the same input.

        Raises:
            ValueError: if they do not; the text names what hands out data.
        """
        tensors = [each for each in args if isinstance(each, Tensor)]
        digest = hashlib.sha256(b"".join(each.detach().cpu().numpy().tobytes() for each in tensors)).digest()
        shapes = [tuple(each.shape) for each in tensors]
        gpu = torch.cuda.get_rng_state() if self.mesh.device_type == "cuda" else None
        said: list[Any] = [None] * self.mesh.size()
        distributed.all_gather_object(said, (digest, shapes, torch.get_rng_state(), gpu), group=self.mesh.get_group())
        if any(each[:2] != said[0][:2] for each in said):
            raise ValueError(
                f"the {self.mesh.size()} processes of one tensor-parallel group were given different batches: hand out "
                "data by the strategy's distributed_sampler_kwargs, as Lightning's own sampler does, and not by "
                "trainer.world_size and global_rank"
            )
        torch.set_rng_state(said[0][2])
        if said[0][3] is not None:
            torch.cuda.set_rng_state(said[0][3])


def _whole_or_own(weight: Any) -> Tensor:
    """This process's share of what is split, and the whole of what each process computes wholly."""
    return weight.to_local()
