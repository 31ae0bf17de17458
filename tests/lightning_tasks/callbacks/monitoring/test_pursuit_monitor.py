"""PursuitMonitor logs each pass of each RPC layer, as rpc_diagnostics has it."""

import math
import re
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from attention_modules import SelfAttention, rpc_diagnostics
from lightning_tasks.callbacks import PursuitMonitor
from tests.lightning_tasks.callbacks.modules import TinyLM, batches, fit
from tests.rows import each_row


class Tokens(pl.LightningModule):
    def __init__(self, mechanism="rpc", padding=False):
        super().__init__()
        self.plain = SelfAttention(16, 2)
        self.attention = SelfAttention(16, 2, mechanism)
        self.mask = torch.ones(4, 1, 5, 5, dtype=torch.bool).tril() if padding else None

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        mask = None if self.mask is None else self.mask[: len(x)]
        self.log("val/loss", self.attention(x, attn_mask=mask).square().mean())

    test_step = validation_step


def tokens():
    x = 3 * torch.randn(8, 5, 16, generator=torch.Generator().manual_seed(0))
    return DataLoader(torch.utils.data.TensorDataset(x), batch_size=4), x


def evaluate(module, tmp_path, command="validate", **options):
    callbacks = [PursuitMonitor(**options)]
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, callbacks=callbacks, default_root_dir=tmp_path, enable_progress_bar=False
    )
    getattr(trainer, command)(module, tokens()[0], verbose=False)
    return trainer.callback_metrics


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("num_samples", [3, 32])
def test_it_logs_the_diagnostics_of_the_first_samples(tmp_path, num_samples, padding):
    torch.manual_seed(0)
    module = Tokens(padding=padding)
    metrics = evaluate(module, tmp_path, num_samples=num_samples)
    some = tokens()[1][: min(num_samples, 4)]
    k, v = module.attention.qkv(some).view(len(some), 5, 2, 2, 8).permute(2, 0, 3, 1, 4)
    mask = None if module.mask is None else module.mask[: len(some)]
    expected = rpc_diagnostics(k, v, attn_mask=mask)
    assert len([name for name in metrics if "pursuit" in name]) == 18
    for name in ("mean_abs_key", "threshold"):
        torch.testing.assert_close(metrics[f"val/pursuit/{name}/layer_01"], expected.pop(name).mean())
    for name, values in expected.items():
        for number, value in enumerate(values.mean((1, 2)), start=1):
            torch.testing.assert_close(metrics[f"val/pursuit/{name}/layer_01/pass_{number}"], value)


def test_it_watches_the_test_and_leaves_no_hook(tmp_path):
    module = Tokens()
    assert "test/pursuit/entropy/layer_01/pass_4" in evaluate(module, tmp_path, "test")
    assert not any(part._forward_pre_hooks for part in module.modules())


def test_it_sees_through_compiled_code(tmp_path):
    module = Tokens()
    module.attention.compile(backend="aot_eager")
    module.attention(tokens()[1])
    assert "val/pursuit/entropy/layer_01/pass_4" in evaluate(module, tmp_path)


class Windows(Tokens):
    """Calls its layer on one sample after another, as windows of an image go through a network."""

    def validation_step(self, batch, batch_idx):
        for x in batch[0].split(1):
            self.attention(x)


@pytest.mark.parametrize("num_samples", [3, 32])
def test_calls_of_a_layer_add_up(tmp_path, num_samples):
    torch.manual_seed(0)
    whole = evaluate(Tokens(), tmp_path, num_samples=num_samples)
    torch.manual_seed(0)
    parts = evaluate(Windows(), tmp_path, num_samples=num_samples)
    assert len(parts) == 18
    for name, value in parts.items():
        torch.testing.assert_close(value, whole[name], msg=name)


@each_row("which", [0, 3])
def test_a_call_with_nan_makes_the_mean_nan_and_is_said(tmp_path, which):
    class Damaged(Windows):
        def validation_step(self, batch, batch_idx):
            x = batch[0].clone()
            x[which] = math.nan
            super().validation_step([x], batch_idx)

    with pytest.warns(UserWarning, match="PursuitMonitor.*NaN or infinite"):
        parts = evaluate(Damaged(), tmp_path)
    assert all(value.isnan() for value in parts.values())


def summed(elsewhere, own, *_, **__):
    """What two processes join of the names of an evaluation; of anything else, what is here."""
    return own + elsewhere if torch.is_tensor(own) and own.ndim == 2 else own


def test_an_empty_batch_weighs_nothing_and_warns_of_nothing(tmp_path, recwarn, monkeypatch):
    """What another process saw is then the mean."""
    logged = {}
    monkeypatch.setattr(Tokens, "log", lambda self, name, value, **_: logged.update({name: float(value)}))
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[PursuitMonitor()], default_root_dir=tmp_path)
    nothing, seen = torch.zeros(3), torch.tensor([3.0, 4.0, 1.0])  # sum, count, processes
    for elsewhere, expected in ((nothing, []), (seen, [0.75] * 18)):
        logged.clear()
        monkeypatch.setattr(trainer.strategy, "reduce", partial(summed, elsewhere))
        trainer.validate(Tokens(), DataLoader([[tokens()[1][:0]], [tokens()[1]]], batch_size=None), verbose=False)
        assert [value for name, value in logged.items() if "pursuit" in name] == expected
    assert not [warning for warning in recwarn if "PursuitMonitor" in str(warning.message)]


