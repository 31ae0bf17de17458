"""Is self-attention kernel PCA? What the tables and numbers of the page are."""

from __future__ import annotations

from functools import partial

import numpy as np

from docs.pages.errors import PageError, check_told
from docs.pages.figures import Figure
from docs.pages.numbers import in_turn, number, signed, significant
from docs.pages.page import Claim, Page
from docs.pages.raw import Raw
from docs.pages.tables import Table
from docs.pages.verdicts import by_count
from lightning_tasks.analyses import kernel_pca_report as report
from lightning_tasks.analyses.kernel_pca_report import ALL_LAYERS, LINEAR, NOISE, OWN, Draw, Interval, Row

PAGE = Page("kernel_pca", "Kernel PCA")
MODELS = {"cifar10_vit": "trained ViT", "minilm": "MiniLM", "vit_random": "untrained ViT"}
TRAINED = ("cifar10_vit", "minilm")
NEARER_IF_LARGER = {
    "matched_cosine": "matched cosine",
    "linear_cka": "linear CKA",
    "rbf_cka": "RBF CKA",
    "signed_cosine": "cosine with the best signs (ours)",
}
NEARER_IF_SMALLER = {
    "gamma_relative": "γ, relative difference (0: constant)",
    "eigen_residual": "eigenvector equation, residual (0: holds)",
}
MEASURES = NEARER_IF_LARGER | NEARER_IF_SMALLER
COSINES = ("matched_cosine", "signed_cosine")
# Two models in training, looked at after so many epochs, each control drawn twenty times.
COURSES = {"softmax": "softmax", "scaled": "Scaled Attention"}
EPOCHS = (0, 1, 3, 9, 18)


def rows(raw: Raw, model: str) -> list[Row]:
    """Every head and sample."""
    return raw.records(f"{model}/{report.TABLE}", Row)


def mean(raw: Raw, model: str, kind: str, measure: str) -> float:
    """Over layers, heads and samples."""
    return float(np.mean([getattr(row, measure) for row in rows(raw, model) if row.values == kind]))


def by_layer(raw: Raw, model: str, kind: str, measure: str) -> list[float]:
    """A mean over heads and samples for each layer."""
    found: dict[str, list[float]] = {}
    for row in rows(raw, model):
        if row.values == kind:
            found.setdefault(row.layer, []).append(getattr(row, measure))
    return [float(np.mean(values)) for values in found.values()]


def ratios_of(raw: Raw, model: str) -> dict[str, list[float]]:
    """‖h‖² over ‖φ(q)‖² for each head and sample, by layer."""
    found: dict[str, list[float]] = {}
    for row in rows(raw, model):
        if row.values == OWN:
            found.setdefault(row.layer, []).append(row.h / row.phi)
    return found


def gains(raw: Raw) -> list[float]:
    """By how much the trained models' own values are nearer to what the reading predicts than the linear control."""
    return [
        (1 if measure in NEARER_IF_LARGER else -1)
        * (mean(raw, model, OWN, measure) - mean(raw, model, LINEAR, measure))
        for model in TRAINED
        for measure in MEASURES
    ]


def drawn(raw: Raw, course: str, epoch: int) -> dict[tuple[str, str], Interval]:
    """By measure and control: the means over layers, heads and samples of a model after so many epochs."""
    found = raw.records(f"epochs/{course}_{epoch:02d}/{report.DRAWS}", Draw)
    among = report.intervals(found)
    return {(each.measure, each.values): each for each in among if each.layer == ALL_LAYERS}


def nearer(found: Interval) -> str:
    """Whether the own values are nearer to what the reading predicts than all draws of a control, or farther."""
    signs = (
        {found.draws: "nearer", 0: "farther"}
        if found.measure in NEARER_IF_LARGER
        else {
            0: "nearer",
            found.draws: "farther",
        }
    )
    return signs.get(found.below, "within")


def moved_nearer(raw: Raw, course: str, measure: str, of: str = "own") -> bool:
    """Whether own values, or the mean of the control's draws, end nearer to what is predicted than before training."""
    before, after = (getattr(drawn(raw, course, epoch)[measure, LINEAR], of) for epoch in (EPOCHS[0], EPOCHS[-1]))
    return after > before if measure in NEARER_IF_LARGER else after < before


