"""Watching changes nothing: with each monitor, a model of every host trains to the same bits as without."""

import random
from contextlib import nullcontext
from functools import partial

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

import attnswap
from attention_modules import AttentionMechanism
from attention_modules.swap import swap_attention
from lightning_tasks.callbacks import (
    AttentionDiversification,
    AttentionMapLogger,
    AttentionMonitor,
    EntropyRegularizer,
    KernelPCAMonitor,
    LipschitzMonitor,
    LocAteR,
    LogitMonitor,
    PursuitMonitor,
    RunSummary,
    SpectrumMonitor,
)
from tests.attention_modules.hosts.cases import HOSTS, padding_mask
from tests.lightning_tasks.callbacks.modules import TOKENS, TinyLM, batches, fit, weights_of

MONITORS = {
    "AttentionMonitor": lambda: AttentionMonitor(every_n_steps=1),
    "SpectrumMonitor": lambda: SpectrumMonitor(every_n_steps=1),
    "LipschitzMonitor": lambda: LipschitzMonitor(max_iter=2),
    "AttentionMapLogger": AttentionMapLogger,
    "LocAteR": lambda: LocAteR(0.1, gamma=0.1, observe_only=True),
    "RunSummary": lambda: RunSummary("val/loss"),
    "LogitMonitor": lambda: LogitMonitor(every_n_steps=1),
    "PursuitMonitor": PursuitMonitor,
    "KernelPCAMonitor": KernelPCAMonitor,
}
# Keys of a reduced image are no function of tokens, whose constant could be taken; and projections that nobody told.
UNFIT = {("mmseg-segformer-reduced", "LipschitzMonitor"), ("sdpa", "SpectrumMonitor"), ("sdpa", "LocAteR")}


class Keeps(AttentionMechanism):
    """Keeps a mean of keys in what is no buffer."""

    def __init__(self, spec):
        super().__init__(spec)
        self.mean = torch.zeros(spec.num_heads, 1, spec.head_dim)

    def forward(self, q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0, scale=None):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * k.detach().mean((0, 2)).unsqueeze(1))
        return self.attend(q, k + 5 * self.mean, v, attn_mask, is_causal, scale)

    def attend(self, q, k, v, attn_mask, is_causal, scale):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, scale=scale)


class Counts:
    def __init__(self):
        self.calls = 0

    def draw(self):
        self.calls += 1
        return self.calls / 16 + random.random() + np.random.rand()  # noqa: NPY002 - what older code draws from


class Draws(Keeps):
    """Counts its calls in a plain object, and draws from generators of its own and of others."""

    def __init__(self, spec):
        super().__init__(spec)
        self.counts, self.generator = Counts(), torch.Generator().manual_seed(0)
        self.others = [random.Random(0), np.random.default_rng(0)]

    def attend(self, q, *rest):
        noise = torch.randn(q.shape, generator=self.generator) * sum(each.random() for each in self.others)
        return super().attend(q * (1 + self.counts.draw()) + 0.1 * noise, *rest)


NOISE = torch.Generator()


def noisy(q, k, v, attn_mask=None, is_causal=False):
    q = q + 0.1 * torch.randn(q.shape, generator=NOISE)
    return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AttentionMonitor(every_n_steps=1),
        lambda: EntropyRegularizer(0.0, target=0.3),
        lambda: AttentionDiversification(0.0),
    ],
    ids=["monitor", "regularizer", "diversification"],
)
@pytest.mark.parametrize("mechanism", [Keeps, Draws, noisy])
def test_what_a_mechanism_keeps_outside_of_buffers_stays(mechanism, make):
    found = []
    for callbacks in ([], [make()]):
        pl.seed_everything(0, verbose=False)
        NOISE.manual_seed(0)
        module = TinyLM()
        swap_attention(module, mechanism)
        fit(module, callbacks)
        found.append(weights_of(module))
    assert torch.equal(*found)


