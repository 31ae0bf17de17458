"""``--output``: one command at a time writes there, and a lock that is something else is refused."""

import os
import re

import pytest
from filelock import FileLock

from lightning_tasks.__main__ import main
from lightning_tasks.errors import UsageError
from lightning_tasks.runs.folder import LOCK, output_folder
from lightning_tasks.runs.safe_files import written_whole

MODEL = ["--model", "test_vit", "--random", "--data", "cifar10"]
COMMANDS = {
    "analyze token-selection": ["--experiment", "multi", "--seeds", "1", "--steps", "1"],
    "analyze kernel-pca": [*MODEL, "--samples", "2"],
    "analyze lipschitz": [*MODEL, "--sequences", "1", "--lengths", "2,3"],
    "analyze spectrum": [*MODEL[:3], "--layers", "0"],
    "drift": [*MODEL, "--sequences", "1", "--mechanism", "sink"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_another_command_holds_is_refused_and_free_afterwards(command, tmp_path, tiny_data, capsys):
    folder = tmp_path / "a" / "b"
    given = [*command.split(), *COMMANDS[command], "--output", str(folder)]
    if "--data" in given:
        given += ["--root", str(tiny_data)]
    with output_folder(folder):
        with pytest.raises(SystemExit) as stop:
            main(given)
        assert stop.value.code == 2
        assert f"--output {folder}: another attnswap command is at work there; wait for it" in capsys.readouterr().err
        assert {path.name for path in folder.iterdir()} == {LOCK}
    main(given)
    assert (folder / "made_by.json").is_file()


def test_a_folder_is_free_after_an_error(tmp_path):
    with pytest.raises(KeyError), output_folder(tmp_path):
        raise KeyError
    with output_folder(tmp_path):
        pass


@pytest.mark.parametrize("kind", ["link", "hard link", "folder", "pipe"])
def test_a_lock_that_is_no_file_of_its_own_is_refused_and_stays(tmp_path, kind):
    victim, lock = tmp_path / "victim", tmp_path / "out" / LOCK
    victim.write_text("mine")
    lock.parent.mkdir()
    {"link": lock.symlink_to, "hard link": lock.hardlink_to, "folder": lambda _: lock.mkdir()}.get(
        kind, lambda _: os.mkfifo(lock)
    )(victim)
    before = lock.lstat()
    said = f"--output {lock.parent}: {lock} is no plain file, or a link to one; remove it"
    with pytest.raises(UsageError, match=re.escape(said)), output_folder(lock.parent):
        pass
    assert victim.read_text() == "mine"
    assert lock.lstat().st_ino == before.st_ino


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), NotImplementedError("no locks here")])
def test_a_folder_that_cannot_be_locked_is_named(tmp_path, monkeypatch, error):
    def refuse(self):
        raise error

    monkeypatch.setattr(FileLock, "acquire", refuse)
    reason = getattr(error, "strerror", None) or "no locks here"
    said = f"--output {tmp_path}: {tmp_path / LOCK} cannot be locked ({reason}); give another folder"
    with pytest.raises(UsageError, match=re.escape(said)), output_folder(tmp_path):
        pass


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        said = re.escape(f"--output {path}: {tmp_path / 'file'} is a file; give a folder")
        with pytest.raises(UsageError, match=said), output_folder(path):
            pass


def test_of_two_that_write_a_file_at_once_each_writes_it_whole(tmp_path):
    path = tmp_path / "file"
    with written_whole(path) as last:
        last.write_text("the last")
        with written_whole(path) as first:
            first.write_text("the first")
        assert path.read_text() == "the first"
    assert path.read_text() == "the last"
    assert [*tmp_path.iterdir()] == [path]
