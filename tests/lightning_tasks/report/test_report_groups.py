"""What a report shows as one configuration, what counts as a seed, and what a wrong folder is answered."""

import os

import pytest

from lightning_tasks.errors import UsageError
from lightning_tasks.report import groups
from lightning_tasks.report.groups import distinct_names, read_all
from lightning_tasks.runs.run import read_run, runs_below
from tests.lightning_tasks.report.report_folders import report, run_folder


def comparison_folder(folder, value):
    folder.mkdir(parents=True)
    (folder / "results.csv").write_text(f"config,seed,step,metric,value\nplain,0,5,val/loss,{value}\n")
    return folder


def test_two_comparisons_of_one_name_stay_two(tmp_path):
    folders = [comparison_folder(tmp_path / where / "out", value) for where, value in (("a", 1), ("b", 2))]
    text, found = report(tmp_path, *folders)
    assert "2 runs of 2" in " ".join(text.split())
    assert "val/loss 1 2" in found.rows
    assert "metric a/out: plain b/out: plain" in found.rows


def test_the_working_folder_has_a_name(tmp_path, monkeypatch):
    here, other = (comparison_folder(tmp_path / name, 1) for name in ("here", "other"))
    monkeypatch.chdir(here)
    _, found = report(tmp_path, ".", other)
    assert "metric here: plain other: plain" in found.rows


def test_folders_whose_parents_have_one_name_are_told_apart_by_the_whole_path(tmp_path):
    folders = [tmp_path / where / "b" / "out" for where in ("1", "2")]
    assert distinct_names(folders) == [str(folder.resolve()) for folder in folders]


def test_a_seed_that_is_there_twice_counts_once(tmp_path):
    """The finished one, though the killed one is newer; of two finished the newer."""
    finished, older, other = (run_folder(tmp_path / "a" / f"version_{n}", 3, n) for n in range(3))
    killed = run_folder(tmp_path / "a" / "version_3", 3, 50)
    second = run_folder(tmp_path / "a" / "version_4", 4, 2)
    log = (killed / "metrics.csv").read_text().splitlines()[:-1]
    (killed / "metrics.csv").write_text("\n".join(log) + "\n")
    for age, folder in enumerate((killed, finished, other, older)):
        os.utime(folder / "metrics.csv", (1e9 - age, 1e9 - age))
    text, found = report(tmp_path, finished, older, other, killed, second)
    assert "val/loss 3 ± 1.4 (2)" in found.rows  # 2 + 0 of seed 3 and 2 + 2 of seed 4
    left_out = ", ".join(map(str, (older, other, killed)))
    assert f"a: seed 3 is there 4 times and counts once, by {finished}" in text
    assert f"left out: {left_out}" in text
    assert [row for row in found.rows if row.startswith("a ") and "version" in row] == [
        f"a 3 {finished}",
        f"a 4 {second}",
    ]
    assert "end at different steps" not in text


def test_runs_that_do_not_say_their_seed_are_named(tmp_path):
    folders = [run_folder(tmp_path / "a" / f"version_{n}", seed, n) for n, seed in enumerate((None, 0, True))]
    text, found = report(tmp_path, *folders)
    assert "a: 2 of its runs do not say their seed, and stand apart: they are no seeds" in text
    assert "metric a a, version_0 a, version_2" in found.rows
    assert "val/loss 3 2 4" in found.rows


def test_runs_of_one_name_in_other_folders_stand_apart(tmp_path):
    folders = [run_folder(tmp_path / day / "a" / "version_0", None, n) for n, day in enumerate(("monday", "tuesday"))]
    _, found = report(tmp_path, *folders)
    assert f"metric a, {folders[0].resolve()} a, {folders[1].resolve()}" in found.rows
    assert "val/loss 2 3" in found.rows


def test_runs_of_unlike_length_are_named(tmp_path):
    folders = [run_folder(tmp_path / "a" / f"version_{seed}", seed) for seed in (0, 1, 2)]
    log = folders[1] / "metrics.csv"
    log.write_text("\n".join(log.read_text().splitlines()[:-1]) + "\n")
    text, _ = report(tmp_path, *folders)
    assert "a: its runs end at different steps" in text
    assert "step 5 of seed 1; step 10 of seed 0, 2" in text


def test_every_run_below_a_folder_is_found_and_links_are_named(tmp_path):
    inside = [run_folder(tmp_path / "runs" / "deep/er/and/deep/er" / f"version_{n}", seed=n) for n in range(2)]
    comparison_folder(tmp_path / "runs" / "compared", 2)
    run_folder(tmp_path / "elsewhere")
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    text, texts = report(tmp_path, tmp_path / "runs")
    assert "below it 2 runs and 1 comparison were found" in text
    assert f"not followed (give them by themselves): {tmp_path / 'runs' / 'link'}" in text
    assert all(any(str(place) in row for row in texts.rows) for place in inside)
    assert not any("elsewhere" in row for row in texts.rows)
    assert text.index("<h2>Curves") < text.index("<h2>What was swapped")
    with pytest.raises(UsageError, match="given twice"):
        read_all([tmp_path / "runs", inside[0]])


def test_a_folder_of_no_run_is_answered_with_the_runs_below(tmp_path):
    runs = [run_folder(tmp_path / "runs" / "quickstart" / "recipe" / f"version_{n}") for n in range(4)]
    compared = comparison_folder(tmp_path / "runs" / "compared", 1)
    with pytest.raises(UsageError, match=f"below it are {compared}, {runs[0]}, {runs[1]} and others, which can"):
        read_run(tmp_path / "runs")
    assert runs_below(tmp_path, 9) == [compared, *runs]
    assert runs_below(tmp_path, 9, depth=3) == [compared]
    assert runs_below(tmp_path, 9, width=0) == []


def test_what_is_damaged_among_others_is_left_out_by_name(tmp_path):
    whole = run_folder(tmp_path / "runs" / "whole")
    damaged = run_folder(tmp_path / "runs" / "damaged")
    (damaged / "metrics.csv").write_text("step,loss\n0,nought\n")
    compared = tmp_path / "runs" / "compared"
    compared.mkdir()
    (compared / "results.csv").write_text("config,seed\nrpc,0\n")
    with pytest.warns(UserWarning, match="is left out") as warned:
        text, found = report(tmp_path, tmp_path / "runs")
    for folder in (damaged, compared):
        assert f"{folder} cannot be read and is left out: " in text
        assert any(str(folder) in str(each.message) for each in warned)
    assert any(str(whole) in row for row in found.rows)
    (whole / "metrics.csv").unlink()
    with pytest.raises(UsageError, match=r"metrics\.csv cannot be read: ValueError.*nought"):
        read_all([tmp_path / "runs"])


def test_a_name_that_is_wrong_is_an_error_among_others(tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        read_all([run_folder(tmp_path / "a"), tmp_path / "b"])


def test_a_whole_disk_is_not_walked(tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "MOST_FOLDERS", 3)
    for name in "abcd":
        (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match="more than 3 folders below it: give those that hold the runs"):
        read_all([tmp_path])
