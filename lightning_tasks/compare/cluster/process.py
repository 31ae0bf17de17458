"""The process of a cell on several devices, which Lightning starts once more for each further device."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from lightning_tasks.compare.cell import Cell
from lightning_tasks.compare.cluster.lease import HeldError
from lightning_tasks.compare.cluster.run import run_held
from lightning_tasks.compare.cluster.several import HELD, LEADER, REFUSED, end_with_parent
from lightning_tasks.errors import UsageError, reason
from lightning_tasks.runs.environment import take_code


def main(file: str) -> None:
    """Run the cell that a file of :func:`.run_by_command` describes.

    Raises:
        SystemExit: with 75 where another process runs it, 2 where it is refused, 1 and the reason where it failed.
    """
    asked = json.loads(Path(file).read_text(encoding="utf-8"))
    end_with_parent(int(os.environ.get(LEADER, asked["parent"])))
    take_code(tuple(asked["code"]))
    cell = Cell(**(asked["cell"] | {"overrides": tuple(asked["cell"]["overrides"])}))
    try:
        run_held(cell, asked["planned"])
    except HeldError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(HELD) from None
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(REFUSED) from None
    except Exception as error:
        raise SystemExit(f"error: {reason(error)}") from error


if __name__ == "__main__":
    main(*sys.argv[1:])
