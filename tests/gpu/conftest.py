"""Where these tests run, and what they found: each in a row of the file of `--gpu-results`."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

DRY = "ATTNSWAP_GPU_TESTS"
COLUMNS = ("test", "outcome", "seconds", "found", "why")


def is_dry() -> bool:
    """Whether the CPU is to stand for the GPU.

    Raises:
        ValueError: if the variable says something else.
    """
    given = os.environ.get(DRY, "")
    if given not in ("", "cpu"):
        raise ValueError(f"{DRY} must be 'cpu', for a dry run without a GPU, or not be set; got {given!r}")
    return given == "cpu"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    if path := config.getoption("--gpu-results", None):
        done = results_in(Path(path))
        config.hook.pytest_deselected(items=[item for item in items if short_name(item.nodeid) in done])
        items[:] = [item for item in items if short_name(item.nodeid) not in done]


def short_name(nodeid: str) -> str:
    """A test's name in the file of results."""
    return nodeid.removeprefix("tests/gpu/")


def results_in(path: Path) -> set[str]:
    """The tests that a file of results has."""
    if not path.is_file():
        return set()
    with path.open(newline="", encoding="utf-8") as file:
        return {row["test"] for row in csv.DictReader(file)}


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU in a dry run; tests are skipped where there is neither."""
    if is_dry():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device; {DRY}=cpu runs these tests on the CPU")
    return torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _plain_float32() -> Iterator[None]:
    """Float32 products in float32, whatever a test before asked for."""
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision("highest")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-results",
        metavar="FILE",
        help="a row for each test, written as soon as it ends (CSV); those that are there are not run again",
    )


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("--gpu-results", None)) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ResultWriter(Path(path)))


class ResultWriter:
    """Writes each test's outcome, time and what it recorded, so that a run that is killed keeps what it had."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            self._add(COLUMNS)

    def _add(self, row: tuple[str, ...]) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(row)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the call, or the phase before it that skipped or failed."""
        if report.when != "call" and report.passed:
            return
        found = " ".join(f"{name}={value}" for name, value in report.user_properties)
        why = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            why = report.longrepr[2]
        elif report.failed:
            why = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr))
        name = short_name(report.nodeid)
        self._add((name, report.outcome, f"{report.duration:.2f}", found, " ".join(why.split())[:300]))
