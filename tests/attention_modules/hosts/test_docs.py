"""docs/hosts.md says what the table test tests."""

from __future__ import annotations

from tests.attention_modules.hosts.table import PAGE, markdown


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run python -m tests.attention_modules.hosts.table"
