"""What a test says of each image, and the intervals over images that a comparison makes of it."""

import math

import numpy as np
import pytest
import torch

from lightning_tasks.compare.cluster.run import run_cell
from lightning_tasks.compare.formats import latex, markdown
from lightning_tasks.compare.images import FILE, ImageResults, read_images, robustness_values, write_images
from lightning_tasks.compare.plan import plan_cells
from lightning_tasks.compare.statistics import percentile_interval, resampled_sums
from lightning_tasks.compare.summary import summarize
from lightning_tasks.compare.tables import collect_results, write_tables
from lightning_tasks.errors import UsageError
from lightning_tasks.recipes import find_recipe
from lightning_tasks.recipes.schema import override_arguments
from lightning_tasks.recipes.variants import Variant
from lightning_tasks.runs.robustness import Row, right_as_text, right_from_text, write_csv
from lightning_tasks.training.segmentation_metrics import SCORES, scores_of_counts
from tests.lightning_tasks.compare.test_record import finish
from tests.rows import each_row

SHORT = {"trainer.max_epochs": 1, "trainer.limit_train_batches": 1, "trainer.limit_val_batches": 1}
SHORT |= {"trainer.num_sanity_val_steps": 0, "trainer.callbacks": []}


def run_of(recipe, output, **overrides):
    variant = Variant("v", str(find_recipe(recipe)), override_arguments({**SHORT, **overrides}), test=True)
    (cell,) = plan_cells([variant], [0], output)
    run_cell(cell)
    rows = cell.result()["rows"]
    logged = {row["metric"]: row["value"] for row in rows if row["metric"].startswith("test/")}
    return logged, read_images(cell.folder / FILE, output)


# -- statistics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("images", [1, 7, 300])
def test_resampled_sums_are_those_of_a_direct_loop(images, monkeypatch):
    monkeypatch.setattr("lightning_tasks.compare.statistics._MOST_COUNTS", 1000)  # several chunks
    parts = np.random.default_rng(1).normal(size=(images, 3))
    generator, direct = np.random.default_rng(5), []
    for _ in range(40):
        total = np.zeros(3)
        for place in generator.integers(images, size=images):
            total += parts[place]
        direct.append(total)
    np.testing.assert_allclose(resampled_sums(parts, draws=40, seed=5), direct, rtol=1e-12, atol=1e-12)


def test_the_interval_of_a_share_is_near_its_normal_one():
    right = np.zeros((2000, 1))
    right[:600] = 1
    low, high = percentile_interval(resampled_sums(right)[:, 0] / 2000)
    half = 1.96 * math.sqrt(0.3 * 0.7 / 2000)
    assert (low, high) == pytest.approx((0.3 - half, 0.3 + half), abs=0.002)
    assert (low, high) == percentile_interval(resampled_sums(right)[:, 0] / 2000)


# -- what a cell keeps -------------------------------------------------------------------------------------------------


def test_values_of_images_give_what_a_classifier_logged(tmp_path):
    logged, values = run_of("quickstart/classification", tmp_path)
    assert {"data", "top1", "top5", "loss"} == set(values)
    assert len(values["top1"]) > 100
    for name in ("top1", "top5", "loss"):
        assert values[name].mean() == pytest.approx(logged[f"test/{name}"], rel=1e-5)


def test_pixels_of_images_give_what_a_segmenter_logged(tmp_path):
    logged, values = run_of("quickstart/segmentation", tmp_path, **{"trainer.limit_test_batches": 2})
    pixels = torch.from_numpy(values["class_pixels"])
    assert pixels.shape[1] == 3
    found = dict(zip(SCORES, scores_of_counts(pixels.sum(0)).tolist(), strict=True))
    assert found == pytest.approx({name: logged[f"test/{name}"] for name in found})


