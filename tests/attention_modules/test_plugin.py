"""A mechanism of another package: found by its entry point, checked, and swapped in."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from attention_modules import (
    SelfAttention,
    available_mechanisms,
    build_mechanism,
    mechanism,
    mechanism_class,
    restore_attention,
    swap_attention,
)
from attention_modules.testing import CHECKS, check_mechanism

SOURCE = Path(__file__).parents[1] / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder that the example is installed into, as pip would: its module and its metadata."""
    folder, scratch = (str(tmp_path_factory.mktemp(name)) for name in ("plugin", "scratch"))
    setup = [sys.executable, "-W", "ignore", "-c", "from setuptools import setup; setup()"]
    steps = ["egg_info", "--egg-base", folder, "build", "--build-base", scratch, "--build-lib", folder]
    subprocess.run([*setup, *steps], cwd=SOURCE, check=True, capture_output=True)
    return folder


@pytest.fixture
def plugin(installed, monkeypatch):
    """The registry as a fresh process with that package on its path would have it."""
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setattr(mechanism, "_entry_points_loaded", False)
    monkeypatch.setattr(mechanism, "_REGISTRY", dict(mechanism._REGISTRY))


def test_is_found_by_its_entry_point(plugin):
    assert "near" in available_mechanisms()
    assert mechanism_class("near").__module__ == "window_attention"


@pytest.mark.parametrize("check", sorted(set(CHECKS) - {"compile"}))
def test_passes_every_check(plugin, check):
    check_mechanism("near", window=2, only=[check])


def test_passes_the_compile_check(plugin):
    check_mechanism("near", window=2, only=["compile"])


def test_one_that_needs_the_input_and_another_layers_values(plugin):
    check_mechanism("gated_residual", only=set(CHECKS) - {"compile"})
    layer = nn.TransformerEncoderLayer(24, 3, 48, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    x = torch.randn(2, 9, 24)
    before = model(x)
    swap_attention(model, "gated_residual")
    after = model(x)
    assert not torch.allclose(after, before)
    after.sum().backward()
    unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert unused == [f"layers.0.self_attn.mechanism.gate.{name}" for name in ("weight", "bias")]
    restore_attention(model)
    assert torch.equal(model(x), before)


def test_swaps_into_a_model_and_out(plugin):
    model = nn.Sequential(SelfAttention(24, 3), SelfAttention(24, 3)).eval()
    x = torch.randn(2, 9, 24)
    before = model(x)
    swap_attention(model, "near", window=1)
    assert not torch.allclose(model(x), before)
    restore_attention(model)
    assert torch.equal(model(x), before)


def test_wide_enough_it_is_plain_attention(plugin):
    spec = SelfAttention(24, 3).mechanism.spec
    q, k, v = torch.randn(3, 2, 3, 9, 8).unbind(0)
    wide, plain = (build_mechanism(name, spec, **o) for name, o in (("near", {"window": 9}), ("softmax", {})))
    assert torch.allclose(wide(q, k, v), plain(q, k, v), atol=1e-6)


def test_a_package_that_fails_to_load_is_a_warning_that_names_it(installed, plugin, tmp_path, monkeypatch):
    info = tmp_path / "broken-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[attnswap.mechanisms]\nbroken = no_such_module:Attention\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(UserWarning, match=r"'broken'.*no_such_module"):
        names = available_mechanisms()
    assert "near" in names
    assert "broken" not in names
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        available_mechanisms()
