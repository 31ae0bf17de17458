"""Layers of one's own in other people's tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.data import DataLoader

from attention_modules import AttentionSwapError, declare_host, swap_attention
from attention_modules.hosts import attention_layers
from lightning_tasks import load_swapped
from lightning_tasks.callbacks import AttentionMonitor, LipschitzMonitor, LocAteR, SpectrumMonitor, SwapAttention
from tests.attention_modules.hosts.cases import features, padding_mask
from tests.attention_modules.hosts.sdpa.own import ByHead, DeclaredJoint, Joint, SequenceFirst, WithMemory


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mechanism", ["softmax", "sink", "symmetric", "sigmoid", "gated", "forgetting"])
def test_half_precision_with_a_mask(mechanism: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = DeclaredJoint().eval()
    swap_attention(model, mechanism)
    mask = ~padding_mask()[:, None, None, :]
    expected = model(features(), mask)
    half = DeclaredJoint().eval()
    swap_attention(half, mechanism)
    half.load_state_dict(model.state_dict())
    x = features().clone()
    x[padding_mask()] = 1e4  # nobody sees it
    out = half.to(dtype)(x.to(dtype), mask).float()
    seen = ~padding_mask()
    torch.testing.assert_close(out[seen], expected[seen], atol=3e-2, rtol=3e-2)
    assert out.isfinite().all()


def test_frozen_stays_frozen_and_hooks_fire() -> None:
    model, seen = nn.Sequential(Joint(), Joint()), []
    model[0].requires_grad_(False)
    for layer in model:
        layer.register_forward_hook(lambda module, args, out: seen.append(type(module).__name__))
        layer.c_proj.register_forward_hook(lambda *_: seen.append("projection"))
    new = swap_attention(model, "sink").new
    assert new == ("0.mechanism.sink", "1.mechanism.sink")
    assert [value.requires_grad for value in map(dict(model.named_parameters()).get, new)] == [False, True]
    model(features()).sum().backward()
    assert seen == ["projection", "SwappedJoint"] * 2


def test_the_trainer_of_transformers_goes_on_with_the_best_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(Joint(), DeclaredJoint())

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            out = self.net(x)
            return {"loss": (out - labels).square().mean(), "logits": out}

    torch.manual_seed(0)
    model, data = Model(), [{"x": x, "labels": x.roll(1, 0)} for x in torch.randn(8, 6, 16)]
    swap_attention(model, "sink", where="net.0")
    swap_attention(model, "symmetric", where="net.1")
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "logging_steps": 1, "max_steps": 3}
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            **{"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True, "disable_tqdm": True},
            **{"load_best_model_at_end": True, "learning_rate": 0.05, **often},
        ),
        train_dataset=data,
        eval_dataset=data,
    )
    trainer.train()
    best = trainer.state.best_metric
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-5)
    assert bool(model.net[0].mechanism.sink.any())
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


class OwnByHead(ByHead):
    """A class of its own, so that no other test sees what is declared of it."""


class Module(LightningModule):
    """With a layer that the callback declares."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(OwnByHead())

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_declared_layer_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    declaration = {"kind": f"{__name__}.OwnByHead", "qkv": "query_key_value", "heads": "heads"}
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    swap = SwapAttention("rpc", options={"iterations": 2}, declare=[declaration])
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", max_steps=2, callbacks=[swap], **quiet)
    module = Module()
    trainer.fit(module, DataLoader(torch.randn(4, 6, 16), 2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = load_swapped(Module, tmp_path / "a.ckpt")
    assert torch.equal(loaded.net.eval()(features()), module.net.eval()(features()))
    assert loaded.net[0].query_key_value.weight.shape == (32, 16)


class Folded(nn.Module):
    """Heads lie in the batch, as older code has it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, 4, 4).permute(2, 0, 3, 1, 4).reshape(3, batch * 4, tokens, 4)
        return F.scaled_dot_product_attention(q, k, v).view(batch, 4, tokens, 4).transpose(1, 2).flatten(2)


def test_heads_that_lie_in_the_batch_are_told() -> None:
    layer, x = Folded(), torch.randn(2, 5, 16)
    plain = layer(x)
    swap_attention(layer, "softmax")
    with pytest.warns(UserWarning, match="gave 8 sequences for 2 samples: its heads lie in the batch"):
        torch.testing.assert_close(layer(x), plain)


class Decoder(LightningModule):
    """Sequence-first self-attention, and cross-attention to a memory of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = SequenceFirst(), WithMemory(memory=12)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        x = self.own(batch.transpose(0, 1)).transpose(0, 1)
        return self.cross(x, batch[:, :4, :12]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_both_layers_of_a_decoder_are_declared_in_yaml(tmp_path: Path) -> None:
    text = f"""
    - {{mechanism: rpc, options: {{iterations: 2}}, where: own, declare: [
        {{kind: {SequenceFirst.__module__}.SequenceFirst, qkv: c_attn, heads: n_head}},
        {{kind: {WithMemory.__module__}.WithMemory, q: to_q, kv: to_kv, heads: heads}}]}}
    - {{mechanism: sink, where: cross}}
    """
    swaps = [SwapAttention(**options) for options in yaml.safe_load(text)]
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", max_steps=2, callbacks=swaps, **quiet)
    module = Decoder()
    trainer.fit(module, DataLoader(torch.randn(4, 6, 16), 2))
    assert module.own.c_attn.weight.shape == (32, 16)
    assert bool(module.cross.mechanism.sink.any())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = load_swapped(Decoder, tmp_path / "a.ckpt")
    x = features()
    assert torch.equal(loaded.eval().training_step(x, 0), module.eval().training_step(x, 0))
    with pytest.raises(ValueError, match="cannot swap 'cross': cross-attention needs a query"):
        Trainer(callbacks=[SwapAttention("rpc", where="cross")], default_root_dir=tmp_path, max_steps=1, **quiet).fit(
            Decoder(), DataLoader(torch.randn(4, 6, 16), 2)
        )


class Watched(LightningModule):
    """A declared layer that does not run alone, of which the example tells."""

    def __init__(self, kind: type[nn.Module], example: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own = kind()
        if example:
            self.example_input_array = features()

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x, torch.ones(6, 6).tril().bool()) if isinstance(self.own, Joint) else self.own.turned(x)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self(batch).square().mean()

    def validation_step(self, batch: Tensor, _: int) -> None:
        self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NeedsMask(SequenceFirst):
    """Sequence-first, with a mask that it cannot do without."""

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).unflatten(2, (3, self.n_head, -1)).permute(2, 1, 3, 0, 4)
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, visible).permute(2, 0, 1, 3).flatten(2))

    def turned(self, x: Tensor) -> Tensor:
        return self(x.transpose(0, 1), torch.ones(6, 6).tril().bool()).transpose(0, 1)


