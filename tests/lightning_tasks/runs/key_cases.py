"""What a test runs as a program: in which mode W&B starts, by the variables and settings file of each case (JSON)."""

import json
import os
import sys
from pathlib import Path

import wandb

from lightning_tasks.errors import UsageError
from lightning_tasks.runs.wandb_runs import go_offline_without_key


def mode(case: dict[str, str]) -> list[str | None] | str:
    """$WANDB_MODE and the mode of the settings, or the refusal."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        os.environ.pop(name, None)
    if "settings" in case:
        Path(os.environ["WANDB_CONFIG_DIR"], "settings").write_text(case.pop("settings"))
    os.environ.update(case)
    wandb.teardown()
    try:
        go_offline_without_key()
    except UsageError as error:
        return str(error)
    return [os.environ.get("WANDB_MODE"), wandb.setup().settings.mode]


if __name__ == "__main__":
    print(json.dumps([mode(case) for case in json.loads(sys.argv[1])]))
