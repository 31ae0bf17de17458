"""A cell on several devices: a command of its own, which Lightning starts once more for each further device."""

from __future__ import annotations

import json
import os
import re
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

REFUSED, HELD = 2, 75  # the latter is the exit status of who finds a cell run by another process
LEADER = "ATTNSWAP_LEADER"  # the number of the process that started the others of its cell
# What says that a launcher has started processes, or is to: the cell's own are started here.
_LAUNCHED = re.compile(
    "(GLOBAL_|LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|(SLURM|TORCHELASTIC)_.*|ATTNSWAP_LEADER"
)


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
    strategy = trainer.strategy or ""
    name = strategy if isinstance(strategy, str) else str((strategy.get("init_args") or {}).get("start_method", ""))
    if count > 1 and any(word in name for word in ("spawn", "fork", "notebook")):
        raise UsageError(f"a cell of {count} processes starts them by a command, not by {name!r}; give strategy ddp")
    if nodes > 1 and one_node:
        raise UsageError(f"a cell on {nodes} nodes is no work for one machine; give --plan, or --executor submitit")
    return count


def rank_of(cell: Cell, environment: Mapping[str, str] = os.environ) -> int:
    """Which of the cell's processes this is, as who started it says; 0 where nobody does.

    A cell of one process has others only where the first of them started these itself.
    """
    names = ("RANK", "LOCAL_RANK", "SLURM_PROCID") if cell.processes > 1 else ("LOCAL_RANK",) * (LEADER in environment)
    return max((int(environment.get(name) or 0) for name in names), default=0)


def end_with_parent(parent: int) -> None:
    """End this process when the one that started it, of that number, ends: a killed cell leaves nobody at work."""

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def run_by_command(cell: Cell, planned: Sources) -> None:
    """Run a cell as :func:`.run_held` in a process of its own and those that Lightning starts beside it.

    Raises:
        HeldError: another process holds it.
        UsageError: it was refused.
        RuntimeError: it failed.
    """
    here = this_environment()
    asked = {"cell": asdict(cell), "planned": planned, "code": [*here.state], "parent": os.getpid()}
    environment = {name: value for name, value in os.environ.items() if not _LAUNCHED.fullmatch(name)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cell.json"
        file.write_text(json.dumps(asked), encoding="utf-8")
        command = [sys.executable, "-m", f"{__package__}.process", str(file)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, errors="replace", env=environment, check=False
        )
    if not done.returncode:
        return
    printed = cell.log.read_text(encoding="utf-8", errors="replace") if cell.log.is_file() else ""
    ended = "" if done.stderr.strip() else f" (it ended with {done.returncode})"
    text = last_error(f"{printed}\n{done.stderr}") + ended
    raise {HELD: HeldError, REFUSED: UsageError}.get(done.returncode, RuntimeError)(text)
