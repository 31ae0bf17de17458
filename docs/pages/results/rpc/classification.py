"""RPC-Attention on CIFAR-10: what the tables and numbers of its page are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from statistics import fmean

from docs.pages.cell_tests import primary_table
from docs.pages.errors import PageError, check_told
from docs.pages.figures import Figure, curves_of
from docs.pages.numbers import difference, in_turn, interval, least_to_most, number, signed, significant, told
from docs.pages.page import Claim, Page
from docs.pages.raw import Comparison, Raw
from docs.pages.results.rpc.all_images import all_images, all_images_numbers, all_images_primary, on_all_images
from docs.pages.results.rpc.cifar10 import ATTACKED, BLIND, GRADIENT, INPUT_GRADIENT, ON_500, RECIPE, read
from docs.pages.results.rpc.explored import EXPLORATORY, exploratory, explored
from docs.pages.results.rpc.shared import CORRUPTED, NAMES, PAIRS, TOP1, by_pass, points, pursuit, under_attack
from docs.pages.tables import Table, differences, means, p_value, step_costs
from docs.pages.verdicts import counted, verdict
from lightning_tasks.compare.summary import SummaryRow

PAGE = Page("rpc_classification", "CIFAR-10")
PAGE.table(all_images_primary)
PAGE.table(all_images)
PAGE.numbers(all_images_numbers)
PAGE.table(exploratory)
PAGE.numbers(explored)
PAGE.summaries |= {"": RECIPE, "exploratory": EXPLORATORY}
TAKEN = "taken by corruption"
SHARE = "val/pursuit/sparsity/layer_00/pass_4"


@PAGE.claims
def claims(raw: Raw) -> list[Claim]:
    found = read(raw)
    top1 = found.row(TOP1, "rpc", "softmax")
    symmetric = found.row(TOP1, "rpc", "symmetric")
    gradient = [found.row(metric, "rpc", "softmax") for metric in GRADIENT]
    blind = [found.row(metric, "rpc", "softmax") for metric in BLIND]
    corrupted = found.row(CORRUPTED, "rpc", "softmax")
    accuracies = " against ".join(f"{number(found.mean(TOP1, config) * 100)}%" for config in ("rpc", "softmax"))

    return [
        Claim(
            "RPC-Attention classifies better than softmax attention (Teo and Nguyen, NeurIPS 2024)",
            f"CIFAR-10, S all but empty: test accuracy {accuracies}, {difference(top1, 1, 100)} points; symmetric "
            f"attention alone {difference(found.row(TOP1, 'symmetric', 'softmax'), 1, 100)}",
            verdict("higher", top1),
        ),
        Claim(
            "... and than symmetric attention",
            f"{difference(symmetric, 1, 100)} points",
            verdict("higher", symmetric),
        ),
        *under_attack(("FGSM and PGD", gradient), ("Square and transfer", blind)),
        Claim(
            "... and under corruption",
            f"mean of 15 corruptions, first 500 test images: {difference(corrupted, 1, 100)} points to softmax",
            verdict("higher", corrupted),
        ),
        *on_all_images(raw),
    ]


@PAGE.table
def primary(raw: Raw) -> Table:
    return primary_table(read(raw), TOP1)


@PAGE.table
def clean(raw: Raw) -> Table:
    return means(
        read(raw),
        NAMES,
        {
            "clean": (TOP1, 1, 100, True),
            "top-5": ("test/top5", 1, 100, True),
            "loss": ("test/loss", 3, 1, True),
            "calibration error": ("test/calibration_error", 1, 100, True),
        },
    )


@PAGE.table
def attacked(raw: Raw) -> Table:
    columns = {name: (metric, 1, 100.0, metric == CORRUPTED) for name, metric in ON_500.items()}
    return means(read(raw), NAMES, columns | {"input gradient": (INPUT_GRADIENT, 2, 1, False)})


@PAGE.table
def paired(raw: Raw) -> Table:
    rows = {"clean, 2,000 images": TOP1, **ATTACKED, "corrupted": CORRUPTED}
    return differences(read(raw), "accuracy, points", PAIRS, {name: (metric, 1, 100) for name, metric in rows.items()})


@PAGE.table
def passes(raw: Raw) -> Table:
    return pursuit(read(raw), 4)


def steps(raw: Raw) -> list[int]:
    """The steps at which validation was logged, one per epoch."""
    return sorted({row["step"] for row in read(raw).rows if row["metric"] == "val/top1"})


@PAGE.table
def support(raw: Raw) -> Table:
    found, logged = read(raw), steps(raw)
    shown = [logged[epoch - 1] for epoch in (1, 3, 6, 9, 18)]

    def cell(config: str, layer: int) -> str:
        metric = f"val/attention/effective_support/layer_{layer:02}"
        return " → ".join(number(found.mean(metric, config, step), 0) for step in shown)

    rows = [[name, *(cell(config, layer) for layer in range(4))] for config, name in NAMES.items()]
    return Table(["", *(f"layer {layer}" for layer in range(4))], rows)


@PAGE.table
def cost(raw: Raw) -> Table:
    return step_costs(raw.step_costs("rpc/compare_classification"), NAMES)


@PAGE.numbers
def prose(raw: Raw) -> dict[str, str]:
    found = read(raw)
    clean, loss = found.row(TOP1, "rpc", "softmax"), found.row("test/loss", "rpc", "softmax")
    symmetric, of_iterating = found.row(TOP1, "symmetric", "softmax"), found.row(TOP1, "rpc", "symmetric")
    images = found.over_images(TOP1, "rpc", "softmax")
    sizes = {config: found.mean(INPUT_GRADIENT, config) for config in NAMES}
    share, entropy = (by_pass(found, what, "rpc", 4) for what in ("sparsity", "entropy"))
    residual = by_pass(found, "residual", "rpc", 4)
    shares = [f"val/pursuit/sparsity/layer_00/pass_{1 + place}" for place in range(4)]
    at_first = [found.mean(each, "rpc", steps(raw)[0]) for each in shares]
    check_told("S is fuller in the last pass than in the others", all(share[-1] > each for each in share[:-1]), share)
    check_told("S is empty in all passes after the first epoch", not any(at_first), at_first)
    check_told("three passes are nearly uniform attention", all(each > 4 for each in entropy[:3]), entropy)
    check_told("the residual is as large as the keys in all passes", all(each >= 1 for each in residual), residual)
    largest = max(row["value"] for row in found.rows if (row["config"], row["metric"]) == ("rpc", SHARE))
    for named, row in {"RPC": clean, "symmetric attention": symmetric}.items():
        check_told(f"{named} is below softmax on clean images", row.verdict == "lower", told(row, 2, 100))
    apart = of_iterating.verdict
    check_told("RPC is not told from symmetric attention", apart == "budget too small", apart)
    minutes = [fmean(found.seconds(config)) / 60 for config in found.configs]
    return {
        "seeds": str(clean.pairs),
        "top1": difference(clean, 2, 100),
        "top1-verdict": f"{clean.verdict}; p {p_value(clean.corrected)} after the correction",
        "top1-images": interval(images.low, images.high, 1, 100),
        "loss": difference(loss, 3),
        "loss-verdict": loss.verdict,
        "symmetric": difference(symmetric, 2, 100),
        "symmetric-verdict": symmetric.verdict,
        "rpc-symmetric": difference(of_iterating, 1, 100),
        "rpc-symmetric-verdict": of_iterating.verdict,
        "rpc-symmetric-within": f"{p_value(of_iterating.within)}, corrected {p_value(of_iterating.within_corrected)}",
        "symmetric-loss": told(found.row("test/loss", "symmetric", "softmax"), 3),
        "detectable": number(100 * clean.detectable),
        "share": significant(share[-1], 1),
        "share-largest": significant(largest, 2),
        "gradients": f"{number(sizes['rpc'], 2)} and {number(sizes['softmax'], 2)}",
        "gradient-rpc": difference(found.row(INPUT_GRADIENT, "rpc", "softmax"), 2),
        "equal-tokens": number(math.exp(entropy[-1]), 0),
        "minutes": least_to_most(minutes, 0),
        "ran": found.ran_in(),
    }


@PAGE.numbers
def of_twins(raw: Raw) -> dict[str, str]:
    """RPC beside its twin without S."""
    found = read(raw)
    compared = {"clean": TOP1, **ATTACKED, "corrupted": CORRUPTED}
    rows = {name: found.row(metric, "rpc", "rpc without S") for name, metric in compared.items()}
    without = found.by_seed(TOP1, "rpc without S")
    apart = {seed: value - without[seed] for seed, value in found.by_seed(TOP1, "rpc").items()}
    furthest = max(apart, key=lambda seed: abs(apart[seed]))
    most = max(row["value"] for row in found.rows if row["metric"] == SHARE and row["seed"] == furthest)
    out = [f"{name}, {difference(row, 1, 100)}" for name, row in rows.items() if row.excludes_zero]
    return {
        "twin": difference(rows["clean"], 1, 100),
        "twin-verdict": rows["clean"].verdict,
        "twin-softmax": told(found.row(TOP1, "rpc without S", "softmax"), 2, 100),
        "twin-intervals": counted([*rows.values()]),
        "twin-out": f" ({in_turn(out)})" if out else "",
        "twin-furthest": signed(100 * apart[furthest], 2),
        "twin-share": f"{significant(100 * most, 1)}%",
    }


@PAGE.numbers
def support_after_nine(raw: Raw) -> dict[str, str]:
    """To how many tokens attention has narrowed in layers 1 to 3 after nine epochs."""
    found, logged = read(raw), steps(raw)
    metrics = [f"val/attention/effective_support/layer_{layer:02}" for layer in (1, 2, 3)]

    def of_runs(metric: str, config: str, epoch: int) -> list[float]:
        return [*found.by_seed(metric, config, logged[epoch - 1]).values()]

    nine = {config: [of_runs(metric, config, 9) for metric in metrics] for config in NAMES}
    ends = [of_runs(metric, "softmax", 18) for metric in metrics]
    spread = [
        a < b for nine_runs, end in zip(nine["softmax"], ends, strict=True) for a, b in zip(nine_runs, end, strict=True)
    ]
    rest = [*nine["softmax"], *nine["symmetric"]]
    return {
        "narrow": f"{least_to_most(map(fmean, rest), 0)} (single runs {least_to_most(chain(*rest), 0)})",
        "narrow-rpc": f"{least_to_most(map(fmean, nine['rpc']), 0)} ({least_to_most(chain(*nine['rpc']), 0)})",
        "spreads": f"{sum(spread)} of {len(spread)}",
    }


@PAGE.table
def with_earlier(raw: Raw) -> Table:
    """Differences beside those of the seeds that ran before, and of these and the others together."""
    found, earlier, every = map(with_taken, (read(raw), *raw.with_earlier(read(raw))))
    of_pair = {
        "RPC − softmax": [TOP1, "test/loss", ON_500["clean"], *ATTACKED.values(), CORRUPTED, TAKEN],
        "symmetric − softmax": [TOP1, CORRUPTED, INPUT_GRADIENT],
        "RPC − symmetric": [TOP1, *GRADIENT, INPUT_GRADIENT],
        "RPC − RPC without S": [TOP1],
        "RPC without S − softmax": [ATTACKED["FGSM 4/255"]],
    }
    called = {metric: name for name, metric in ON_500.items()}
    called |= {TOP1: "clean, 2,000 images", ON_500["clean"]: "clean, first 500", TAKEN: TAKEN}
    others = {"test/loss": ("test loss, nats", 3, 1.0), INPUT_GRADIENT: ("input gradient", 2, 1.0)}
    rows = []
    for pair, metrics in of_pair.items():
        for metric in metrics:
            name, digits, scale = others.get(metric, (called.get(metric, metric), 1, 100.0))
            apart = [difference(each.row(metric, *PAIRS[pair]), digits, scale) for each in (found, earlier, every)]
            rows.append([pair if metric == metrics[0] else "", name, *apart, every.below(metric, *PAIRS[pair])])
    return Table(["", "", "these seeds", "seeds 0 to 7", "all", "below 0"], rows)


def with_taken(found: Comparison) -> Comparison:
    """The same with what corruption takes from the accuracy on the same images."""
    return taken_by(found, CORRUPTED, TAKEN)


def taken_by(found: Comparison, metric: str, name: str) -> Comparison:
    """The same with what is lost from the accuracy on the first 500 images to what a metric measures."""
    return found.with_loss(name, ON_500["clean"], metric)


@PAGE.numbers
def of_all_seeds(raw: Raw) -> dict[str, str]:
    """The primary endpoint on the seeds that ran before, and on these and the others together."""
    earlier, every = raw.with_earlier(read(raw))
    rows = {name: every.row(TOP1, *PAIRS[f"{name} − softmax"]) for name in ("RPC", "symmetric")}
    return {
        "earlier": difference(earlier.row(TOP1, "rpc", "softmax"), 2, 100),
        "every": difference(rows["RPC"], 2, 100),
        "every-symmetric": difference(rows["symmetric"], 2, 100),
        "every-verdicts": "; ".join(f"{name}: {row.verdict}" for name, row in rows.items()),
        "every-apart": told(every.row(TOP1, "rpc", "symmetric"), 2, 100),
    }


@PAGE.numbers
def harmed(raw: Raw) -> dict[str, str]:
    """What attacks and corruptions leave."""
    found = read(raw)
    blind, gradient = ([found.row(metric, "rpc", "softmax") for metric in metrics] for metrics in (BLIND, GRADIENT))
    to_symmetric = [found.row(metric, "rpc", "symmetric") for metric in GRADIENT]
    symmetric = [found.row(metric, "symmetric", "softmax") for metric in GRADIENT]
    if strange := [row for row in (*gradient, *to_symmetric, *symmetric) if row.low > 0]:
        raise PageError(f"the page says that none is above 0, and {strange[0].metric} is: write it anew")
    earlier, _ = raw.with_earlier(found)
    before = [earlier.row(metric, "rpc", "symmetric") for metric in GRADIENT]
    transfer = ATTACKED["transfer 4/255"]
    over_images = found.over_images(transfer, "rpc", "softmax")
    check_told(
        "RPC is higher than softmax under transfer at 4/255, not after the correction",
        found.row(transfer, "rpc", "softmax").verdict == "higher, not after correction",
        told(found.row(transfer, "rpc", "softmax"), 1, 100),
    )
    earlier_kept = [
        f"{row.config} to {row.reference}"
        for row in earlier.summary
        if row.metric in ON_500.values() and row.verdict in ("lower", "higher") and row.metric != ON_500["clean"]
    ]
    check_told("one difference of seeds 0 to 7 held", earlier_kept == ["rpc without S to softmax"], earlier_kept)
    check_told(
        "RPC is below symmetric attention under all four on both sets of seeds; at 1/255 intervals hold 0 here alone",
        all(row.difference < 0 for row in (*to_symmetric, *before))
        and [row.excludes_zero for row in (*to_symmetric[::2], *before[::2])] == [False, False, True, True],
        in_turn(difference(row, 1, 100) for row in (*to_symmetric, *before)),
    )
    corrupted, taken = found.row(CORRUPTED, "rpc", "softmax"), with_taken(found).row(TAKEN, "rpc", "softmax")
    taken_before = with_taken(earlier)
    called = {metric: name for name, metric in ON_500.items()}
    on_both = {
        name: (found.row(metric, "rpc", "softmax"), earlier.row(metric, "rpc", "softmax"))
        for name, metric in ATTACKED.items()
    }
    on_both = {name: rows for name, rows in on_both.items() if all(row.excludes_zero for row in rows)}
    check_told(
        "those intervals of RPC to softmax under attack that exclude 0 on both sets of seeds are below 0",
        all(row.high < 0 for rows in on_both.values() for row in rows),
        in_turn(difference(row, 1, 100) for rows in on_both.values() for row in rows),
    )
    remaining = [
        f"{NAMES[row.config]} to {row.reference} under {called[row.metric]}, {difference(row, 1, 100)} "
        f"(p {p_value(row.corrected)})"
        for row in attacks(found)
        if row.verdict in ("lower", "higher")
    ]
    return {
        "gradient-intervals": counted(gradient),
        "gradient-to-symmetric": counted(to_symmetric),
        "gradient-symmetric-only": counted(symmetric),
        "blind": points(blind),
        "blind-intervals": counted(blind),
        "transfer": difference(found.row(transfer, "rpc", "softmax"), 1, 100),
        "transfer-images": interval(over_images.low, over_images.high, 1, 100),
        "transfer-symmetric": difference(found.row(transfer, "rpc", "symmetric"), 1, 100),
        "corrected-family": str(found.row(GRADIENT[0], "rpc", "softmax").family),
        "earlier-held": told(found.row(ATTACKED["FGSM 4/255"], "rpc without S", "softmax"), 1, 100),
        "gradient-to-symmetric-norm": difference(found.row(INPUT_GRADIENT, "rpc", "symmetric"), 2),
        "blind-detectable": least_to_most(row.detectable * 100 for row in blind),
        "taken": difference(taken, 1, 100),
        "corrupted": difference(corrupted, 1, 100),
        "corrupted-before": difference(earlier.row(CORRUPTED, "rpc", "softmax"), 1, 100),
        "taken-before": difference(taken_before.row(TAKEN, "rpc", "softmax"), 1, 100),
        "taken-symmetric": " here and ".join(
            difference(each.row(TAKEN, "symmetric", "softmax"), 1, 100) for each in (with_taken(found), taken_before)
        ),
        "taken-apart": number(abs(apart(with_taken(found), taken_before, TAKEN))),
        "clean-apart": number(abs(apart(found, earlier, ON_500["clean"]))),
        "gradient-detectable": least_to_most(row.detectable * 100 for row in to_symmetric),
        "on-both": f"{len(on_both)} of the {len(ATTACKED)} intervals of RPC to softmax under attack "
        f"exclude 0 on each set ({in_turn(on_both)})",
        "corrected-lower": str(len(remaining)),
        "corrected-all": str(len(attacks(found))),
        "corrected-which": in_turn(remaining),
    }


def apart(found: Comparison, earlier: Comparison, metric: str) -> float:
    """By how many points the mean difference of RPC to softmax has changed from the seeds that ran before."""
    now, before = (each.row(metric, "rpc", "softmax").difference for each in (found, earlier))
    return 100 * (now - before)


@PAGE.numbers
def taken_by_attacks(raw: Raw) -> dict[str, str]:
    """What attacks take from the accuracy on the first 500 images."""
    found = read(raw)
    earlier, every = raw.with_earlier(found)

    def more(attack: str, config: str, reference: str, of: Comparison = found) -> SummaryRow:
        return taken_by(of, ATTACKED[attack], "lost").row("lost", config, reference)

    def listed_as(rows: Sequence[SummaryRow]) -> str:
        return in_turn(difference(row, 1, 100) for row in rows)

    def on_each(attack: str) -> str:
        here, before, both = (more(attack, "rpc", "softmax", of) for of in (found, earlier, every))
        texts = [difference(row, 1, 100) for row in (here, before, both)]
        return f"{texts[0]} here, {texts[1]} on seeds 0 to 7 and {texts[2]} on all seeds"

    gradient = [taken_by(found, metric, "lost").row("lost", "rpc", "softmax") for metric in GRADIENT]
    clean = [each.row(ON_500["clean"], "rpc", "softmax") for each in (found, earlier)]
    out = sum(row.excludes_zero for row in gradient)
    return {
        "clean-500": difference(clean[0], 1, 100),
        "clean-500-earlier": difference(clean[1], 1, 100),
        "lost": f"{points(gradient)} points; {out} of {len(gradient)} intervals exclude 0",
        "lost-fgsm": on_each("FGSM 4/255"),
        "lost-square": on_each("Square 4/255"),
        "lost-transfer": on_each("transfer 4/255"),
        "lost-symmetric": listed_as([more(name, "rpc", "symmetric") for name in ("FGSM 4/255", "PGD 4/255")]),
        "lost-blind-symmetric": listed_as(
            [more(name, "symmetric", "softmax") for name in ("Square 4/255", "transfer 4/255")]
        ),
    }


def attacks(found: Comparison) -> list[SummaryRow]:
    """The rows of the summary on attacks and corruption."""
    return [row for row in found.summary if row.metric.startswith("robustness/") and row.pairs]


@PAGE.figure("curves.png")
def curves(raw: Raw) -> Figure:
    return curves_of(read(raw))
