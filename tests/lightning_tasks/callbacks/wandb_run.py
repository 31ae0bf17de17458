"""A program that logs two offline W&B runs with monitors into a folder, in a process that has no other run.

What the first left is copied beside the folder before the second begins.
"""

import shutil
import sys
from pathlib import Path

from lightning.pytorch.loggers import WandbLogger

from lightning_tasks.runs.wandb_runs import one_run
from tests.lightning_tasks.callbacks.test_any_logger import monitored

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for number in range(2):
        if number:
            shutil.copytree(folder / "demo", f"{folder}_before")
        with one_run():
            monitored(folder, WandbLogger(save_dir=folder, project="demo", offline=True))