@PAGE.claims
def claims(raw: Raw) -> list[Claim]:
    found, said, last = gains(raw), course(raw), at_last(raw)
    counted = by_count(last.count("nearer"), len(last), "measures nearer than all of twenty maps")
    return [
        Claim(
            "Self-attention is kernel PCA of its keys, and training finds the values that this needs (Teo and Nguyen, "
            "NeurIPS 2024)",
            "in two trained models, values are nearer to those than a random linear map of the input in "
            f"{sum(gain > 0 for gain in found)} of {len(found)} means, by {significant(max(found), 1)} at most; with "
            f"twenty such maps, in two ViTs, nearer than all of them in {said['nearer-last']} "
            f"({said['nearer-most']} from their mean at most) and farther in {said['farther-last']} "
            f"({said['farther-most']} at most)",
            f"{counted}; one run of each model, no test; nor in the reproduction study of Sarıtaş and Yıldız",
        )
    ]


@PAGE.table
def measures(raw: Raw) -> Table:
    lines = []
    for measure, name in MEASURES.items():
        for model, called in MODELS.items():
            values = [number(mean(raw, model, kind, measure), 3) for kind in (OWN, LINEAR, NOISE)]
            largest = report.PUBLISHED.get(measure) if model == "cifar10_vit" else None
            lines.append(
                [name if model == "cifar10_vit" else "", called, *values, "" if largest is None else number(largest, 2)]
            )
    return Table(["", "", "own values", "random linear map", "random values", "largest published"], lines)


def left(raw: Raw, course: str, epoch: int) -> list[float]:
    """J = ‖φ(q)‖² − ‖h‖² of each head and sample of a model after so many epochs."""
    return [row.phi - row.h for row in rows(raw, f"epochs/{course}_{epoch:02d}") if row.values == OWN]


def without_phi(raw: Raw) -> list[float]:
    """The median of ‖φ(q)‖² / ‖h‖² of each of these models: by so much J is nearer to 0 than −‖h‖²."""
    found = [rows(raw, f"epochs/{course}_{epoch:02d}") for course in COURSES for epoch in EPOCHS]
    return [float(np.median([row.phi / row.h for row in each if row.values == OWN])) for each in found]


@PAGE.table
def losses(raw: Raw) -> Table:
    """The median of J, and in how many heads and samples it is at least 0."""
    lines = []
    for course, called in COURSES.items():
        found = [left(raw, course, epoch) for epoch in EPOCHS]
        cells = [f"{signed(float(np.median(each)), 2)} ({sum(one >= 0 for one in each)})" for each in found]
        lines.append([called, *cells])
    return Table(["median of J (count at least 0)", *(f"epoch {epoch}" for epoch in EPOCHS)], lines)


@PAGE.numbers
def loss_in_training(raw: Raw) -> dict[str, str]:
    """How large J is before and after training."""
    sizes = {
        course: [float(np.median(np.abs(left(raw, course, epoch)))) for epoch in (EPOCHS[0], EPOCHS[-1])]
        for course in COURSES
    }
    check_told("J does not become small in training", all(after > before for before, after in sizes.values()), sizes)
    late = {course: [float(np.median(np.abs(left(raw, course, epoch)))) for epoch in EPOCHS[-2:]] for course in COURSES}
    check_told("from epoch 9 to 18 J falls somewhat", all(ninth > last for ninth, last in late.values()), late)
    return {
        "loss-before": number(sizes["softmax"][0], 2),
        "loss-after": in_turn(number(after, 2) for _, after in sizes.values()),
        "loss-is-h": number(100 * max(without_phi(raw)), 1),
        "loss-of": str(len(left(raw, "softmax", EPOCHS[0]))),
    }


@PAGE.table
def epochs(raw: Raw) -> Table:
    """Own values beside the linear control, in the course of training."""
    lines = []
    for measure, name in MEASURES.items():
        for course, called in COURSES.items():
            cells = []
            for epoch in EPOCHS:
                found = drawn(raw, course, epoch)[measure, LINEAR]
                text = (
                    f"{number(found.own, 3)}; {number(found.mean, 3)} [{number(found.low, 3)}, {number(found.high, 3)}]"
                )
                cells.append({"nearer": f"**{text}**", "farther": f"*{text}*"}.get(nearer(found), text))
            lines.append([name if course == "softmax" else "", called, *cells])
    return Table(["", "model", *(f"epoch {epoch}" for epoch in EPOCHS)], lines)


