"""Change what happens between the projections of any attention layer, train it with Lightning, and see what it did.

What is named here is imported when it is first used. Swapping, mechanisms and analyses need torch alone;
:mod:`attnswap.callbacks`, :mod:`attnswap.tasks` and :mod:`attnswap.datamodules` need the extra ``[train]``.

Example:
    >>> import attnswap, torch
    >>> model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
    >>> report = attnswap.swap_attention(model, "symmetric")
    >>> [layer.name for layer in report]
    ['self_attn']
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# In a checkout the folders `datamodules` and `configs` lie beside this one, and Python finds this one first there.
if not (_here := Path(__file__).resolve().parent).joinpath("datamodules").is_dir():
    __path__.append(str(_here.parent))

if TYPE_CHECKING:
    from attention_modules import (
        AttentionMechanism as AttentionMechanism,
        AttentionSpec as AttentionSpec,
        AttentionSwapError as AttentionSwapError,
        NoMapError as NoMapError,
        SelfAttention as SelfAttention,
        SwapReport as SwapReport,
        __version__ as __version__,
        available_mechanisms as available_mechanisms,
        declare_host as declare_host,
        load_pretrained as load_pretrained,
        register_host as register_host,
        register_mechanism as register_mechanism,
        restore_attention as restore_attention,
        swap_attention as swap_attention,
        swapped as swapped,
    )
    from attention_modules.analysis.model_maps import attention_maps as attention_maps
    from attention_modules.testing import check_mechanism as check_mechanism
    from attnswap import (
        analysis as analysis,
        callbacks as callbacks,
        datamodules as datamodules,
        functional as functional,
        hosts as hosts,
        integrations as integrations,
        tasks as tasks,
    )
    from lightning_tasks.explore.page import explore as explore
    from lightning_tasks.files.load import load_swapped as load_swapped
    from lightning_tasks.integrations.loop import watch as watch

_MODULES = ("analysis", "callbacks", "datamodules", "functional", "hosts", "integrations", "tasks")
_HOMES = {
    **dict.fromkeys(
        (
            *("AttentionMechanism", "AttentionSpec", "AttentionSwapError", "NoMapError", "SelfAttention", "SwapReport"),
            *("__version__", "available_mechanisms", "declare_host", "load_pretrained", "register_host"),
            *("register_mechanism", "restore_attention", "swap_attention", "swapped"),
        ),
        "attention_modules",
    ),
    "attention_maps": "attention_modules.analysis.model_maps",
    "check_mechanism": "attention_modules.testing",
    "explore": "lightning_tasks.explore.page",
    "load_swapped": "lightning_tasks.files.load",
    "watch": "lightning_tasks.integrations.loop",
}

__all__ = sorted([*_MODULES, *(name for name in _HOMES if not name.startswith("_"))])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
