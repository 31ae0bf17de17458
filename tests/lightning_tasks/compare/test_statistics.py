"""The summary of a comparison against closed forms."""

import math

import numpy as np
import pytest

from lightning_tasks.compare.formats import latex, markdown, write_summary
from lightning_tasks.compare.statistics import (
    equivalence_p,
    holm,
    last_values,
    minimum_detectable_effect,
    p_of_interval,
    paired_interval,
    paired_p,
)
from lightning_tasks.compare.summary import Endpoints, PairedCell, SummaryRow, count_comparisons, summarize, unpaired
from lightning_tasks.figures.curves import curve
from lightning_tasks.runs.divergence import STOPPED, diverged_cells, diverged_configs, with_stops
from lightning_tasks.runs.log import read_metrics
from tests.rows import each_row


def rows_of(values):
    return [
        {"config": config, "seed": seed, "step": step, "metric": "m", "value": value + step}
        for config, seeds in values.items()
        for seed, value in enumerate(seeds)
        for step in (1, 0)
    ]


def test_the_last_step_counts():
    assert last_values(rows_of({"a": [5.0]}), "m") == {"a": {0: 6.0}}


def test_a_run_that_diverged_is_in_the_table(tmp_path):
    log = tmp_path / "metrics.csv"
    log.write_text("step,epoch,val/loss\n1,0,4.0\n2,0,nan\n3,0,\n")
    rows = [{"config": "a", "seed": 0, **row} for row in read_metrics(log)]
    assert [row["step"] for row in rows] == [1, 2]
    assert math.isnan(last_values(rows, "val/loss")["a"][0])


def test_paired_interval_of_a_known_sample():
    # Mean 2, standard deviation 1, n = 3: 2 -+ t(0.975, 2) / sqrt(3), t = 4.302653.
    assert paired_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.484138, 2 + 2.484138), abs=1e-5)


def test_p_values_against_scipy():
    from scipy import stats

    found = [0.3, -0.1, 0.4, 0.2, 0.1]
    assert paired_p(found) == pytest.approx(stats.ttest_1samp(found, 0.0).pvalue)
    assert p_of_interval(np.mean(found), *paired_interval(found), 5) == pytest.approx(paired_p(found))
    above = stats.ttest_1samp(found, -0.5, alternative="greater").pvalue
    below = stats.ttest_1samp(found, 0.5, alternative="less").pvalue
    assert equivalence_p(found, 0.5) == pytest.approx(max(above, below))
    # The 90% interval ends at the margin where the p-value is 0.05.
    assert equivalence_p(found, max(map(abs, paired_interval(found, 0.9)))) == pytest.approx(0.05)
    assert math.isnan(paired_p([1.0, 1.0]))
    assert math.isnan(equivalence_p([1.0, 1.0], 0.1))


def test_holm_of_the_textbook():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, math.nan, 0.7])[::2] == [1.0, 1.0]
    assert math.isnan(holm([0.6, math.nan])[1])
    assert holm([]) == []


def test_holm_counts_comparisons_without_a_result():
    assert holm([0.01, math.nan, 0.02]) == pytest.approx([0.03, math.nan, 0.04], nan_ok=True)
    assert holm([0.01, 0.02], 5) == pytest.approx([0.05, 0.08])
    assert holm([0.01, 0.02], 1) == holm([0.01, 0.02])


def with_differences(differences, metric="m"):
    return [
        {
            "config": config,
            "seed": seed,
            "step": 1,
            "metric": metric,
            "value": 5.0 + (difference if config == "b" else 0.0),
        }
        for seed, difference in enumerate(differences)
        for config in ("a", "b")
    ]


