"""A lease: one holder at a time, taken over from the dead, whatever the clocks say."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from lightning_tasks.compare.cluster import lease
from lightning_tasks.compare.cluster.lease import HeldError, LostError, held, is_free, owner_of

OTHER = {"host": "elsewhere", "process": 7, "since": "2026", "token": "a", "space": ""}
HERE = {"host": lease.socket.gethostname(), "space": lease._space()}


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "ENDING", 0.2)
    return tmp_path / "leases" / "cells" / "slow" / "seed_0"


def written(path, **changes):
    """A lease of another machine, whose file is as old as asked."""
    age = changes.pop("age", 0.0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**OTHER, **changes}))
    os.utime(path, (time.time() - age,) * 2)


def test_one_holds_it_and_it_is_gone_afterwards(path):
    with held(path, "slow seed 0"):
        assert owner_of(path).process == os.getpid()
        with pytest.raises(HeldError, match=rf"slow seed 0 is run by .*, process {os.getpid()}, since 20"):
            held(path, "slow seed 0").__enter__()
    assert not path.exists()
    with held(path, "slow seed 0") as again:
        again.check()


@pytest.mark.parametrize(("age", "free"), [(0.0, False), (lease.PATIENCE - 5, False), (lease.PATIENCE + 5, True)])
def test_the_dead_on_another_machine_are_waited_for(path, age, free):
    written(path, age=age)
    assert is_free(path) == free
    if free:
        with held(path, "it"):
            assert owner_of(path).host != "elsewhere"
        assert [*path.parent.iterdir()] == []
    else:
        with pytest.raises(HeldError, match="elsewhere, process 7, since 2026"), held(path, "it"):
            pass


def test_the_dead_on_this_machine_are_not_waited_for(path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    written(path, **HERE, process=ended.pid)
    with held(path, "it"):
        pass


def test_a_number_of_another_container_of_one_name_says_nothing(path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    written(path, **{**HERE, "space": "another"}, process=ended.pid)
    with pytest.raises(HeldError), held(path, "it"):
        pass


STRANGE = [
    {"process": 0},
    {"process": -1},
    {"process": 1e400},
    {"host": "\x1b[31mred"},
    {"since": None, "process": "x"},
]
TEXTS = ["", "{", "[]", '{"host": 1}', "\0" * 2_000, *(json.dumps({**OTHER, **each}) for each in STRANGE)]


def test_one_that_is_ending_on_this_machine_is_waited_for(path, monkeypatch):
    monkeypatch.setattr(lease, "ENDING", 30.0)
    ending = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"])
    written(path, **HERE, process=ending.pid)
    threading.Thread(target=ending.wait).start()
    with held(path, "it"):
        assert ending.poll() is not None


@pytest.mark.parametrize("text", TEXTS)
def test_a_file_that_cannot_be_read_is_held_by_somebody_until_it_is_old(path, text):
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(HeldError, match="an unknown machine"), held(path, "it"):
        pass
    os.utime(path, (time.time() - lease.PATIENCE - 5,) * 2)
    with held(path, "it"):
        pass


def test_several_that_nothing_could_be_written_into_are_taken_over(path):
    """As on a disk that was full when each of them was made."""
    path.parent.mkdir(parents=True)
    for _ in range(3):
        empty = path if not path.exists() else lease._following(path, lease._chain(path)[-1])
        empty.touch()
        os.utime(empty, (time.time() - lease.PATIENCE - 5,) * 2)
    with held(path, "it"):
        assert owner_of(path).process == os.getpid()
    assert [*path.parent.iterdir()] == []


def test_a_full_disk_leaves_no_lease(path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lease.json, "dump", full)
    with pytest.raises(OSError, match="No space left"), held(path, "it"):
        pass
    assert [*path.parent.iterdir()] == []


def test_a_sign_of_life_keeps_it_and_one_that_was_taken_over_is_lost(path, monkeypatch):
    monkeypatch.setattr(lease, "BEAT", 0.05)
    with held(path, "it") as mine:
        old = time.time() - 1_000
        os.utime(path, (old, old))
        for _ in range(100):
            if path.stat().st_mtime > old + 1:
                break
            time.sleep(0.05)
        assert not is_free(path)
        written(path)
        with pytest.raises(LostError, match="was taken over by elsewhere, process 7"):
            mine.check()
    assert owner_of(path).host == "elsewhere", "the lease of another is not removed"


def test_of_many_who_take_over_one_holds_it(path):
    written(path, age=lease.PATIENCE + 60)
    start, holding, most, failures = threading.Barrier(8), [], [], []

    def take():
        start.wait()
        try:
            with held(path, "it"):
                holding.append(1)
                most.append(len(holding))
                time.sleep(0.2)
                holding.pop()
        except HeldError as error:
            failures.append(error)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(most) + len(failures) == 8
    assert [*path.parent.iterdir()] == []


def test_one_who_was_taken_over_and_wakes_up_leaves_it_to_the_other(path):
    with held(path, "it") as mine:
        os.utime(path, (time.time() - lease.PATIENCE - 60,) * 2)
        other = lease.Owner("elsewhere", 7, "2026", "b")
        assert lease._took(path, other)
        with pytest.raises(LostError, match="was taken over by elsewhere, process 7"):
            mine.check()
    assert owner_of(path) == other


def test_who_took_over_from_an_owner_that_is_gone_meanwhile_lets_go(path, monkeypatch):
    """Between its look and its file, another one took the lease over, ended, and a third one made a new lease."""
    written(path, age=lease.PATIENCE + 60)
    made, third = lease._made, lease.Owner("elsewhere", 9, "2026", "c")

    def late(file, owner):
        monkeypatch.setattr(lease, "_made", made)
        with held(path, "it"):
            pass
        assert lease._took(path, third)
        return made(file, owner)

    monkeypatch.setattr(lease, "_made", late)
    assert not lease._took(path, lease.Owner("elsewhere", 7, "2026", "b"))
    assert owner_of(path) == third
    assert [*path.parent.iterdir()] == [path]
