"""docs/hosts.md says what the table test tests."""

from __future__ import annotations

import pytest

from tests.attention_modules.hosts.table import PAGE, ROOT, markdown
from tests.attention_modules.hosts.timm import models as timm_models


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run python -m tests.attention_modules.hosts.table"


def test_the_decoder_of_the_page_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    code = next(
        block for block in PAGE.read_text(encoding="utf-8").split("```python\n")[1:] if "class Decoder" in block
    )
    code = code.partition("```")[0]
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), {"__name__": "page"})
    assert f"# {capsys.readouterr().out}" == code.splitlines(keepends=True)[-1]


def test_the_readme_counts_the_same_models() -> None:
    rows = timm_models.read()
    totals = timm_models.totals(rows)
    assert f"timm: {totals['softmax']} of {len(rows)} attention models" in (ROOT / "README.md").read_text(
        encoding="utf-8"
    )
