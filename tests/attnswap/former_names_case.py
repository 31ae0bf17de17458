"""Prints what the former names of data modules stand for, with the working folder first on the path."""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

from lightning_tasks.cli.former_names import know_former_names

checkout = str(Path(__file__).resolve().parents[2])  # installed packages are found without it
sys.path[:] = [os.getcwd(), *(path for path in sys.path if path != checkout)]
know_former_names()
know_former_names()
found: dict[str, object] = {}
for name in ("datamodules", "datamodules.vision", "datamodules.shared.images", "attnswap.datamodules.text"):
    try:
        module = import_module(name)
        found[name] = [module.__name__, module.__spec__.name if module.__spec__ else None]
    except ModuleNotFoundError as error:
        found[name] = str(error)
ours = import_module("attnswap.datamodules")
found["same"] = getattr(sys.modules["datamodules"], "DigitsDataModule", None) is ours.DigitsDataModule
print(json.dumps(found))
