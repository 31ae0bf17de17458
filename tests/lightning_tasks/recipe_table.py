"""The table of recipes in the documentation; ``python -m tests.lightning_tasks.recipe_table`` writes it."""

from __future__ import annotations

from pathlib import Path

from lightning_tasks.recipes import shipped_recipes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "recipes.md"
MARKS = ("<!-- recipes: made by `python -m tests.lightning_tasks.recipe_table` -->\n", "<!-- /recipes -->")


def table() -> str:
    """A row a shipped recipe: what the head of its file says."""
    entries = [{recipe.name: recipe.summary} | recipe.variant_names for recipe in shipped_recipes()]
    rows = [f"| `{name}` | {summary} |" for each in entries for name, summary in each.items()]
    return "\n".join(["| recipe | what |", "|---|---|", *rows]) + "\n"


def page() -> str:
    """The page with the table between its marks."""
    before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
    return before + MARKS[0] + table() + MARKS[1] + rest.split(MARKS[1])[1]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
