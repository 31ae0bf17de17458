"""`made_by.json`: what wrote the tables of an analysis."""

import json
from datetime import datetime, timedelta, timezone

import pytest

from lightning_tasks.__main__ import main
from lightning_tasks.analyses.made_by import MADE_BY, Recording, read_made_by
from lightning_tasks.errors import UsageError
from lightning_tasks.runs.environment import this_environment
from lightning_tasks.runs.folder import LOCK


def test_a_run_is_kept_each_time_that_it_writes_and_earlier_ones_stay(tmp_path):
    assert read_made_by(tmp_path) == []
    first = Recording("attnswap drift", ["--model", "a b"])
    first.write(tmp_path)
    first.write(tmp_path)
    (kept,) = read_made_by(tmp_path)
    assert kept.command == "attnswap drift --model 'a b'"
    assert 0 <= kept.seconds < 60
    assert abs(datetime.now(timezone.utc) - datetime.fromisoformat(kept.began)) < timedelta(minutes=1)
    assert kept.environment == this_environment()
    second = Recording("attnswap drift", ["--model", "a b"])
    second.write(tmp_path)
    first.write(tmp_path)  # of two runs in one folder none loses the other's
    assert len(read_made_by(tmp_path)) == 2
    second.write(tmp_path, anew=True)
    assert len(read_made_by(tmp_path)) == 1


def test_a_path_that_is_no_text_is_kept_as_one_that_can_be_read(tmp_path):
    Recording("attnswap drift", ["--output", "caf\udce9"]).write(tmp_path)
    assert read_made_by(tmp_path)[0].command == "attnswap drift --output 'caf\\udce9'"
    Recording("attnswap drift", []).write(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "{}",
            "[1]",
            '[{"command": "a"}]',
            '[{"command": 1, "began": "", "seconds": 1, "environment": {}}]',
            "[" * 100_000,
        ),
        '[{"command": "a", "began": "", "seconds": 1e999, "environment": {}}]',
    ],
    ids=range(7),
)
def test_a_damaged_file_is_refused_before_anything_runs(tmp_path, text, capsys):
    (tmp_path / MADE_BY).write_text(text)
    with pytest.raises(UsageError, match=r"made_by\.json is damaged .*; delete it"):
        Recording("attnswap drift", []).write(tmp_path)
    with pytest.raises(SystemExit):
        main(["analyze", "token-selection", "--experiment", "multi", "--output", str(tmp_path)])
    assert "made_by.json is damaged" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} <= {MADE_BY, LOCK}
    assert (tmp_path / MADE_BY).read_text() == text
    Recording("attnswap drift", []).write(tmp_path, anew=True)
    assert len(read_made_by(tmp_path)) == 1


def test_a_link_out_of_the_folder_is_not_read_and_not_written_through(tmp_path):
    other, folder = tmp_path / "other.json", tmp_path / "folder"
    folder.mkdir()
    other.write_text("[]")
    (folder / MADE_BY).symlink_to(other)
    with pytest.raises(UsageError, match="is a link out of"):
        read_made_by(folder)
    Recording("attnswap drift", []).write(folder, anew=True)
    assert other.read_text() == "[]"
    assert not (folder / MADE_BY).is_symlink()


def test_an_analysis_says_what_made_its_tables(tmp_path):
    given = ["token-selection", "--experiment", "multi", "--seeds", "1", "--steps", "5", "--output", str(tmp_path)]
    main(["analyze", *given])
    main(["analyze", *given])
    kept = json.loads((tmp_path / MADE_BY).read_text())
    assert [each["command"].split()[:4] for each in kept] == [["attnswap", "analyze", *given[:2]]] * 2
    assert kept[0]["environment"]["versions"]["torch"]
