"""Taking the query rows out of a projection, and putting them back.

The rows live on as plain attributes of the projection: outside ``parameters()``, ``buffers()`` (which DDP broadcasts at
every forward) and ``state_dict()``, but copied and pickled with it, and moved and cast with the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def hooked_refusal(mechanism: Any) -> str | None:
    """Why a mechanism cannot make room for another one, if hooks on its Parameters would be gone with it."""
    for name, parameter in mechanism.named_parameters():
        hooks = {**(parameter._backward_hooks or {}), **(parameter._post_accumulate_grad_hooks or {})}
        if hooks:
            return (
                f"its mechanism's {name} has hooks ({_names(hooks.values())}), which the next mechanism would not "
                "have: remove them first, or restore the layer"
            )
    return None


@dataclass(frozen=True)
class QueryPart:
    """A tensor of which ``size`` entries along ``dim`` belong to the query: the first ones of each block.

    Args:
        owner: path of the module that holds the tensor, below the attention layer ("" = the layer itself).
        tensor: the Parameter's name in its owner.
        dim: axis of the output features.
        size: query features, H * d.
        full: output features in all, keys and values included.
        trains: ``requires_grad`` of the Parameter when the rows were taken.
        blocks: equal blocks that the features lie in (the heads, where each has its query, key and value together).
        others: ``requires_grad`` of all other Parameters of the layer then; None where they differed.
    """

    owner: str
    tensor: str
    dim: int
    size: int
    full: int
    trains: bool = True
    blocks: int = 1
    others: bool | None = None

    def rows_in(self, layer: nn.Module) -> Tensor | None:
        """The kept rows; None where the projection was replaced after the swap, or they were forgotten."""
        return vars(layer.get_submodule(self.owner)).get(self._attribute)

    def filled(self, layer: nn.Module) -> bool:
        """Whether there are rows, and they did not stay on the meta device when the layer got its values."""
        rows = self.rows_in(layer)
        return rows is not None and (not rows.is_meta or all(each.is_meta for each in layer.parameters()))

    def keep_in(self, layer: nn.Module, rows: Tensor | None) -> None:
        """Keep the rows, outside the buffers; None forgets them."""
        vars(layer.get_submodule(self.owner))[self._attribute] = rows

    def change_in(self, layer: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
        """Move or cast the rows as ``fn`` does; what gives tensors new memory without values loses them."""
        rows = self.rows_in(layer)
        assert rows is not None
        changed = fn(rows)
        changed.__dict__.update(rows.__dict__)
        self.keep_in(layer, changed.to("meta") if empties(fn) else changed)

    def take_from(self, layer: nn.Module) -> Tensor | None:
        """The kept rows, which are kept no longer."""
        return vars(layer.get_submodule(self.owner)).pop(self._attribute, None)

    @property
    def _attribute(self) -> str:
        return f"query_{self.tensor}"

    def hooked(self, layer: nn.Module) -> str | None:
        """Why hooks on the Parameter forbid to put another in its place, if there are some."""
        held = layer.get_submodule(self.owner)._parameters.get(self.tensor)
        hooks = {**(held._backward_hooks or {}), **(held._post_accumulate_grad_hooks or {})} if held is not None else {}
        if not hooks:
            return None
        return (
            f"its {self.key('')} has hooks ({_names(hooks.values())}), which another Parameter with more or fewer "
            "rows, in its place, would not have: register hooks (W&B's watch, an optimizer step in backward) after it, "
            "or remove them first"
        )

    def watched(self, layer: nn.Module) -> str | None:
        """Why hooks on the projection forbid to drop the query, if there are some; those on the layer do not."""
        owner = layer.get_submodule(self.owner)
        kinds = (owner._forward_hooks, owner._forward_pre_hooks, owner._backward_hooks, owner._backward_pre_hooks)
        hooks = [hook for kind in kinds for hook in kind.values()] if self.owner else []
        if not hooks:
            return None
        return (
            f"its query projection {self.owner!r} has hooks ({_names(hooks)}), which would see nothing of a query that "
            "is dropped: remove them first, or choose a mechanism with a query"
        )

    def key(self, prefix: str) -> str:
        """The tensor's key in a state dict."""
        return prefix + (f"{self.owner}." if self.owner else "") + self.tensor

    def split(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """The query's rows and the others of a whole tensor."""
        sizes = [self.size // self.blocks, (self.full - self.size) // self.blocks]
        rows, rest = tensor.unflatten(self.dim, (self.blocks, -1)).split(sizes, self.dim + 1)
        return rows.flatten(self.dim, self.dim + 1), rest.flatten(self.dim, self.dim + 1)

    def rows_beside(self, rest: Tensor) -> tuple[int, ...]:
        """The shape of the query's rows where the others are ``rest``."""
        return (*rest.shape[: self.dim], self.size, *rest.shape[self.dim + 1 :])

    def join(self, rows: Tensor, rest: Tensor) -> Tensor:
        """The whole tensor from its query's rows and the others."""
        parts = [part.unflatten(self.dim, (self.blocks, -1)) for part in (rows, rest)]
        return torch.cat(parts, self.dim + 1).flatten(self.dim, self.dim + 1)


def become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module another class; what hooks of accelerate left on it, the former class's forward, goes."""
    module.__dict__.pop("forward", None)
    object.__setattr__(module, "__class__", kind)


def empties(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether what ``nn.Module._apply`` is given takes the values: ``to_empty`` does."""
    return getattr(fn, "__qualname__", "").startswith("Module.to_empty.")


def _names(hooks: Iterable[object]) -> str:
    return ", ".join(
        f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', type(hook).__name__)}" for hook in hooks
    )


class WithoutQuery(nn.Module):
    """A projection whose query rows were taken out.

    It is no nn.Linear or Conv1D, so that peft leaves it out of "all-linear", and refuses it by its printed form where
    ``target_modules`` names it: an adapter would change a query that nothing reads.
    """

    def extra_repr(self) -> str:
        return (
            "its mechanism uses no query; for adapters: leave it out of target_modules, which can be a list such as "
            "[k_proj, v_proj], or, where other layers keep their query, a regular expression such as "
            "'.*layer[.](0|1)[.].*query|.*(key|value)'; or call restore_attention() first"
        )


class QuerylessLinear(WithoutQuery):
    """A query projection without weights: gives zeros of the right shape, which a layer may change in place."""

    in_features: int
    out_features: int

    def forward(self, input: Tensor) -> Tensor:
        return input.new_zeros(*input.shape[:-1], self.out_features)

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                "this query projection has no weight, as its mechanism uses no query; call restore_attention() first "
                "to read or change it"
            )
        return super().__getattr__(name)


def query_parts(
    layer: nn.Module, owner: str, size: int, dims: dict[str, int], blocks: int = 1
) -> tuple[QueryPart, ...]:
    """The query's share in each of the owner's tensors ``dims`` (name -> axis) that exist."""
    holder = layer.get_submodule(owner)
    tensors = {name: held for name, held in holder._parameters.items() if name in dims}  # in its own order
    others = _trains(layer, tensors.values())
    return tuple(
        QueryPart(owner, name, dims[name], size, tensor.shape[dims[name]], tensor.requires_grad, blocks, others)
        for name, tensor in tensors.items()
        if tensor is not None
    )


def _parameter(data: Tensor, trains: bool, old: Tensor) -> nn.Parameter:
    new = nn.Parameter(data, requires_grad=trains)
    new.__dict__.update(old.__dict__)
    return new


def _own(layer: nn.Module, without: Iterable[Tensor | None]) -> list[nn.Parameter]:
    """The layer's Parameters beside its mechanism's."""
    left_out = {id(tensor) for tensor in without}
    named = layer.named_parameters()
    return [held for name, held in named if not name.startswith("mechanism.") and id(held) not in left_out]


def _trains(layer: nn.Module, without: Iterable[Tensor | None]) -> bool | None:
    """Whether these train; None where some do and some do not, or there are none."""
    found = {held.requires_grad for held in _own(layer, without)}
    return found.pop() if len(found) == 1 else None


def _set_size(owner: Any, size: int) -> None:
    """Keep the printed size of nn.Linear, nn.Conv2d and Conv1D true."""
    for attribute in ("out_features", "out_channels", "nf"):
        if hasattr(owner, attribute):
            setattr(owner, attribute, size)


def drop_query(layer: nn.Module, parts: Sequence[QueryPart]) -> None:
    """Shrink the projections to keys and values."""
    for part in parts:
        owner = layer.get_submodule(part.owner)
        old = owner._parameters[part.tensor]
        if old is None:
            raise RuntimeError(f"{part.owner}.{part.tensor} has no values to take the query rows from")
        rows, rest = part.split(old.detach())
        rows = rows.clone()
        rows.__dict__.update(old.__dict__)  # marks such as `_no_weight_decay`
        part.keep_in(layer, rows)
        if part.full > part.size:
            owner._parameters[part.tensor] = _parameter(rest.clone(), old.requires_grad, old)
            _set_size(owner, part.full - part.size)
        else:
            owner._parameters[part.tensor] = None
            if type(owner) in (nn.Linear, QuerylessLinear):
                del owner._parameters[part.tensor]
                become(owner, QuerylessLinear)


def restore_query(layer: nn.Module, parts: Sequence[QueryPart]) -> None:
    """Put the kept query rows in front of the current keys and values; frozen or thawed since, they are as these."""
    now = _trains(layer, ())
    like = next((held for held in _own(layer, ()) if held.is_floating_point() and not held.is_meta), None)
    for part in parts:
        owner = layer.get_submodule(part.owner)
        rows = part.take_from(layer)
        if rows is None:
            raise RuntimeError(f"the kept query rows of {part.key('')!r} are lost")
        rest = owner._parameters.get(part.tensor)
        if rest is None:
            trains = part.trains if now in (None, part.others) else now
            data = rows if like is None else rows.to(like.device, like.dtype)
            owner._parameters[part.tensor] = _parameter(data, trains, rows)
            if isinstance(owner, QuerylessLinear):
                become(owner, nn.Linear)
        else:
            full = part.join(rows.to(rest), rest.detach())
            owner._parameters[part.tensor] = _parameter(full, rest.requires_grad, rest)
            _set_size(owner, part.full)


def lose_query(layer: nn.Module, parts: Sequence[QueryPart]) -> None:
    """Forget the kept rows, which have no values of their own."""
    for part in parts:
        part.keep_in(layer, None)


def accept_plain_layout(
    layer: nn.Module, parts: Sequence[QueryPart], state: dict[str, Tensor], prefix: str, assign: bool
) -> None:
    """Where ``state`` holds the plain projection, move its query rows to the kept rows and leave the rest."""
    for part in parts:
        key, kept, given = part.key(prefix), part.rows_in(layer), state.get(part.key(prefix))
        if kept is None or given is None:
            continue
        plain_shape = (*kept.shape[: part.dim], part.full, *kept.shape[part.dim + 1 :])
        if tuple(given.shape) != plain_shape:
            continue
        rows, rest = part.split(given.detach())
        rows = rows.full_tensor() if hasattr(rows, "full_tensor") else rows  # sharded by FSDP2, as kept rows are not
        if assign:
            rest = rest.clone()  # not a view that keeps the whole alive
        if assign or not part.filled(layer):
            part.keep_in(layer, rows.clone())
        else:
            kept.copy_(rows)
        if part.full > part.size:
            state[key] = rest
        else:
            del state[key]
