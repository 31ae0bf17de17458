"""Random calls of every mechanism, in every precision, against its equations in float64.

    python -m tests.reliability.fuzz_mechanisms [--cases 6000] [--seed 0]

Each case draws a mechanism and its options, shapes, precision (as inputs or by autocast), mask, causality, scale and
magnitudes, and compares outputs and gradients with the naive form. What fails is printed with the number that draws it
again, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_modules import AttentionSpec
from attention_modules.mechanism import build_mechanism
from attention_modules.naive import naive_attention, naive_rpc, naive_scaled, visibility

MECHANISMS = ("softmax", "symmetric", "rpc", "scaled", "uniform")
PRECISIONS = ("float64", "float32", "bfloat16", "float16", "autocast bfloat16", "autocast float16")
MASKS = ("none", "none", "boolean", "padding", "sample", "head", "-inf", "-1e9", "-1e4", "bias", "rows hidden")
# Largest distance from the equations, of the norm, at ordinary magnitudes: output and gradients. Principal Attention
# Pursuit amplifies what rounding leaves in each of its passes, hence is given more.
BOUNDS = {
    torch.float64: {"rpc": (1e-9, 1e-7), "": (1e-12, 1e-10)},
    torch.float32: {"rpc": (1e-4, 1e-2), "": (1e-5, 1e-4)},
    torch.bfloat16: {"rpc": (0.1, 0.5), "": (0.05, 0.15)},
    torch.float16: {"rpc": (0.02, 0.2), "": (5e-3, 0.05)},
}


@dataclass
class Case:
    """One call, and what the equations give for it."""

    mechanism: str
    options: dict[str, Any]
    dtype: torch.dtype  # of attention
    autocast: bool
    inputs: dict[str, Tensor]  # q, k, v in the dtype in which they are given
    s: Tensor | None
    weights: Tensor
    call: dict[str, Any]
    plain: bool  # under the MATH backend
    ordinary: bool  # of a size at which the equations are well conditioned


def draw(number: int, seed: int = 0) -> Case:
    """The case of this number."""
    choose = random.Random(f"{seed} {number}")
    generator = torch.Generator().manual_seed(choose.getrandbits(40))
    mechanism = choose.choice(MECHANISMS)
    batch, heads, width = choose.choice((0, 1, 1, 2, 2, 3)), choose.randint(1, 3), choose.choice((1, 2, 4, 8, 16, 33))
    tokens = choose.choice((1, 1, 2, 3, 5, 8, 13, 17, 33))
    if choose.random() < 0.02:
        batch, heads, tokens, width = 1, 1, choose.choice((257, 512, 2048)), 8
    precision = choose.choice(PRECISIONS)
    dtype = getattr(torch, precision.split()[-1])
    autocast = precision.startswith("autocast")

    ordinary = choose.random() < 0.5
    sizes = {name: choose.choice((0.1, 0.5)) for name in "qkv"}
    if not ordinary:
        # Half precision ends at 65,504, and the passes of rpc add up some ten keys and values.
        largest = 1e3 if dtype == torch.float16 else 1e4
        sizes = {
            "q": choose.choice((0.0, 1e-30, 1.0, 30.0, largest)),
            "k": choose.choice((0.0, 1e-30, 1e-13, 1e-3, 1.0, 2.0, 30.0, largest)),
            "v": choose.choice((0.0, 1e-30, 1.0, 100.0, largest)),
        }
    given = torch.float32 if autocast else dtype
    shape = (batch, heads, tokens, width)
    # Numbers that half precision holds, so that rounding them is no part of the comparison.
    inputs = {n: (torch.randn(shape, generator=generator) * size).to(dtype).to(given) for n, size in sizes.items()}
    if not ordinary and choose.random() < 0.3:
        inputs["k"][..., : tokens // 2, :] = 0

    options: dict[str, Any] = {}
    s = None
    if mechanism == "rpc":
        options = {
            "iterations": choose.choice((1, 2, 3, 4)),
            "lam": choose.choice((None, 0.0, 0.3, 4.0, float("inf"))),
            "threshold": choose.choice(("released", "head", "ratio")),
        }
    elif mechanism == "scaled":
        options = {"variant": choose.choice(("matrix", "scalar"))}
        size = (heads, tokens, tokens) if options["variant"] == "matrix" else (1,)
        s = (0.3 * torch.randn(size, generator=generator)).to(dtype).to(given)
    scale = choose.choice((None, None, None, 1.0, 0.0, -0.5))
    call = {
        "attn_mask": draw_mask(choose.choice(MASKS), batch, heads, tokens, given, dtype, generator),
        "is_causal": choose.random() < 0.4,
        "scale": scale,
    }
    weights = torch.randn(shape, generator=generator, dtype=torch.float64)
    return Case(mechanism, options, dtype, autocast, inputs, s, weights, call, choose.random() < 0.2, ordinary)


def draw_mask(
    kind: str,
    batch: int,
    heads: int,
    tokens: int,
    given: torch.dtype,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor | None:
    """A mask of this kind; what half precision makes of an additive one is what is given."""
    if kind == "none":
        return None
    shape = {"padding": (batch, 1, 1, tokens), "sample": (batch, 1, tokens, tokens), "head": (heads, tokens, tokens)}
    size = shape.get(kind, (tokens, tokens))
    if kind == "bias":
        return torch.randn(size, generator=generator).to(dtype).to(given)
    seen = torch.rand(size, generator=generator) > 0.3
    if kind == "rows hidden":
        seen[: tokens // 2 + 1] = False
    if kind.startswith("-"):
        low = torch.tensor(float(kind)).to(dtype).to(given)
        return torch.where(seen, torch.zeros((), dtype=given), low)
    return seen


def equations(case: Case, q: Tensor, k: Tensor, v: Tensor, s: Tensor | None) -> Tensor:
    """The naive form in float64."""
    call = dict(case.call)
    mask = call["attn_mask"]
    if mask is not None and mask.dtype != torch.bool:
        call["attn_mask"] = mask.double()
    if case.mechanism == "softmax":
        return naive_attention(q, k, v, **call)
    if case.mechanism == "symmetric":
        return naive_attention(k, k, v, **call)
    if case.mechanism == "rpc":
        return naive_rpc(k, v, **case.options, **call)
    if case.mechanism == "scaled":
        assert s is not None
        return naive_scaled(q, k, v, s, **call)
    seen = visibility(k.shape[-2], call["attn_mask"], call["is_causal"]).expand(*k.shape[:-1], -1).to(v.dtype)
    return seen / seen.sum(-1, keepdim=True).clamp(min=1) @ v


def found(case: Case) -> dict[str, Tensor]:
    """What the mechanism gives: the output, and the gradients of a weighted sum of it."""
    _, heads, tokens, width = case.inputs["k"].shape
    spec = AttentionSpec(heads * width, heads, width, num_tokens=tokens)
    module = build_mechanism(case.mechanism, spec, **case.options).to(case.inputs["k"].dtype)
    if case.s is not None:
        with torch.no_grad():
            module.s.copy_(case.s)
    leaves = {name: x.clone().requires_grad_() for name, x in case.inputs.items()}
    with sdpa_kernel(SDPBackend.MATH) if case.plain else nullcontext():
        with torch.autocast("cpu", case.dtype) if case.autocast else nullcontext():
            out = module(**leaves, **case.call)
        asked = {**leaves, **dict(module.named_parameters())}
        grads = torch.autograd.grad(out, list(asked.values()), case.weights.to(out.dtype), allow_unused=True)
    return {"output": out.detach(), **{n: g for n, g in zip(asked, grads, strict=True) if g is not None}}


def expected(case: Case) -> dict[str, Tensor]:
    """The same of the equations."""
    given = {**case.inputs, **({} if case.s is None else {"s": case.s})}
    leaves = {name: x.double().requires_grad_() for name, x in given.items()}
    out = equations(case, leaves["q"], leaves["k"], leaves["v"], leaves.get("s"))
    # The weights as the mechanism's output took them.
    weights = case.weights.to(case.dtype).double()
    grads = torch.autograd.grad(out, list(leaves.values()), weights, allow_unused=True)
    return {"output": out.detach(), **{n: g for n, g in zip(leaves, grads, strict=True) if g is not None}}


def lost_to_pytorch(case: Case) -> bool:
    """Whether softmax meets a row that finite numbers hide wholly, over which PyTorch averages."""
    mask = case.call["attn_mask"]
    if case.mechanism != "softmax" or mask is None or mask.dtype == torch.bool:
        return False
    seen = visibility(mask.shape[-1], mask, case.call["is_causal"])
    return bool((~seen.any(-1)).any())


def beyond_pytorch(case: Case) -> bool:
    """Whether logits may be so large that PyTorch's flash kernels have no gradient."""
    q, k, v = (
        case.inputs[name].double().norm(dim=-1).max().item() if case.inputs[name].numel() else 0.0 for name in "qkv"
    )
    sizes = {"softmax": (q, k), "uniform": (0.0, 0.0), "rpc": (k + 5 * v,) * 2, "scaled": (max(q, k), k)}
    one, other = sizes.get(case.mechanism, (k, k))
    scale = case.call["scale"]
    scale = case.inputs["k"].shape[-1] ** -0.5 if scale is None else abs(scale)
    return not case.plain and scale * one * other > 2**23


