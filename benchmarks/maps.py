"""What a mechanism's own map costs: `python -m benchmarks.maps` writes `maps`.

The entropy, and all statistics with the sink, of the map that acts, in passes of the mechanism itself, without
gradients; one thread, process CPU time, in turns. The probe that finds the map is in them. The error is the largest
difference of map · v to the output, in float64.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_modules import AttentionSpec, available_mechanisms, build_mechanism
from attention_modules.analysis import STATISTICS
from attention_modules.analysis.acting import acting_sums
from attention_modules.mechanisms.shared.probe import acting_map
from benchmarks.common import alternate, write_results
from lightning_tasks.callbacks.attention_monitor import SINK_ROWS

HEADS, TOKENS, WIDTH = 3, 4096, 64
FEW = 64  # tokens of which the map is held
FINISHED = (
    "delta",
    "differential",
    "gated_delta",
    "gla",
    "kda",
    "retention",
)  # the map, and then a norm
LEFT_OUT = ("elliptical", "neutreno", "value_residual")  # in layers of a stack alone
OPTIONS = {"scaled": {"variant": "scalar"}, "dam": {"num_tokens": TOKENS}, "position_bias": {"num_tokens": TOKENS}}


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softmax that calls no kernel."""
    return F.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


@torch.no_grad()
def measured(name: str, repeats: int) -> dict[str, object]:
    """A row of the table."""
    torch.manual_seed(0)
    spec = AttentionSpec(HEADS * WIDTH, HEADS, WIDTH)
    mechanism = build_mechanism(written_out if name == "written out" else name, spec, **OPTIONS.get(name, {})).eval()
    if name == "scaled":
        torch.nn.init.constant_(mechanism.s, 0.1)
    causal = {"is_causal": True} if mechanism.causality == "always" else {}

    def inputs(tokens: int, dtype: torch.dtype) -> dict[str, Tensor]:
        drawn = dict(zip("qkv", torch.randn(3, 1, HEADS, tokens, WIDTH, dtype=dtype), strict=True))
        x = {"x": torch.randn(1, tokens, HEADS * WIDTH, dtype=dtype)} if "x" in mechanism.needs else {}
        return {**drawn, **x, **causal}

    given = inputs(TOKENS, torch.float32)
    entropy = {"statistics": ("entropy",)}
    every = {"statistics": STATISTICS, "sink_rows": SINK_ROWS}
    seconds = alternate(
        {
            "pass": lambda: mechanism(**given),
            "entropy": lambda: acting_sums(acting_map(mechanism, **given), **entropy),
            "all": lambda: acting_sums(acting_map(mechanism, **given), **every),
        },
        repeats,
        cpu_time=True,
    )
    ratios = {f"{which}, passes": f"{seconds[which] / seconds['pass']:.2f}" for which in ("entropy", "all")}
    few = inputs(FEW, torch.float64)
    mixed, out = acting_map(mechanism.double(), **few).dense() @ few["v"], mechanism(**few)
    error = "" if name in FINISHED else f"{float((mixed - out).abs().max()):.0e}"
    return {"mechanism": name, "pass, ms": f"{seconds['pass'] * 1e3:.0f}", **ratios, "map · v, error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    rows = []
    for name in ["softmax", *(each for each in available_mechanisms() if each != "softmax"), "written out"]:
        if name not in LEFT_OUT:
            rows.append(measured(name, repeats))
            print(*rows[-1].values(), flush=True)
    notes = f"Left out, as they act in layers of a stack alone: {', '.join(LEFT_OUT)}. Errors are of {FEW} tokens in "
    notes += "float64, where no norm follows the map; test_acting.py compares all."
    title = f"What maps cost, of {HEADS} heads of width {WIDTH} and {TOKENS:,} tokens"
    print(write_results("maps", title, "python -m benchmarks.maps", rows, notes))


if __name__ == "__main__":
    main()
