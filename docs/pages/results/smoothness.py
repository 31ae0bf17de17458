"""How the local Lipschitz constant of attention grows with the number of tokens: the tables and numbers of the page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import numpy as np

from docs.pages.errors import PageError, check_told
from docs.pages.figures import Figure
from docs.pages.numbers import in_turn, least_to_most, number, significant
from docs.pages.page import Claim, Page
from docs.pages.raw import Raw
from docs.pages.results.slopes import (
    ADVERSARIAL,
    TEXT,
    between,
    ends,
    fit,
    held,
    lengths,
    mean_at,
    of_layer,
    rows,
    sides,
    slope,
    span,
)
from docs.pages.tables import Table
from docs.pages.verdicts import by_count
from lightning_tasks.analyses import lipschitz_report as report
from lightning_tasks.analyses.lipschitz_report import Fit, Row

PAGE = Page("smoothness", "Smoothness")
TEXTS = {"minilm-gutenberg": "Alice, every even n", "minilm-ag_news": "AG News, every even n"}
RANDOM = {
    "bert-gutenberg": "BERT, Alice",
    "bert-ag_news": "BERT, AG News",
    "gpt2-gutenberg": "GPT-2, Alice",
    "gpt2-ag_news": "GPT-2, AG News",
}
STEPS = (30, 100, 300)
# What is in all six layers of MiniLM, and the beginning of its folders; the end is the text.
MECHANISMS = {"softmax": "minilm-256", "l2": "minilm-l2", "sinkhorn": "minilm-sinkhorn"}
NAMES = {"gutenberg": "Alice", "ag_news": "AG News"}
CAUSAL = {"softmax": "causal-softmax", "l2": "causal-l2"}
TIMES = ("before", "after")
FOLDERS = [
    *TEXTS,
    *RANDOM,
    *(f"minilm-adversarial-{steps}" for steps in STEPS),
    *(f"{start}-{name}" for start in MECHANISMS.values() for name in NAMES),
    *(f"{start}-{when}" for start in CAUSAL.values() for when in TIMES),
]
LAYERS = {0: "first", 2: "middle", 5: "last"}  # of MiniLM


@dataclass(frozen=True)
class Draw:
    """The mean over sequences of what the ascent found from inputs that differ by rounding; draw 0 is the text."""

    layer: int
    draw: int
    length: int
    mean: float


@dataclass(frozen=True)
class Bound:
    """The bound of a layer on all inputs of 100 tokens of a norm."""

    layer: int
    radius: float
    bound: float


@dataclass(frozen=True)
class Norm:
    """The spectral norm of the weights that values pass in a layer of a random model."""

    model: str
    layer: int
    norm: float


def text_table(raw: Raw, names: dict[str, str], head: str, layers: tuple[int, ...]) -> Table:
    """A row for each folder and layer."""
    lines = []
    for folder, name in names.items():
        for layer in layers:
            found = of_layer(raw, folder, layer)
            constant, radius = (
                " to ".join(significant(each) for each in ends(found, key)) for key in ("value", "radius")
            )
            lines.append([name, str(layer), slope(fit(found)), constant, radius, number(fit(found, "radius").slope, 3)])
    return Table([head, "layer", "slope [95%]", "constant, least n to n = 100", "R there", "slope of R"], lines)


@PAGE.table
def minilm(raw: Raw) -> Table:
    return text_table(raw, TEXTS, "text", (0, 2, 5))


@PAGE.table
def random_models(raw: Raw) -> Table:
    return text_table(raw, RANDOM, "model, text", (0, 5, 11))


def ends_of(raw: Raw, folder: str, layer: int) -> str:
    """The mean constants at the least and at the largest length."""
    return " to ".join(significant(each) for each in ends(of_layer(raw, folder, layer), "value"))


@PAGE.table
def six_layers(raw: Raw) -> Table:
    lines = []
    for text, name in NAMES.items():
        for layer in range(6):
            folders = [f"{start}-{text}" for start in MECHANISMS.values()]
            slopes = [slope(fit(of_layer(raw, folder, layer)), 2) for folder in folders]
            lines.append([name, str(layer), *slopes, *(ends_of(raw, folder, layer) for folder in folders)])
    heads = [f"{name}, {what}" for what in ("slope [95%]", "constant") for name in MECHANISMS]
    return Table(["text", "layer", *heads], lines)


@PAGE.table
def causal(raw: Raw) -> Table:
    lines = []
    for name, start in CAUSAL.items():
        for layer in range(4):
            folders = [f"{start}-{when}" for when in TIMES]
            slopes = [slope(fit(of_layer(raw, folder, layer)), 2) for folder in folders]
            late = slope(fit(of_layer(raw, folders[1], layer, least=32)), 2)
            lines.append([name, str(layer), *slopes, late, *(ends_of(raw, folder, layer) for folder in folders)])
    heads = ["slope before", "after training", "after, from n = 32", "constant before", "after training"]
    return Table(["attention", "layer", *heads], lines)


@PAGE.table
def adversarial(raw: Raw) -> Table:
    lines = []
    for layer in LAYERS:
        kinds = [(str(steps), f"minilm-adversarial-{steps}", ADVERSARIAL, 0) for steps in STEPS]
        for name, folder, kind, digits in [*kinds, ("0: the texts", "minilm-adversarial-300", TEXT, 1)]:
            found = of_layer(raw, folder, layer, kind)
            cells = [number(mean_at(found, length), digits) for length in lengths(found)]
            lines.append([str(layer), name, slope(fit(found)), *cells])
    first, *others = lengths(of_layer(raw, "minilm-adversarial-300", 0))
    return Table(["layer", "steps", "slope [95%]", f"n = {first}", *map(str, others)], lines)


@PAGE.table
def short(raw: Raw) -> Table:
    def cell(steps: int, layer: int, least: int) -> str:
        return number(fit(of_layer(raw, f"minilm-adversarial-{steps}", layer, ADVERSARIAL, least)).slope, 2)

    lines = [
        [f"{steps} steps, {name}", *(cell(steps, layer, least) for layer in LAYERS)]
        for steps in STEPS
        for name, least in (("all n", 0), ("from n = 32", 32))
    ]
    return Table(["slope", *(f"{name} layer" for name in LAYERS.values())], lines)


def six_keys() -> list[tuple[str, int]]:
    """Folder and layer of softmax attention in MiniLM's six layers."""
    return [(f"{MECHANISMS['softmax']}-{text}", layer) for text in NAMES for layer in range(6)]


