"""Rows of a table that are measured one by one, written at once, and not measured again."""

from __future__ import annotations

import csv
import gc
import json
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

OK, CRASHED = "ok", "crashed"
_DEVICE_LOST = ("CUDA error", "cuDNN error", "an illegal memory access", "device-side assert")


class LeftOutError(Exception):
    """A row is not measured, for the reason given."""


class Rows:
    """A CSV file of rows, each with a `state`: "ok", or why there are no numbers.

    Rows that are there are not measured again. One during which the process died is there as "crashed".

    Args:
        path: the file; its columns grow as rows bring new ones.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._begun = path, path.with_suffix(".begun.json")
        self.rows: list[dict[str, str]] = []
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                self.rows = list(csv.DictReader(file))
        if self._begun.is_file():
            self._add({**json.loads(self._begun.read_text(encoding="utf-8")), "state": CRASHED})

    def measure(self, key: Mapping[str, str], call: Callable[[], Mapping[str, str]]) -> dict[str, str]:
        """The row of a key: as it is there, or measured and written.

        Raises:
            SystemExit: with 3, if the device is lost and a new process is needed for the rows that follow.
        """
        for row in self.rows:
            if all(row.get(name) == value for name, value in key.items()):
                return row
        self._begun.write_text(json.dumps(dict(key)), encoding="utf-8")
        lost = False
        try:
            found = {"state": OK, **call()}
        except LeftOutError as error:
            found = {"state": str(error)}
        except (torch.OutOfMemoryError, MemoryError):
            found = {"state": "out of memory"}
        except Exception as error:  # one row's fault must not take the others
            traceback.print_exc()
            said = " ".join(str(error).split())[:200]
            found, lost = {"state": f"{type(error).__name__}: {said}"}, any(word in said for word in _DEVICE_LOST)
        except BaseException:  # stopped from outside, which is not the row's fault
            self._begun.unlink()
            raise
        row = {**key, **found}
        self._add(row)
        print(row, flush=True)
        if lost:
            raise SystemExit(3)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return row

    def _add(self, row: dict[str, str]) -> None:
        self.rows.append(row)
        columns = list(dict.fromkeys(name for each in self.rows for name in each))
        partial = self.path.with_suffix(".partial")
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
        partial.replace(self.path)
        self._begun.unlink(missing_ok=True)
