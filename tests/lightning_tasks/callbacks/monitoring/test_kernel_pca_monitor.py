"""KernelPCAMonitor logs what the analysis of the same layer and samples gives."""

import lightning.pytorch as pl
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from attention_modules import SelfAttention, softmax_attention, swap_attention
from attention_modules.analysis import gamma_constancy, projection_loss
from attention_modules.analysis.kernel_pca import queries_at_kernel_scale
from lightning_tasks.callbacks import KernelPCAMonitor
from tests.lightning_tasks.callbacks.modules import PROMPTS, InTwoCalls, TinyLM, batches, decoder, fit

LAYERS = {"softmax": {}, "symmetric": {}, "scaled": {"variant": "scalar"}, "rpc": {}}
TOKENS = torch.randn(8, 6, 16, generator=torch.Generator().manual_seed(0))


class Layers(pl.LightningModule):
    """A layer of each kind, beside each other; a mask hides the last token where there is padding."""

    def __init__(self, padding=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleDict(
            {name: SelfAttention(16, 2, name, options) for name, options in LAYERS.items()}
        )
        torch.nn.init.constant_(self.layers["scaled"].mechanism.s, 0.3)
        self.mask = torch.ones(1, 1, 1, 6, dtype=torch.bool) if padding else None
        if padding:
            self.mask[..., -1] = False

    def validation_step(self, batch, batch_idx):
        for layer in self.layers.values():
            layer(batch[0], attn_mask=self.mask)

    test_step = validation_step


def evaluated(module, command="validate", **options):
    monitor = KernelPCAMonitor(**options)
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[monitor], enable_progress_bar=False)
    getattr(trainer, command)(module, DataLoader(TensorDataset(TOKENS), batch_size=4), verbose=False)
    return {name: value for name, value in trainer.callback_metrics.items() if "kernel_pca" in name}


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("num_samples", [3, 32])
def test_it_logs_the_analysis_of_the_first_samples(num_samples, padding):
    module = Layers(padding)
    with pytest.warns(UserWarning, match=r"leaves out 'layers.rpc' \(RPCAttention"):
        metrics = evaluated(module, num_samples=num_samples)
    some = TOKENS[: min(num_samples, 4)]
    for number, name in enumerate(("softmax", "symmetric", "scaled")):
        layer = module.layers[name]
        heads = layer.qkv(some).view(len(some), 6, -1, 2, 8).permute(2, 0, 3, 1, 4)
        heads = heads[..., :5, :] if padding else heads  # as the sequence alone has it
        q, k, v = heads if len(heads) == 3 else (heads[0], *heads)
        if name == "scaled":
            v = v - 0.3 * softmax_attention(k, k, v)
        loss = projection_loss(q, k, softmax_attention(q, k, v))
        expected = {"projection_loss": loss.signed, "absolute_loss": loss.absolute}
        expected["eigen_residual"] = gamma_constancy(k, v)["eigen_residual"]
        for statistic, values in expected.items():
            found = metrics.pop(f"val/kernel_pca/{statistic}/layer_0{number}")
            torch.testing.assert_close(found, values.mean().float(), rtol=1e-5, atol=1e-6)
    assert not metrics


def test_it_watches_tests_and_plain_layers_and_leaves_them_as_they_were():
    assert len(evaluated(Layers(), "test", where="layers.softmax")) == 3
    module = TinyLM()
    before = [type(part) for part in module.modules()]
    trainer = fit(module, [KernelPCAMonitor()], val_loader=batches(2))
    names = {name for name in trainer.callback_metrics if "kernel_pca" in name}
    losses = {f"val/kernel_pca/{kind}/layer_0{n}" for kind in ("projection_loss", "absolute_loss") for n in (0, 1)}
    assert names == losses, "a causal layer has no row that sees all keys"
    assert [type(part) for part in module.modules()] == before


def test_numbers_that_are_not_finite_are_logged_as_nan():
    module = Layers()
    module.layers["softmax"].qkv.weight.data[0, 0] = torch.inf
    metrics = evaluated(module, where=["layers.softmax", "layers.scaled"])
    assert all(value.isnan() for name, value in metrics.items() if name.endswith("layer_00"))
    assert all(value.isfinite() for name, value in metrics.items() if name.endswith("layer_02"))


def test_a_key_too_long_for_the_kernel_is_nan_and_ends_nothing():
    module = Layers()
    module.layers["softmax"].qkv.weight.data[16:32] *= 1_000
    metrics = evaluated(module, where="layers.softmax")
    assert metrics["val/kernel_pca/eigen_residual/layer_00"].isnan()
    assert metrics["val/kernel_pca/projection_loss/layer_00"].isfinite()


def test_the_number_of_samples_is_checked():
    with pytest.raises(ValueError, match="num_samples must be an integer of at least 1, got 0"):
        KernelPCAMonitor(num_samples=0)


def test_without_a_query_a_call_that_continues_from_a_cache_is_of_the_new_tokens():
    module = InTwoCalls(decoder())
    swap_attention(module, "symmetric")
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[KernelPCAMonitor()], enable_progress_bar=False)
    trainer.validate(module, DataLoader(PROMPTS[1::2], batch_size=2), verbose=False)  # those without padding
    k, v = (of.double() for of in (module.cache.layers[0].keys, module.cache.layers[0].values))
    logits = k @ k.mT * k.shape[-1] ** -0.5
    seen = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -torch.inf)
    size = (logits.diagonal(dim1=-2, dim2=-1) - 2 * seen.logsumexp(-1)).exp()
    rows = size - (seen.softmax(-1) @ v).square().sum(-1)
    wanted = (rows[..., :4].mean() + rows[..., 4:].mean()) / 2  # of the two calls
    found = trainer.callback_metrics["val/kernel_pca/projection_loss/layer_00"]
    torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-6)


class Scales(torch.nn.Module):
    """A layer that multiplies its queries by 1/sqrt(d), before the call or by it."""

    def __init__(self, before):
        super().__init__()
        self.qkv, self.before = torch.nn.Linear(16, 48), before

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        q, scale = (q * 8**-0.5, 1.0) if self.before else (q, None)
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)


class Net(pl.LightningModule):
    def __init__(self, before, kind=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.kind = torch.nn.Sequential(Scales(before)).to(kind), kind

    def validation_step(self, batch, batch_idx):
        self.net(batch[0].to(self.kind))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_it_does_not_matter_where_a_layer_scales_its_logits(kind):
    found = [evaluated(Net(before, kind)) for before in (False, True)]
    assert len(found[0]) == 3
    for name, value in found[0].items():
        rounding = {} if kind == torch.float32 else {"rtol": 0.02, "atol": 0.0}
        torch.testing.assert_close(found[1][name], value, **rounding)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_queries_are_brought_to_the_kernels_scale_in_float64(kind):
    q, k, v = torch.randn(3, 2, 2, 6, 80, generator=torch.Generator().manual_seed(0)).to(kind) / 9
    h = softmax_attention(q, k, v, scale=1.0)
    expected = projection_loss(q.double() * 80**0.5, k.double(), h.double()).signed
    torch.testing.assert_close(projection_loss(queries_at_kernel_scale(q, 1.0), k, h).signed, expected)