def test_rows_of_robustness_give_what_was_logged(tmp_path):
    fog, snow = np.array([True, False, True]), np.array([True, False, False])
    rows = [
        Row("clean", "", "", "accuracy", 2 / 3, 3, right=right_as_text(fog)),
        Row("attack", "fgsm", "4/255", "accuracy", 1 / 3, 3, right=right_as_text(snow)),
        Row("corruption", "fog", "3", "accuracy", 2 / 3, 3, right=right_as_text(fog)),
        Row("corruption", "snow", "3", "accuracy", 1 / 3, 3, right=right_as_text(snow)),
        Row(
            "corruption", "spatter", "3", "accuracy", 1 / 3, 3, right=right_as_text(~fog)
        ),  # which the mean is not over
        Row("mean corruption", "", "", "accuracy", 0.5, 3),
    ]
    write_csv(rows, tmp_path / "robustness.csv")
    found = robustness_values(tmp_path, {"data": np.array("digest")})
    assert str(found.pop("data")) == "digest"
    assert found.keys() == {row.label for row in rows}
    for row in rows:
        assert found[row.label].mean() == pytest.approx(row.value)
    assert found["robustness/mean_corruption/accuracy"].tolist() == [1, 0, 0.5]
    assert robustness_values(tmp_path, {}) == {}  # of what images is not known
    assert robustness_values(tmp_path / "none", {"data": np.array("digest")}) == {}


@pytest.mark.parametrize("samples", [0, 1, 7, 8, 9, 500])
def test_outcomes_as_text_and_back(samples):
    right = np.random.default_rng(2).random(samples) < 0.5
    assert np.array_equal(right_from_text(right_as_text(right), samples), right)


@each_row(("text", "samples"), [("ff", 9), ("ffff", 8), ("f", 4), ("xy", 8), ("", -1)])
def test_text_of_other_samples_is_refused(text, samples):
    with pytest.raises(ValueError, match=r"bits of|hexadecimal|fromhex"):
        right_from_text(text, samples)


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def compared(demo, tmp_path):
    """Cells of two variants and two seeds whose tests have 50 images; `images(cell)` says which are right."""
    cells = plan_cells([Variant(name, str(demo), (f"--model.rate={name}",)) for name in "12"], [0, 1], tmp_path)
    generator = np.random.default_rng(0)
    for cell in cells:
        right = generator.random(50) < (0.4 if cell.name == "1" else 0.7)
        row = {"step": 5, "metric": "test/top1", "value": float(right.mean())}
        finish(cell, 0.0, rows=[row, {**row, "metric": "val/top1"}])
        write_images({"data": np.array("digest"), "top1": right}, cell.folder / FILE)
    return cells


def test_a_difference_has_an_interval_over_images_beside_that_over_seeds(compared, tmp_path):
    rows = collect_results(compared)
    metrics = ["test/top1", "val/top1"]
    summary = summarize(rows, ["1", "2"], metrics)
    (found,) = ImageResults({(c.name, c.seed): c.folder for c in compared}, tmp_path).intervals(summary)
    assert (found.metric, found.config, found.reference, found.images, found.seeds) == ("test/top1", "2", "1", 50, 2)
    right = {(c.name, c.seed): read_images(c.folder / FILE, tmp_path)["top1"].astype(float) for c in compared}
    each = np.mean([right["2", seed] - right["1", seed] for seed in (0, 1)], axis=0)
    assert each.mean() == pytest.approx(summary[1].difference)
    generator = np.random.default_rng(0)
    direct = [each[generator.integers(50, size=50)].mean() for _ in range(2000)]
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(direct, [0.025, 0.975])))
    write_tables(compared, metrics, {}, tmp_path)
    text = (tmp_path / "summary.md").read_text()
    assert f"| [{found.low:+.4g}, {found.high:+.4g}] |" in text
    assert text.count("| over images [95%] |") == 1  # not in the table of a metric of validation
    assert text.count("over seeds, for these images") == 1
    assert text.count("over the 50 test images, which a paired bootstrap draws anew") == 1
    assert (tmp_path / "images.csv").read_text().splitlines()[0] == "metric,config,reference,images,seeds,low,high"
    assert "over images" in latex(summary, [found])
    assert markdown(summary, [found]) != markdown(summary)


