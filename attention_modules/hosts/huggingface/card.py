"""What a model card says of a swapped Hugging Face model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Plan = Sequence[Mapping[str, Any]]
_START, _END = b"<!-- attnswap -->", b"<!-- attnswap end -->"
_SECTION = re.compile(rb"\n*" + re.escape(_START) + rb".*?" + re.escape(_END) + rb"\n*", re.DOTALL)


def name_swap(folder: Path, model: str, plan: Plan, write: Callable[[Path, bytes], None]) -> None:
    """Name what was swapped in the model card of a folder, in a section; the rest of the card stays as it is.

    Args:
        folder: that holds the model.
        model: its class.
        plan: of the swapped layers; where there are none, the section is taken away.
        write: a file, whole or not at all.
    """
    path = folder / "README.md"
    before = path.read_bytes() if path.is_file() else b""
    rest = _SECTION.sub(b"\n", before)
    parts = ([rest.rstrip(b"\n") + b"\n"] if rest.strip() else []) + ([_section(model, plan)] if plan else [])
    if plan or rest != before:
        write(path, b"\n".join(parts))


def _section(model: str, plan: Plan) -> bytes:
    kinds = Counter((str(layer["mechanism"]), _options(layer["options"])) for layer in plan)
    rows = [f"| {mechanism} | {options} | {count} |" for (mechanism, options), count in kinds.items()]
    text = f"""## Attention

This model has other attention in {len(plan)} of its layers, put there by attnswap. Load it with
`attnswap.load_pretrained({model}, folder)`: `from_pretrained` builds plain attention, with other outputs.

| mechanism | options | layers |
|---|---|---|
"""
    return b"\n".join([_START, text.encode() + "\n".join(rows).encode(), _END]) + b"\n"


def _options(options: Mapping[str, Any] | None) -> str:
    named = {"mechanism=": "of its own"} if options is None else {f"{name}=": options[name] for name in options}
    return ", ".join(f"{name}{value}" for name, value in named.items()).replace("|", "\\|").replace("\n", " ")
