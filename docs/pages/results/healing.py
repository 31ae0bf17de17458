"""A pretrained sentence encoder with other attention: what the tables and numbers of its page are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial

from docs.pages.errors import PageError, check_told
from docs.pages.figures import Figure
from docs.pages.numbers import difference, in_turn, interval, least_to_most, mean_std, number, signed, significant, told
from docs.pages.page import Page
from docs.pages.raw import RESULTS, Comparison, Raw
from docs.pages.tables import Table, nothing_yet, verdicts
from lightning_tasks.analyses import drift_report as report

PAGE = Page(
    "healing",
    "all-MiniLM-L6-v2",
    summaries={"minilm": "examples/healing/compare_minilm.yaml", "vit": "examples/healing/compare_cifar10_vit.yaml"},
)
DRIFT = f"drift/{report.TABLE}"
METRICS = {  # of each comparison the primary endpoint is the first
    "minilm": {
        "cosine, AG News": ("test/cosine_ag_news", 3, 1.0),
        "cosine, WikiText-2": ("test/cosine_wikitext", 3, 1.0),
        "neighbors kept, %": ("test/neighbours_kept", 1, 100.0),
        "probe, %": ("test/probe_accuracy", 1, 100.0),
    },
    "vit": {
        "accuracy, %": ("test/top1", 1, 100.0),
        "loss, nats": ("test/loss", 3, 1.0),
        "cosine": ("val/drift/cosine", 3, 1.0),
        "mean error of layers": ("val/drift/relative_error/mean", 3, 1.0),
    },
}
BEFORE = "{}, not healed"
COSINES = ("test/cosine_ag_news", "test/cosine_wikitext")
ROUNDING = 1e-5  # a relative error below it says nothing of a layer


def read(raw: Raw, part: str) -> Comparison | None:
    """The comparison; None before it has run."""
    return raw.comparison(part, PAGE.summaries[part]) if (raw.folder / part / RESULTS).is_file() else None


def healed(found: Comparison) -> list[str]:
    """The mechanisms that were healed, in the order of the comparison."""
    return [name for name in found.configs if BEFORE.format(name) in found.configs]


def error_of(row: Mapping[str, str]) -> str:
    """The relative error of the model's output; 0 where it is no more than rounding."""
    error = float(row["output_error"])
    return significant(error) if error > ROUNDING else "0"


@PAGE.table
def drift(raw: Raw) -> Table:
    """Each mechanism in all layers, and in the one that costs least and the one that costs most."""
    heads = ["mechanism", "all layers: relative error", "cosine", "cheapest layer", "cosine", "dearest layer", "cosine"]
    rows = []
    for mechanism in dict.fromkeys(row["mechanism"] for row in raw.rows(DRIFT)):
        given = [row for row in raw.rows(DRIFT) if row["mechanism"] == mechanism and not row["refused"]]
        alone = [row for row in given if row["layer"] != "all"]
        alone.sort(key=lambda row: float(row["output_error"]))
        (whole,) = [row for row in given if row["layer"] == "all"]
        cells = [mechanism, error_of(whole), significant(float(whole["output_cosine"]))]
        for row in (alone[0], alone[-1]):
            changed = float(alone[-1]["output_error"]) > ROUNDING
            cells += [row["layer"].split(".")[2] if changed else "", significant(float(row["output_cosine"]))]
        rows.append((float(whole["output_error"]), cells))
    return Table(heads, [cells for _, cells in sorted(rows)])


@PAGE.table
def drift_of_classes(raw: Raw) -> Table:
    """Each mechanism in all layers of the vision transformer."""
    rows = [row for row in raw.rows("drift_vit/drift.csv") if row["layer"] == "all"]
    rows.sort(key=lambda row: float(row["output_error"]))
    cells = [
        [
            row["mechanism"],
            error_of(row),
            number(float(row["output_cosine"]), 3),
            number(max(float(row["output_kl"]), 0.0), 3),
            number(100 * float(row["same_class"]), 1),
        ]
        for row in rows
    ]
    return Table(["mechanism", "relative error", "cosine", "KL, nats", "same class, %"], cells)


def before_and_after(part: str, raw: Raw) -> Table:
    """Every metric of each mechanism, not healed and healed; one that only a fit measures healed alone."""
    found, metrics = read(raw, part), METRICS[part]
    heads = ["mechanism", *metrics]
    if found is None:
        return nothing_yet(*heads)
    rows = []
    for name in healed(found):
        both = [BEFORE.format(name), name]
        pairs = [
            " → ".join(mean_std(found.values(metric, each), digits, scale) for each in both if found.has(metric, each))
            for metric, digits, scale in metrics.values()
        ]
        rows.append([name, *pairs])
    return Table(heads, rows)


def primary(part: str, raw: Raw) -> Table:
    """The primary endpoint of what was healed, with what the rules say."""
    found = read(raw, part)
    if found is None:
        return nothing_yet("mechanism", "primary endpoint")
    metric, digits, scale = next(iter(METRICS[part].values()))
    every = verdicts(found, metric, {name: name for name in found.configs}, digits, scale)
    return Table(every.heads, [row for row in every.rows if row[0] in healed(found)])


