"""``--output``: one command at a time writes there, and a lock that is something else is refused."""

import pytest

from lightning_tasks.__main__ import main
from lightning_tasks.errors import UsageError
from lightning_tasks.runs.folder import LOCK, output_folder


def test_a_folder_that_another_command_holds_is_refused_and_free_afterwards(tmp_path, capsys):
    folder = tmp_path / "a" / "b"
    given = ["analyze", "token-selection", "--experiment", "multi", "--seeds", "1", "--steps", "1", "--output"]
    with output_folder(folder):
        with pytest.raises(SystemExit) as stop:
            main([*given, str(folder)])
        assert stop.value.code == 2
        assert f"--output {folder}: another attnswap command is at work there; wait for it" in capsys.readouterr().err
        assert {path.name for path in folder.iterdir()} <= {LOCK}
    main([*given, str(folder)])
    with pytest.raises(KeyError), output_folder(folder):
        raise KeyError
    with output_folder(folder):
        pass


def test_a_lock_that_is_a_folder_or_a_link_is_refused_and_stays(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for place, make in (("linked", lambda lock: lock.symlink_to(victim)), ("taken", lambda lock: lock.mkdir())):
        (tmp_path / place).mkdir()
        make(tmp_path / place / LOCK)
        with (
            pytest.raises(UsageError, match=r"cannot be locked: .*; give another folder"),
            output_folder(tmp_path / place),
        ):
            pass
    assert victim.read_text() == "mine"


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        said = f"--output {path}: {tmp_path / 'file'} is a file; give a folder"
        with pytest.raises(UsageError, match=said), output_folder(path):
            pass
