"""What tests cost in CPU time, and by that which of them a run leaves out.

``pytest`` runs all. ``--brief``, as CI: of each costly test a few cases, and none of the dearest, but a test of each
file. ``--fast``: no costly test. ``--write-costs`` measures them anew.

CPU time, because it hardly depends on what else the machine does; that of programs which a test starts is counted.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from zlib import crc32

import pytest

COSTS = Path(__file__).with_name("costs.txt")
COSTLY = 0.5  # seconds of CPU time that the dearest case of a test, or a fixture of its module, takes
DEAREST = 1.0
ONE_IN = 10  # of the cases of a costly test


def _cpu_seconds() -> float:
    return sum(os.times()[:4])


def read_costs() -> dict[str, float]:
    """Seconds by test, without its parameters, or by fixture, of those that are costly."""
    lines = (line.split() for line in COSTS.read_text(encoding="utf-8").splitlines())
    return {name: float(seconds) for seconds, name in lines}


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _cost(item: pytest.Item, costs: Mapping[str, float]) -> float:
    """Of the test and of the costly fixtures that it uses, as functions of its file."""
    path = item.nodeid.partition("::")[0]
    names = {_test(item), *(f"{path}::{name}" for name in getattr(item, "fixturenames", []))}
    marked = COSTLY + 0.1 if item.get_closest_marker("costly") else 0.0
    return max(marked, *(costs.get(name, 0.0) for name in names))


def without_costly(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests that cost little."""
    costs = read_costs()
    return [item for item in items if _cost(item, costs) <= COSTLY]


def in_brief(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests that cost little, a few cases of costly ones, and what else a file needs to have one test."""
    costs, tests = read_costs(), defaultdict[str, list[pytest.Item]](list)
    for item in items:
        tests[_test(item)].append(item)
    cost = {name: max(_cost(item, costs) for item in cases) for name, cases in tests.items()}
    few = {name: cases if cost[name] <= COSTLY else some(name, cases) for name, cases in tests.items()}
    kept = {name for name in few if cost[name] <= DEAREST}
    files = {name.partition("::")[0] for name in kept}
    for name in sorted(few, key=lambda name: cost[name] * len(few[name])):
        if (path := name.partition("::")[0]) not in files:
            files.add(path)
            kept.add(name)
    chosen = {item for name in kept for item in few[name]}
    return [item for cases in tests.values() for item in cases if item in chosen]


def some(name: str, cases: list[pytest.Item]) -> list[pytest.Item]:
    """One in a few cases, from a first one that the name gives: of several tests of one list others."""
    return cases[crc32(name.encode()) % min(ONE_IN, len(cases)) :: ONE_IN]


def leave_out(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    """Deselect all but these."""
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


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
            report.cpu_seconds = {**self.fixtures, _test(item): own}
        return report

    def pytest_runtest_logreport(self, report) -> None:
        for name, seconds in getattr(report, "cpu_seconds", {}).items():
            self.found[name] = max(self.found[name], seconds)

    def pytest_sessionfinish(self, session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        measured = {name.partition("::")[0] for name in self.found}
        before = read_costs() if COSTS.exists() else {}
        kept = {
            name: seconds
            for name, seconds in before.items()
            if (path := name.partition("::")[0]) not in measured and Path(path).exists()
        }
        costs = kept | {name: seconds for name, seconds in self.found.items() if seconds > COSTLY}
        COSTS.write_text("".join(f"{costs[name]:.1f} {name}\n" for name in sorted(costs)), encoding="utf-8")
