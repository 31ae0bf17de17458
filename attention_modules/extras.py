"""Libraries that an extra of this package brings: where one is missing, the error names the extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXTRA_OF = {
    "fla": "fla",
    "imagecorruptions": "robustness",
    "pyautoattack": "robustness",
    "pytorch_ood": "robustness",
    "mmcv": "mmseg",
    "mmengine": "mmseg",
    "mmseg": "mmseg",
    "peft": "lora",
    "safetensors": "hf",
    "scipy": "analysis",
    "submitit": "slurm",
    "tokenizers": "hf",
    "transformers": "hf",
    "wandb": "wandb",
    "wandb_workspaces": "wandb",
}


@contextmanager
def needed_for(what: str, extra: str) -> Iterator[None]:
    """Around imports: the error of a missing library says what needs it, and which extra brings it.

    Raises:
        ModuleNotFoundError: if a library is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{what} needs {error.name}, which is not installed: pip install 'attnswap[{extra}]'", name=error.name
        ) from error
