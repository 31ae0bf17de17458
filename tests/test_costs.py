"""`tests/costly.txt` names what there is: a test that is renamed or moved would run again under `--fast`, unnoticed."""

import re
from pathlib import Path

from tests.costs import COSTLY

ROOT = Path(__file__).resolve().parents[1]


def defined(path: Path) -> set[str]:
    """The functions that a file of Python defines, at any level."""
    return set(re.findall(r"^ *def (\w+)\(", path.read_text(encoding="utf-8"), flags=re.MULTILINE))


def is_stale(entry: str) -> bool:
    """Whether an entry's file, or the test or fixture in it, is gone; fixtures may come from a conftest.py above."""
    file, *names = entry.split("::")  # a file, or a test or fixture of it
    path = ROOT / file
    if not path.is_file() or not names:
        return not path.is_file()
    name = names[-1]
    conftests = [] if name.startswith("test_") else [folder / "conftest.py" for folder in path.parents]
    return not any(name in defined(one) for one in (path, *conftests) if one.is_file())


def test_the_list_of_costly_tests_names_what_there_is():
    entries = COSTLY.read_text(encoding="utf-8").splitlines()
    assert not [entry for entry in entries if is_stale(entry)], "remove these lines, or name what took their place"
    assert entries == sorted(set(entries)), "sort the lines, each once"
    gone = ("tests/gone.py::test_it", "tests/test_costs.py::test_gone", "tests/test_costs.py::gone")
    assert all(is_stale(entry) for entry in gone)