def test_a_layer_without_samples_is_not_logged_beside_one_with(tmp_path):
    class Two(Tokens):
        def __init__(self):
            super().__init__()
            self.other = SelfAttention(16, 2, "rpc")

        def validation_step(self, batch, batch_idx):
            self.attention(batch[0])
            self.other(batch[0][:0])

    values = evaluate(Two(), tmp_path)
    assert {name.split("/")[3] for name in values} == {"layer_01"}
    assert not any(value.isnan() for value in values.values())


def test_a_batch_without_an_end_leaves_nothing_behind(tmp_path):
    """Lightning takes StopIteration for the end of the data."""

    class Stops(Tokens):
        def validation_step(self, batch, batch_idx):
            self.attention(100 * batch[0])
            raise StopIteration

    torch.manual_seed(0)
    expected = evaluate(Tokens(), tmp_path)
    monitor = PursuitMonitor()
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[monitor], default_root_dir=tmp_path)
    trainer.validate(Stops(), tokens()[0], verbose=False)
    torch.manual_seed(0)
    trainer.validate(Tokens(), tokens()[0], verbose=False)
    for name, value in trainer.callback_metrics.items():
        torch.testing.assert_close(value, expected[name], msg=name)


def test_an_iteration_out_of_range_is_said(tmp_path):
    class Huge(Tokens):
        def validation_step(self, batch, batch_idx):
            self.attention(torch.cat([batch[0][:1], 1e25 * batch[0][1:2]]))

    with pytest.warns(UserWarning, match="PursuitMonitor.*NaN or infinite"):
        values = evaluate(Huge(), tmp_path)
    assert all(value.isnan() for value in values.values())


def test_no_layer_to_watch_is_said_once(recwarn):
    """In a comparison the same monitors stand in the cells that have nothing to pursue."""
    monitor = PursuitMonitor()
    trainer = fit(TinyLM(), [monitor], batches(1), batches(1), max_epochs=2, num_sanity_val_steps=1)
    trainer.validate(trainer.lightning_module, batches(1), verbose=False)
    said = [str(one.message) for one in recwarn if "no layer with RPC attention" in str(one.message)]
    assert len(said) == 1
    assert "among 'net.encoder.layers.0.self_attn', 'net.encoder.layers.1.self_attn'," in said[0]
    assert not any("pursuit" in name for name in trainer.callback_metrics)


def test_no_layer_to_choose_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="blocks"):
        fit(TinyLM(), [PursuitMonitor(where="blocks.*")], batches(1), batches(1))


def test_num_samples_is_checked():
    with pytest.raises(ValueError, match="num_samples must be an integer of at least 1, got 0"):
        PursuitMonitor(num_samples=0)
    with pytest.raises(ValueError, match="num_samples must be an integer of at least 1, got '3'"):
        PursuitMonitor(num_samples="3")


def test_an_exception_leaves_no_hook(tmp_path):
    class Fails(Tokens):
        def validation_step(self, batch, batch_idx):
            raise RuntimeError("planned")

    module = Fails()
    with pytest.raises(RuntimeError, match="planned"):
        evaluate(module, tmp_path)
    assert not any(part._forward_pre_hooks for part in module.modules())


class Trains(Tokens):
    """Keys are the tokens times a factor, values zero."""

    def __init__(self, factor, lam):
        super().__init__()
        self.attention.mechanism.lam = lam
        with torch.no_grad():
            self.attention.qkv.weight.copy_(torch.cat([factor * torch.eye(16), torch.zeros(16, 16)]))

    def training_step(self, batch, batch_idx):
        return self.attention(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize(
    ("factor", "lam", "words"),
    [
        (1e-3, 4.0, r"when training ended: S stayed empty in every pass, .*sparsity below 0.0001 in attention \(0\)"),
        (1e-3, math.inf, None),
        (20.0, 4.0, r"val at step \d: S took nearly all of the keys, .*sparsity above 0.98 in attention \("),
        (5.0, 242.0, r"val at step \d: entropy collapse: each token .*self_probability above 0.98 in attention \("),
        (1.0, 9.7, None),
    ],
)
def test_an_idle_full_or_saturated_pursuit_is_warned_of_once_in_words(tmp_path, recwarn, factor, lam, words):
    # Twenty tokens of one length, which point apart: the more, the larger they are.
    signs = 1.0 - 2.0 * (torch.arange(20)[:, None] >> torch.arange(8) & 1)
    x = (signs * torch.tensor([1.0, 1.2]).repeat(4)).repeat(8, 1, 2)
    loader = DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)
    options = {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        callbacks=[PursuitMonitor(where="attention")],
        default_root_dir=tmp_path,
        **options,
    )
    trainer.fit(Trains(factor, lam), loader, loader)
    said = [str(one.message) for one in recwarn if "said once" in str(one.message)]
    assert len(said) == (words is not None), (said, trainer.callback_metrics)
    assert words is None or re.search(f"PursuitMonitor, {words}", said[0]), said