def test_scores_of_masks_are_those_of_the_pixels_of_all_drawn_images(demo, tmp_path):
    """Not a mean of scores of images."""
    cells = plan_cells([Variant(name, str(demo)) for name in "12"], [0, 1], tmp_path)
    generator, kept = np.random.default_rng(0), {}
    for cell in cells:
        there = generator.integers(1, 90, (30, 4))
        kept[cell.name, cell.seed] = np.stack([there // int(cell.name), there, there], 1).astype(np.int32)
        finish(cell, 0.0, rows=[{"step": 5, "metric": f"test/{name}", "value": 0.5} for name in SCORES])
        write_images({"data": np.array("d"), "class_pixels": kept[cell.name, cell.seed]}, cell.folder / FILE)
    summary = summarize(collect_results(cells), ["1", "2"], [f"test/{name}" for name in SCORES])
    found = ImageResults({(c.name, c.seed): c.folder for c in cells}, tmp_path).intervals(summary)
    assert [interval.metric for interval in found] == [f"test/{name}" for name in SCORES]
    generator, direct = np.random.default_rng(0), []
    for _ in range(2000):
        drawn = generator.integers(30, size=30)
        totals = {key: torch.from_numpy(pixels[drawn].sum(0)) for key, pixels in kept.items()}
        pairs = [scores_of_counts(totals["2", seed]) - scores_of_counts(totals["1", seed]) for seed in (0, 1)]
        direct.append(torch.stack(pairs).mean(0).tolist())
    for interval, of_score in zip(found, np.array(direct).T, strict=True):
        assert (interval.low, interval.high) == pytest.approx(tuple(np.quantile(of_score, [0.025, 0.975])), abs=1e-12)


def test_missing_files_leave_the_column_empty_and_are_said(compared, tmp_path):
    (compared[0].folder / FILE).unlink()
    write_tables(compared, ["test/top1"], {}, tmp_path)
    text = (tmp_path / "summary.md").read_text()
    assert "over images" not in text.partition("Without")[0]
    assert "- 2 and 1: not every run has top1 of its images" in text
    for cell in compared[1:]:
        (cell.folder / FILE).unlink()
    write_tables(compared, ["test/top1"], {}, tmp_path)  # a folder of an earlier version
    assert "images" not in (tmp_path / "summary.md").read_text()


def test_runs_on_other_images_are_not_paired(compared, tmp_path):
    write_images({"data": np.array("another"), "top1": np.ones(50, bool)}, compared[0].folder / FILE)
    write_tables(compared, ["test/top1"], {}, tmp_path)
    assert "2 and 1: their runs were not tested on the same images" in (tmp_path / "summary.md").read_text()
    assert not (tmp_path / "images.csv").exists()


@pytest.mark.parametrize("content", [b"", b"PK", b"\x93NUMPY", None])
def test_a_damaged_file_is_named_and_stops_nothing(compared, tmp_path, content):
    path = compared[0].folder / FILE
    if content is None:
        np.savez(path, top1=np.array([{}], dtype=object), data=np.array(""))
    else:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"images\.npz is damaged"):
        read_images(path, tmp_path)
    write_tables(compared, ["test/top1"], {}, tmp_path)
    assert f"- {path} is damaged" in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize(
    "values",
    [
        {"top1": np.full(50, "yes")},
        {"top1": np.ones((50, 2), bool)},
        {"top1": np.ones(50, complex)},
        {"top1": np.ones(50, int)},
        {"top1": np.zeros(50, [("top1", bool)])},
        {"class_pixels": np.ones(50, np.int32)},
        {"class_pixels": np.ones((50, 2, 4), np.int32)},
        {"class_pixels": np.full((50, 3, 4), "many")},
        {"top1": np.ones(50, bool), "data": np.arange(2)},
    ],
)
def test_values_of_other_kinds_are_damage(compared, tmp_path, values):
    for cell in compared:
        write_images({"data": np.array("digest"), **values}, cell.folder / FILE)
        with pytest.raises(UsageError, match=r"images\.npz is damaged"):
            read_images(cell.folder / FILE, tmp_path)
    write_tables(compared, ["test/top1"], {}, tmp_path)
    assert (tmp_path / "summary.md").is_file()
