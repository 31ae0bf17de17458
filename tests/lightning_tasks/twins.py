"""Tiny twins of the shipped recipes: each is a recipe with the sizes that `tests/conf` gives it laid over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lightning_tasks.recipes import read_settings, recipe_name
from lightning_tasks.recipes.variants import find_named

OVERLAYS = Path(__file__).resolve().parents[1] / "conf"


def twin(name: str, folder: Path) -> str:
    """Write the twin of the recipe `name`, or of a variant of it, below `folder`; return what `--config` takes."""
    recipe, settings, variant = find_named(name)
    shipped = recipe_name(recipe)
    path = folder / f"{shipped}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = overlaid(settings, read_settings(OVERLAYS / f"{shipped}.yaml"))
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return str(path) if variant is None else f"{path}/{variant}"


def overlaid(value: Any, over: Any) -> Any:
    """`value` with what `over` names in its place, level by level; lists of classes are joined by `class_path`."""
    if isinstance(value, dict) and isinstance(over, dict):
        return {**value, **{key: overlaid(value.get(key), each) for key, each in over.items()}}
    if not (isinstance(over, list) and over and all(isinstance(each, dict) and "class_path" in each for each in over)):
        return over
    joined, places = list(value), [each["class_path"] for each in value]
    for each in over:
        if places.count(each["class_path"]) != 1:
            raise ValueError(f"{each['class_path']} is not once among {', '.join(places)}")
        place = places.index(each["class_path"])
        joined[place] = overlaid(joined[place], each)
    return joined
