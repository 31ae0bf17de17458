"""A model whose only attention is the class token's: it is compared and healed, monitored layer by layer it is not."""

import pytest
import torch
from torch.utils.data import DataLoader

from attention_modules.hosts import AttentionSwapError
from lightning_tasks.callbacks import AttentionMonitor, DriftMonitor, Heal, LogitMonitor, SwapAttention
from tests.lightning_tasks.callbacks.modules import TinyLM, fit

WHERE = "net.cls_attn_blocks.*.attn"


class Module(TinyLM):
    def __init__(self):
        super().__init__(lr=1e-3)
        timm = pytest.importorskip("timm")
        torch.manual_seed(0)
        sizes = {"img_size": 32, "depth": 1, "embed_dim": 32, "num_heads": 4}
        self.net = timm.create_model("xcit_nano_12_p16_224", num_classes=3, **sizes)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return self(batch).square().mean()


def run(*callbacks):
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(images, batch_size=4)
    return fit(Module(), callbacks, loader, loader, max_epochs=1)


@pytest.mark.parametrize("kind", [DriftMonitor, lambda: Heal([{"match": "layers", "steps": 1}, {"match": "output"}])])
def test_it_is_compared_by_its_name(kind):
    metrics = run(SwapAttention("gated", where=WHERE), kind()).callback_metrics
    layers = [f"val/drift/relative_error/cls_attn_blocks.{place}.attn" for place in (0, 1)]
    found = [float(metrics[name]) for name in (*layers, "val/drift/relative_error/mean")]
    assert all(0 < error < 2 for error in found), found


@pytest.mark.parametrize("where", [None, WHERE])
@pytest.mark.parametrize("kind", [AttentionMonitor, LogitMonitor])
def test_monitors_say_that_they_leave_it_out(kind, where):
    with pytest.raises(AttentionSwapError, match=r"cross-attention only .* which monitors and stabilizers leave out"):
        run(SwapAttention("sink", where=WHERE), kind(where=where))


def test_two_swaps_of_one_layer_are_refused():
    with pytest.raises(ValueError, match=r"choose net.cls_attn_blocks.0.attn; give them where="):
        run(SwapAttention("sink", where=WHERE), SwapAttention("gated", where="net.cls_attn_blocks.0.attn"))