@PAGE.numbers
def prose(raw: Raw) -> dict[str, str]:
    minilm, vit = (raw.comparison(part, recipe) for part, recipe in PAGE.summaries.items())
    far, near = ("symmetric", "rpc", "differential"), ("gated", "differential")
    cosines = [minilm.mean(metric, each) for metric in COSINES for each in far]
    kept = [100 * minilm.mean("test/neighbours_kept", each) for each in (*far, "sink", "gated")]

    def accuracies(*names: str) -> str:
        return " and ".join(number(100 * vit.mean("test/top1", each)) for each in names)

    behind = sorted(-100 * vit.row("test/top1", each, "softmax").difference for each in far[:2])
    softmax = BEFORE.format("softmax"), "softmax"
    loss = vit.row("test/loss", *softmax)  # of the models before the steps, to those after them
    if not loss.verdict.startswith("lower"):
        raise PageError(f"the verdict on softmax's loss is turned here, and is {loss.verdict}: write it anew")
    steps = [vit.row("test/top1", *pair).verdict for pair in (softmax, ("sink", BEFORE.format("sink")))]
    check_told(
        "the budget is too small to tell softmax and sink from the same models before the steps",
        {*steps} == {"budget too small"},
        in_turn(steps),
    )
    errors = {each: vit.mean("val/drift/relative_error/mean", each) for each in (*far, "gated")}
    return {
        "cosines-before": least_to_most(
            (minilm.mean(metric, BEFORE.format(each)) for metric in COSINES for each in far), 2
        ),
        "cosines": least_to_most(cosines, 2),
        "neighbors": f"{number(min(kept), 0)}% to {number(max(kept), 0)}%",
        "probe": in_turn(told(minilm.row("test/probe_accuracy", each, "softmax"), 1, 100) for each in far),
        "probe-sink": told(minilm.row("test/probe_accuracy", "sink", "softmax"), 1, 100),
        "vit-seeds": f"{len(vit.seeds)} seeds ({vit.seeds[0]} to {vit.seeds[-1]})",
        "teacher": number(100 * vit.mean("test/top1", BEFORE.format("softmax"))),
        "near": accuracies(*near),
        "near-to-softmax": in_turn(told(vit.row("test/top1", each, "softmax"), 1, 100) for each in near),
        "near-losses": in_turn(told(vit.row("test/loss", each, "softmax"), 4) for each in near),
        "far-before": accuracies(*map(BEFORE.format, far[:2])),
        "far": accuracies(*far[:2]),
        "behind": " to ".join(number(each, 0) for each in behind),
        "softmax-steps": difference(vit.row("test/top1", *softmax[::-1]), 1, 100),
        "sink-steps": difference(vit.row("test/top1", "sink", BEFORE.format("sink")), 1, 100),
        "sink-loss": told(vit.row("test/loss", "sink", BEFORE.format("sink")), 4),
        "softmax-loss": f"{signed(-loss.difference, 4)} {interval(-loss.high, -loss.low, 4)} "
        f"({loss.verdict.replace('lower', 'higher')})",
        "layers": f"{number(errors['symmetric'])}, {number(errors['symmetric'] / errors['gated'], 0)} times",
    }


@PAGE.numbers
def runs(raw: Raw) -> dict[str, str]:
    """What the runs took, and how far the encoder's are from those of the seeds before."""
    minilm, vit = (raw.comparison(part, recipe) for part, recipe in PAGE.summaries.items())
    before, fits = (
        [second / 60 for second in vit.seconds(*names)] for names in (map(BEFORE.format, healed(vit)), healed(vit))
    )
    earlier, _ = Raw(raw.root, "docs/results/healing/minilm").with_earlier(minilm)
    metric = minilm.endpoints.primary
    apart = [
        abs(minilm.mean(metric, config) - earlier.mean(metric, config))
        for name in healed(minilm)[1:]
        for config in (name, BEFORE.format(name))
    ]
    apart_before = dict(zip(healed(minilm)[1:], apart[1::2], strict=True))
    equal = [name for name, each in apart_before.items() if not each]
    check_told(
        "before healing the three without newly drawn weights are equal on both sets of seeds",
        equal == ["sink", "symmetric", "rpc"],
        apart_before,
    )
    return {
        "hours": number(sum(minilm.seconds()) / 3600),
        "ran": minilm.ran_in(),
        "ran-fits": vit.ran_in(*healed(vit)),
        "ran-tests": vit.ran_in(*map(BEFORE.format, healed(vit))),
        "fits": f"{len(fits)} runs of {least_to_most(fits)} minutes",
        "tests": f"{len(before)} of {least_to_most((60 * each for each in before), 0)} seconds",
        "earlier": number(max(apart[::2]), 3),
        "earlier-before": in_turn(f"{number(each, 3)} (`{name}`)" for name, each in apart_before.items() if each),
    }


@PAGE.figure(f"drift/{report.FIGURE}")
def drift_of_layers(raw: Raw) -> Figure:
    """What the analysis draws."""
    rows = raw.records(DRIFT, report.Row)
    return Figure(lambda path: report.draw(path, rows), [asdict(row) for row in rows], report)


for name in METRICS:
    PAGE.tables |= {
        f"{name}_before_and_after": partial(before_and_after, name),
        f"{name}_primary": partial(primary, name),
    }