@each_row(
    ("differences", "verdict"),
    [
        ([-1.0, -1.1, -0.9, -1.0], "lower"),
        ([1.0, 1.1, 0.9, 1.0], "higher"),
        ([1.0, 1.1, 0.9], "too few pairs"),
        ([-1.0, 1.2, 0.1, 0.3], "undecided"),
        ([0.0, 0.0, 0.0, 0.0], "equal"),
        ([0.0, 0.0, 0.0], "too few pairs"),
        ([0.5, 0.5, 0.5], "too few pairs"),
        ([0.5, 0.5, 0.5, 0.5], "no spread"),
        ([1.0], ""),
        ([0.1, 0.9, 0.8, 0.2, 1.0], "undecided"),
        ([0.1, math.nan, 0.2], "diverged"),
        ([0.1, math.inf, 0.2], "diverged"),
        ([-math.inf], "diverged"),
    ],
)
def test_the_verdict_follows_the_paired_differences(differences, verdict):
    _, row = summarize(with_differences(differences), ["a", "b"], ["m"])
    assert row.verdict == verdict
    assert markdown([row]).splitlines()[-1].endswith(f"| {verdict} |")


def test_one_large_pair_does_not_hide_the_spread_of_the_others():
    pairs = {"a": [1e6, 30.0, 31.0, 29.0], "b": [1e6 + 0.5, 30.4, 31.5, 29.6]}
    rows = [
        {"config": config, "seed": seed, "step": 0, "metric": "m", "value": value}
        for config, values in pairs.items()
        for seed, value in enumerate(values)
    ]
    row = summarize(rows, ["a", "b"], ["m"])[-1]
    assert (row.verdict, row.p) == ("higher", pytest.approx(paired_p([0.5, 0.4, 0.5, 0.6])))


def test_pairs_that_differ_by_the_rounding_of_a_log_are_equal():
    near = np.nextafter(np.float32(0.5), np.float32(1))
    rows = [
        {"config": config, "seed": seed, "step": 0, "metric": "m", "value": float(value)}
        for config, values in {"a": [0.5, 0.7, 0.6, 0.8], "b": [near, 0.7, 0.6, 0.8]}.items()
        for seed, value in enumerate(values)
    ]
    row = summarize(rows, ["a", "b"], ["m"])[-1]
    assert (row.verdict, row.difference) == ("equal", 0.0)


@pytest.mark.parametrize("step", [0.01, -0.003])
def test_the_rounding_of_a_log_is_no_spread(step):
    def row_of(*noise):
        rows = [
            {"config": config, "seed": seed, "step": 0, "metric": "m", "value": float(np.float32(value + added))}
            for config, others in (("a", [0.0] * 5), ("b", [step + each for each in noise]))
            for seed, (value, added) in enumerate(zip((0.8, 0.71, 0.62, 0.53, 0.9), others, strict=True))
        ]
        return summarize(rows, ["a", "b"], ["m"], endpoints=Endpoints(margins={"m": 1.0}))[-1]

    row = row_of(0, 0, 0, 0, 0)
    assert (row.verdict, row.difference) == ("no spread", pytest.approx(step, rel=1e-4))
    assert math.isnan(row.p)
    assert math.isnan(row.within)
    assert row_of(1e-6, 0, 0, 0, 0).verdict == ("higher" if step > 0 else "lower")


def test_a_margin_that_was_stated_before_makes_small_differences_equivalent():
    rows = with_differences([0.01, -0.02, 0.015, 0.0])

    def verdict(margins):
        return summarize(rows, ["a", "b"], ["m"], None, Endpoints("", margins))[1].verdict

    assert verdict({"m": 0.1}) == "equivalent"
    assert verdict({}) == verdict({"m": 0.011}) == "undecided"
    text = markdown(summarize(rows, ["a", "b"], ["m"], None, Endpoints("m", {"m": 0.1})))
    assert text.startswith("### m (primary endpoint, equivalent within ±0.1)")


def test_other_metrics_are_corrected_for_their_number_and_the_primary_endpoint_is_not():
    names = [f"m{index}" for index in range(20)]
    one = [1.0, 1.3, 0.3, 0.9, 0.6]  # significant alone, and not among twenty
    rows = [row for name in names for row in with_differences(one, name)]
    found = {row.metric: row for row in summarize(rows, ["a", "b"], names, None, Endpoints("m0")) if row.pairs}
    assert found["m0"].corrected == found["m0"].p == found["m1"].p
    assert found["m1"].corrected == pytest.approx(19 * found["m1"].p)
    assert (found["m0"].verdict, found["m1"].verdict) == ("higher", "undecided")


