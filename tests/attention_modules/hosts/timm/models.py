"""All attention models of timm, one by one; ``python -m tests.attention_modules.hosts.timm.models`` counts anew.

The count takes minutes (every model is built, on the meta device), so that its result is kept in ``docs``, and
``python -m tests.attention_modules.hosts.table`` makes the page of it.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import nn

from attention_modules.hosts import attention_layers, discovery
from attention_modules.swap import restore_attention, swap_attention

FILE = Path(__file__).parents[4] / "docs" / "timm_models.csv"
VERSION = "1.0.31"  # of timm, whose models were counted
MECHANISMS = ("softmax", "symmetric", "rpc")
# Convolutional networks: gates of channels and pooling that call themselves attention, in some of their models.
_CONVOLUTIONAL = ("byobnet", "mobilenetv3", "resnest", "sknet")
_NAMED_OTHERWISE = ("GPSA", "MHSA", "XCA", "ParallelScalingBlock")


BY_NAME = " (by name)"  # of a layer that is swapped where a pattern of `where` spells its name


@dataclass(frozen=True)
class Row:
    """What becomes of one model."""

    family: str
    model: str
    swapped: str
    softmax: str
    symmetric: str
    rpc: str
    left: str
    maps: str = ""

    @property
    def same_maps(self) -> bool:
        """Whether every map is the one that its layer writes out without fused kernels, to 1e-5."""
        try:
            return float(self.maps) <= 1e-5
        except ValueError:
            return False

    @property
    def by_name(self) -> bool:
        """Whether the model takes mechanisms in class attention alone."""
        return BY_NAME in self.swapped

    def takes(self, mechanism: str) -> bool:
        """Whether the mechanism goes into the model."""
        return getattr(self, mechanism).isdigit()


def family_of(model: str) -> str:
    """The file of timm's that registers the model."""
    from timm.models import model_entrypoint

    return model_entrypoint(model).__module__.rpartition(".")[2]


def on_meta(model: str) -> nn.Module:
    """The model without values."""
    import timm

    with torch.device("meta"):
        return timm.create_model(model)


def count(name: str, model: nn.Module) -> Row:
    """Swap each mechanism in, and out again; into class attention, by its name, where it goes nowhere else."""
    cells, kinds, left = {}, "", ""
    asked = [layer.name for layer in discovery.survey(model).layers if layer.cross]
    for mechanism in MECHANISMS:
        try:
            report, how = swap_attention(model, mechanism), ""
        except ValueError as error:
            try:
                report, how = swap_attention(model, mechanism, where=asked or None), BY_NAME
            except ValueError as named:
                cells[mechanism] = _short(str(named if "cross-attention only" in str(error) else error))
                continue
        cells[mechanism] = str(len(report))
        kinds = ", ".join(sorted({row.host.removeprefix("timm ") + how for row in report}))
        left = "; ".join(sorted({f"{skipped.kind}: {skipped.reason}" for skipped in report.skipped}))
        restore_attention(model)
    return Row(family_of(name), name, kinds, left=left, **cells)


def _short(error: str) -> str:
    """The reasons without the layers' names and sizes, each once, and without the cure."""
    if "has no attention layer" in error:
        return "it has no attention layer"
    unknown = "no host (docs/hosts.md) knows the model's attention layers: "
    if error.startswith(unknown):
        error = error.removeprefix(unknown).partition(f". {discovery._OWN_CLASS}")[0]
        names = re.compile(r"^'.*?' (?:and \d+ more )?\((\w+)\)")
        return "; ".join(dict.fromkeys(names.sub(r"\1", reason) for reason in error.split("; ")))
    return re.sub(r"^cannot swap '[^']*': | \(\d+ and \d+\)", "", error).partition("; ")[0]


def calls_itself_attention(model: nn.Module) -> bool:
    """Whether a module's class has attention in its name, or is one of those known by another."""
    kinds = {type(module).__name__ for module in model.modules()}
    return any("Attention" in kind or "Attn" in kind or kind in _NAMED_OTHERWISE for kind in kinds)


def families() -> list[str]:
    """timm's files in which models may have attention."""
    import timm

    return sorted(set(timm.list_modules()).difference(_CONVOLUTIONAL))


def survey(family: str) -> list[Row]:
    """Every model of the family, if one of them has attention."""
    import timm

    rows, attentive = [], False
    for name in timm.list_models(module=family):
        model = on_meta(name)
        attentive |= calls_itself_attention(model)
        rows.append(count(name, model))
    return rows if attentive else []


def layer_classes(model: nn.Module) -> Counter[str]:
    """How many attention layers of each host."""
    return Counter(layer.host.name for layer in attention_layers(model))


def read() -> list[Row]:
    """The count as it was last made."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def write(rows: list[Row]) -> None:
    """Keep a count."""
    with FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, rows))


def totals(rows: list[Row]) -> dict[str, int]:
    """Into how many models each mechanism goes."""
    return {mechanism: sum(row.takes(mechanism) for row in rows) for mechanism in MECHANISMS}


def table(rows: list[Row]) -> str:
    """A row a family, those with most models first."""
    head = ["Family", "Models", *MECHANISMS, "Classes swapped", "What is left or refused, and why"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    families = {family: [row for row in rows if row.family == family] for family in {row.family for row in rows}}
    for family, members in sorted(families.items(), key=lambda item: (-len(item[1]), item[0])):
        kinds = sorted({kind for row in members for kind in row.swapped.split(", ") if kind})
        cells = [family, len(members), *totals(members).values(), ", ".join(f"`{kind}`" for kind in kinds)]
        lines.append(f"| {' | '.join(map(str, cells))} | {_reasons(members)} |")
    return "\n".join([*lines, f"| all | {len(rows)} | {' | '.join(map(str, totals(rows).values()))} | | |"]) + "\n"


def _reasons(members: list[Row]) -> str:
    """Each reason once, with the number of models that have it where it is not all."""
    found: Counter[str] = Counter()
    for row in members:
        said = {reason for reason in row.left.split("; ") if reason}
        if not row.takes("softmax"):
            said |= set(row.softmax.split("; "))
        else:
            refused = {name: getattr(row, name) for name in MECHANISMS if not row.takes(name)}
            for reason in set(refused.values()):
                said.add(f"{', '.join(name for name in refused if refused[name] == reason)}: {reason}")
        found.update(said)
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return "; ".join(reason if n == len(members) else f"{reason} ({n})" for reason, n in ordered)


if __name__ == "__main__":
    found = [row for family in families() for row in survey(family)]
    write(found)
    sys.stdout.write(f"{totals(found)} of {len(found)} models\n")
