"""A forked program has what one of its own interpreter has: a folder, an environment, output, an exit code, an end."""

import subprocess
import sys

import pytest

from tests.lightning_tasks.programs import run_forked, run_ranks, start_forked

pytestmark = pytest.mark.costly

PROGRAM = """
import atexit, os, sys
atexit.register(print, "at exit")
print(os.getcwd(), os.environ["WORD"], os.environ.get("GONE"), sys.argv[1:])
print("said", file=sys.stderr)
if sys.argv[1] == "wait":
    import time
    time.sleep(60)
sys.exit(sys.argv[1])
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("GONE", raising=False)
    monkeypatch.setenv("WORD", "there")
    return tmp_path


def test_what_it_says_and_how_it_ends(folder):
    done = run_forked("program", "no", WORD="here")
    assert (done.returncode, done.stdout) == (1, f"{folder} here None ['no']\nat exit\n")
    assert done.stderr.split() == ["said", "no"]
    with pytest.raises(AssertionError, match="said\nno"):
        run_ranks("program", "no", ranks=1)


def test_it_is_killed_where_it_does_not_end(folder):
    with start_forked("program", "wait", WORD="") as program:
        assert program.running
        with pytest.raises(subprocess.TimeoutExpired):
            program.finish(0.1)
    assert not program.running
    assert "program" not in sys.modules
