"""A cell on several devices: a command of its own, which Lightning starts once more for each further device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_tasks.compare.cell import Cell, last_error
from lightning_tasks.compare.cluster.lease import HeldError
from lightning_tasks.errors import UsageError
from lightning_tasks.files.sources import Sources
from lightning_tasks.runs.environment import this_environment

HELD = 75  # the exit status of who finds a cell run by another process
_RANKS = ("RANK", "LOCAL_RANK")


def processes_of(trainer: Any, one_node: bool = False) -> int:
    """How many processes a fit of this `trainer` section has; one where it takes what there is.

    Raises:
        UsageError: they cannot be started by a command, or are of several nodes where there is one.
    """
    devices, nodes = trainer.devices, int(trainer.num_nodes or 1)
    if isinstance(devices, str) and devices.strip("-").isdigit():
        devices = int(devices)
    if isinstance(devices, str) and "," in devices:
        devices = [each for each in devices.split(",") if each.strip()]
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        devices = len(devices)
    count = max(1, devices) * nodes if isinstance(devices, int) else nodes
    strategy = trainer.strategy
    name = strategy if isinstance(strategy, str) else str((strategy or {}).get("init_args", {}).get("start_method", ""))
    if count > 1 and any(word in name for word in ("spawn", "fork", "notebook")):
        raise UsageError(f"a cell of {count} processes starts them by a command, not by {name!r}; give strategy ddp")
    if nodes > 1 and one_node:
        raise UsageError(f"a cell on {nodes} nodes is no work for one machine; give --plan, or --executor submitit")
    return count


def rank_of(cell: Cell, environment: Mapping[str, str] = os.environ) -> int:
    """Which of the cell's processes this is, as who started it says; 0 where nobody does."""
    names = (*_RANKS, "SLURM_PROCID") if cell.processes > 1 else _RANKS
    return max(int(environment.get(name) or 0) for name in names)


def end_with_parent() -> None:
    """End this process when the one that started it ends: a killed cell leaves nobody at work."""
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def run_by_command(cell: Cell, planned: Sources) -> None:
    """Run a cell as :func:`.run_held` in a process of its own and those that Lightning starts beside it.

    Raises:
        HeldError: another process holds it.
        RuntimeError: it failed.
    """
    here = this_environment()
    asked = {"cell": asdict(cell), "planned": planned, "code": [here.commit, here.modified]}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cell.json"
        file.write_text(json.dumps(asked), encoding="utf-8")
        command = [sys.executable, "-m", f"{__package__}.process", str(file)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode == HELD:
        raise HeldError(last_error(done.stderr))
    if done.returncode:
        raise RuntimeError(last_error(done.stderr) or f"it ended with {done.returncode}")
