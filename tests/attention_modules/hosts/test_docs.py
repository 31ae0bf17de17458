"""docs/hosts.md says what the table test tests."""

from __future__ import annotations

from tests.attention_modules.hosts.table import PAGE, README, markdown, readme


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run python -m tests.attention_modules.hosts.table"


def test_the_readme_is_current() -> None:
    assert README.read_text(encoding="utf-8") == readme(), "run python -m tests.attention_modules.hosts.table"
