"""The name of a logged metric, and its parts: the only place that joins and splits such names."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

ROBUSTNESS = "robustness"
"""What the names of a robustness evaluation's figures begin with."""

_PARTS = re.compile(
    r"(?:(?P<stage>train|val|test)/)?(?P<family>.+?)"
    r"(?:/(?P<line>layer_\d{1,9})(?:/(?P<part>[^/]+?))?|/(?P<mean>mean))?"
    r"(?:_(?P<interval>step|epoch))?(?:/dataloader_idx_(?P<loader>\d{1,9}))?",
    re.DOTALL | re.ASCII,
)


@dataclass(frozen=True)
class MetricName:
    """A metric's name: ``val/attention/entropy/layer_00/head_03``, ``train/loss_step``, ``val/loss/dataloader_idx_0``.

    Args:
        family: what is measured, such as ``attention/entropy`` or ``loss``.
        line: which line of a chart it is: ``layer_00``, or ``mean`` (over the layers); "" for a single value.
        part: what of a layer: ``head_03``, ``pass_1``; "" for the whole layer.
        stage: ``train``, ``val`` or ``test``; "" where the name does not begin with one.
        interval: ``step`` or ``epoch``, which Lightning adds where both are logged; else "".
        loader: the number of the data loader, which Lightning adds where there are several; else "".

    >>> name = MetricName.parse("val/attention/entropy/layer_02/head_03")
    >>> name.stage, name.family, name.layer, name.part
    ('val', 'attention/entropy', 2, 'head_03')
    >>> str(MetricName("attention/entropy", "mean", stage="val"))
    'val/attention/entropy/mean'
    >>> MetricName.parse("train/loss_epoch/dataloader_idx_0").plain
    'train/loss'
    """

    family: str
    line: str = ""
    part: str = ""
    stage: str = ""
    interval: str = ""
    loader: str = ""

    @staticmethod
    def parse(text: str) -> MetricName:
        """The parts of a name; ``str()`` of them is the name again, whatever it is."""
        return _parse(text)

    @property
    def layer(self) -> int | None:
        """The layer's number; None for what is not of one layer."""
        return int(self.line.removeprefix("layer_")) if self.line.startswith("layer_") else None

    @property
    def kind(self) -> str:
        """What the parts of a layer are, ``head`` or ``pass``; "" where there is no part."""
        return self.part.rpartition("_")[0]

    @property
    def label(self) -> str:
        """Line and part, by which the curves of a group are told apart: ``layer_00/pass_1``."""
        return f"{self.line}/{self.part}" if self.part else self.line

    @property
    def is_mean(self) -> bool:
        """Whether it is the mean over layers."""
        return self.line == "mean"

    @property
    def is_robustness(self) -> bool:
        """Whether it is a figure of a robustness evaluation."""
        return self.family.startswith(f"{ROBUSTNESS}/") and not self.stage

    @property
    def is_loss(self) -> bool:
        """Whether it is a loss or a perplexity, by its name."""
        return not self.line and (self.statistic in ("loss", "perplexity") or self.statistic.endswith("_loss"))

    @property
    def statistic(self) -> str:
        """The last part of the family: ``entropy`` of ``attention/entropy``."""
        return self.family.rpartition("/")[2]

    @property
    def group(self) -> str:
        """The stage and the family, which all lines of a chart share: ``val/attention/entropy``."""
        return str(MetricName(self.family, stage=self.stage))

    @property
    def plain(self) -> str:
        """The name as it was logged, without what Lightning adds to it."""
        return str(replace(self, interval="", loader=""))

    def is_below(self, path: str) -> bool:
        """Whether the group is ``path``, or begins with it: ``val/attention`` has all of attention's."""
        return f"{self.group}/".startswith(f"{path}/")

    def at(self, interval: str) -> MetricName:
        """The name of the same of each step or epoch; "" for neither."""
        return replace(self, interval=interval)

    def __str__(self) -> str:
        name = "/".join(part for part in (self.stage, self.family, self.line, self.part) if part)
        interval = f"_{self.interval}" if self.interval else ""
        return f"{name}{interval}/dataloader_idx_{self.loader}" if self.loader else name + interval


@lru_cache(maxsize=1 << 16)  # a log repeats its names in every row
def _parse(text: str) -> MetricName:
    found = _PARTS.fullmatch(text)
    if found is None:  # the empty name
        return MetricName(text)
    parts = {name: found[name] or "" for name in ("family", "part", "stage", "interval", "loader")}
    return MetricName(**parts, line=found["line"] or found["mean"] or "")


def layer_line(number: int) -> str:
    """The line of a layer by its number: ``layer_00``."""
    return f"layer_{number:02d}"


def head_part(number: int) -> str:
    """The part of a head by its number: ``head_00``."""
    return f"head_{number:02d}"


def robustness_name(*parts: str) -> str:
    """The name of a figure of a robustness evaluation; a slash or a space in a part becomes ``_``."""
    return "/".join([ROBUSTNESS, *(part.replace("/", "_").replace(" ", "_") for part in parts if part)])


def in_stage(stage: str, name: str) -> str:
    """The name of what was logged under ``name``, in a stage: ``val/attention/entropy/mean``."""
    return str(replace(MetricName.parse(name), stage=stage))
