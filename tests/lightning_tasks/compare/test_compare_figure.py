import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from lightning_tasks.figures.confusion import draw_confusion
from lightning_tasks.figures.curves import curve, draw_comparison, draw_curve, looks, paired_differences
from lightning_tasks.figures.run import draw_run

ROWS = [
    {"config": config, "seed": seed, "step": step, "metric": "val/loss", "value": 3.0 - step / 10 + seed}
    for config in ("a", "b")
    for seed in (0, 1)
    for step in (5, 0)
]


def test_a_curve_is_sorted_and_averaged_over_seeds():
    steps, means, spreads = curve(ROWS, "val/loss", "a")
    assert steps.tolist() == [0, 5]
    np.testing.assert_allclose(means, [3.5, 3.0])
    np.testing.assert_allclose(spreads, [np.sqrt(0.5)] * 2)


@pytest.mark.figures
def test_a_panel_for_each_metric_that_was_logged(tmp_path):
    figure = draw_comparison(ROWS, ["a", "b"], ["val/loss", "absent"], {"b": " (1 of 2 diverged)"})
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["a", "b (1 of 2 diverged)"]
    figure.savefig(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("rows", "panels"), [(ROWS, ["val/loss"]), ([], ["test/loss"])])
def test_what_was_logged_once_is_no_curve(rows, panels):
    once = [{**row, "metric": "test/loss"} for row in ROWS if row["step"] == 5]
    figure = draw_comparison([*rows, *once], ["a", "b"], ["val/loss", "test/loss"], {})
    assert [axes.get_title("left") for axes in figure.axes] == [*panels, f"{panels[0]}, difference to a"]


def legend(figure):
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


@pytest.mark.figures
@pytest.mark.parametrize("name", ["$x", "$\\frac{$", "$\\foo$"])
def test_names_are_no_formulas(tmp_path, name):
    rows = [{**row, "config": name, "metric": name} for row in ROWS if row["config"] == "a"]
    figure = draw_comparison([*rows, *({**row, "metric": name} for row in ROWS)], [name, "a"], [name], {})
    figure.savefig(tmp_path / "curves.png")
    assert legend(figure) == [name, "a"]
    assert figure.axes[1].get_title("left") == f"{name}, difference to {name}"
    draw_run([(name, {name: ([0, 1], [0.0, 1.0])})], tmp_path / "run.png")
    draw_confusion(torch.eye(2), [name, "b"]).savefig(tmp_path / "confusion.png")


def test_the_legend_has_every_variant_that_is_drawn_anywhere():
    rows = [
        {"config": config, "seed": 0, "step": step, "metric": metric, "value": 1.0}
        for config, metric in (("_a", "m"), ("b", "n"))
        for step in (0, 1)
    ]
    figure = draw_comparison(rows, ["_a", "b", "absent"], ["m", "n"], {"_a": " (1 of 1 diverged)"})
    assert legend(figure) == ["_a (1 of 1 diverged)", "b"]
    colors = [line.get_color() for line in figure.axes[0].get_legend().get_lines()]
    assert colors == [color for color, _ in looks(2)]


def test_no_figure_without_a_known_metric():
    assert draw_comparison(ROWS, ["a"], ["absent"], {}) is None


def test_differences_are_of_one_metric_seed_and_step():
    rows = [
        {"config": "a", "seed": 0, "step": 1, "metric": "m", "value": 2.0},
        {"config": "b", "seed": 0, "step": 1, "metric": "m", "value": 2.5},
        {"config": "b", "seed": 1, "step": 1, "metric": "m", "value": 9.0},
        {"config": "b", "seed": 0, "step": 2, "metric": "m", "value": 9.0},
        {"config": "b", "seed": 0, "step": 1, "metric": "n", "value": 9.0},
    ]
    assert paired_differences(rows, "a") == [{"config": "b", "seed": 0, "step": 1, "metric": "m", "value": 0.5}]


@pytest.mark.parametrize("count", [1, 10, 11, 57])
def test_no_two_configurations_look_alike(count):
    assert len(set(looks(count))) == len(looks(count)) == count


def test_dashes_are_drawn_where_colors_come_again():
    axes = Figure().subplots()
    for config, look in zip(("a", "b"), (looks(11)[0], looks(11)[10]), strict=True):
        draw_curve(axes, ROWS, "val/loss", config, look)
    first, eleventh = axes.lines
    assert first.get_color() == eleventh.get_color()
    assert (first.get_linestyle(), eleventh.get_linestyle()) == ("-", "--")
