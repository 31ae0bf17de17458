"""The arguments of `attnswap report`, known before torch is imported."""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = "`attnswap report`: runs and comparisons in one HTML page that needs no network."


def parser() -> argparse.ArgumentParser:
    """The parser of `attnswap report`."""
    arguments = argparse.ArgumentParser(prog="attnswap report", allow_abbrev=False, description=DESCRIPTION)
    arguments.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        type=Path,
        help="folder of a run (with metrics.csv), or of `attnswap compare`, or one above such folders",
    )
    arguments.add_argument(
        "--output", type=Path, default=Path("report.html"), help="file to write (default: %(default)s)"
    )
    return arguments
