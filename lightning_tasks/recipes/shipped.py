"""The shipped recipes, the YAML files of the folder `configs`, found by name without importing torch or yaml."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from lightning_tasks.errors import UsageError

_ROOT = Path(__file__).resolve().parents[2]
CONFIGS = next(  # in a checkout the folder is beside the packages
    path for path in (_ROOT / "attnswap" / "configs", _ROOT / "configs") if path.is_dir()
)
PARTS = "parts"  # the folder of files that change a section of any recipe; their names leave it out
_HEADER = re.compile(r"^#\s*(summary|paper|needs|variant \S+):\s*(.+)$")


@dataclass(frozen=True)
class Recipe:
    """What `attnswap recipes` prints of one recipe: its name and the comment lines at the head of its file.

    `variants` are the summaries of its variants (lines `# variant NAME: SUMMARY`), by name.
    """

    name: str
    path: Path
    summary: str
    paper: str
    needs: str
    variants: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, root: Path = CONFIGS) -> Recipe:
        """Read the head of the recipe at `path`; a line that is missing reads as "-"."""
        head: dict[str, str] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            if match := _HEADER.match(line):
                head[match[1]] = match[2].strip()
        summary, paper, needs = (head.get(key, "-") for key in ("summary", "paper", "needs"))
        variants = {key.removeprefix("variant "): text for key, text in head.items() if key.startswith("variant ")}
        return cls(recipe_name(path, root), path, summary, paper, needs, variants)

    @property
    def variant_names(self) -> dict[str, str]:
        """The summaries of the variants by the names under which each can be fitted."""
        return {f"{self.name}/{variant}": summary for variant, summary in self.variants.items()}


def recipe_name(path: Path, root: Path = CONFIGS) -> str:
    """The name of a recipe or part: its path inside `root` (or its folder of parts) without the suffix.

    Of a file elsewhere, it is the file's name without the suffix.
    """
    path = path.resolve()
    for folder in (root / PARTS, root):
        if path.is_relative_to(folder):
            return path.relative_to(folder).with_suffix("").as_posix()
    return path.stem


def shipped_recipes(root: Path = CONFIGS) -> list[Recipe]:
    """Every shipped recipe, sorted by name."""
    files = [path for path in root.rglob("*.yaml") if not path.is_relative_to(root / PARTS)]
    return sorted((Recipe.read(path, root) for path in files), key=lambda recipe: recipe.name)


def shipped_parts(root: Path = CONFIGS) -> list[str]:
    """The names of every shipped part, sorted."""
    return sorted(recipe_name(path, root) for path in (root / PARTS).rglob("*.yaml"))


def find_recipe(name: str, root: Path = CONFIGS) -> Path:
    """The file that `name` means: a path, or the name of a shipped recipe or part.

    Raises:
        UsageError: nothing is called `name`; the message lists the nearest names.
    """
    with contextlib.suppress(OSError, ValueError):  # a name that no file can have
        if Path(name).is_file():
            return Path(name).resolve()
        for folder in (root, root / PARTS):
            shipped = folder / f"{name.removesuffix('.yaml')}.yaml"
            if shipped.is_file() and shipped.resolve().is_relative_to(root):
                return shipped
    if os.path.isdir(name):
        inside = Path(name, "config.yaml")
        cure = f"give {inside}" if inside.is_file() else "give a YAML file, or the name of a shipped recipe"
        raise UsageError(f"{name!r} is a folder; {cure}")
    recipes = shipped_recipes(root)
    names = [name for recipe in recipes for name in (recipe.name, *recipe.variant_names)] + shipped_parts(root)
    raise UsageError(f"{name!r} is neither a file nor a shipped recipe; {_suggestion(name, names)}")


def _suggestion(name: str, names: list[str]) -> str:
    tails = {known.rsplit("/", 1)[-1]: known for known in names}
    near = get_close_matches(name, names, cutoff=0.4)
    near += [tails[tail] for tail in get_close_matches(name.rsplit("/", 1)[-1], list(tails))]
    if near:
        return f"the nearest names are {', '.join(dict.fromkeys(near))}"
    return "`attnswap recipes` lists the shipped ones"


def offered(name: str, known: Iterable[str]) -> str:
    """The names nearest to `name` in words, or all of them; without `attention_modules`, which brings torch."""
    if near := get_close_matches(name, known := list(known), cutoff=0.4):
        return f"the nearest are {', '.join(near)}"
    return f"they are {', '.join(known)}" if known else "it has none"


def print_recipes() -> None:
    """Print every shipped recipe: name, summary, paper, what it needs, its variants."""
    for recipe in shipped_recipes():
        print(f"{recipe.name}\n    {recipe.summary}\n    paper: {recipe.paper}\n    needs: {recipe.needs}")
        for name, summary in recipe.variant_names.items():
            print(f"    variant {name}: {summary}")