CALLBACKS: dict[str, Callable[[], Any]] = {
    "attention/entropy/layer_00": AttentionMonitor,
    "qk_spectrum/variance/layer_00": SpectrumMonitor,
    "val/lipschitz/layer_00": lambda: LipschitzMonitor(max_tokens=None, tol=1e-4, max_iter=50),
    "locater/penalty": lambda: LocAteR(weight=0.1),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_see_a_declared_layer_as_its_example_shows_it(tmp_path: Path, name: str) -> None:
    declare_host(NeedsMask, qkv="c_attn", heads="n_head")
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    found = []
    for kind in (DeclaredJoint, NeedsMask):
        torch.manual_seed(0)
        trainer = Trainer(
            default_root_dir=tmp_path, accelerator="cpu", max_steps=2, callbacks=[CALLBACKS[name]()], **quiet
        )
        batches = DataLoader(torch.randn(4, 6, 16), 2)
        trainer.fit(Watched(kind), batches, batches)
        found.append(trainer.callback_metrics[name])
    torch.testing.assert_close(*found, rtol=1e-3, atol=0)
    with pytest.raises(AttentionSwapError, match="does not run alone: pass example="):
        Trainer(default_root_dir=tmp_path, max_steps=1, callbacks=[CALLBACKS[name]()], **quiet).fit(
            Watched(NeedsMask, example=False), batches
        )


class CausalByBias(Joint):
    """It hides the future by PyTorch's own mask, which holds no values."""

    kind = staticmethod(causal_upper_left)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, 2))
        mask = self.kind(x.shape[1], x.shape[1])
        return nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("mechanism", ["softmax", "sigmoid", "entmax", "hard", "linear"])
@pytest.mark.parametrize("kind", [causal_upper_left, causal_lower_right])
def test_the_future_is_hidden_by_torchs_own_masks(kind: Any, mechanism: str) -> None:
    layer, x = type("Own", (CausalByBias,), {"kind": staticmethod(kind)})(), features()
    plain = layer(x)
    swap_attention(layer, mechanism)
    assert attention_layers(layer)[0].spec.is_causal
    out, other = layer(x), layer(torch.cat([x[:, :3], torch.randn_like(x[:, 3:])], 1))
    torch.testing.assert_close(out[:, :3], other[:, :3])
    if mechanism == "softmax":
        torch.testing.assert_close(out, plain)