def at_last(raw: Raw) -> list[str]:
    """Where own values are to the draws of the linear control after training, of each model and measure."""
    return [nearer(drawn(raw, course, EPOCHS[-1])[measure, LINEAR]) for course in COURSES for measure in MEASURES]


@PAGE.numbers
def course(raw: Raw) -> dict[str, str]:
    """How often own values are nearer than every draw of the linear control."""
    said = {
        (course, epoch): [nearer(drawn(raw, course, epoch)[measure, LINEAR]) for measure in MEASURES]
        for course in COURSES
        for epoch in EPOCHS
    }
    last = at_last(raw)
    first = said["softmax", EPOCHS[0]]
    if drawn(raw, "softmax", EPOCHS[0]) != drawn(raw, "scaled", EPOCHS[0]):
        raise PageError("the page says that both models are the same before training: write it anew")
    apart = {"nearer": [0.0], "farther": [0.0]}
    for course in COURSES:
        for measure, each in zip(MEASURES, said[course, EPOCHS[-1]], strict=True):
            found = drawn(raw, course, EPOCHS[-1])[measure, LINEAR]
            apart.setdefault(each, []).append(abs(found.own - found.mean))
    scaled = {measure: drawn(raw, "scaled", EPOCHS[-1])[measure, LINEAR] for measure in COSINES}
    moved = {course: [measure for measure in MEASURES if moved_nearer(raw, course, measure)] for course in COURSES}
    check_told(
        "the two cosines end nearer to what is predicted than they began, and all else farther",
        all({*each} == {*COSINES} for each in moved.values()),
        moved,
    )
    alike = [
        moved_nearer(raw, course, measure) == moved_nearer(raw, course, measure, "mean")
        for course in COURSES
        for measure in MEASURES
    ]
    after_softmax, after_scaled = (
        {measure: each for measure, each in zip(MEASURES, said[course, EPOCHS[-1]], strict=True)}
        for course in ("softmax", "scaled")
    )
    check_told(
        "with softmax both CKAs and the matched cosine end farther, and γ nearer; with scaled the two cosines nearer",
        {measure for measure, each in after_softmax.items() if each == "farther"}
        == {"linear_cka", "rbf_cka", "matched_cosine"}
        and [measure for measure, each in after_softmax.items() if each == "nearer"] == ["gamma_relative"]
        and {measure for measure, each in after_scaled.items() if each == "nearer"} == {*COSINES}
        and sum(each == "farther" for each in after_scaled.values()) == 4,
        [after_softmax, after_scaled],
    )
    without = [
        (each, drawn(raw, course, EPOCHS[-1])[measure, LINEAR])
        for course in COURSES
        for measure, each in zip(MEASURES, said[course, EPOCHS[-1]], strict=True)
        if measure != "matched_cosine"
    ]
    of_nearer = [abs(found.own - found.mean) for each, found in without if each == "nearer"]
    return {
        **{f"{each}-most": number(max(apart[each]), 3) for each in ("nearer", "farther")},
        "moved": f"{sum(measure not in moved['softmax'] for measure in MEASURES)} of the {len(MEASURES)}",
        "moved-alike": f"{sum(alike)} of these {len(alike)}",
        "matched-noise": number(drawn(raw, "scaled", EPOCHS[-1])["matched_cosine", NOISE].mean, 2),
        "without-matched": f"{len(of_nearer)} of {len(without)} figures are nearer, by {number(max(of_nearer), 3)} at "
        f"most, and {sum(each == 'farther' for each, _ in without)} farther",
        "scaled-cosines": " and ".join(signed(each.own - each.mean, 3) for each in scaled.values()),
        **{
            f"{course}-last": f"{after.count('nearer')} nearer than every draw and {after.count('farther')} farther"
            for course, after in ((course, said[course, EPOCHS[-1]]) for course in COURSES)
        },
        "nearer-last": f"{last.count('nearer')} of {len(last)}",
        "farther-last": f"{last.count('farther')}",
        "first": f"{len(first) - first.count('within')} of {len(first)}",
    }


