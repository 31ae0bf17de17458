"""`made_by.json`: what wrote the tables of an analysis."""

import json

import pytest

from lightning_tasks.__main__ import main
from lightning_tasks.analyses.made_by import MADE_BY, Recording, read_made_by
from lightning_tasks.errors import UsageError
from lightning_tasks.runs.environment import this_environment


def test_a_run_is_kept_and_earlier_ones_if_asked(tmp_path):
    assert read_made_by(tmp_path) == []
    for arguments, anew, count in (("a b", True, 1), ("c", False, 2), ("d", True, 1)):
        recording = Recording(tmp_path, "attnswap drift", ["--model", arguments], anew)
        assert len(read_made_by(tmp_path)) == (2 if arguments == "d" else count - 1), "not before it is written"
        recording.write()
        found = read_made_by(tmp_path)
        assert len(found) == count
    (last,) = found
    assert last.command == "attnswap drift --model d"
    assert 0 <= last.seconds < 60
    assert last.environment == this_environment()


def test_an_argument_with_spaces_is_one(tmp_path):
    Recording(tmp_path, "attnswap drift", ["--options", "{iterations: 2}"]).write()
    assert read_made_by(tmp_path)[0].command == "attnswap drift --options '{iterations: 2}'"


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", '[{"command": "a"}]', '[{"command": 1, "seconds": 1, "environment": {}}]', "[" * 100_000],
)
def test_a_damaged_file_is_refused_before_anything_runs(tmp_path, text):
    (tmp_path / MADE_BY).write_text(text)
    with pytest.raises(UsageError, match=r"made_by\.json is damaged .*; delete it"):
        Recording(tmp_path, "attnswap drift", [], anew=False)
    assert (tmp_path / MADE_BY).read_text() == text


def test_a_link_out_of_the_folder_is_not_read_and_not_written_through(tmp_path):
    other, folder = tmp_path / "other.json", tmp_path / "folder"
    folder.mkdir()
    other.write_text("[]")
    (folder / MADE_BY).symlink_to(other)
    with pytest.raises(UsageError, match="is a link out of"):
        read_made_by(folder)
    Recording(folder, "attnswap drift", []).write()
    assert other.read_text() == "[]"
    assert not (folder / MADE_BY).is_symlink()


def test_an_analysis_says_what_made_its_tables(tmp_path):
    given = ["token-selection", "--experiment", "multi", "--seeds", "1", "--steps", "5", "--output", str(tmp_path)]
    main(["analyze", *given])
    main(["analyze", *given])
    kept = json.loads((tmp_path / MADE_BY).read_text())
    assert [each["command"].split()[:4] for each in kept] == [["attnswap", "analyze", *given[:2]]] * 2
    assert kept[0]["environment"]["versions"]["torch"]
