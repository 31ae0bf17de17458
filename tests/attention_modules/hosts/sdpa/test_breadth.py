"""docs/hosts_sdpa.csv: lines of packages that are here are made anew, and the prose says what it says."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.attention_modules.hosts.sdpa import breadth
from tests.attention_modules.hosts.sdpa.strangers import BUILDERS
from tests.lightning_tasks.programs import ROOT

LINES = {line.model: line for line in breadth.read()}
HERE = [name for name in LINES if LINES[name].package in ("nanoGPT", "own", "torchvision")]


def check(name: str) -> None:
    """What the line says is so, but for the size of what another mechanism changes."""
    found, line = breadth.tried(name), LINES[name]
    if found.result == "not tried":
        pytest.skip(found.reason)
    assert (found.result, found.found, found.layers, found.hosts) == (line.result, line.found, line.layers, line.hosts)


@pytest.mark.parametrize("name", HERE)
def test_a_line_is_what_its_model_shows(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(LINES.keys() - {*HERE}))
def test_every_line_is_what_its_model_shows(name: str) -> None:
    check(name)


def test_no_model_is_at_fault_and_each_that_is_not_equal_has_its_reason() -> None:
    assert set(LINES) == set(BUILDERS)
    assert {line.result for line in LINES.values()} <= {"equal", "refused", "not tried"}
    for line in LINES.values():
        if line.result == "equal":
            assert max(float(line.output), float(line.gradient)) <= 1e-6 < float(line.sink)
        else:
            assert line.reason


def test_readme_counts_as_the_file_does() -> None:
    packages = {line.package for line in LINES.values()} - {"own", "nanoGPT"}
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert re.findall(r"tried on (\d+) models of (\d+) packages", readme) == [(str(len(LINES)), str(len(packages)))]
    assert Counter(line.result for line in LINES.values())["equal"] >= 60
    assert len(packages) >= 12
