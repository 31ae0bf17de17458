"""What tests cost in CPU time: ``pytest --fast`` leaves the costly ones out, ``--write-costly`` lists them anew.

CPU time, because it hardly depends on what else the machine does; that of programs which a test starts is counted.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

COSTLY = Path(__file__).with_name("costly.txt")
LIMIT = 0.3  # seconds of CPU time that the dearest case of a test, or a fixture of its module, takes


def _cpu_seconds() -> float:
    return sum(os.times()[:4])


def _names(item: pytest.Item) -> set[str]:
    """Its file, the test without its parameters, and the fixtures that it uses, as functions of its file."""
    path = item.nodeid.partition("::")[0]
    names = [path, item.nodeid.partition("[")[0]]
    return {*names, *(f"{path}::{name}" for name in getattr(item, "fixturenames", []))}


def folded(costly: set[str], tests: dict[str, int]) -> set[str]:
    """Where three tests of a file, or more, and a third of all are costly, the file is named in their place."""
    counts = Counter(name.partition("::")[0] for name in costly)
    files = {path for path, count in counts.items() if count >= 3 and 3 * count >= tests.get(path, 0)}
    return {path if (path := name.partition("::")[0]) in files else name for name in costly}


def leave_out_costly(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that are listed or marked as costly, and those whose fixtures are listed."""
    listed = set(COSTLY.read_text(encoding="utf-8").split())
    left_out = [item for item in items if item.get_closest_marker("costly") or listed & _names(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


class CostWriter:
    """Measures what runs in each process; the process that collects the reports writes the list."""

    def __init__(self) -> None:
        self.started = 0.0
        self.fixtures: dict[str, float] = {}  # of the test that is running
        self.found: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        before = _cpu_seconds()
        try:
            return (yield)
        finally:
            if fixturedef.scope in ("module", "class"):
                path = request.node.nodeid.partition("::")[0]
                self.fixtures[f"{path}::{fixturedef.argname}"] = _cpu_seconds() - before

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self.started, self.fixtures = _cpu_seconds(), {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "teardown":  # attributes of reports travel from the workers
            own = _cpu_seconds() - self.started - sum(self.fixtures.values())
            marked = item.get_closest_marker("costly") is not None
            report.cpu_seconds = {**self.fixtures, item.nodeid.partition("[")[0]: 0.0 if marked else own}
        return report

    def pytest_runtest_logreport(self, report) -> None:
        for name, seconds in getattr(report, "cpu_seconds", {}).items():
            self.found[name] = max(self.found[name], seconds)

    def pytest_sessionfinish(self, session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        listed = set(COSTLY.read_text(encoding="utf-8").split()) if COSTLY.exists() else set()
        measured = {name.partition("::")[0] for name in self.found}
        kept = {name for name in listed - set(self.found) if Path(name.partition("::")[0]).exists()} - measured
        tests = Counter(name.partition("::")[0] for name in self.found if "::test_" in name)
        costly = folded({name for name, seconds in self.found.items() if seconds > LIMIT}, tests)
        COSTLY.write_text("".join(f"{name}\n" for name in sorted(kept | costly)), encoding="utf-8")
