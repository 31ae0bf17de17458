import multiprocessing
import os
import shutil
import time
import warnings

import numpy as np
import pytest
from attnswap.datamodules.shared.token_cache import CacheEntry, write_tokens

from tests.rows import each_row


def entry_in(folder):
    return CacheEntry.of(folder, "text", {"source": 1})


def write(folder):
    write_tokens(folder, "train", [np.array([1, 2]), np.array([3])], vocab_size=10)


def test_chunks_come_back_as_one_read_only_map(tmp_path):
    entry = entry_in(tmp_path)
    entry.prepare(write)
    tokens = entry.tokens("train")
    assert tokens.tolist() == [1, 2, 3]
    assert isinstance(tokens, np.memmap)
    assert not tokens.flags.writeable


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "int32")])
def test_ids_are_as_wide_as_the_vocabulary_needs(tmp_path, vocab_size, dtype):
    entry = entry_in(tmp_path)
    entry.prepare(lambda folder: write_tokens(folder, "train", [np.array([vocab_size - 1])], vocab_size) and None)
    assert entry.tokens("train").dtype == dtype
    assert entry.tokens("train").tolist() == [vocab_size - 1]


@each_row("dtype", ["O", "float32", "V8"])
def test_ids_that_are_no_integers_are_refused(tmp_path, dtype):
    """A memory map of objects would read addresses from the file."""
    entry = entry_in(tmp_path)
    entry.prepare(write)
    (entry.folder / "tokens.json").write_text(f'{{"train": "{dtype}"}}')
    with pytest.raises(ValueError, match=r"tokens.json: ids of train are .*; delete this folder"):
        entry.tokens("train")


def test_entries_differ_by_what_they_are_made_from(tmp_path):
    assert CacheEntry.of(tmp_path, "text", {"source": 1}) != CacheEntry.of(tmp_path, "text", {"source": 2})


def test_a_whole_entry_is_not_written_again(tmp_path):
    entry_in(tmp_path).prepare(write)
    entry_in(tmp_path).prepare(lambda folder: pytest.fail("written again"))


def flip(path):
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


CORRUPTIONS = {
    "changed": lambda entry: flip(entry / "train.bin"),
    "cut": lambda entry: os.truncate(entry / "train.bin", 1),
    "removed": lambda entry: (entry / "train.bin").unlink(),
    "no manifest": lambda entry: (entry / "manifest.json").unlink(),
    "broken manifest": lambda entry: (entry / "manifest.json").write_text("{"),
    "empty manifest": lambda entry: (entry / "manifest.json").write_text('{"files": {}}'),
    "a file in its place": lambda entry: (shutil.rmtree(entry), entry.write_text("")),
    "foreign manifest": lambda entry: (entry / "manifest.json").write_text('{"files": [1]}'),
}


@each_row("corrupt", CORRUPTIONS.values())
def test_a_corrupt_entry_is_made_again_with_a_warning(tmp_path, corrupt):
    entry = entry_in(tmp_path)
    entry.prepare(write)
    corrupt(entry.folder)
    with pytest.warns(UserWarning, match=f"{entry.folder} is corrupt and is made again"):
        entry.prepare(write)
    assert entry.tokens("train").tolist() == [1, 2, 3]


def test_a_failed_write_leaves_nothing(tmp_path, contents):
    def fail(folder):
        write(folder)
        raise RuntimeError("power cut")

    entry = entry_in(tmp_path)
    with pytest.raises(RuntimeError, match="power cut"):
        entry.prepare(fail)
    assert not entry.exists()
    assert contents(tmp_path) == {"text"}


def test_leftovers_of_a_killed_process_are_cleared(tmp_path, contents):
    entry = entry_in(tmp_path)
    leftover = entry.folder.with_name(f".{entry.folder.name}.new")
    leftover.mkdir(parents=True)
    (leftover / "train.bin").write_bytes(b"half")
    entry.prepare(write)
    assert not leftover.exists()
    assert entry.tokens("train").tolist() == [1, 2, 3]


def _prepare_slowly(folder, log, start):
    def slow(target):
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        write(target)

    start.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry_in(folder).prepare(slow)
        assert entry_in(folder).tokens("train").tolist() == [1, 2, 3]


def test_of_two_processes_one_writes_and_both_read(tmp_path):
    processes = multiprocessing.get_context("fork")
    start, log = processes.Barrier(2), tmp_path / "log"
    both = [processes.Process(target=_prepare_slowly, args=(tmp_path / "cache", log, start)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(30)
    assert [process.exitcode for process in both] == [0, 0]
    assert len(log.read_text().splitlines()) == 1


def test_a_folder_that_cannot_be_made_names_the_cure(tmp_path):
    (tmp_path / "text").touch()
    with pytest.raises(OSError, match=r"cannot be written.*cache_dir=.*\$ATTNSWAP_CACHE"):
        entry_in(tmp_path).prepare(write)


def test_a_read_only_folder_names_the_cure(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match=r"not writable.*cache_dir=.*\$ATTNSWAP_CACHE"):
        entry_in(tmp_path).prepare(write)
