"""docs/hosts.md says what the table test tests."""

from __future__ import annotations

from tests.attention_modules.hosts.table import PAGE, ROOT, markdown
from tests.attention_modules.hosts.timm import models as timm_models


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run python -m tests.attention_modules.hosts.table"


def test_the_readme_counts_the_same_models() -> None:
    rows = timm_models.read()
    totals = timm_models.totals(rows)
    assert f"timm: {totals['softmax']} of {len(rows)} attention models" in (ROOT / "README.md").read_text(
        encoding="utf-8"
    )