def test_a_family_counts_variants_that_have_not_run_and_differences_without_a_spread():
    one = with_differences([1.0, 1.3, 0.3, 0.9, 0.6])
    same = [{**row, "config": "c", "value": row["value"] + 0.5} for row in one if row["config"] == "a"]
    alone = summarize(one, ["a", "b"], ["m"])[-1]
    assert (alone.family, alone.corrected) == (1, alone.p)
    for rows, configs, references, comparisons, family in (
        (one, ["a", "b", "c", "d"], {}, 0, 3),
        (one, ["a", "b", "c", "d"], {"d": ["b", "c"]}, 0, 5),
        (one, ["a", "b"], {}, 4, 4),
        ([*one, *same], ["a", "b", "c"], {"c": ["b"]}, 2, 3),
    ):
        found = summarize(rows, configs, ["m", "never logged"], references, Endpoints(comparisons=comparisons))
        row = next(row for row in found if row.config == "b")
        assert (row.family, row.corrected) == (2 * family, pytest.approx(2 * family * row.p)), "of both metrics"
        found = summarize(rows, configs, ["m", "never logged"], references, Endpoints("m", comparisons=comparisons))
        assert next(row for row in found if row.config == "b").family == family
    assert count_comparisons([], {}) == 0


def test_equivalence_is_corrected_as_differences_are():
    rows, endpoints = with_differences([0.01, -0.02, 0.015, 0.0]), Endpoints(margins={"m": 0.022})
    few = summarize(rows, ["a", "b"], ["m"], None, endpoints)[-1]
    many = summarize(rows, ["a", "b", "c", "d", "e"], ["m"], None, endpoints)[-1]
    assert few.within == few.within_corrected == many.within
    assert many.within_corrected == pytest.approx(4 * many.within)
    assert (few.verdict, many.verdict) == ("equivalent", "undecided")


def logged(config, seed, **values):
    """Rows of a cell, each metric at its steps: ``val_loss=[(step, value)]``."""
    names = {"val_loss": "val/loss", "val_top1": "val/top1", "stopped": STOPPED, "entropy": "attention/entropy"}
    return [
        {"config": config, "seed": seed, "step": step, "metric": names[name], "value": value}
        for name, points in values.items()
        for step, value in points
    ]


DIVERGED = [
    *logged("a", 0, val_loss=[(5, 2.0), (10, 1.0)], val_top1=[(10, 0.9)]),
    *logged("a", 1, val_loss=[(5, 2.0), (10, 1.0)], val_top1=[(10, 0.9)], entropy=[(10, 1.0)]),
    *logged("b", 0, val_loss=[(5, 2.0), (10, math.nan)], val_top1=[(10, 0.1)]),
    *logged("b", 1, val_loss=[(5, 2.0), (10, 1.5)], val_top1=[(10, 0.8)]),
    *logged("c", 0, stopped=[(3, 1.0)]),
    *logged("c", 1, val_loss=[(5, 2.5), (10, 1.2)], val_top1=[(10, 0.7)]),
]


def test_a_run_that_diverged_is_said_to_for_each_of_its_metrics():
    """By its loss, or by the guard that stopped it; accuracies of NaN are numbers, and say nothing."""
    texts = {("b", 0): "val/loss is nan at step 10", ("c", 0): "stopped at step 3: a loss or gradient was not finite"}
    assert diverged_cells(DIVERGED) == texts
    summary = summarize(
        with_stops(DIVERGED), ["a", "b", "c"], ["val/loss", "val/top1", "attention/entropy"], {"a": ["b"]}
    )
    found = [(row.metric, row.config, row.reference, row.seeds, row.diverged, row.verdict) for row in summary]
    assert found == [
        ("val/loss", "a", "", 2, 0, ""),
        ("val/loss", "a", "b", 2, 0, "reference diverged"),
        ("val/loss", "b", "a", 2, 1, "diverged"),
        ("val/loss", "c", "a", 2, 1, "diverged"),
        ("val/top1", "a", "", 2, 0, ""),
        ("val/top1", "a", "b", 2, 0, "reference diverged"),
        ("val/top1", "b", "a", 2, 1, "diverged"),
        ("val/top1", "c", "a", 2, 1, "diverged"),
        ("attention/entropy", "a", "", 1, 0, ""),
        ("attention/entropy", "a", "b", 1, 0, ""),
    ]
    assert [row.pairs for row in summary[:4]] == [0, 2, 2, 2]  # no seed is left out
    assert math.isnan(summary[3].mean)
    assert "| c | 2, 1 diverged | nan | a | +nan [+nan, +nan] | nan | nan | diverged |" in markdown(summary)