@PAGE.claims
def claims(raw: Raw) -> list[Claim]:
    six = {key: fit(of_layer(raw, *key)) for key in six_keys()}
    trained = [fit(of_layer(raw, "causal-softmax-after", layer)) for layer in range(4)]
    parts = {"MiniLM to 128": to_trained_length(raw), "to 256": [*six.values()], "causal model": trained}
    holding = {name: held(fits, 0.25) for name, fits in parts.items()}
    holding_of = ", ".join(f"{count} of {len(parts[name])} ({name})" for name, count in holding.items())
    check_told(
        "slopes are about a quarter in the mean, and not layer by layer",
        all(0.2 < np.mean([each.slope for each in fits]) < 0.3 for fits in parts.values())
        and any(holding.values())
        and all(count < len(parts[name]) for name, count in holding.items())
        and sum(holding.values()) < 0.5 * sum(map(len, parts.values())),
        f"{holding_of}; {', '.join(map(between, parts.values()))}",
    )
    ascents = {layer: fit(of_layer(raw, "minilm-adversarial-300", layer, ADVERSARIAL)) for layer in LAYERS}
    late_ascents = [fit(of_layer(raw, "minilm-adversarial-300", layer, ADVERSARIAL, 32)) for layer in LAYERS]
    slopes = ", ".join(f"{name} {slope(ascents[layer], 2)}" for layer, name in LAYERS.items())
    late = late_slopes(raw)
    return [
        Claim(
            "On real text the local Lipschitz constant of self-attention grows about like n^{1/4} (Castin, Ablin and "
            "Peyré, ICML 2024)",
            f"slopes of MiniLM's six layers on two texts, to the 128 tokens that it was trained on: "
            f"{between(to_trained_length(raw))}; to 256: {between([*six.values()])}; of the four of a small causal "
            f"model: {between(trained)}; of three of MiniLM's layers at every even n to 100: {of_three_layers(raw)}",
            "not shown here (about a quarter in the mean over layers, and not layer by layer: "
            f"intervals that hold 1/4: {holding_of}; what 'about' allows was not stated before)",
        ),
        Claim(
            "... and like n^{1/2} for adversarial inputs",
            f"MiniLM, 300 steps of ascent: {slopes}; from n = 32 on {late}",
            by_count(held([*ascents.values()], 0.5), len(LAYERS), "intervals over all lengths that hold 1/2")
            + f"; from n = 32 on, a limit chosen after the runs: {held(late_ascents, 0.5)} of {len(LAYERS)}",
        ),
    ]


