"""The exploratory runs on CIFAR-10, one seed each, beside the runs of that seed in the comparison."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from docs.pages.errors import PageError, check_told
from docs.pages.numbers import least_to_most, number, signed
from docs.pages.raw import Comparison, Raw
from docs.pages.results.rpc.cifar10 import ATTACKED, INPUT_GRADIENT, ON_500, read
from docs.pages.results.rpc.shared import CORRUPTED, NAMES, TOP1, by_pass
from docs.pages.tables import Table

EXPLORATORY = "rpc/compare_classification_exploratory"
EVERYWHERE, WITH_RATIO = "RPC in all layers (n = 2, lam = 3)", "RPC, `ratio` threshold, its own lam"
MATRIX, SCALAR = "Scaled, matrix, all layers", "Scaled, scalar, all layers"


@dataclass(frozen=True)
class Runs:
    """The runs of one seed.

    Args:
        seed: that of all of them.
        beside: the comparison that has softmax, symmetric attention and RPC of this seed.
        extra: the exploratory ones.
    """

    seed: int
    beside: Comparison
    extra: Comparison

    def configs(self) -> dict[str, tuple[Comparison, str]]:
        """Where the values of each row of the table are."""
        return {
            "softmax, the same seed": (self.beside, "softmax"),
            "symmetric, the same seed": (self.beside, "symmetric"),
            "RPC, the same seed": (self.beside, "rpc"),
            EVERYWHERE: (self.extra, "rpc in all layers"),
            WITH_RATIO: (self.extra, "rpc with threshold ratio"),
            MATRIX: (self.extra, "scaled by a matrix"),
            SCALAR: (self.extra, "scaled by a scalar"),
        }

    def value(self, name: str, metric: str) -> float:
        """What a row of the table has."""
        found, config = self.configs()[name]
        return found.by_seed(metric, config)[self.seed]

    def more(self, name: str, metric: str) -> float:
        """By how many points a row is above softmax."""
        return 100 * (self.value(name, metric) - self.value("softmax, the same seed", metric))


def read_runs(raw: Raw) -> Runs:
    """The exploratory runs, and those of their seed.

    Raises:
        PageError: they are of several seeds, or of one that the comparison has never run.
    """
    extra = raw.comparison("exploratory", EXPLORATORY)
    found = read(raw)
    earlier, _ = raw.with_earlier(found)
    for each in (found, earlier):
        if extra.seeds[0] in each.seeds and len(extra.seeds) == 1:
            return Runs(extra.seeds[0], each, extra)
    raise PageError(f"the exploratory runs are of the seeds {extra.seeds}, and must be of one that the comparison has")


def exploratory(raw: Raw) -> Table:
    """Accuracies in percent, the loss, and the gradient for the image."""
    runs = read_runs(raw)
    metrics = {"clean": (TOP1, 1, 100.0), **{name: (metric, 1, 100.0) for name, metric in ATTACKED.items()}}
    metrics |= {"corrupted": (CORRUPTED, 1, 100.0), "loss": ("test/loss", 3, 1.0)}
    metrics |= {"input gradient": (INPUT_GRADIENT, 2, 1.0)}
    rows = [
        [name, *(number(runs.value(name, metric) * scale, digits) for metric, digits, scale in metrics.values())]
        for name in runs.configs()
    ]
    return Table([f"configuration, seed {runs.seed}", *metrics], rows)


def residuals(found: Comparison, config: str) -> list[float]:
    """What the monitor logged of each pass at the end of training and in the test, means over seeds."""
    logged = {str(row["metric"]) for row in found.rows if row["config"] == config}
    metrics = [metric for metric in logged if re.fullmatch(r"(val|test)/pursuit/residual/layer_\d+/pass_\d+", metric)]
    return [found.mean(metric, config) for metric in metrics]


def explored(raw: Raw) -> dict[str, str]:
    """What the exploratory runs have more than softmax, in points, and what S holds in them."""
    runs, now = read_runs(raw), read(raw)
    more, extra = runs.more, runs.extra
    in_layers = [extra.mean(f"val/pursuit/sparsity/layer_{layer:02}/pass_2", "rpc in all layers") for layer in range(4)]
    share = by_pass(extra, "sparsity", "rpc with threshold ratio", 4)[-1]
    *passes, residual = by_pass(extra, "residual", "rpc with threshold ratio", 4)
    others = [*residuals(now, "rpc"), *residuals(now, "rpc without S"), *residuals(extra, "rpc in all layers")]
    check_told(
        "with ratio the residual falls with every pass",
        all(later < each for each, later in zip(passes, [*passes[1:], residual], strict=True)),
        [*passes, residual],
    )
    accuracies = [
        {name: runs.value(name, metric) for name in runs.configs()} for metric in (TOP1, *ATTACKED.values(), CORRUPTED)
    ]
    best = sum(max(column, key=column.__getitem__) == MATRIX for column in accuracies)
    gained = [more(EVERYWHERE, ATTACKED[name]) for name in ("FGSM 4/255", "PGD 4/255")]
    clean_500 = more(EVERYWHERE, ON_500["clean"])
    elsewhere = [more(EVERYWHERE, metric) for metric in (*ATTACKED.values(), CORRUPTED)]
    twin = runs.value(WITH_RATIO, TOP1) - runs.beside.by_seed(TOP1, "rpc without S")[runs.seed]
    return {
        "everywhere-500": number(-clean_500),
        "everywhere-takes": f"{sum(each > clean_500 for each in elsewhere)} of {len(elsewhere)}",
        "everywhere-above": f"{sum(each > 0 for each in elsewhere)} of {len(elsewhere)}",
        "everywhere-share": " and ".join(f"{number(100 * each, 0)}%" for each in in_layers[:2]),
        "everywhere-share-rest": " and ".join(f"{number(100 * each, 1)}%" for each in in_layers[2:]),
        "everywhere-clean": number(-more(EVERYWHERE, TOP1)),
        "everywhere-gain": " to ".join(number(each) for each in sorted(gained)),
        "clean-deviations": least_to_most(100 * float(np.std(now.values(TOP1, name), ddof=1)) for name in NAMES),
        "other-residual": f"{number(math.floor(100 * min(others)), 0)}%",
        "ratio-share": f"{number(100 * share, 0)}%",
        "ratio-residual": f"{number(100 * residual, 0)}%",
        "ratio-twin": signed(100 * twin),
        "scalar-clean": signed(more(SCALAR, TOP1)),
        "matrix-best": f"{best} of the {len(accuracies)}",
        "matrix-clean": number(more(MATRIX, TOP1)),
        "matrix-corrupted": number(more(MATRIX, CORRUPTED)),
        "matrix-transfer": number(more(MATRIX, ATTACKED["transfer 4/255"])),
        "matrix-square": signed(more(MATRIX, ATTACKED["Square 4/255"])),
        "corrupted-spread": number(100 * float(np.std(runs.beside.values(CORRUPTED, "softmax"), ddof=1))),
    }
