"""All mechanisms side by side: the sentences of the page that have no number of their own, held to the raw files.

Comparisons are written so that a NaN makes no sentence true.
"""

from __future__ import annotations

from docs.pages.errors import check_told
from docs.pages.raw import Comparison, Raw
from docs.pages.results.zoo_seeds import (
    BETTER,
    BETTER_SIGN,
    DECIDED,
    LONGER,
    LONGEST,
    SCORES,
    SOFTMAX,
    WIDER,
    Seeds,
    best_and_worst,
    control_row,
    corrected,
    is_mechanism,
    over_all,
    over_eight,
    ranked,
    seeds_of,
    step_times,
    to_softmax,
)
from docs.pages.verdicts import OPPOSITE
from lightning_tasks.compare.choice import Choice

FURTHEST = {"images": "scaled", "text": "forgetting"}


def check_sentences(raw: Raw) -> None:
    """Refuse raw files that say otherwise.

    Raises:
        PageError: they do.
    """
    for part in SCORES:
        seeds = seeds_of(raw, part)
        check_followed(part, seeds)
        check_longest(part, seeds)
    images, text = (seeds_of(raw, part) for part in ("images", "text"))
    check_first_images(images.first)
    check_qk_norm(images)
    check_further_images(images)
    check_rates_of_images(images.first)
    check_times_of_images(step_times(raw, "images"))
    check_first_text(text.first)
    check_parameters_of_text(raw, text.first)
    check_further_text(text)
    check_rates_of_text(text.first)


def check_followed(part: str, seeds: Seeds) -> None:
    """The five best and the five worst mechanisms have further seeds."""
    best, worst = best_and_worst(part, seeds.first)
    followed = [name for name in seeds.further.configs if is_mechanism(name)]
    said = f"the five best and the five worst mechanisms of the first seeds have further ones ({part})"
    check_told(said, {*followed} == {*best, *worst}, followed)


def check_longest(part: str, seeds: Seeds) -> None:
    """Longer training gains more than the other controls, and than any mechanism but one."""
    (metric, _, _), sign = SCORES[part], BETTER_SIGN[part]
    gain = control_row(part, seeds).difference * sign
    ahead = [name for name, row in over_all(part, seeds).items() if not row.difference * sign <= gain]
    check_told(f"{FURTHEST[part]} alone gains more than {LONGEST[part]} ({part})", ahead == [FURTHEST[part]], ahead)
    for found in (seeds.first, seeds.both):
        names = [name for name in (*WIDER, *LONGER) if name in found.configs]
        controls = {name: found.row(metric, name, SOFTMAX).difference * sign for name in names}
        strongest = all(controls[LONGEST[part]] >= each for each in controls.values())
        check_told(f"{LONGEST[part]} is the strongest of the controls ({part})", strongest, controls)


def check_first_images(first: Comparison) -> None:
    """Which differences are higher over four seeds, and which were not compared with longer training."""
    metric, _, _ = SCORES["images"]
    higher = [(row.config, row.reference) for row in first.summary if row.metric == metric and row.verdict == "higher"]
    check_told(
        "scaled to softmax widest and qk_norm to softmax alone are higher on the images, over four seeds",
        higher == [("scaled", WIDER[-1]), ("qk_norm", SOFTMAX)],
        higher,
    )
    best = ranked("images", first)[:2]
    check_told("scaled and qk_norm are the two best on the images", best == ["scaled", "qk_norm"], best)
    check_without_longer("the two best on the images", best, first)


def check_without_longer(called: str, names: list[str], first: Comparison) -> None:
    """Some mechanisms are not compared with softmax that trains longer."""
    compared = [row.config for row in first.summary if row.reference in LONGER and row.config in names]
    check_told(f"{called} are not compared with softmax that trains longer", not compared, compared)


def check_qk_norm(seeds: Seeds) -> None:
    """What the further seeds make of the gain of `qk_norm` on the images."""
    metric, _, _ = SCORES["images"]
    first, further = (found.row(metric, "qk_norm", SOFTMAX) for found in (seeds.first, seeds.further))
    over_images = seeds.first.over_images(metric, "qk_norm", SOFTMAX)
    check_told(
        "the mean of the further seeds of qk_norm lies outside of both of its intervals",
        further.difference < min(first.low, over_images.low),
        further.difference,
    )
    rows = [over_eight("images", seeds)[name] for name in ("qk_norm", "entmax")]
    gains, widths = ([row.difference for row in rows], [row.high - row.low for row in rows])
    check_told(
        "over eight seeds qk_norm gains more than entmax, and its seeds are further apart",
        gains[0] > gains[1] and widths[0] > widths[1],
        (gains, widths),
    )