def of_three_layers(raw: Raw) -> str:
    """The mean slope of the first, the middle and the last layer of MiniLM on each text."""
    means = [fmean(fit(of_layer(raw, folder, layer)).slope for layer in LAYERS) for folder in TEXTS]
    return " and ".join(number(each, 2) for each in means) + " in the mean"


def late_slopes(raw: Raw) -> str:
    """The slopes of the ascent of 300 steps from n = 32 on, layer by layer."""
    found = (fit(of_layer(raw, "minilm-adversarial-300", layer, ADVERSARIAL, 32)) for layer in LAYERS)
    return ", ".join(slope(each, 2) for each in found)


def to_trained_length(raw: Raw) -> list[Fit]:
    """The slopes of softmax attention in MiniLM's six layers to n = 128."""
    return [fit([row for row in of_layer(raw, *key) if row.length <= 128]) for key in six_keys()]


def causal_norms() -> dict[int, float]:
    """‖C_n‖₂ of the matrix of running means, by n."""
    means = {n: np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None] for n in range(2, 101, 2)}
    return {n: math.sqrt(np.linalg.eigvalsh(each @ each.T)[-1]) for n, each in means.items()}


def longer(raw: Raw) -> dict[str, str]:
    """What is said of lengths up to 256, of other mechanisms and of the causal models."""
    found = {
        name: [fit(of_layer(raw, f"{start}-{text}", layer)) for text in NAMES for layer in range(6)]
        for name, start in MECHANISMS.items()
    }
    first = [of_layer(raw, f"{MECHANISMS['softmax']}-{text}", 0) for text in NAMES]
    steps = [[significant(mean_at(each, n)) for n in (2, 128, 256)] for each in first]
    trained = {
        f"{start}-{when}": [fit(of_layer(raw, f"{start}-{when}", layer)) for layer in range(4)]
        for start in CAUSAL.values()
        for when in TIMES
    }
    first_sinkhorn = [of_layer(raw, f"{MECHANISMS['sinkhorn']}-{text}", 0) for text in NAMES]
    all_lengths = [*zip(trained["causal-l2-after"], trained["causal-softmax-after"], strict=True)]
    smaller = [l2.slope < softmax.slope for l2, softmax in zip(found["l2"], found["softmax"], strict=True)]
    late = {
        name: [fit(of_layer(raw, f"{start}-after", layer, least=32)) for layer in range(4)]
        for name, start in CAUSAL.items()
    }
    rows_of = [(text, layer) for text in NAMES for layer in range(6)]
    smaller_in = [layer for (_, layer), is_smaller in zip(rows_of, smaller, strict=True) if is_smaller]
    check_told(
        "slopes with L2 attention are smaller in the first layer and the last", {*smaller_in} == {0, 5}, smaller_in
    )
    check_told(
        "from n = 32 on slopes are smaller with L2 attention in all four layers",
        all(l2.slope < softmax.slope for l2, softmax in zip(late["l2"], late["softmax"], strict=True)),
        {name: between(each) for name, each in late.items()},
    )
    return {
        "six-trained": between(to_trained_length(raw)),
        "late-300": late_slopes(raw),
        "late-first": " at n = 32 and ".join(
            number(mean_at(of_layer(raw, "minilm-adversarial-300", 0, ADVERSARIAL), n), 0) for n in (32, 100)
        ),
        "late-100": number(mean_at(of_layer(raw, "minilm-adversarial-100", 0, ADVERSARIAL), 100), 0),
        "six-softmax": between(found["softmax"]),
        "six-first": " and ".join(f"{least} to {at_128}" for least, at_128, _ in steps),
        "six-first-last": " and ".join(last for *_, last in steps),
        "six-l2": between(found["l2"]),
        "six-l2-smaller": f"{sum(smaller)} of {len(smaller)}",
        **{f"causal-late-{name}": between(each) for name, each in late.items()},
        "causal-late-apart": str(
            sum(l2.high < softmax.low for l2, softmax in zip(late["l2"], late["softmax"], strict=True))
        ),
        "six-sinkhorn": span(found["sinkhorn"]),
        "sinkhorn-highest": number(max(each.high for each in found["sinkhorn"]), 2),
        "sinkhorn-intervals": sides(found["sinkhorn"]),
        "sinkhorn-last": " and ".join(ends_of(raw, f"{MECHANISMS['sinkhorn']}-{text}", 5) for text in NAMES),
        "sinkhorn-first": " and ".join(
            " to ".join(significant(pick(mean_at(each, n) for n in lengths(each)), 2) for pick in (min, max))
            for each in first_sinkhorn
        ),
        "causal-l2-larger": str(sum(l2.slope > softmax.slope for l2, softmax in all_lengths)),
        "causal-before": span(trained["causal-softmax-before"]),
        "causal-after": between(trained["causal-softmax-after"]),
        "causal-l2-before": span(trained["causal-l2-before"]),
        "causal-l2-after": between(trained["causal-l2-after"]),
    }


