"""Each mechanism against its equation, in float64, with every gradient, under every kind of mask."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention_modules import (
    AttentionSpec,
    build_mechanism,
    mechanisms as found,
    naive,
    swap_attention,
)
from attention_modules.mechanisms.keys.mom import mom_attention
from attention_modules.testing import CHECKS, check_mechanism
from tests.attention_modules.compare import as_it_must, assert_same, masks, random_heads, values_and_gradients
from tests.rows import each_row, pairwise

HEADS = (2, 3, 9, 8)


@dataclass(frozen=True)
class Case:
    """A mechanism, its pure function beside its naive twin, and what else the two take.

    Args:
        name: short name of the mechanism.
        options: that it is built with, in the checks of every mechanism.
        tensors: further arguments of the function, by name, and their shapes.
        shape: of queries, keys and values.
        tolerance: of outputs and gradients, absolute.
        signs: what brings random tensors within their limits, by name.
        shared: names of the options that the function takes too.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shape: tuple[int, ...] = HEADS
    tolerance: float = 1e-12
    signs: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    shared: tuple[str, ...] = (
        "iterations",
        "detach",
        "pairs",
        "alpha",
        "bias",
        "loss",
        "a",
        "outliers",
        "window",
        "sinks",
    )

    @property
    def must(self) -> dict[str, bool]:
        """What a call of the mechanism with these options must say: nothing, or that the future is hidden."""
        return as_it_must(build_mechanism(self.name, AttentionSpec(32, 4, 8, num_tokens=9), **self.options))

    @property
    def given(self) -> dict[str, Any]:
        """The options that the function takes too, and what a call must say."""
        return self.must | {name: self.options[name] for name in self.shared if name in self.options}

    @property
    def function(self) -> Callable[..., Tensor]:
        """With its options; where calls must hide the future, they do, unless they say otherwise."""
        return partial(getattr(found, f"{self.name}_attention"), **self.given)

    @property
    def twin(self) -> Callable[..., Tensor]:
        return getattr(naive, f"naive_{self.name}")

    def inputs(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shapes = {**dict.fromkeys("qkv", self.shape), **self.tensors}
        drawn = {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}
        return {name: self.signs.get(name, Tensor.clone)(x) for name, x in drawn.items()}


LIMITS = {"log_decay": F.logsigmoid, "beta": torch.sigmoid, "k": lambda k: F.normalize(k, dim=-1)}
CASES = [
    Case("sink", tensors={"sink": (3,)}),
    Case("gated", tensors={"gate": (2, 3, 9, 1)}),
    Case("gated", {"gate": "element"}, tensors={"gate": HEADS}),
    Case("twicing"),
    Case("neutreno", tensors={"first_value": HEADS}),
    Case("value_residual", tensors={"first_value": HEADS}),
    Case("elliptical", tensors={"previous_value": HEADS}),
    Case("ssmax", tensors={"s": (3,)}),
    Case("ssa", tensors={"beta": (3,)}),
    Case("l2"),
    Case("l2", {"shared": True}),
    Case("sinkhorn", {"iterations": 1}),
    Case("sinkhorn", {"iterations": 5}),
    Case("sinkhorn", {"iterations": 3, "detach": False}),
    Case("kde"),
    Case("rkde"),
    Case("rkde", {"loss": "hampel", "a": 0.5}),
    Case("mom", {"outliers": 0.3}, tensors={"draws": (3, 9)}),
    Case("dam", {"num_tokens": 9}, tensors={"gates": (3, 11)}, tolerance=1e-11),  # 10⁴ times the gate, in the logits
    Case("position_bias", {"num_tokens": 9}, tensors={"position_bias": (3, 9, 9)}),
    Case("sigmoid"),
    Case("sigmoid", {"bias": -2.0}),
    Case("entmax"),
    Case("entmax", {"alpha": 2.0}),
    Case("hard"),
    Case("talking_heads", tensors={"mix_logits": (3, 3), "mix_weights": (3, 3)}),
    Case(
        "talking_heads",
        tensors={"mix_logits": (3, 3), "mix_weights": (3, 3), "bias_logits": (3,), "bias_weights": (3,)},
    ),
    Case("forgetting", tensors={"gate": (2, 3, 9)}),
    Case("differential", tensors={"lam": ()}),
    Case("differential", {"pairs": "heads"}, {"lam": ()}, shape=(2, 2, 9, 8)),
    Case("qk_norm", tensors={"q_gain": (8,), "k_gain": (8,)}),
    Case("qk_norm", {"gain": "scalar"}, tensors={"q_gain": (1,), "k_gain": (1,)}),
    Case("linear"),
    Case("retention", tensors={"log_decay": (3,)}, signs=LIMITS),
    Case("retention", {"output": "gated"}, {"log_decay": (3,)}, signs=LIMITS),
    Case("gla", tensors={"log_decay": HEADS}, signs=LIMITS),
    Case("delta", tensors={"beta": HEADS[:3]}, signs=LIMITS),
    Case("delta", {"negative": True, "output": "plain"}, {"beta": HEADS[:3]}, signs=LIMITS),
    Case("gated_delta", tensors={"log_decay": HEADS[:3], "beta": HEADS[:3]}, signs=LIMITS),
    Case("window", {"window": 3, "sinks": 0}),
    Case("window", {"window": 3, "sinks": 2}),
    Case("window", {"window": 512, "sinks": 4}),
    Case("hedgehog", tensors={"q_weight": (3, 8, 5), "k_weight": (3, 8, 5)}),
    Case("hedgehog", {"window": 3}, {"q_weight": (3, 8, 5), "k_weight": (3, 8, 5), "alpha": (3,)}),
    Case("performer", tensors={"projection": (12, 8)}),
    Case("kda", {"output": "gated"}, {"log_decay": HEADS, "beta": HEADS[:3]}, signs=LIMITS),
]
IDS = ["-".join((case.name, *map(str, case.options.values()))) for case in CASES]
each = pytest.mark.parametrize("case", CASES, ids=IDS)


def _first_heads(mask: Any, heads: int) -> Any:
    """A mask for fewer heads than it was made for."""
    return mask[..., :heads, :, :] if torch.is_tensor(mask) and mask.dim() > 2 else mask


PADDING, CAUSAL = ("nothing", "padding"), ("causal", "causal mask", "padding and causal")


def _taken(index: int, mask: str, scale: float | None) -> bool:
    kind = build_mechanism(CASES[index].name, AttentionSpec(32, 4, 8), **CASES[index].options)
    without_rows = {"any": PADDING + CAUSAL, "always": CAUSAL, "never": PADDING}[kind.causality]
    return kind.row_masks or mask in without_rows


COMPARED = pairwise(range(len(CASES)), masks(), (None, 0.7), allowed=_taken)


@pytest.mark.parametrize("index", range(len(CASES)), ids=IDS)
def test_equals_its_equation(index, subtests):
    for _, mask, scale in (row for row in COMPARED if row[0] == index):
        with subtests.test(mask=mask, scale=scale):
            check_equation(CASES[index], mask, scale)


def check_equation(case, mask, scale):
    given = {name: _first_heads(value, case.shape[1]) for name, value in masks()[mask].items()}
    given |= {"scale": scale, **{name: case.options[name] for name in case.shared if name in case.options}}
    actual = values_and_gradients(lambda **inputs: case.function(**inputs, **given), case.inputs())
    expected = values_and_gradients(lambda **inputs: case.twin(**inputs, **given), case.inputs())
    assert_same(actual, expected, case.tolerance)


EAGER = set(CHECKS) - {"compile"}


@each
def test_is_what_every_mechanism_must_be(case):
    check_mechanism(case.name, only=EAGER, **case.options)


def each_mechanism(cases: list[Any], ids: list[str]) -> Any:
    """One form of each mechanism, the one with most options; the others are slow."""
    most = {case.name: case for case in sorted(cases, key=lambda case: len(case.options))}
    marks = [() if most[case.name] is case else pytest.mark.slow for case in cases]
    rows = [pytest.param(case, marks=mark, id=name) for case, mark, name in zip(cases, marks, ids, strict=True)]
    return pytest.mark.parametrize("case", rows)


@each_mechanism(CASES, IDS)
def test_compiles(case):
    check_mechanism(case.name, only=["compile"], **case.options)


class Pretrained(nn.Module):
    """Three layers whose weights are as large as trained ones: a start that is not neutral would show."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 3, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        torch.manual_seed(3)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor, padding: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return self.encoder(x, mask, padding)


NAMES = sorted({case.name for case in CASES})


@pytest.mark.parametrize("name", [*NAMES, "scaled"])
def test_starts_as_softmax_where_it_says_so(name):
    spec = AttentionSpec(24, 3, 8, num_tokens=7)
    neutral = build_mechanism(name, spec).neutral
    length = {"num_tokens": 7} if name in ("dam", "position_bias", "scaled") else {}
    x, model = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(4)), Pretrained().eval()
    padding = torch.arange(7) >= torch.tensor([[7], [5]])
    hides_the_future = bool(as_it_must(build_mechanism(name, spec, **{**(neutral or {}), **length})))
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1) if hides_the_future else None
    plain = model(x, padding, mask)
    swap_attention(model, name, **(neutral or {}), **length)
    change = (model(x, padding, mask) - plain)[~padding].abs().max().item()
    assert change < 1e-5 if neutral is not None else change > 1e-3


@each_row("hidden", [(0, 1, 2), (0, 3, 7), (6, 7, 8)])
def test_a_median_of_means_is_that_of_the_visible_tokens_alone(hidden):
    q, k, v = torch.randn(3, 2, 3, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    draws = torch.rand(3, 9, generator=torch.Generator().manual_seed(1))
    seen = torch.tensor([at not in hidden for at in range(9)])
    found = mom_attention(q, k, v, draws, 0.3, attn_mask=seen[None, None, None])
    alone = mom_attention(q[..., seen, :], k[..., seen, :], v[..., seen, :], draws[:, :6], 0.3)
    torch.testing.assert_close(found[..., seen, :], alone)
    torch.testing.assert_close(found, naive.naive_mom(q, k, v, draws, 0.3, attn_mask=seen[None, None, None]))


@each_row(("name", "dtype"), itertools.product(NAMES, (torch.float16, torch.bfloat16, torch.float32)))
def test_is_finite_for_zeros(name, dtype):
    mechanism = build_mechanism(name, AttentionSpec(8, 1, 8, num_tokens=6)).to(dtype).eval()
    inputs = {n: x.to(dtype) * 0 for n, x in random_heads(("q", "k", "v", *mechanism.needs), (1, 1, 6, 8)).items()}
    if "x" in inputs:
        inputs["x"] = inputs["x"][:, 0]
    given = {n: x.requires_grad_() for n, x in inputs.items()}
    out = mechanism(**given, **as_it_must(mechanism))
    (out.sum() + out.square().sum()).backward()
    trained = (*given.values(), *mechanism.parameters())
    assert out.isfinite().all()
    assert all(x.grad is None or x.grad.isfinite().all() for x in trained)


@pytest.mark.parametrize("name", NAMES)
def test_is_finite_and_near_for_few_tokens_and_for_many(name):
    check_near(name, 1)
    check_near(name, 2304)  # 2,049 is the first count that float16 does not hold, in bfloat16 257


def check_near(name, tokens):
    mechanism = build_mechanism(name, AttentionSpec(8, 1, 8, num_tokens=tokens)).eval()
    shape = (1, 1, tokens, 8)
    inputs = {n: x.float() for n, x in random_heads(("q", "k", "v", *mechanism.needs), shape).items()}
    if "x" in inputs:
        inputs["x"] = inputs["x"][:, 0]
    with torch.no_grad():
        exact = mechanism(**inputs, **as_it_must(mechanism))
    limit = 0.25 if name == "hard" else 0.02  # a rounded logit may be the largest in place of another
    for dtype in (torch.bfloat16, torch.float16):
        given = {n: x.clone().requires_grad_() for n, x in inputs.items()}
        with torch.autocast("cpu", dtype):
            out = mechanism(**given, **as_it_must(mechanism))
        out.float().square().sum().backward()
        assert (out - exact).norm() <= limit * exact.norm()
        assert all(x.grad is None or x.grad.isfinite().all() for x in given.values())
