"""Maps that no fused kernel makes: more rows than are held at once, second derivatives, and no map of all of them."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention_modules import AttentionSpec, available_mechanisms, build_mechanism, mechanisms as found, naive
from attention_modules.mechanisms.maps.entmax import entmax
from tests.attention_modules.compare import assert_same, random_heads, values_and_gradients

TOKENS = 150  # more than two chunks
ALONE = [("sigmoid", {}), ("sigmoid", {"bias": -2.0}), ("entmax", {"alpha": 1.5}), ("entmax", {"alpha": 2.0})]
CASES = [*ALONE, ("hard", {}), ("dam", {}), ("position_bias", {})]
LEARNED = {"dam": ("gates", (2, TOKENS + 3)), "position_bias": ("position_bias", (2, TOKENS, TOKENS))}


def _given(kind):
    row = torch.arange(TOKENS)
    seen = (row[None, :] % 7 != row[:, None] % 5).expand(2, 1, TOKENS, TOKENS)
    return {
        "nothing": {},
        "causal": {"is_causal": True},
        "boolean": {"attn_mask": seen},
        "additive": {"attn_mask": torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -1e9) + row / 50},
        "padding": {"attn_mask": (row < 140).view(1, 1, 1, -1)},
    }[kind]


KINDS = ["nothing", "causal", "boolean", "additive", "padding"]


@pytest.mark.parametrize(("index", "kind"), [(i, KINDS[(i + j) % 5]) for i in range(len(CASES)) for j in (0, 2, 3)])
def test_many_rows_equal_the_equation(index, kind):
    name, options = CASES[index]
    inputs = random_heads("qkv", (2, 2, TOKENS, 4))
    if name in LEARNED:
        argument, shape = LEARNED[name]
        inputs[argument] = random_heads("s", shape)["s"] * (1e-4 if name == "dam" else 1.0)  # 10⁴ times, in the logits
    given = {**options, **_given(kind)}
    actual = values_and_gradients(lambda **x: getattr(found, f"{name}_attention")(**x, **given), inputs)
    expected = values_and_gradients(lambda **x: getattr(naive, f"naive_{name}")(**x, **given), inputs)
    assert_same(actual, expected, 1e-11 if name == "dam" else 1e-12)


@pytest.mark.parametrize("kind", ["nothing", "causal", "boolean"])
@pytest.mark.parametrize("frozen", [(), ("k",)])
def test_sigmoid_is_differentiated_twice(kind, frozen):
    def second(function):
        inputs = random_heads("qkv", (2, 2, TOKENS, 4))
        free = [x.requires_grad_() for name, x in inputs.items() if name not in frozen]
        out = function(**inputs, **_given(kind))[:1].square().sum()
        slopes = torch.autograd.grad(out, free, create_graph=True)
        return torch.autograd.grad(sum((g * g.detach().cos()).sum() for g in slopes), free)

    for actual, expected in zip(second(found.sigmoid_attention), second(naive.naive_sigmoid), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def _sorted_entmax(z, alpha):
    """By the largest support whose smallest member is above its own threshold, in float64."""
    z = (z.double() - z.double().amax()) * (alpha - 1)
    for size in range(len(z), 0, -1):
        kept = z.topk(size).values
        spread = 1 - (kept - kept.mean()).square().sum()
        tau = kept.mean() - (1 / size if alpha == 2.0 else (spread.clamp(min=0.0) / size).sqrt())
        if kept[-1] > tau and (alpha == 2.0 or spread > 0):
            return (z - tau).clamp(min=0.0) ** (1 / (alpha - 1))
    raise AssertionError


@pytest.mark.parametrize("alpha", [1.5, 2.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_entmax_finds_every_threshold_without_sorting(alpha, dtype, tolerance):
    place = torch.arange(500, dtype=torch.float64)
    rows = [0.99**place, (place / 500) ** 0.1, 1 / (1 + place), place * 0, 3 * place.cos(), (place == 7) * 1e-4]
    rows = torch.stack([sign * row for row in rows for sign in (1.0, -1.0)]).to(dtype)
    expected = torch.stack([_sorted_entmax(row, alpha) for row in rows])
    for actual in (entmax(rows, alpha), torch.func.vmap(lambda row: entmax(row, alpha))(rows)):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operator gives."""

    def __init__(self):
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if torch.is_tensor(x):
                self.found = max(self.found, x.untyped_storage().nbytes() // x.element_size())
        return out


SMALL = {"scaled": {"variant": "scalar"}, "window": {"window": 64}}  # a window holds twice its width of each row


@pytest.mark.parametrize("name", [name for name in available_mechanisms() if name != "position_bias"])  # learns one
def test_holds_no_map_of_all_rows(name):
    tokens = 2048
    spec = AttentionSpec(8, 1, 8, num_tokens=tokens)
    mechanism = build_mechanism(name, spec, **SMALL.get(name, {}))
    inputs = {n: x.float() for n, x in random_heads(("q", "k", "v", *mechanism.needs), (1, 1, tokens, 8)).items()}
    if "x" in inputs:
        inputs["x"] = inputs["x"][:, 0]
    with Largest() as largest:
        causal = mechanism.causality != "never"
        mechanism(**{n: x.requires_grad_() for n, x in inputs.items()}, is_causal=causal).sum().backward()
    assert largest.found <= tokens * 256


@pytest.mark.parametrize("name", ["dam", "entmax", "sigmoid", "mom", "qk_norm"])
def test_compiled_with_dynamic_shapes(name):
    """Numbers of a module and options are symbols then, which what is computed again in backward could not take up."""
    mechanism = build_mechanism(name, AttentionSpec(8, 2, 4, num_tokens=TOKENS)).double().eval()
    inputs = random_heads("qkv", (2, 2, TOKENS, 4))
    mask = torch.zeros(2, 1, 1, TOKENS, dtype=torch.float64).masked_fill(torch.arange(TOKENS) >= 140, -torch.inf)
    torch.compiler.reset()
    compiled = torch.compile(mechanism, backend="eager", dynamic=True, fullgraph=True)
    actual = values_and_gradients(lambda **x: compiled(**x, attn_mask=mask), inputs)
    assert_same(actual, values_and_gradients(lambda **x: mechanism(**x, attn_mask=mask), inputs), 1e-12)
    torch.compiler.reset()