def repeated_means(raw: Raw) -> dict[int, dict[int, dict[int, float]]]:
    """By layer, draw and length."""
    found: dict[int, dict[int, dict[int, float]]] = {}
    for row in raw.records("draws.csv", Draw, grid=("layer", "draw", "length")):
        found.setdefault(row.layer, {}).setdefault(row.draw, {})[row.length] = row.mean
    return found


@PAGE.table
def repeated(raw: Raw) -> Table:
    found = repeated_means(raw)
    tried = sorted({length for draws in found.values() for means in draws.values() for length in means})
    shown = []
    for layer, draws in found.items():
        for draw, means in draws.items():
            slope_of = np.polyfit(np.log(tried), np.log([means[length] for length in tried]), 1)[0]
            cells = [number(means[length], 0) for length in tried]
            shown.append([str(layer), str(draw), number(float(slope_of), 3), *cells])
    return Table(["layer", "draw", "slope", f"n = {tried[0]}", *map(str, tried[1:])], shown)


@PAGE.numbers
def bounds(raw: Raw) -> dict[str, str]:
    def largest(layer: int) -> float:
        ascents = (of_layer(raw, f"minilm-adversarial-{steps}", layer, ADVERSARIAL) for steps in STEPS)
        return max(mean_at(each, 100) for each in ascents)

    found = raw.records("bounds.csv", Bound, grid=("layer",))
    if [each.layer for each in found] != [*LAYERS]:
        raise PageError(f"bounds.csv has the layers {in_turn(str(each.layer) for each in found)}, not the page's")
    apart = [
        max(draws[draw][length] for draw in draws) / min(draws[draw][length] for draw in draws) - 1
        for draws in repeated_means(raw).values()
        for length in draws[0]
    ]
    return {
        "bounds": in_turn(significant(each.bound, 2) for each in found),
        "bound-radii": in_turn(f"{each.radius:g}" for each in found),
        "bound-times": in_turn(significant(each.bound / largest(each.layer), 2) for each in found),
        "apart": f"{number(100 * max(apart), 0)}%",
    }


