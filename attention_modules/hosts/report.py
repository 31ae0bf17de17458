"""What a swap did, what it left alone, and what acts in a model's layers now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import overload

from torch import nn

from attention_modules.base import AttentionMechanism
from attention_modules.hosts.base import acting_mechanism
from attention_modules.hosts.discovery import Skipped
from attention_modules.hosts.networks import Network
from attention_modules.mechanisms.softmax import SoftmaxAttention
from attention_modules.sharing import without_wrappers


def swapped_mechanisms(model: nn.Module) -> dict[str, AttentionMechanism]:
    """The mechanism that acts in each layer, by the layer's name, where it is not plain softmax attention."""
    found = {}
    for name, module in model.named_modules():
        mechanism = acting_mechanism(module._modules.get("mechanism"))
        if mechanism is not None and type(mechanism) is not SoftmaxAttention:
            found[without_wrappers(name)] = mechanism
    return found


@dataclass(frozen=True)
class SwapRow:
    """One swapped layer.

    Args:
        name: its name in the model ("" where it is the model).
        host: the host that understands it.
        mechanism: class of its new mechanism.
        dim: width of its input; None where it cannot be told.
        heads: number of query heads; likewise.
        before: its parameters before the swap.
        after: its parameters after it.
        options: those that the mechanism was built with, as "iterations=4".
    """

    name: str
    host: str
    mechanism: str
    dim: int | None
    heads: int | None
    before: int
    after: int
    options: str = ""


class SwapReport(Sequence[SwapRow]):
    """The swapped layers in module order.

    ``skipped`` lists the attention-like modules that were not, and why; ``new`` names the Parameters that no optimizer
    from before the swap can hold; ``networks`` lists the networks of the model, within which layers are counted.

    Example:
        >>> import torch
        >>> from attnswap import swap_attention
        >>> model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
        >>> report = swap_attention(model, "symmetric")
        >>> report[0].name, report[0].before - report[0].after
        ('self_attn', 272)
    """

    def __init__(
        self,
        rows: Sequence[SwapRow],
        skipped: Sequence[Skipped],
        new: Sequence[str] = (),
        networks: Sequence[Network] = (),
    ) -> None:
        self.rows = tuple(rows)
        self.skipped = tuple(skipped)
        self.new = tuple(new)
        self.networks = tuple(networks)

    @overload
    def __getitem__(self, index: int) -> SwapRow: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[SwapRow]: ...

    def __getitem__(self, index: int | slice) -> SwapRow | Sequence[SwapRow]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"SwapReport({len(self.rows)} swapped, {len(self.skipped)} not)"

    def __str__(self) -> str:
        header = [field.name for field in fields(SwapRow)][:-1]
        lines = _table([header, *(_cells(row) for row in self.rows)])
        before, after = (sum(counts) for counts in zip(*((row.before, row.after) for row in self.rows), strict=True))
        lines.append(f"{len(self.rows)} swapped, {before:,} parameters before, {after:,} after")
        if self.new:
            are = "Parameter is" if len(self.new) == 1 else "Parameters are"
            lines.append(f"{len(self.new)} {are} new: build the optimizer after the swap")
        if len(self.networks) > 1:
            shown = ", ".join(map(_network_cell, self.networks))
            lines.append(f"{len(self.networks)} networks, whose layers are counted apart: {shown}")
        if self.skipped:
            lines += ["", f"not swapped ({len(self.skipped)}):"]
            lines += _table([[_cell(row.name), row.kind, row.reason] for row in self.skipped])
        return "\n".join(lines)


def _cells(row: SwapRow) -> list[str]:
    whole = replace(row, mechanism=", ".join(filter(None, (row.mechanism, row.options))))
    return [_cell(value) for value in astuple(whole)[:-1]]


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "?" if value is None else str(value) or "(the model)"


def _network_cell(network: Network) -> str:
    layers = f"{len(network.layers)} layer{'s' if len(network.layers) > 1 else ''}"
    return f"{_cell(network.name)} ({layers}{', frozen' if network.frozen else ''})"


def _table(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