def test_no_run_that_diverged_makes_the_correction_of_the_others_milder():
    """By its loss alone the accuracy is a number, and would take a place before theirs."""
    one = with_differences([0.011, 0.015, 0.004, 0.005, 0.001], "val/top1")
    lost = [{**row, "config": "c", "value": 0.1} for row in one if row["config"] == "a"]
    loss = {**lost[0], "metric": "val/loss", "value": math.nan}
    stopped = [row for row in lost if row["seed"] != lost[0]["seed"]]
    found = {}
    for name, rows in {"loss": [*lost, loss], "guard": [*stopped, {**loss, "metric": STOPPED, "value": 1.0}]}.items():
        summary = summarize(with_stops([*one, *rows]), ["a", "b", "c"], ["val/top1"])
        found[name] = [(row.config, row.corrected, row.verdict) for row in summary[1:]]
        assert summary[1].corrected == pytest.approx(2 * summary[1].p)
        assert math.isnan(summary[2].mean)
        assert (summary[2].pairs, summary[2].verdict) == (5, "diverged")
    assert found["loss"][0] == found["guard"][0]


def test_a_run_that_diverged_counts_where_it_logged_nothing():
    names = {"train/loss": 1.0, "robustness/clean/accuracy": 0.5, "pursuit": 0.1}

    def cell(config, seed, *left_out):
        return [
            {"config": config, "seed": seed, "step": 9, "metric": metric, "value": value + seed * 0.01}
            for metric, value in names.items()
            if metric not in left_out
        ]

    def stop(config, seed):
        return [{"config": config, "seed": seed, "step": 3, "metric": STOPPED, "value": 1.0}]

    def verdicts(rows):
        summary = summarize(with_stops(rows), ["a", "b"], ["robustness/clean/accuracy", "pursuit"])
        return [(row.metric[0], row.config, row.seeds, row.diverged, row.verdict) for row in summary]

    a, b = ([row for seed in range(4) for row in cell(config, seed)] for config in "ab")
    stopped_a, stopped_b = ([row for seed in range(4) for row in stop(config, seed)] for config in "ab")
    some = [row for row in b if row["seed"] > 0]
    assert verdicts([*a, *stopped_b])[1] == ("r", "b", 4, 4, "diverged")
    assert verdicts([*stopped_a, *b])[1] == ("r", "b", 4, 0, "reference diverged")
    nan = {"config": "b", "seed": 0, "step": 9, "metric": "train/loss", "value": math.nan}
    assert verdicts([*a, *some, nan])[1] == ("r", "b", 4, 1, "diverged")
    without = [row for seed in range(1, 4) for row in cell("a", seed, "pursuit")]
    found = verdicts([*without, *stop("a", 0), *b])
    assert [each for each in found if each[:2] == ("p", "a")] == [], "a metric that its configuration never has"


def test_a_stopped_run_has_nan_where_others_went_on():
    rows = with_stops(DIVERGED)
    assert rows[: len(DIVERGED)] == DIVERGED
    added = [(row["config"], row["seed"], row["metric"], row["step"]) for row in rows[len(DIVERGED) :]]
    assert added == [("c", 0, "val/loss", 5), ("c", 0, "val/loss", 10), ("c", 0, "val/top1", 10)]
    assert all(math.isnan(row["value"]) for row in rows[len(DIVERGED) :])
    assert with_stops(DIVERGED[:5]) == DIVERGED[:5]
    steps, means, _ = curve(rows, "val/loss", "c")
    assert (steps.tolist(), np.isnan(means).tolist()) == ([5, 10], [True, True])
    assert diverged_configs(rows) == {"b": " (1 of 2 diverged)", "c": " (1 of 2 diverged)"}


