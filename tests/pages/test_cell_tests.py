"""Tests of cells that are copied beside their page fill it, and those of other settings are named."""

import json
import re
import shutil
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest

from docs.pages import cell_tests
from docs.pages.errors import PageError
from docs.pages.results import out_of_distribution
from docs.pages.results.rpc import all_images, autoattack, cifar10, classification, shared, sparse_part
from lightning_tasks.compare.cell import folder_name
from lightning_tasks.runs import robustness
from lightning_tasks.runs.environment import Environment
from tests.pages.toy import ROOT


def test_tests_of_cells_that_are_copied_beside_their_page_fill_it(tmp_path):
    page, folder = out_of_distribution.PAGE, tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / page.file, folder)
    assert "no numbers yet" in str(out_of_distribution.primary(page.raw(tmp_path)))

    told = [
        ("imagenet", "msp", "aupr"),
        *(
            (*score.split("/"), each)
            for score in ("digits/energy", "camvid/knn")
            for each in out_of_distribution.FIGURES
        ),
    ]

    def share(row, above, seed):
        """Of what is added: what the page does not tell has a spread."""
        return (row in above) * (1.0 if row in told else 1 + seed / 9)

    def write(least, above=told):
        for variant, more in (("softmax", 0.0), ("rpc_lam_1", 0.1)):
            for seed in range(4):
                rows = [
                    robustness.Row(
                        "out of distribution",
                        place,
                        score,
                        metric,
                        least + more * share((place, score, metric), above, seed) + seed / 100,
                    )
                    for place in out_of_distribution.OUTSIDE
                    for score in out_of_distribution.SCORES
                    for metric in out_of_distribution.FIGURES
                ]
                (folder / "out_of_distribution" / variant).mkdir(parents=True, exist_ok=True)
                table = folder / "out_of_distribution" / variant / f"seed_{seed}.csv"
                robustness.write_csv([robustness.Row("clean", "", "", "accuracy", 0.5), *rows], table)

    write(0.5)
    with pytest.raises(PageError, match=r"says that KNN and ViM are worse than chance on digits, and one has 51\.5"):
        out_of_distribution.prose(page.raw(tmp_path))
    write(0.3, above=[*told, ("camvid", "vim", "aupr")])
    with pytest.raises(PageError, match=r"tells all differences of RPC to softmax but camvid/vim/aupr: write it anew"):
        out_of_distribution.prose(page.raw(tmp_path))
    write(0.3)
    raw = page.raw(tmp_path)
    assert out_of_distribution.prose(raw)["verdicts"] == "no spread 1 of 1"
    assert (raw.folder / "softmax" / "seed_0.csv").is_file()
    assert "| softmax | digits | 31.5 ± 1.3 |" in str(out_of_distribution.figures("auroc", raw))
    primary = str(out_of_distribution.primary(raw))
    assert "| rpc lam 1 | 4 | 41.5 ± 1.3 | softmax | +10.0 [+10.0, +10.0]" in primary
    shutil.rmtree(folder / "out_of_distribution" / "softmax")
    with pytest.raises(PageError, match=r"has no values of softmax, which all others are compared with"):
        out_of_distribution.primary(page.raw(tmp_path))


ATTACKED = 50  # images


def attacked(share, note):
    """The table that a test with AutoAttack writes."""
    right = robustness.right_as_text(np.arange(ATTACKED) + 0.5 < share * ATTACKED)
    clean = robustness.Row("clean", "", "", "accuracy", 0.5, ATTACKED)
    after = [f" after {name}" for name in ("apgd-ce", "apgd-t", "fab-t", "square")]
    return [
        clean,
        *(
            robustness.Row(
                "attack", f"autoattack{name}", eps, "accuracy", share, ATTACKED, seconds=took, note=said, right=right
            )
            for eps, took in (("1/255", 180.0), ("4/255", 36.0))
            for name, said in [("", note), *((name, "") for name in after)]
        ),
    ]


def copied(root, *names):
    for name in names:
        shutil.copytree(ROOT / "docs" / "results" / name, root / "docs" / "results" / name)


