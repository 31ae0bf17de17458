"""Names of earlier versions in configurations and checkpoints: `datamodules.X` is now `attnswap.datamodules.X`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_FORMER, _PACKAGE = "datamodules", "attnswap.datamodules"
_CHECKOUT = Path(__file__).resolve().parents[2] / _FORMER


class FormerNames(MetaPathFinder, Loader):
    """Finds `datamodules` and its modules under their present names, unless the user has a package of that name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec of the present module, or None where the name is not ours."""
        top, _, rest = fullname.partition(".")
        if top != _FORMER or (_is_users_own() if not rest else sys.modules[top].__name__ != _PACKAGE):
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module under its present name, which the import system then knows by both."""
        module = import_module(f"attnswap.{spec.name}")
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It ran already; the import system put the other name into its spec."""
        module.__spec__ = self._own_spec


def know_former_names() -> None:
    """From now on, `datamodules` is found in this process as before 0.2, unless the user has a package of that name."""
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, FormerNames())  # before the finder that sees the folder of a checkout


def with_present_names(settings: Any) -> Any:
    """Plain settings with the present path for each `class_path` of before 0.2; a package of the user's stays hers."""
    if isinstance(settings, dict):
        found = {key: with_present_names(value) for key, value in settings.items()}
        path = found.get("class_path")
        if isinstance(path, str) and path.startswith(f"{_FORMER}.") and not _is_users_own():
            found["class_path"] = f"attnswap.{path}"
        return found
    return [with_present_names(each) for each in settings] if isinstance(settings, list) else settings


def _is_users_own() -> bool:
    spec = PathFinder.find_spec(_FORMER)
    return spec is not None and [*map(Path, spec.submodule_search_locations or ())] != [_CHECKOUT]
