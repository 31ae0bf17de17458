"""What a run leaves out: `tests/costs.txt` names what there is, and in brief each file has a test."""

import re
from pathlib import Path

from tests.costs import COSTS, ONE_IN, in_brief, read_costs, some, without_costly

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
    entries = [line.partition(" ")[2] for line in COSTS.read_text(encoding="utf-8").splitlines()]
    assert not [entry for entry in entries if is_stale(entry)], "remove these lines, or name what took their place"
    assert entries == sorted(set(entries)), "sort the lines, each once"
    gone = ("tests/gone.py::test_it", "tests/test_costs.py::test_gone", "tests/test_costs.py::gone")
    assert all(is_stale(entry) for entry in gone)


class Item:
    """As much of a test as is chosen by."""

    def __init__(self, nodeid):
        self.nodeid = nodeid

    def get_closest_marker(self, name):
        return None


def test_in_brief_a_few_cases_run_and_a_test_of_each_file(monkeypatch):
    costs = {"a.py::test_some": 1.0, "a.py::test_dear": 9.0, "b.py::test_dear": 9.0, "b.py::test_dearer": 90.0}
    monkeypatch.setattr("tests.costs.read_costs", lambda: costs)
    cheap = [Item(f"a.py::test_cheap[{case}]") for case in range(9)]
    cases = [Item(f"a.py::test_some[{case}]") for case in range(3 * ONE_IN)]
    dear = [Item("a.py::test_dear"), Item("b.py::test_dearer"), Item("b.py::test_dear")]
    assert without_costly([*cheap, *cases, *dear]) == cheap
    assert in_brief([*cheap, *cases, *dear]) == [*cheap, *some("a.py::test_some", cases), dear[2]]
    assert len(some("a.py::test_some", cases)) == 3
    assert some("a.py::test_some", cases[:1]) == cases[:1]


def test_costs_are_of_the_list():
    assert all(seconds >= 0.5 for seconds in read_costs().values())