@pytest.fixture
def with_attacks(tmp_path):
    """The page of AutoAttack, with other tables of the checkpoints that were attacked before."""
    raw = autoattack.PAGE.raw(tmp_path)
    copied(tmp_path, "rpc_autoattack", "rpc_sparse_part")
    shutil.rmtree(raw.folder / "earlier")
    with pytest.raises(PageError, match="earlier has no tables"):
        autoattack.compared_before(raw)
    for variant, more in (("softmax", 0.2), ("rpc_lam_1", 0.1)):
        folder = raw.folder / "earlier" / variant
        folder.mkdir(parents=True)
        for seed in range(4):
            flags = "the output is random; some gradients are zero" if more == 0.1 and seed == 1 else "none"
            note = f"worst case of square (5,000 queries); L-inf; flags: {flags}"
            robustness.write_csv(attacked(more + seed * 0.02, note), folder / f"seed_{seed}.csv")
    return autoattack.PAGE.raw(tmp_path)


def test_what_autoattack_leaves_is_read_with_its_flags(with_attacks):
    raw = with_attacks
    rows = [row[:4] for row in autoattack.before(raw).rows]
    clean = "50.0 ± 0.0"
    assert rows == [[name, "4", eps, clean] for name in ("softmax", "rpc lam 1") for eps in ("1/255", "4/255")]
    assert "| softmax | 4 | 1/255 | 50.0 ± 0.0 | 23.0 ± 2.6 |" in str(autoattack.before(raw))
    primary = autoattack.before_primary(raw).rows
    assert [row[3] for row in primary] == ["", "softmax"]  # references without tables are left out
    assert primary[1][4].startswith("−10.0")
    text = autoattack.of_before(raw)
    one = "(1 of 4 seeds)"
    assert text["before-flags"].split("; ") == [
        f"rpc lam 1 at {eps}: {flag} {one}"
        for eps in ("1/255", "4/255")
        for flag in ("the output is random", "some gradients are zero")
    ]
    assert re.fullmatch(r"\[−\d+\.\d, −\d+\.\d\]", text["before-images"])
    assert text["together-seeds"] == "8"
    cells = autoattack.attacks_before(raw)
    assert [autoattack.seconds_of(cells, eps) for eps in ("1/255", "4/255")] == [180, 36]
    planned = autoattack.sparse_part(raw)
    hours = autoattack.planned_hours(planned, 50, 576)
    assert hours == 64, "5 configurations, 8 seeds and 10 times as many images, 576 seconds each"


def cut(table):
    table.write_text("\n".join(table.read_text().splitlines()[:-1]) + "\n")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda table: table.rename(table.with_name("seed_00.csv")), r"seed_00\.csv is none of VARIANT/seed_N\.csv"),
        (lambda table: table.parent.rename(table.parents[1] / "rpc lam 1"), r"is none of VARIANT/seed_N\.csv"),
        (cut, "have other rows: autoattack after square/4/255/accuracy is in one alone"),
        (lambda table: table.write_text(table.read_text() + table.read_text().splitlines()[-1] + "\n"), "a row twice"),
        (
            lambda table: table.write_text(table.read_text().replace("5,000", "100")),
            "other settings of autoattack/1/255",
        ),
        (lambda table: table.write_text(table.read_text().replace(",50,", ",500,")), "are not the bits of 500 samples"),
        (lambda table: table.write_text(table.read_text().replace("attack,", "shift,")), "no row of the test 'attack'"),
        (lambda table: robustness.write_csv(attacked(float("nan"), "none"), table), "was not measured"),
    ],
    ids=["seed_00", "folder", "cut", "twice", "queries", "images", "other test", "nan"],
)
def test_a_table_of_another_test_is_named(with_attacks, damage, said):
    damage(with_attacks.folder / "earlier" / "rpc_lam_1" / "seed_2.csv")
    with pytest.raises(PageError, match=said):
        autoattack.before(autoattack.PAGE.raw(with_attacks.root))


def test_a_flag_of_two_settings_counts_a_seed_once(with_attacks):
    (cell, *_), flagged = autoattack.attacks_before(with_attacks), "worst case; flags: the output is random"
    row = replace(cell.rows["autoattack/1/255/accuracy"], note=flagged)
    twice = replace(cell, rows={"one": row, "other": replace(row, name="autoattack with another label")})
    assert autoattack.flags_of([twice]) == f"{cell.variant} at 1/255: the output is random (1 of 1 seeds)"


