"""Tests of other libraries, run on models that were swapped with softmax as they were built.

    python -m tests.clients.peers timm CHECKOUT [PYTEST_ARGUMENTS]
    python -m tests.clients.peers peft CHECKOUT [PYTEST_ARGUMENTS]

CHECKOUT is a copy of the library's repository at the version that is installed. Softmax for softmax changes no output,
so that whatever fails here and passes with ``ATTNSWAP_PEERS=plain`` shows something that a swap takes from a model.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from attention_modules.hosts.discovery import survey
from attention_modules.swap import swap_attention

_MODELS = (
    *(
        "vit_tiny_patch16_224",
        "deit_tiny_patch16_224",
        "deit3_small",
        "beit_base_patch16_224",
        "eva02_tiny_patch14_224",
    ),
    *("swin_tiny_patch4", "swinv2_tiny_window8", "xcit_nano_12_p8_224", "crossvit_9_240", "pit_ti_224"),
    *(
        "convit_tiny",
        "visformer_tiny",
        "tnt_s_patch16_224",
        "davit_tiny",
        "pvt_v2_b0",
        "twins_svt_small",
        "coat_lite_tiny",
    ),
    *("mobilevit_xxs", "edgenext_xx_small", "efficientformer_l1", "vit_relpos_small", "test_vit"),
)
SUITES: dict[str, tuple[str, str]] = {  # the file of tests, and which of them concern attention
    "timm": ("tests/test_models.py", f"({' or '.join(_MODELS)}) and not pretrained and not inference"),
    "peft": ("tests/test_custom_models.py", "mha"),
}


def _swap(model: Any) -> Any:
    """Softmax in every layer that a host understands; a model without any stays as it is."""
    if isinstance(model, nn.Module) and any(not layer.cross for layer in survey(model).layers):
        swap_attention(model, "softmax")
    return model


def _swapping(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def built(*args: Any, **kwargs: Any) -> Any:
        return _swap(build(*args, **kwargs))

    return built


def _patch_timm() -> None:
    import timm

    timm.create_model = timm.models.create_model = _swapping(timm.create_model)


def _patch_torch() -> None:
    plain = nn.MultiheadAttention.__init__

    @functools.wraps(plain)
    def init(self: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if type(self) is nn.MultiheadAttention and self._qkv_same_embed_dim and self.bias_k is None:
            _swap(self)

    nn.MultiheadAttention.__init__ = init  # type: ignore[method-assign]


def pytest_configure(config: pytest.Config) -> None:
    """Swap whatever the suite builds."""
    suite = os.environ.get("ATTNSWAP_PEERS")
    if suite == "timm":
        _patch_timm()
    elif suite == "peft":
        _patch_torch()


def main(arguments: list[str]) -> int:
    """Run a suite; the exit status is pytest's."""
    if len(arguments) < 2 or arguments[0] not in SUITES:
        print(__doc__, file=sys.stderr)
        return 2
    suite, checkout, *rest = arguments
    file, chosen = SUITES[suite]
    here = Path(__file__).resolve()
    paths = os.pathsep.join(map(str, (here.parents[2], here.parent)))
    environment = {"ATTNSWAP_PEERS": suite, **os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "pytest", "-p", here.stem, "-q", "-o", "addopts=", "-k", chosen, file, *rest]
    return subprocess.run(command, cwd=checkout, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
