"""The exploratory runs on CIFAR-10, each beside the runs of its seed in the comparison.

docs/results/rpc_classification/exploratory has the newest seed, and in earlier.csv what is told of the one before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from docs.pages.errors import PageError, check_told
from docs.pages.numbers import in_turn, least_to_most, number, signed
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

    def shares(self) -> list[float]:
        """The share of S that is not 0 in the last pass of each layer, with RPC in all of them."""
        name, config = "val/pursuit/sparsity/layer_{:02}/pass_2", "rpc in all layers"
        return [self.extra.mean(name.format(layer), config) for layer in range(4)]

    def twin_to_rpc(self) -> float:
        """By how many points RPC without S is above RPC of the same seed, on clean images."""
        return 100 * (self.beside.by_seed(TOP1, "rpc without S")[self.seed] - self.value("RPC, the same seed", TOP1))

    def ratio_to_twin(self) -> float:
        """By how many points RPC with `ratio` is above RPC without S of the same seed, on clean images."""
        return 100 * (self.value(WITH_RATIO, TOP1) - self.beside.by_seed(TOP1, "rpc without S")[self.seed])


def read_runs(raw: Raw) -> tuple[Runs, Runs]:
    """The exploratory runs of the newest seed, and those of the seed before.

    Raises:
        PageError: one of the two has several seeds, or one that the comparison has never run.
    """
    extra = raw.comparison("exploratory", EXPLORATORY)
    before, _ = raw.with_earlier(extra, "exploratory")
    return _beside(raw, extra), _beside(raw, before)


def _beside(raw: Raw, extra: Comparison) -> Runs:
    found = read(raw)
    earlier, _ = raw.with_earlier(found)
    for each in (found, earlier):
        if extra.seeds[0] in each.seeds and len(extra.seeds) == 1:
            return Runs(extra.seeds[0], each, extra)
    raise PageError(f"the exploratory runs are of the seeds {extra.seeds}, and must be of one that the comparison has")


def exploratory(raw: Raw) -> Table:
    """Accuracies in percent, the loss, and the gradient for the image."""
    runs, _ = read_runs(raw)
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
    (runs, before), now = read_runs(raw), read(raw)
    extra = runs.extra
    share = by_pass(extra, "sparsity", "rpc with threshold ratio", 4)[-1]
    *passes, residual = by_pass(extra, "residual", "rpc with threshold ratio", 4)
    others = [*residuals(now, "rpc"), *residuals(now, "rpc without S"), *residuals(extra, "rpc in all layers")]
    check_told(
        "with ratio the residual falls with every pass",
        all(later < each for each, later in zip(passes, [*passes[1:], residual], strict=True)),
        [*passes, residual],
    )
    all_accuracies = (TOP1, *ATTACKED.values(), CORRUPTED)

    def both(of: Callable[[Runs], str]) -> str:
        return f"{of(runs)} (seed {before.seed}: {of(before)})"

    def more(name: str, metric: str) -> str:
        return both(lambda each: signed(each.more(name, metric)))

    def best(each: Runs) -> str:
        columns = [{name: each.value(name, metric) for name in each.configs()} for metric in all_accuracies]
        return f"{sum(max(column, key=column.__getitem__) == MATRIX for column in columns)} of {len(columns)}"

    def above(each: Runs, than: float) -> str:
        gained = [each.more(EVERYWHERE, metric) for metric in all_accuracies[1:]]
        return f"{sum(gain > than for gain in gained)} of {len(gained)}"

    return {
        "explored-seed": f"{runs.seed}",
        "explored-before": f"{before.seed}",
        "explored-ran": extra.ran_in(),
        "everywhere-clean": more(EVERYWHERE, TOP1),
        "everywhere-500": more(EVERYWHERE, ON_500["clean"]),
        "everywhere-fgsm": more(EVERYWHERE, ATTACKED["FGSM 4/255"]),
        "everywhere-pgd": more(EVERYWHERE, ATTACKED["PGD 4/255"]),
        "everywhere-above": both(lambda each: above(each, 0.0)),
        "everywhere-takes": both(lambda each: above(each, each.more(EVERYWHERE, ON_500["clean"]))),
        "everywhere-share": both(lambda each: in_turn(f"{number(100 * share, 1)}%" for share in each.shares())),
        "ratio-share": f"{number(100 * share, 0)}%",
        "ratio-residual": f"{number(100 * residual, 0)}%",
        "ratio-clean": more(WITH_RATIO, TOP1),
        "twin-rpc": f"{signed(runs.twin_to_rpc(), 2)} (seed {before.seed}: {signed(before.twin_to_rpc(), 2)})",
        "ratio-twin": both(lambda each: signed(each.ratio_to_twin())),
        "other-residual": f"{number(math.floor(100 * min(others)), 0)}%",
        "scalar-clean": more(SCALAR, TOP1),
        "matrix-best": both(best),
        "matrix-clean": more(MATRIX, TOP1),
        "matrix-500": more(MATRIX, ON_500["clean"]),
        "matrix-fgsm": more(MATRIX, ATTACKED["FGSM 4/255"]),
        "matrix-pgd": more(MATRIX, ATTACKED["PGD 4/255"]),
        "matrix-corrupted": more(MATRIX, CORRUPTED),
        "matrix-transfer": more(MATRIX, ATTACKED["transfer 4/255"]),
        "matrix-square": more(MATRIX, ATTACKED["Square 4/255"]),
        "clean-deviations": least_to_most(100 * float(np.std(now.values(TOP1, name), ddof=1)) for name in NAMES),
        "corrupted-spread": number(100 * float(np.std(now.values(CORRUPTED, "softmax"), ddof=1))),
    }