def test_what_s_holds_is_that_of_the_attacked_checkpoints(with_attacks):
    assert autoattack.filled(with_attacks)["filled"].endswith("%")
    table = with_attacks.folder / "filled" / "seed_8.csv"
    shutil.copy(table.with_name("seed_9.csv"), table)
    with pytest.raises(PageError, match=r"filled/seed_8\.csv has 0\.\d+ where results\.csv has .*test last\.ckpt anew"):
        autoattack.filled(autoattack.PAGE.raw(with_attacks.root))


def test_a_test_whose_time_was_not_kept_is_named(with_attacks):
    table = with_attacks.folder / "earlier" / "rpc_lam_1" / "seed_2.csv"
    table.write_text(table.read_text().replace(",180.0,", ",,"))
    with pytest.raises(PageError, match=r"rpc_lam_1/seed_2\.csv has no seconds of autoattack at 1/255"):
        autoattack.seconds_of(autoattack.attacks_before(with_attacks), "1/255")


def test_what_autoattack_left_is_that_of_the_comparison(with_attacks):
    cells = with_attacks.folder / "tests" / "softmax"
    autoattack.attacks(with_attacks)
    table = cells / "seed_8.csv"
    own = robustness.read_csv(table)
    none_stands = robustness.right_as_text(np.zeros(100, bool))
    other = [
        replace(row, value=0.0, right=none_stands) if (row.name, row.setting) == ("autoattack", "0.25/255") else row
        for row in own
    ]
    robustness.write_csv(other, table)
    with pytest.raises(PageError, match=r"seed_8\.csv has 0\.0 where .*autoattack/0\.25_255.* of another checkpoint"):
        autoattack.attacks(autoattack.PAGE.raw(with_attacks.root))
    shutil.copy(with_attacks.folder / "earlier" / "softmax" / "seed_0.csv", cells / "seed_8.csv")
    with pytest.raises(PageError, match="have other rows"):
        autoattack.attacks(autoattack.PAGE.raw(with_attacks.root))
    (cells / "seed_8.csv").unlink()
    with pytest.raises(PageError, match=r"softmax seed 8 is in results\.csv alone"):
        autoattack.attacks(autoattack.PAGE.raw(with_attacks.root))


def changed(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda table: table.rename(table.with_name("seed_9.csv")), "rpc lam 1 seed 2 is in results.csv alone"),
        (
            lambda table: shutil.copy(table, table.with_name("seed_9.csv")),
            r"rpc lam 1 seed 9 is in .*seed_9\.csv alone",
        ),
        (lambda table: shutil.copy(table.with_name("seed_3.csv"), table), r"seed_2\.csv has 0\.5\d+ where results"),
        (
            lambda table: robustness.write_csv(
                [
                    replace(row, right=robustness.right_as_text(np.zeros(2000, bool))) if row.right else row
                    for row in robustness.read_csv(table)
                ],
                table,
            ),
            r"seed_2\.csv is damaged: robustness/clean/accuracy is 0\.5\d+, and its images say something else",
        ),
        (
            lambda table: changed(table, "note,right", "note,left"),
            r"seed_2\.csv is damaged: .* is no table of a robust",
        ),
    ],
    ids=["renamed", "copied", "another cell's", "other images", "other columns"],
)
def test_what_was_said_of_clean_images_is_that_of_the_comparison(tmp_path, damage, said):
    copied(tmp_path, "rpc_sparse_part", "out_of_distribution")  # the second has what was said of each clean image
    damage(tmp_path / "docs" / "results" / "out_of_distribution" / "rpc_lam_1" / "seed_2.csv")
    with pytest.raises(PageError, match=said):
        sparse_part.prose(sparse_part.PAGE.raw(tmp_path))


def first_right(share):
    """Bits of 2,000 images, of which the first ones are right."""
    return robustness.right_as_text(np.arange(2000) + 0.5 < share * 2000)