def judge(case: Case) -> tuple[dict[str, float], list[str]]:
    """Relative distances, where the case is ordinary, and what is wrong."""
    actual, exact = found(case), expected(case)
    wrong = [
        f"{name} is {tuple(value.shape)} for {tuple(case.inputs['v'].shape)}"
        for name, value in actual.items()
        if name != "s" and value.shape != case.inputs["v"].shape
    ]
    # Part of the range is left to sums on the way: beyond it the number is none of this precision.
    largest = torch.finfo(case.dtype).max / 64
    gradients = [x.double() for name, x in exact.items() if name != "output"]
    in_range = all(bool((x.isfinite() & (x.abs() < largest)).all()) for x in gradients) and not beyond_pytorch(case)
    total = max([x.norm().item() for x in gradients if x.isfinite().all()], default=0.0)
    distances: dict[str, float] = {}
    for name, value in actual.items():
        reference = exact.get(name, torch.zeros_like(value, dtype=torch.float64))
        kind = "output" if name == "output" else "gradient"
        held = reference.isfinite() & (reference.abs() < largest) & (in_range or kind == "output")
        lost = int((held & ~value.isfinite()).sum())
        if lost:
            wrong.append(f"{name}: {lost} of {value.numel()} numbers are not finite where the equations are")
        # With lam = 0 every number is at the kink of the soft threshold where half precision rounds it to 0.
        kink = case.options.get("lam") == 0.0 and kind == "gradient" and case.dtype.itemsize == 2
        compared = case.ordinary and not lost_to_pytorch(case) and not kink
        if compared and value.numel() and reference.isfinite().all():
            # What is next to nothing has no relative error of its own.
            size = max(reference.norm().item(), 0.1 * total if kind == "gradient" else 0.0, 1e-3)
            distance = (value.double() - reference).norm().item() / size
            distances[kind] = max(distance, distances.get(kind, 0.0))
    bounds = BOUNDS[case.dtype].get(case.mechanism, BOUNDS[case.dtype][""])
    for kind, bound in zip(("output", "gradient"), bounds, strict=True):
        if not distances.get(kind, 0.0) <= bound:
            wrong.append(f"{kind}: {distances[kind]:.3g} from the equations, limit {bound:g}")
    return distances, wrong