def test_cells_are_compared_with_the_first_that_saw_all_of_its_data():
    first = PairedCell("a", 0, "w", "beginning", True)
    others = [PairedCell("b", 0, "w", "data", False), PairedCell("c", 0, "v", "other data", False)]
    assert unpaired([first, *others]) == [
        "c seed 0: initial weights differ from those of a",
        "c seed 0: training data differ from those of b",
    ]
    assert unpaired([first, others[0], PairedCell("d", 0, "w", "less", True)]) == []


def test_minimum_detectable_effect_of_the_textbook():
    # A paired t-test of 34 pairs finds half a standard deviation with power 0.8 (Cohen's tables: n = 34).
    assert minimum_detectable_effect(2.0, 34) == pytest.approx(2.0 * 0.4949, rel=2e-3)
    assert minimum_detectable_effect(1.0, 8) == pytest.approx(1.1560, rel=1e-3)
    assert minimum_detectable_effect(1.0, 2) == pytest.approx(11.55, rel=1e-3)  # by integration over chi
    assert minimum_detectable_effect(0.0, 8) == 0.0


def test_differences_are_paired_by_seed():
    # Differences 1, 2, 3 whatever the large spread between seeds.
    summary = summarize(rows_of({"a": [0.0, 100.0, 1000.0], "b": [1.0, 102.0, 1003.0]}), ["a", "b"], ["m", "absent"])
    first, second = summary
    assert (first.pairs, second.pairs, second.difference) == (0, 3, 2.0)
    assert (second.low, second.high) == pytest.approx(paired_interval([1.0, 2.0, 3.0]))
    assert math.isnan(first.difference)
    assert "| b | 3 | 369.67 ± 5.5e+02 | a | +2 [-0.4841, +4.484] |" in markdown(summary)


def test_a_named_reference_is_paired_as_the_first_is():
    rows = rows_of({"a": [0.0, 0.0, 0.0], "b": [1.0, 102.0, 1003.0], "c": [2.0, 104.0, 1006.0]})
    *_, to_first, to_named = summarize(rows, ["a", "b", "c"], ["m"], {"c": ["b"]})
    assert (to_first.config, to_first.reference, to_first.difference) == ("c", "a", pytest.approx(1112 / 3))
    assert (to_named.config, to_named.reference, to_named.pairs, to_named.difference) == ("c", "b", 3, 2.0)
    assert (to_named.low, to_named.high) == pytest.approx(paired_interval([1.0, 2.0, 3.0]))
    assert to_named.detectable == pytest.approx(minimum_detectable_effect(1.0, 3))
    assert to_named.verdict == "too few pairs"
    assert "| c | 3 | 371.67 ± 5.5e+02 | b | +2 [-0.4841, +4.484] |" in markdown([to_named])


def test_one_seed_has_no_interval():
    _, second = summarize(rows_of({"a": [1.0], "b": [2.0]}), ["a", "b"], ["m"])
    assert second.pairs == 0
    assert math.isnan(second.std)


def test_latex_escapes_what_names_hold_and_has_every_row():
    rows = [
        SummaryRow("val/loss_a", "a_b & 50% #1 {x} ~^\\ $", 2, 1.0, 0.5),
        SummaryRow("val/loss_a", "c", 2, 2.0, 0.5),
    ]
    text = latex(rows)
    assert r"a\_b \& 50\% \#1 \{x\} \textasciitilde{}\textasciicircum{}\textbackslash{} \$ & 2 & 1 $\pm$ 0.5 &" in text
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 1
    assert r"{val/loss\_a} \\" in text
    assert all(line.count(" & ") == 7 for line in text.splitlines() if " & " in line)


def test_a_summary_is_written_as_latex_too(tmp_path):
    write_summary([SummaryRow("val/loss", "c", 2, 2.0, 0.5)], {}, tmp_path)
    assert (tmp_path / "tables.tex").read_text().startswith(r"\begin{tabular}")