def test_what_is_left_of_all_images_has_verdicts_of_its_own(tmp_path):
    copied(tmp_path, "rpc_classification")
    raw = classification.PAGE.raw(tmp_path)
    shutil.rmtree(raw.folder / "all_images", ignore_errors=True)
    assert all_images.all_images_numbers(raw) is None
    assert all_images.on_all_images(raw) == []
    assert "no numbers yet" in str(all_images.all_images_primary(raw))
    found = cifar10.read(raw)
    for place, config in enumerate(found.configs):
        folder = raw.folder / "all_images" / folder_name(config)
        folder.mkdir(parents=True)
        for seed, clean in found.by_seed(shared.TOP1, config).items():
            corrupted = 0.3 + 0.02 * (place == 1) + 0.001 * (seed * (place + 2) % 5)
            rows = [("clean", "", "", clean), ("mean corruption", "", "", corrupted)]
            rows += [("attack", "fgsm", f"{eps}/255", 0.1 / eps + 0.001 * (seed * place % 3)) for eps in (1, 4)]
            robustness.write_csv(
                [
                    robustness.Row(*row[:3], "accuracy", row[3], 2000, note="all of them", right=first_right(row[3]))
                    for row in rows
                ],
                folder / f"seed_{seed}.csv",
            )
            ran = Environment("0123456789abcdef", hardware=f"a machine of {'3' if seed < 12 else '5'} cores")
            (folder / f"seed_{seed}.json").write_text(json.dumps(asdict(ran)))
    raw = classification.PAGE.raw(tmp_path)
    numbers = all_images.all_images_numbers(raw)
    assert numbers["all-images"] == "2,000 images, all of them, 8 seeds"
    assert numbers["all-images-families"] == "6 and 12"
    ran = "commit 0123456789, a machine of 3 cores; commit 0123456789, a machine of 5 cores"
    assert numbers["all-images-ran"] == ran
    assert numbers["all-equivalent"] == "2", "symmetric attention is higher than all others"
    assert numbers["further-fgsm"] == "+0.0 [+0.0, +0.0]", "the images that are right are among the first 500"
    (claim,) = all_images.on_all_images(raw)
    assert claim.verdict == "does not hold here (equivalent)"
    verdicts = [(*row[:1], row[3], row[-1]) for row in all_images.all_images_primary(raw).rows]
    assert ("symmetric", "softmax", "higher") in verdicts
    assert ("rpc", "softmax", "equivalent") in verdicts, "the margin is 1 point"
    differences = {row[0]: row[1] for row in all_images.all_images(raw).rows}
    assert [*differences][:4] == ["corrupted", "FGSM 1/255", "FGSM 4/255", "clean"]
    assert differences["corrupted"].startswith("**+2.0")
    assert "**" not in differences["FGSM 1/255"]
    table = raw.folder / "all_images" / "rpc" / "seed_8.csv"
    own = robustness.read_csv(table)
    robustness.write_csv([replace(own[0], value=own[0].value - 0.1, right=""), *own[1:]], table)
    with pytest.raises(PageError, match="it is a test of another checkpoint"):
        all_images.read(classification.PAGE.raw(tmp_path))
    robustness.write_csv(own, table)
    environment = raw.folder / "all_images" / "rpc" / "seed_8.json"
    environment.write_text("[]")
    with pytest.raises(PageError, match=r"seed_8\.json is damaged"):
        all_images.read(classification.PAGE.raw(tmp_path))
    environment.unlink()
    with pytest.raises(PageError, match=r"seed_8\.json is missing: copy environment\.json of the test there"):
        all_images.all_images_numbers(classification.PAGE.raw(tmp_path))


def test_tests_of_runs_that_are_in_no_comparison_or_diverged_are_refused(tmp_path):
    copied(tmp_path, "rpc_sparse_part", "out_of_distribution")
    folder = tmp_path / "docs" / "results"
    found = sparse_part.PAGE.raw(tmp_path).comparison("", sparse_part.RECIPE)
    cells = cell_tests.tested(folder / "out_of_distribution", sparse_part.RECIPE, "clean")
    check = partial(cell_tests.check_checkpoints, cells, cell_tests.CLEAN)
    check(found, shared.TOP1)
    fewer = replace(found, configs=[each for each in found.configs if each != "rpc lam 1"])
    with pytest.raises(PageError, match=r"rpc lam 1 seed 0 is in .*rpc_lam_1/seed_0\.csv alone"):
        check(fewer, shared.TOP1)
    lost = {"config": "rpc lam 1", "seed": 2, "step": 9999, "metric": "val/loss", "value": float("nan")}
    with pytest.raises(PageError, match=r"rpc lam 1 seed 2 diverged, .*seed_2\.csv .*: leave that table out"):
        check(replace(found, rows=[*found.rows, lost]), shared.TOP1)
