"""Find the shipped recipes, the YAML files of the folder `configs`, without importing torch."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_tasks.errors import UsageError

_ROOT = Path(__file__).resolve().parent.parent
CONFIGS = next(  # in a checkout the folder is beside the packages
    path for path in (_ROOT / "attnswap" / "configs", _ROOT / "configs") if path.is_dir()
)
PARTS = "parts"  # the folder of files that change a section of any recipe; their names leave it out
SECTIONS = (
    *("seed_everything", "model", "data", "trainer", "init_from", "ckpt_path", "weights_only"),
    *("verbose", "return_predictions"),  # of validate, test and predict
)
COMPARISON_KEYS = {
    "base",
    "variants",
    "settings",
    "test",
    "checkpoints",
    "metrics",
    "references",
    "primary",
    "margins",
    "grid",
    "select",
}
_MAX_DEPTH = 100  # parsers are recursive: a file of some hundred levels would end them
_MAX_VALUES = 1_000_000
_MAX_BYTES = 1 << 24
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


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a YAML file.

    Raises:
        UsageError: it cannot be read, is no YAML, holds something else than settings by name, or is nested too deeply
            or too large, aliases counted as often as they stand there.
    """
    import yaml  # here, so that the list of recipes does without it

    from lightning_tasks.bounded_yaml import SettingsLoader

    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise UsageError(f"{path} has {size:,} bytes, and settings at most {_MAX_BYTES:,}")
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=SettingsLoader)
    except RecursionError as error:
        raise UsageError(f"{path} is nested more than {_MAX_DEPTH} levels deep") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})") from error
    except UsageError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # of a date that is none, say
        raise UsageError(f"{path} is no YAML: {error}") from error
    check_size(content, path)
    if content is None:
        raise UsageError(f"{path} is empty; settings (`name: value`) are needed")
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds {type(content).__name__} where settings (`name: value`) are needed")
    if strange := [key for key in content if not isinstance(key, str)]:
        raise UsageError(f"{path}: the name {strange[0]!r} is no text; put it into quotes")
    return content


def check_size(content: Any, path: Path) -> None:
    """Check that nested data from a file is no deeper and no larger than settings are.

    Raises:
        UsageError: it is, aliases counted as often as they stand there.
    """
    try:
        values = _count_values(content, {}, 0)
    except RecursionError as error:
        raise UsageError(f"{path} is nested more than {_MAX_DEPTH} levels deep") from error
    if values > _MAX_VALUES:
        raise UsageError(f"{path} stands for more than {_MAX_VALUES} values, as its aliases repeat others")


def _count_values(node: Any, counted: dict[int, int], depth: int) -> int:
    """How many values nested data stands for where nothing is shared; what is shared is counted once and kept.

    Raises:
        RecursionError: it is nested too deeply, or holds itself.
    """
    if not isinstance(node, (dict, list)):
        return 1
    if depth > _MAX_DEPTH:
        raise RecursionError
    if id(node) not in counted:
        inner = node.values() if isinstance(node, dict) else node
        counted[id(node)] = 1 + sum(_count_values(each, counted, depth + 1) for each in inner)
    return counted[id(node)]


def is_comparison(settings: Mapping[str, Any]) -> bool:
    """Whether the settings of a file are those of a comparison, not of a recipe with variants."""
    return "variants" in settings and ("base" in settings or settings.keys() <= COMPARISON_KEYS)


def check_recipe(path: Path) -> None:
    """Check that a file has the shape of a recipe; what its sections hold is checked when they are built.

    Raises:
        UsageError: it is no YAML of settings, has a section that no recipe has, variants of another shape, or is a
            comparison.
    """
    settings = read_settings(path)
    if is_comparison(settings):
        raise UsageError(
            f"{path} is a comparison of several runs; start it with `attnswap compare`, or one of its variants by its "
            "name: COMPARISON/VARIANT"
        )
    sections = (*SECTIONS, "variants")
    for section in settings:
        if section not in sections:
            near = difflib.get_close_matches(str(section), sections, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the sections are {', '.join(SECTIONS[:4])}"
            raise UsageError(f"{path}: unknown section {section!r}; {hint}")
    variants = settings.get("variants", {})
    if not isinstance(variants, dict) or not all(each is None or isinstance(each, dict) for each in variants.values()):
        raise UsageError(f"{path}: `variants` must be `{{name: {{setting: value}}}}`, got {variants!r}")


def _suggestion(name: str, names: list[str]) -> str:
    tails = {known.rsplit("/", 1)[-1]: known for known in names}
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    near += [tails[tail] for tail in difflib.get_close_matches(name.rsplit("/", 1)[-1], list(tails), n=3, cutoff=0.6)]
    if near:
        return f"the nearest names are {', '.join(dict.fromkeys(near))}"
    return "`attnswap recipes` lists the shipped ones"


def print_recipes() -> None:
    """Print every shipped recipe: name, summary, paper, what it needs, its variants."""
    for recipe in shipped_recipes():
        print(f"{recipe.name}\n    {recipe.summary}\n    paper: {recipe.paper}\n    needs: {recipe.needs}")
        for name, summary in recipe.variant_names.items():
            print(f"    variant {name}: {summary}")
