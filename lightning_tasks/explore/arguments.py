"""The arguments of `attnswap explore`, known before torch is imported."""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = """\
Look at every attention map of a model, or of two to four side by side with their differences, in one HTML page that
needs no network: which head attends to what, on your images or in your text, before and after a swap or a training.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of `attnswap explore`."""
    arguments = argparse.ArgumentParser(prog="attnswap explore", allow_abbrev=False, description=DESCRIPTION)
    arguments.add_argument(
        "models",
        nargs="+",
        metavar="MODEL_OR_CKPT",
        help="Hugging Face or timm model (folder or name), or a .ckpt file; several stand side by side",
    )
    kind = arguments.add_mutually_exclusive_group(required=True)
    kind.add_argument("--images", type=Path, metavar="FOLDER", help="the first images of a folder, at any depth")
    kind.add_argument("--text", type=Path, metavar="FILE", help="the first lines of a file that are not empty")
    arguments.add_argument(
        "--mechanism",
        action="append",
        default=[],
        metavar="NAME",
        help="show each model with this in the chosen layers, and the weights that it has; may be given again, with "
        "options behind it: 'rpc {iterations: 4}'; own is the model as it is (default: own)",
    )
    arguments.add_argument("--layers", help="0,5,-1 among the attention layers, or globs of names (default: all)")
    arguments.add_argument("--rows", help="queries that are shown: 0,5,-1 (default: all, or as many as fit)")
    arguments.add_argument("--count", type=int, default=4, help="of images or lines (default: %(default)s)")
    arguments.add_argument("--length", type=int, default=128, help="most tokens of a line (default: %(default)s)")
    arguments.add_argument(
        "--tokenizer", help="Hugging Face tokenizer (folder, name or .json file; default: the model's own)"
    )
    arguments.add_argument("--random", action="store_true", help="random weights; a model type (bert, gpt2) is enough")
    arguments.add_argument("--seed", type=int, default=0, help="of what is random (default: %(default)s)")
    arguments.add_argument(
        "--trust_checkpoint", action="store_true", help="import and call whatever the .ckpt file names"
    )
    arguments.add_argument(
        "--output", type=Path, default=Path("explore.html"), help="file to write (default: %(default)s)"
    )
    return arguments
