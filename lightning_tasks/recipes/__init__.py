"""Recipes, their variants and comparisons: files found by name, and what they may hold."""

from lightning_tasks.recipes.schema import (
    COMPARISON_KEYS as COMPARISON_KEYS,
    check_recipe as check_recipe,
    is_comparison as is_comparison,
)
from lightning_tasks.recipes.settings import check_size as check_size, read_settings as read_settings
from lightning_tasks.recipes.shipped import (
    CONFIGS as CONFIGS,
    Recipe as Recipe,
    find_recipe as find_recipe,
    print_recipes as print_recipes,
    recipe_name as recipe_name,
    shipped_parts as shipped_parts,
    shipped_recipes as shipped_recipes,
)
