"""The sentences that a report opens with, one for each kind of verdict."""

import math
from dataclasses import replace

from lightning_tasks.compare.summary import SummaryRow
from lightning_tasks.report.answer import answers
from tests.rows import each_row

ROW = SummaryRow(
    *("val/loss", "rpc", 8, 2.0, 0.1, "softmax", 8, -0.3, -0.4, -0.2),
    detectable=0.2,
    p=0.001,
    corrected=0.002,
    primary=True,
)
SENTENCES = {
    "lower": ({}, "rpc is lower than softmax: difference in val/loss -0.3 [-0.4, -0.2], 8 seeds."),
    "few": (
        {"pairs": 3},
        "No difference shown between rpc and softmax: difference in val/loss -0.3 [-0.4, -0.2], 3 seeds, and 4 are "
        "needed.",
    ),
    "budget": (
        {"p": 0.3, "corrected": 0.5},
        "Undecided between rpc and softmax: difference in val/loss -0.3 [-0.4, -0.2], 8 seeds, p 0.5 after Holm's "
        "correction; so few seeds find differences from 0.2 on reliably.",
    ),
    "equivalent": (
        {"p": 0.3, "corrected": 0.5, "margin": 1.0, "within_corrected": 0.01},
        "rpc and softmax are equivalent within 1: difference in val/loss -0.3 [-0.4, -0.2], 8 seeds.",
    ),
    "correction": (
        {"p": 0.01, "corrected": 0.06},
        "Undecided between rpc and softmax: difference in val/loss -0.3 [-0.4, -0.2], 8 seeds, p 0.06 after Holm's "
        "correction; so few seeds find differences from 0.2 on reliably.",
    ),
    "diverged": (
        {"diverged": 2, "low": math.nan, "high": math.nan},
        "No verdict between rpc and softmax: rpc diverged with 2 of its seeds.",
    ),
    "equal": (
        {"difference": 0.0, "low": 0.0, "high": 0.0},
        "rpc and softmax are equal: difference in val/loss +0 [0, 0], 8 seeds.",
    ),
}


@each_row(["changes", "sentence"], SENTENCES.values())
def test_a_sentence_for_each_verdict(changes, sentence):
    assert answers([replace(ROW, **changes)]) == [sentence]


def test_the_primary_endpoint_decides_and_three_differences_are_said():
    others = [replace(ROW, metric="val/top1", primary=False), *(replace(ROW, config=f"c{n}") for n in range(5))]
    found = answers(others)
    assert len(found) == 4
    assert all("val/loss" in text for text in found[:3])
    assert found[-1] == "2 further differences stand below."
    assert answers([replace(ROW, reference="")]) == []
