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


def small(name, **more):
    """A small model of transformers, the attention of which drops out."""
    import transformers

    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    drops = {"num_attention_heads": 4, "attention_dropout": 0.1, "attention_probs_dropout_prob": 0.1}
    config = getattr(transformers, f"{name}Config")(**{**sizes, **drops, **more})
    kind = (
        "ForMaskedLM"
        if name in ("Bert", "ModernBert")
        else "ForConditionalGeneration"
        if name == "T5"
        else "ForCausalLM"
    )
    return getattr(transformers, name + (kind if name != "GPT2" else "LMHeadModel"))(config).train()


OF_TRANSFORMERS = {
    "BERT": partial(small, "Bert"),
    "GPT-2": partial(small, "GPT2", n_embd=32, n_layer=2, n_head=4),
    "Llama": partial(small, "Llama"),
    "Llama, one key head": partial(small, "Llama", num_key_value_heads=1),
    "Gemma 2": partial(small, "Gemma2", num_key_value_heads=2, head_dim=8, sliding_window=4),
    "GPT-OSS": partial(
        small, "GptOss", num_key_value_heads=2, head_dim=8, sliding_window=4, num_local_experts=4, num_experts_per_tok=2
    ),
    "T5": partial(small, "T5", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0),
}
_PRECISIONS = {
    "float32": lambda: nullcontext(),
    "bfloat16 autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16 autocast": lambda: torch.autocast("cpu", torch.float16),
}


def steps_of(model, watched, precision, mask):
    """Losses, weights and what is drawn next, after two steps."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    torch.manual_seed(1)
    tokens = torch.randint(1, 50, (2, 3, 10))
    watching = attnswap.watch(model, callbacks=[AttentionMonitor(1), LogitMonitor(1)], log=dict) if watched else None
    with watching or nullcontext():
        for batch in tokens:
            with precision():
                labels = batch if mask is None else batch.masked_fill(mask == 0, -100)
                given = {} if mask is None else {"attention_mask": mask}
                out = model(input_ids=batch, labels=labels, output_attentions=True, **given)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(out.loss.item())
    maps = out.get("attentions") or out.get("encoder_attentions") or ()
    return losses, model.state_dict(), [each.detach() for each in maps if each is not None], torch.get_rng_state()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("padding", ["no padding", "padded"])
@pytest.mark.parametrize("precision", _PRECISIONS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("model", OF_TRANSFORMERS)
def test_models_of_transformers_compute_as_they_are_told_to(model, implementation, precision, padding):
    mask = None
    if padding == "padded":
        mask = torch.ones(3, 10, dtype=torch.long)
        mask[0, 7:], mask[1, :3] = 0, 0
    found = []
    for watched in (False, True):
        torch.manual_seed(0)
        built = OF_TRANSFORMERS[model]()
        try:
            built.set_attn_implementation(implementation)
        except ValueError:
            pytest.skip(f"{model} has no {implementation}")
        found.append(steps_of(built, watched, _PRECISIONS[precision], mask))
    plain, watched = found
    assert plain[0] == watched[0]
    assert all(torch.equal(value, watched[1][name]) for name, value in plain[1].items())
    assert len(plain[2]) == len(watched[2])
    assert all(map(torch.equal, plain[2], watched[2]))
    assert torch.equal(plain[3], watched[3])


class Grouped(nn.Module):
    """A layer of one's own with fewer key heads."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x, mask=None):
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = (each.unflatten(-1, (1, 8)).transpose(1, 2) for each in self.kv(x).chunk(2, -1))
        causal = mask is None
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.1, causal, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


class Around(nn.Module):
    """A model of it."""

    def __init__(self):
        super().__init__()
        self.attention = Grouped()

    def forward(self, x, mask=None):
        return x + self.attention(x, mask)


@pytest.mark.parametrize("mask", [None, torch.arange(10) > 2, torch.randn(10, 10).tril()])
def test_a_layer_of_ones_own_calls_the_function_as_it_did(mask):
    found = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = Around().bfloat16().train()
        given = mask if mask is None or mask.dtype is torch.bool else mask.bfloat16()
        x = torch.randn(3, 10, 32, dtype=torch.bfloat16)
        with attnswap.watch(model, callbacks=[AttentionMonitor(1)], log=dict) if watched else nullcontext():
            model(x, given).square().mean().backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_layers_that_hand_indices_of_keys_to_another_function(implementation):
    """Those of DeepSeek V3.2 mask keys themselves for these two implementations, and leave that to all others."""
    pytest.importorskip("transformers")
    from tests.attention_modules.hosts.huggingface.tiny import classes_of, running

    model, inputs = running(classes_of("deepseek_v32")[1][-1])
    model.set_attn_implementation(implementation)
    plain = model(**inputs)[0]
    with attnswap.watch(model.train(), callbacks=[AttentionMonitor(1)], log=dict):
        torch.testing.assert_close(model(**inputs)[0], plain)


class OfTokens(nn.Module):
    """A model of tokens, in place of one of transformers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.around = nn.Embedding(50, 32), Around().eval()

    def forward(self, input_ids):
        return (self.around(self.embedding(input_ids)),)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("implementation", ["sdpa", "eager", None])
@pytest.mark.parametrize("penalty", [EntropyRegularizer, AttentionDiversification])
def test_a_penalty_acts_on_plain_layers_as_on_those_with_softmax(penalty, implementation):
    """Also beside a monitor, and where keys are shared."""
    found, tokens = [], torch.randint(1, 50, (3, 10), generator=torch.Generator().manual_seed(0))
    for swapped, weight in ((False, 100.0), (True, 100.0), (False, 0.0)):
        torch.manual_seed(0)
        model = OfTokens() if implementation is None else small("Llama", num_key_value_heads=2, attention_dropout=0.0)
        if implementation is not None:
            model.set_attn_implementation(implementation)
        if swapped:
            swap_attention(model, "softmax")
        optimizer, logged = torch.optim.SGD(model.parameters(), 0.0), {}
        callbacks = [AttentionMonitor(1), penalty(weight, **({"target": 0.3} if penalty is EntropyRegularizer else {}))]
        with attnswap.watch(
            model, callbacks=callbacks, optimizer=optimizer, log=lambda now, step, into=logged: into.update(now)
        ):
            (model(input_ids=tokens)[0] ** 3).mean().backward()
            gradients = torch.cat([each.grad.flatten() for each in model.parameters()])
            optimizer.step()
        found.append((gradients, {name: value for name, value in logged.items() if "penalty" in name}))
    (plain, logged), (swapped, as_logged), (without, _) = found
    assert logged.keys() == as_logged.keys()
    assert logged
    torch.testing.assert_close(plain, swapped)
    assert (plain - without).abs().max() > 1e-3 or not any(logged.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_compiled_model_of_transformers_is_watched(implementation):
    model, tokens, logged = small("Bert"), torch.randint(1, 50, (3, 10)), []
    model.set_attn_implementation(implementation)
    compiled = torch.compile(model.eval().train(), backend="eager", fullgraph=True)
    with attnswap.watch(compiled, callbacks=[AttentionMonitor(2)], log=lambda now, step: logged.append(step)):
        for _ in range(3):
            compiled(input_ids=tokens).logits.square().mean().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
    assert logged == [0, 2]