@PAGE.numbers
def prose(raw: Raw) -> dict[str, str]:
    cosines = [value for model in MODELS for value in by_layer(raw, model, OWN, "direct_cosine")]
    gammas = {
        kind: [value for model in MODELS for value in by_layer(raw, model, kind, "gamma_absolute")]
        for kind in (OWN, LINEAR, NOISE)
    }
    controls = [*gammas[LINEAR], *gammas[NOISE]]
    cka = [
        " against ".join(number(mean(raw, "cifar10_vit", kind, measure), 2) for kind in (OWN, LINEAR))
        for measure in ("linear_cka", "rbf_cka")
    ]
    lower = [
        sum(
            own < control
            for own, control in zip(
                by_layer(raw, "cifar10_vit", OWN, measure), by_layer(raw, "cifar10_vit", LINEAR, measure), strict=True
            )
        )
        for measure in ("linear_cka", "rbf_cka")
    ]
    found = gains(raw)
    medians = {model: [float(np.median(each)) for each in ratios_of(raw, model).values()] for model in MODELS}
    ratios = {model: [ratio for each in ratios_of(raw, model).values() for ratio in each] for model in MODELS}
    positive = {
        model: [
            phi > h for h, phi in zip(by_layer(raw, model, OWN, "h"), by_layer(raw, model, OWN, "phi"), strict=True)
        ]
        for model in MODELS
    }
    if any(positive["cifar10_vit"] + positive["vit_random"]):
        raise PageError("the page says that the mean of J is negative in all layers of both ViTs: write it anew")
    of_vits = ratios["cifar10_vit"] + ratios["vit_random"]
    return {
        **{
            f"norms-{name}": " to ".join(significant(pick(medians[model]), 2) for pick in (min, max))
            for name, model in {"trained": "cifar10_vit", "untrained": "vit_random", "minilm": "minilm"}.items()
        },
        "positive-layers": f"{sum(positive['minilm'])} of its {len(positive['minilm'])}",
        "longer": f"{sum(ratio > 1 for ratio in of_vits)} of {len(of_vits)}",
        "positive": f"{sum(ratio <= 1 for ratio in ratios['minilm'])} of {len(ratios['minilm'])}",
        **{
            f"signed-{model}": " against ".join(
                number(mean(raw, model, kind, "signed_cosine"), 2) for kind in (OWN, NOISE)
            )
            for model in TRAINED
        },
        "gain": significant(max(found), 1),
        "gains": f"{sum(gain > 0 for gain in found)} of the {len(found)}",
        "gains-not": f"{sum(gain < 0 for gain in found)} of the {len(found)}",
        "gains-few": str(sum(gain > 0 for gain in found)),
        "cosines": f"{signed(min(cosines), 2)} to {signed(max(cosines), 2)}",
        "rbf-minilm": " against ".join(number(mean(raw, "minilm", kind, "rbf_cka"), 2) for kind in (OWN, NOISE)),
        "cka": ", ".join(cka),
        "cka-lower": " and ".join(f"{each}" for each in lower),
        "gamma": " to ".join(f"{pick(gammas[OWN]):.0e}".replace("e-0", "e−") for pick in (min, max)),
        "gamma-controls": " to ".join(f"{pick(controls):.0e}".replace("e-0", "e−") for pick in (min, max)),
    }


def summary(model: str, raw: Raw) -> str:
    """The summary that the analysis writes; its first line says what was run, and is kept."""
    return report.summary(rows(raw, model), raw.text(f"{model}/{report.SUMMARY}").splitlines()[0])


def figure(model: str, raw: Raw) -> Figure:
    """What the analysis draws."""
    means = report.layer_means(rows(raw, model))
    return Figure(lambda path: report.draw(path, means, report.PUBLISHED), [means, report.PUBLISHED], report)


for name in MODELS:
    PAGE.texts[f"{name}/{report.SUMMARY}"] = partial(summary, name)
    PAGE.figures[f"{name}/{report.FIGURE}"] = partial(figure, name)
