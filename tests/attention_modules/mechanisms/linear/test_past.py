"""``window``, ``hedgehog`` and ``performer``: released values, states in any split, packed sequences, growth."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_modules import AttentionSpec, build_mechanism, mechanisms as found, naive
from tests.attention_modules.compare import assert_same, largest_saved, random_heads, values_and_gradients
from tests.rows import each_row

SHAPE = (2, 3, 23, 4)
MAPS = {"q_weight": (3, 4, 5), "k_weight": (3, 4, 5)}
FORMS: dict[str, tuple[str, dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "window": ("window", {}, {"window": 3, "sinks": 2}),
    "a window wider than a block": ("window", {}, {"window": 9, "sinks": 4}),
    "hedgehog": ("hedgehog", MAPS, {}),
    "hedgehog, window": ("hedgehog", {**MAPS, "alpha": (3,)}, {"window": 4}),
    "performer": ("performer", {"projection": (9, 4)}, {}),
}


@pytest.mark.parametrize("tag", ["a", "b"])
@pytest.mark.parametrize("form", ["hedgehog", "lolcats_sw"])
def test_equals_released_code(form, tag):
    path = Path(os.environ.get("ATTNSWAP_DATA", "")) / ".." / "golden" / "linear_released.npz"
    if "ATTNSWAP_DATA" not in os.environ or not path.is_file():
        pytest.skip("ATTNSWAP_DATA/../golden/linear_released.npz is not there")
    with np.load(path) as file:
        arrays = {name: torch.from_numpy(file[name]).double() for name in file.files if name.startswith(f"{tag}.")}
    if f"{tag}.{form}.o" not in arrays:
        assert (form, tag) == ("hedgehog", "b")
        return
    names = {"q": "q", "k": "k", "v": "v", "q_weight": "Wq", "k_weight": "Wk"}
    names |= {"alpha": "alpha"} if form == "lolcats_sw" else {}
    window = 8 if form == "lolcats_sw" else 0
    inputs = {name: arrays[f"{tag}.{given}"].requires_grad_() for name, given in names.items()}
    heads = {name: x.flatten() if name == "alpha" else x for name, x in inputs.items()}
    out = found.hedgehog_attention(**heads, window=window, is_causal=True)
    actual, expected = {"o": out.detach()}, {"o": arrays[f"{tag}.{form}.o"]}
    if tag == "a":
        grads = torch.autograd.grad((out * arrays["a.wo"]).sum(), list(inputs.values()))
        actual |= dict(zip(names, grads, strict=True))
        expected |= {name: arrays[f"a.{form}.grad.{given}"] for name, given in names.items()}
    assert_same(actual, expected, 1e-9)


def _given(form: str, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = FORMS[form][1]
    more = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {**random_heads(shape=SHAPE), **more}


@each_row(("form", "masked"), [(form, masked) for form in FORMS for masked in (False, True)])
@pytest.mark.parametrize("packed", [False, True])
def test_every_split_equals_the_rows_one_by_one(form, masked, packed):
    name, _, options = FORMS[form]
    function, twin = getattr(found, f"{name}_attention"), getattr(naive, f"naive_{name}")
    generator = torch.Generator().manual_seed(7)
    mask = torch.rand(2, 1, 1, 23, generator=generator) > 0.4 if masked else None
    starts = torch.rand(2, 23, generator=generator) > 0.8 if packed else None

    def split(sizes: list[int]) -> Any:
        def run(**inputs: Tensor) -> Tensor:
            state: dict[str, Tensor] = {}
            outs, done = [], 0
            for size in sizes:
                here = slice(done, done + size)
                part = {key: x[:, :, here] if key in "qkv" else x for key, x in inputs.items()}
                part |= {} if mask is None else {"attn_mask": mask[..., here]}
                part |= {} if starts is None else {"starts": starts[:, here]}
                outs.append(function(**part, **options, is_causal=True, state=state))
                done += size
            return torch.cat(outs, 2)

        return run

    given = {**options, "attn_mask": mask, "starts": starts, "is_causal": True}
    expected = values_and_gradients(lambda **inputs: twin(**inputs, **given), _given(form))
    for sizes in ([23], [11, 12], [1] * 23, [7, 0, 1, 15]):
        assert_same(values_and_gradients(split(sizes), _given(form)), expected, 1e-11)


@each_row("form", FORMS)
@pytest.mark.parametrize("hidden", [torch.nan, torch.inf])
def test_what_a_hidden_token_holds_changes_nothing(form, hidden):
    name, _, options = FORMS[form]
    function, given = getattr(found, f"{name}_attention"), _given(form)
    seen = torch.rand(2, 1, 1, 23, generator=torch.Generator().manual_seed(7)) > 0.4
    poisoned = {n: x.masked_fill(~seen.mT, hidden) if n in "qkv" else x for n, x in given.items()}

    def parts(inputs: dict[str, Tensor]) -> Tensor:
        outs, state = [], {}
        for here in (slice(9), slice(9, 10), slice(10, 23)):
            part = {n: x[:, :, here] if n in "qkv" else x for n, x in inputs.items()}
            outs.append(function(**part, **options, attn_mask=seen[..., here], is_causal=True, state=state))
        return torch.cat(outs, 2)[seen[:, :, 0].expand(2, 3, 23)]

    assert torch.equal(parts(poisoned), parts(given))


def test_no_sample_is_no_error():
    for form, (name, _, options) in FORMS.items():
        given = {n: x[:0] if n in "qkv" else x for n, x in _given(form).items()}
        assert getattr(found, f"{name}_attention")(**given, **options, is_causal=True).shape == (0, *SHAPE[1:])


@each_row("form", FORMS)
def test_nothing_that_is_kept_grows_faster_than_the_tokens(form):
    name, _, options = FORMS[form]
    module = build_mechanism(name, AttentionSpec(8, 2, 4), **options)

    def largest(tokens: int) -> int:
        inputs = {n: x.float().requires_grad_() for n, x in random_heads(shape=(1, 2, tokens, 4)).items()}
        return largest_saved(lambda: module(**inputs, is_causal=True).square().sum())

    assert largest(4096) <= 4.5 * largest(1024)


def test_long_sequences_in_half_precision_stay_near():
    for name, options in (
        ("window", {"window": 64}),
        ("hedgehog", {}),
        ("hedgehog", {"window": 64}),
        ("performer", {}),
    ):
        module = build_mechanism(name, AttentionSpec(16, 1, 16), **options)
        inputs = {n: x.float() for n, x in random_heads(shape=(1, 1, 16_384, 16)).items()}
        with torch.no_grad():
            exact = module(**{n: x.double() for n, x in inputs.items()}, is_causal=True)
            for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 0.03)):
                out = module(**{n: x.to(dtype) for n, x in inputs.items()}, is_causal=True)
                assert (out.double() - exact).norm() <= limit * exact.norm(), (name, options, dtype)


def test_performer_draws_without_the_global_state_and_saves_what_it_drew():
    before = torch.get_rng_state()
    one, same, other = (
        build_mechanism("performer", AttentionSpec(16, 2, 8, layer_index=at), seed=seed)
        for at, seed in ((0, 0), (0, 0), (1, 0))
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.projection, same.projection)
    assert not torch.equal(one.projection, other.projection)
    assert list(one.state_dict()) == ["projection"]
    rows = one.projection[:8].double()
    assert (rows @ rows.mT - torch.diag(rows.square().sum(-1))).abs().max() < 1e-5


@each_row(
    ("name", "options", "said"),
    [
        ("window", {"window": 0}, "window must be an integer of at least 1, got 0"),
        ("window", {"sinks": -1}, "sinks must be an integer of at least 0, got -1"),
        ("hedgehog", {"start": "identity"}, "give features=8, or take start='uniform' \\(got features=64\\)"),
        ("performer", {"features": 0}, "features must be an integer of at least 1, got 0"),
    ],
)
def test_options_out_of_their_limits_are_refused(name, options, said):
    with pytest.raises(ValueError, match=said):
        build_mechanism(name, AttentionSpec(16, 2, 8), **options)


def test_what_sees_the_future_is_refused_by_name():
    q, k, v = random_heads(shape=(1, 2, 5, 4)).values()
    with pytest.raises(ValueError, match="window attention sees the last tokens before each, so it must hide"):
        found.window_attention(q, k, v, 3)
    heads = torch.tensor([[[[True, False, True, True, True]], [[True] * 5]]])
    with pytest.raises(ValueError, match="window attention takes one mask of padding for all heads"):
        found.window_attention(q, k, v, 3, attn_mask=heads, is_causal=True)