class Host(pl.LightningModule):
    """A model of a host with dropout within and after its attention, and what its training steps drew."""

    def __init__(self, host, mechanism=None):
        super().__init__()
        torch.manual_seed(0)
        self.case, self.net = HOSTS[host], HOSTS[host].build()
        for module in self.net.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
            elif isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.2
            elif isinstance(getattr(module, "attention_dropout", None), float):
                module.attention_dropout = 0.2
        self.after = nn.Dropout(0.3)
        if mechanism is not None:
            swap_attention(self.net, mechanism)
        self.losses = []

    def _loss(self, batch_idx):
        padding = padding_mask() if self.case.padding and batch_idx % 2 else None
        # Most layouts meet in a sum, and dropout draws in the order of memory.
        return self.after(self.case.run(self.net, padding)).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch_idx)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self._loss(batch_idx), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def trained(host, mechanism, *callbacks):
    """Losses, weights and the state of the random numbers after four steps with two validations."""
    module = Host(host, mechanism)
    torch.manual_seed(1)
    loader = DataLoader(list(range(2)))
    fit(module, callbacks, loader, loader, max_epochs=2, num_sanity_val_steps=1)
    return module.losses, module.state_dict(), torch.get_rng_state()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("host", HOSTS)
def test_training_is_the_same_to_the_bit(host):
    """With all monitors at once, and with one of them, in turn, alone; where all at once change it, with each."""
    names = [name for name in MONITORS if (host, name) not in UNFIT and name != "PursuitMonitor"]
    plain, alone = trained(host, None), list(MONITORS)[list(HOSTS).index(host) % len(MONITORS)]
    if alone in names:
        check_same(plain, trained(host, None, MONITORS[alone]()), alone)
    together = trained(host, None, *(MONITORS[name]() for name in names))
    try:
        check_same(plain, together, "together")
    except AssertionError:
        for name in names:
            check_same(plain, trained(host, None, MONITORS[name]()), name)
        raise
    mechanism = None if "rpc" in HOSTS[host].refuses else "rpc"
    check_same(trained(host, mechanism), trained(host, mechanism, PursuitMonitor()), "PursuitMonitor")


def check_same(plain, watched, name):
    for losses in (plain[0], watched[0]):
        assert len(set(losses)) == 4, "dropout draws anew at each step"
    assert watched[0] == plain[0], name
    assert list(watched[1]) == list(plain[1]), name
    for key, value in plain[1].items():
        assert torch.equal(watched[1][key], value), (name, key)
    assert torch.equal(watched[2], plain[2]), f"{name} draws random numbers"


@pytest.mark.parametrize("mechanism", ["dam", "gated", "twicing", "talking_heads", "rpc", "differential"])
def test_mechanisms_that_draw_or_are_called_again_for_their_map(mechanism):
    """What a call of a mechanism for its map draws and adds is gone before the call that trains."""
    found = []
    for watched in (True, False):
        module = TinyLM()
        torch.manual_seed(0)
        swap_attention(module, mechanism, **({"num_tokens": TOKENS} if mechanism == "dam" else {}))
        monitors = [AttentionMonitor(every_n_steps=1), AttentionMapLogger()] if watched else []
        fit(module, monitors, val_loader=batches(1), max_epochs=2)
        found.append((weights_of(module), torch.get_rng_state()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


class SavesAttention(nn.Module):
    """A block under PyTorch's selective checkpointing, which keeps what attention gave, in order."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        kept = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

        def policy(context, op, *args, **kwargs):
            return CheckpointPolicy.MUST_SAVE if op is kept else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(self.block, x, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize("mechanism", [None, "twicing", "talking_heads", "gated"])
def test_selective_checkpoints_keep_nothing_of_a_monitor(mechanism):
    def trained(watched):
        torch.manual_seed(0)
        layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
        model = nn.Sequential(*layers)
        if mechanism is not None:
            swap_attention(model, mechanism)
        model = nn.Sequential(*map(SavesAttention, model))
        optimizer, x = torch.optim.SGD(model.parameters(), 0.1), torch.randn(3, 2, 7, 16)
        with (
            attnswap.watch(model, callbacks=[AttentionMonitor(1)], log=lambda *_, **__: None)
            if watched
            else nullcontext()
        ):
            for batch in x:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert torch.equal(trained(True), trained(False))