def check_further_images(seeds: Seeds) -> None:
    """What holds over eight seeds on the images, and which means come closer to softmax on the further ones."""
    metric, _, _ = SCORES["images"]
    rows = over_eight("images", seeds)
    decided = [name for name, row in rows.items() if row.verdict in DECIDED]
    check_told(
        "scaled, entmax and hard alone differ from softmax on the images, over eight seeds",
        {*decided} == {"scaled", "entmax", "hard"},
        {name: row.verdict for name, row in rows.items()},
    )
    every = corrected(metric, seeds.first, seeds.both)
    to_longest = {row.config: row.verdict for row in every if row.reference == LONGEST["images"]}
    check_told(
        "differential is lower than softmax longest over eight seeds, and entmax lower before the correction alone",
        to_longest == {"differential": "lower", "entmax": "lower, not after correction"},
        to_longest,
    )
    before, after = (
        {name: found.row(metric, name, SOFTMAX).difference for name in rows} for found in (seeds.first, seeds.further)
    )
    turned = [name for name in rows if not before[name] * after[name] > 0]
    away = [name for name in rows if name not in turned and not abs(after[name]) < abs(before[name])]
    check_told(
        "l2 and ssmax alone go further from softmax on the further seeds, and element-wise gates alone change sign",
        {*away} == {"l2", "ssmax"} and turned == ["gated, element-wise"],
        (away, turned),
    )


def check_first_text(first: Comparison) -> None:
    """Which mechanisms are better on the texts over four seeds, and what the worse ones are worse than."""
    metric, _, _ = SCORES["text"]
    rows = to_softmax(first.summary, metric)
    lower = [name for name, row in rows.items() if row.verdict == "lower"]
    check_told("forgetting and dam alone are lower over four seeds", {*lower} == {"forgetting", "dam"}, lower)
    means = {name: first.mean(metric, name) for name, row in rows.items() if row.verdict == "higher"}
    uniform = first.mean(metric, "uniform")
    check_told("all that are worse are worse than equal weights", all(each > uniform for each in means.values()), means)


def check_parameters_of_text(raw: Raw, first: Comparison) -> None:
    """The three worst on the texts have fewer parameters than softmax."""
    parameters = {row["variant"]: int(row["parameters"]) for row in raw.step_costs("zoo/text")}
    worst = best_and_worst("text", first)[1][:3]
    check_told(
        "rpc, l2 and symmetric are the three worst on the texts, and have fewer parameters than softmax",
        worst == ["rpc", "l2", "symmetric"] and all(parameters[name] < parameters[SOFTMAX] for name in worst),
        {name: parameters[name] for name in (*worst, SOFTMAX)},
    )


def check_further_text(seeds: Seeds) -> None:
    """All ten differ from softmax on the texts, and the better ones are not compared with longer training."""
    best, worst = best_and_worst("text", seeds.first)
    better, worse = BETTER["text"], OPPOSITE[BETTER["text"]]
    verdicts = {name: row.verdict for name, row in over_eight("text", seeds).items()}
    check_told(
        "all ten mechanisms with further seeds differ from softmax on the texts, five lower and five higher",
        verdicts == dict.fromkeys(best, better) | dict.fromkeys(worst, worse),
        verdicts,
    )
    after = {name: seeds.further.row(SCORES["text"][0], name, SOFTMAX).difference for name in verdicts}
    check_told(
        "their further seeds differ in the direction of the first ones",
        all(after[name] < 0 for name in best) and all(after[name] > 0 for name in worst),
        after,
    )
    check_without_longer("the five that are better on the texts", best, seeds.first)


def check_rates_of_images(first: Comparison) -> None:
    """Which of the three rates is best for those that the page names."""
    said = dict.fromkeys((SOFTMAX, *LONGER), "high") | dict.fromkeys((*WIDER, "entmax"), "middle") | {"qk_norm": "low"}
    found = {choice.variant: rate_of(choice) for choice in first.choices if choice.variant in said}
    check_told(f"the best rates on the images are {said}", found == said, found)


def check_rates_of_text(first: Comparison) -> None:
    """The same on the texts: those whose best rate is not the middle one."""
    said = {"uniform": "high", "rpc": "low", "kde": "high", "qk_norm": "high"}
    rates = {choice.variant: rate_of(choice) for choice in first.choices}
    found = {name: rate for name, rate in rates.items() if rate != "middle"}
    check_told(f"the best rates on the texts that are not in the middle are {said}", found == said, found)


def rate_of(choice: Choice) -> str:
    """Where the chosen one lies among those that were tried."""
    return {0: "low", len(choice.tried) - 1: "high"}.get(choice.chosen, "middle")


def check_times_of_images(times: dict[str, float]) -> None:
    """Which longer training is nearer to the time of a step, as it was measured afterwards."""
    found = {name: times[name] for name in ("qk_norm", "entmax")}
    nearer = all(abs(each - 4 / 3) < abs(each - 5 / 3) for each in found.values())
    check_told("steps of qk_norm and entmax take nearer to 4/3 than to 5/3 of softmax's", nearer, found)
