"""A training step of RPC-Segmenter (n = 6 in block 0) against its floor and its symmetric twin.

Run from the repository's root: ``python -m benchmarks.segmentation``. The defaults are those of rpc/ade20k_segmenter: a
DeiT-tiny backbone at 512 pixels (1,025 tokens), a mask transformer of two layers, 150 classes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from attention_modules import symmetric_attention
from attention_modules.mechanism import AttentionMechanism, Mechanism
from benchmarks.common import alternate, peak_memory, write_results
from lightning_tasks.models.segmenter import Segmenter
from lightning_tasks.training.mechanisms import swap_layers

ITERATIONS, LAM, CLASSES, PATCH = 6, 4.0, 150, 16
RPC, FLOOR, SYMMETRIC = "RPC", "six plain passes", "symmetric"


class SixPasses(AttentionMechanism):
    """Symmetric attention over its own result, as often as RPC-Attention passes: its floor."""

    uses_query = False

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        for _ in range(ITERATIONS):
            v = symmetric_attention(k, v, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p, scale=scale)
        return v


BLOCK_0: dict[str, tuple[Mechanism, dict[str, Any]]] = {
    RPC: ("rpc", {"iterations": ITERATIONS, "lam": LAM}),
    FLOOR: (SixPasses, {}),
    SYMMETRIC: ("symmetric", {}),
}


class AttentionMaps(TorchDispatchMode):
    """Counts results ``[..., N, N]``, N the tokens of the backbone's or of the decoder's layers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        patches = (size // PATCH) ** 2
        self.shapes, self.seen = [(patches + extra,) * 2 for extra in (1, CLASSES)], 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            self.seen += isinstance(tensor, Tensor) and tuple(tensor.shape[-2:]) in self.shapes
        return out


def training_step(name: str, size: int, batch_size: int) -> Callable[[], None]:
    """Forward, cross-entropy, backward and an update of a Segmenter with this twin's block 0, symmetric elsewhere."""
    torch.manual_seed(0)
    model = Segmenter("deit_tiny_patch16_224", CLASSES, size)
    mechanism, options = BLOCK_0[name]
    swap_layers(model, mechanism, options, [0], "symmetric")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images, masks = torch.rand(batch_size, 3, size, size), torch.randint(CLASSES, (batch_size, size, size))

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(images), masks).backward()
        optimizer.step()

    return step


def measure(size: int, batch_size: int, repeats: int, cpu_time: bool) -> list[dict[str, object]]:
    """A row for each twin."""
    steps = {name: training_step(name, size, batch_size) for name in BLOCK_0}
    seconds = alternate(steps, repeats, cpu_time)
    rows = []
    for name, step in steps.items():
        peak = peak_memory(step)
        with AttentionMaps(size) as maps:
            step()
        rows.append(
            {
                "block 0": name,
                "step ms": f"{1e3 * seconds[name]:.0f}",
                "/ six plain passes": f"{seconds[name] / seconds[FLOOR]:.3f}",
                "/ symmetric": f"{seconds[name] / seconds[SYMMETRIC]:.3f}",
                "peak MiB": "not measured" if peak is None else f"{peak:.0f}",
                "N x N maps": str(maps.seen),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main(args: list[str] | None = None) -> None:
    """Measure, print and write ``benchmarks/results/segmentation.md`` and ``.csv``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument(
        "--cpu_time", action="store_true", help="process CPU time (on a busy machine, with --threads 1)"
    )
    parser.add_argument("--img_size", type=int, default=512, help="H = W of crops (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=1, help="crops a step (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=11, help="rounds (default: %(default)s)")
    parser.add_argument("--print_only", action="store_true", help="write no file")
    options = parser.parse_args(args)
    torch.set_num_threads(options.threads)
    rows = measure(options.img_size, options.batch_size, options.repeats, options.cpu_time)
    if options.print_only:
        return
    command = " ".join(["python -m benchmarks.segmentation", *(sys.argv[1:] if args is None else args)])
    clock = "process CPU time" if options.cpu_time else "wall-clock time"
    notes = (
        f"Training steps (forward, cross-entropy, backward, SGD) of {options.batch_size} crops of {options.img_size} "
        f"pixels, float32, medians of {clock}, the twins taking turns in one process. RPC: n = {ITERATIONS}, lam = "
        f"{LAM:g}. All other layers, the decoder's too, have symmetric attention. MiB: rise of resident memory during "
        "one step. N x N maps: results of operators of one step, forward and backward, that have that shape."
    )
    write_results("segmentation", "RPC-Segmenter", command, rows, notes)


if __name__ == "__main__":
    main()