def fuzz(cases: int, seed: int = 0, first: int = 0) -> tuple[str, list[str]]:
    """The summary, a line per mechanism and precision, and what went wrong."""
    counts: Counter[tuple[str, str]] = Counter()
    worst: dict[tuple[str, str], dict[str, float]] = {}
    lost: Counter[tuple[str, str]] = Counter()
    failures = []
    for number in range(first, first + cases):
        case = draw(number, seed)
        key = (case.mechanism, str(case.dtype).removeprefix("torch."))
        distances, wrong = judge(case)
        counts[key] += 1
        lost[key] += any("not finite" in line for line in wrong)
        for kind, distance in distances.items():
            at = worst.setdefault(key, {})
            at[kind] = max(distance, at.get(kind, 0.0))
        shape = tuple(case.inputs["k"].shape)
        failures += [f"case {number}, {key} {case.options} {shape} {case.call.keys()}: {line}" for line in wrong]
    lines = [f"{'mechanism':10} {'precision':9} {'cases':>6} {'output':>9} {'gradient':>9} {'NaN where finite':>17}"]
    for key in sorted(counts):
        errors = worst.get(key, {})
        numbers = " ".join(f"{errors.get(kind, float('nan')):9.1e}" for kind in ("output", "gradient"))
        lines.append(f"{key[0]:10} {key[1]:9} {counts[key]:6} {numbers} {lost[key]:17}")
    return "\n".join(lines), failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to draw one again")
    given = parser.parse_args()
    summary, failures = fuzz(given.cases, given.seed, given.first)
    print(summary, *failures, f"{given.cases} cases, {len(failures)} failures", sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
