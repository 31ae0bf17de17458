"""The comparison on CIFAR-10 and its metrics, which all parts of its page use."""

from __future__ import annotations

from docs.pages.raw import Comparison, Raw
from docs.pages.results.rpc.shared import CORRUPTED

RECIPE = "rpc/compare_classification"
GRADIENT = [f"robustness/{attack}/{eps}_255/accuracy" for attack in ("fgsm", "pgd") for eps in (1, 4)]
BLIND = [f"robustness/{attack}/{eps}_255/accuracy" for attack in ("square", "transfer_of_pgd") for eps in (1, 4)]
ATTACKED = {
    **dict(zip(("FGSM 1/255", "FGSM 4/255", "PGD 1/255", "PGD 4/255"), GRADIENT, strict=True)),
    **dict(zip(("Square 1/255", "Square 4/255", "transfer 1/255", "transfer 4/255"), BLIND, strict=True)),
}
ON_500 = {"clean": "robustness/clean/accuracy", **ATTACKED, "corrupted": CORRUPTED}
INPUT_GRADIENT = "robustness/input_gradient/l2"


def read(raw: Raw) -> Comparison:
    """The comparison."""
    return raw.comparison("", RECIPE)