@PAGE.numbers
def prose(raw: Raw) -> dict[str, str]:
    def ascent(steps: int, layer: int) -> list[Row]:
        return of_layer(raw, f"minilm-adversarial-{steps}", layer, ADVERSARIAL)

    alice = {layer: of_layer(raw, "minilm-gutenberg", layer) for layer in LAYERS}
    growth = {
        layer: [last / first for first, last in (ends(found, "value"), ends(found, "radius"))]
        for layer, found in alice.items()
    }
    pairs = [
        (mean_at(ascent(100, layer), n), mean_at(ascent(300, layer), n))
        for layer in LAYERS
        for n in lengths(ascent(100, 0))
    ]
    times = [
        mean_at(ascent(300, layer), 100) / mean_at(of_layer(raw, "minilm-adversarial-300", layer), 100)
        for layer in LAYERS
    ]
    squares = {layer: (found[0], found[1] ** 2) for layer, found in growth.items() if layer}
    check_told("R² grows far less than the constants", all(2 * b < a + 1 for a, b in squares.values()), squares)
    all_slopes = {layer: [fit(ascent(steps, layer)).slope for steps in STEPS] for layer in LAYERS}
    check_told(
        "the slope is above 1/2 in the middle layer and in the last, and below it in the first",
        all(min(all_slopes[layer]) > 0.5 for layer in (2, 5)) and max(all_slopes[0]) < 0.5,
        all_slopes,
    )
    intervals = {layer: [fit(ascent(steps, layer)) for steps in STEPS] for layer in LAYERS}
    first, middle, last = ([(each.low > 0.5) - (each.high < 0.5) for each in intervals[layer]] for layer in (0, 2, 5))
    check_told(
        "intervals lie above 1/2 in the middle layer, hold it in the last, and in the first lie below it but after 100 "
        "steps",
        (first, middle, last) == ([-1, 0, -1], [1, 1, 1], [0, 0, 0]),
        {layer: [slope(each, 2) for each in found] for layer, found in intervals.items()},
    )
    of_texts = {layer: fit(of_layer(raw, "minilm-adversarial-300", layer)).slope for layer in LAYERS}
    check_told(
        "over all lengths the ascent is steeper than text in every layer",
        all(each.slope > of_texts[layer] for layer, found in intervals.items() for each in found),
        of_texts,
    )
    of_text = [fit(of_layer(raw, folder, layer)) for folder in TEXTS for layer in LAYERS]
    check_told("no layer's interval holds 1/4", not held(of_text, 0.25), [slope(each, 2) for each in of_text])
    found = {"text-mean": of_three_layers(raw)}
    found |= {
        f"text-{name}": " and ".join(slope(fit(of_layer(raw, folder, layer)), 2) for folder in TEXTS)
        for layer, name in LAYERS.items()
    }
    found |= {
        f"steps-{name}": ", ".join(number(each, 2) for each in all_slopes[layer]) for layer, name in LAYERS.items()
    }
    return (found | longer(raw)) | {
        "still-growing": f"{sum(late > early for early, late in pairs)} of the {len(pairs)}",
        "times-text": ", ".join(number(each, 0) for each in times),
        "radius-first": " to ".join(number(each, 0) for each in ends(alice[0], "radius")),
        "radius-squared": number(growth[0][1] ** 2, 2),
        "constant-first": number(growth[0][0], 2),
        "radius-others": " and ".join(number(growth[layer][1] ** 2, 2) for layer in (2, 5)),
        "constant-others": " and ".join(number(growth[layer][0], 1) for layer in (2, 5)),
    }


@PAGE.numbers
def of_random_models(raw: Raw) -> dict[str, str]:
    """Random models beside what uniform attention would have."""
    bert, gpt2 = (
        {(folder, layer): of_layer(raw, folder, layer) for folder in folders for layer in (0, 5, 11)}
        for folders in ([*RANDOM][:2], [*RANDOM][2:])
    )
    norms = causal_norms()
    ratios = [[mean_at(found, n) / norm for n, norm in norms.items()] for found in gpt2.values()]
    weights = raw.records("norms.csv", Norm, grid=("model", "layer"))
    return {
        "bert-slopes": least_to_most((fit(each).slope for each in bert.values()), 2),
        "bert-constants": least_to_most((ends(each, "value")[1] for each in bert.values()), 2),
        "bert-norms": least_to_most((each.norm for each in weights if each.model == "bert"), 2),
        "causal-norms": " to ".join(number(norms[n], 2) for n in (2, 100)),
        "causal-slope": number(float(np.polyfit(np.log([*norms]), np.log([*norms.values()]), 1)[0]), 3),
        "gpt2-slopes": least_to_most((fit(each).slope for each in gpt2.values()), 3),
        "gpt2-spread": f"{number(100 * max(max(each) / min(each) - 1 for each in ratios), 1)}%",
        "gpt2-constants": least_to_most((float(np.mean(each)) for each in ratios), 3),
        "gpt2-norms": least_to_most((each.norm for each in weights if each.model == "gpt2"), 3),
    }


def summary(folder: str, raw: Raw) -> str:
    """The summary that the analysis writes; its first line says what was run, and is kept."""
    return report.summary(rows(raw, folder), raw.text(f"{folder}/{report.SUMMARY}").splitlines()[0])


def figure(folder: str, raw: Raw) -> Figure:
    """What the analysis draws."""
    panels = report.panels(rows(raw, folder))
    data = {
        layer: {kind: [points, str(fit)] for kind, (points, fit) in kinds.items()} for layer, kinds in panels.items()
    }
    return Figure(lambda path: report.draw(path, panels), data, report)


for name in FOLDERS:
    PAGE.texts[f"{name}/{report.SUMMARY}"] = partial(summary, name)
    PAGE.figures[f"{name}/{report.FIGURE}"] = partial(figure, name)
