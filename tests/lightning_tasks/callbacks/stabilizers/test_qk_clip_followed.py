"""QKClip and layers that change q or k between projection and product: the limit holds after a clip, or an error."""

import re
import warnings
from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import attnswap
from attention_modules.hosts.sdpa.declared import declare_host
from attention_modules.swap import swap_attention
from lightning_tasks.callbacks import QKClip
from tests.lightning_tasks.callbacks.modules import TinyLM, fit, weights_of

WIDTH, TOKENS, HEADS = 16, 5, 2
OURS = "between W_q, W_k and their product"


class Changing(nn.Module):
    """Causal attention whose queries a subclass changes."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias_u = nn.Parameter(torch.zeros(WIDTH // HEADS))
        self.limit = torch.inf

    def changed(self, q):
        return q

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(self.changed(q), k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Clamping(Changing):
    def changed(self, q):
        return q.clamp(-self.limit, self.limit)


class Adding(Changing):
    def changed(self, q):
        return q + self.bias_u


OWN = {"plain": Changing, "clamp": Clamping, "bias": Adding}
for each in OWN.values():
    declare_host(each, qkv="qkv", heads=HEADS)


def own(name, limit=torch.inf, size=1.0):
    layer = OWN[name]()
    nn.init.normal_(layer.qkv.weight, std=0.5)
    layer.limit = limit
    return nn.Sequential(layer), size * torch.randn(4, TOKENS, WIDTH)


def hugging_face(name, limit):
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    if name == "olmo":
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
        net = transformers.OlmoForCausalLM(transformers.OlmoConfig(vocab_size=64, clip_qkv=limit, **sizes))
    else:
        attention = {"clip_qkv": limit, "kv_n_heads": 2, "attn_pdrop": 0.0, "rope_theta": 1e4}
        ffn = {"ffn_hidden_size": 32, "moe_num_experts": 2, "moe_top_k": 1, "hidden_size": 32}
        sizes = {"d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 64, "vocab_size": 64}
        net = transformers.DbrxForCausalLM(transformers.DbrxConfig(**sizes, attn_config=attention, ffn_config=ffn))
    for parameter in net.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.5)
    return net, torch.randint(2, 64, (4, TOKENS))


def conformer(bias):
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    convolutions = {"conv_dim": (16,), "conv_stride": (8,), "conv_kernel": (10,), "num_feat_extract_layers": 1}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    off = dict.fromkeys(("mask_time_prob", "layerdrop", "hidden_dropout", "attention_dropout"), 0.0)
    off |= dict.fromkeys(("activation_dropout", "feat_proj_dropout", "conformer_conv_dropout"), 0.0)
    net = transformers.Wav2Vec2ConformerModel(
        transformers.Wav2Vec2ConformerConfig(
            **sizes, **convolutions, **positions, **off, position_embeddings_type="relative"
        )
    )
    for name, parameter in net.named_parameters():
        if "linear_" in name and parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.5)
        if "pos_bias_u" in name:
            nn.init.constant_(parameter, bias)
    return net, torch.randn(2, 100)


def in_turn(*batches):
    return DataLoader(batches, batch_size=None)


class Trains(pl.LightningModule):
    """Steps that leave the weights as they are, but for a clip."""

    def __init__(self, net, lr=0.0):
        super().__init__()
        self.net, self.lr = net, lr

    def training_step(self, batch, batch_idx):
        out = self.net(batch)
        return (out if isinstance(out, torch.Tensor) else out[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@torch.no_grad()
def largest(net, batch):
    """The largest logit, of the queries and keys that the plain model hands to PyTorch."""
    found, real = [], F.scaled_dot_product_attention

    def look(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **given):
        logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * (scale or q.shape[-1] ** -0.5)
        if is_causal:
            logits = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -torch.inf)
        found.append(logits.amax().item())
        return real(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", look)
        net.eval()(batch)
    net.train()
    return max(found)


ACTING = {  # what acts on the queries of this batch, and the model with it
    "clamp": lambda: own("clamp", limit=50.0, size=40.0),  # and not on the trial of the declaration
    "olmo": lambda: hugging_face("olmo", 0.7),
    "dbrx": lambda: hugging_face("dbrx", 0.7),
    "conformer": lambda: conformer(1.0),
}
IDLE = {  # and what leaves them as they are, whatever it might do to others
    "clamp": lambda: own("clamp", limit=50.0),
    "bias": lambda: own("bias"),
    "olmo": lambda: hugging_face("olmo", 50.0),
    "dbrx": lambda: hugging_face("dbrx", 50.0),
    "conformer": lambda: conformer(0.0),
}
STRAIGHT = {"plain": lambda: own("plain"), "olmo": lambda: hugging_face("olmo", None)}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("case", ACTING)
def test_what_does_not_scale_with_the_weights_is_refused_by_name(case):
    net, batch = ACTING[case]()
    module, before = Trains(net, lr=0.1), weights_of(net)
    name = next(name for name, _ in module.named_modules() if name.endswith(("attn", "net.0")))
    with pytest.raises(ValueError, match=f"cannot clip '{name}'.*clip_qkv.*exclude="), pytest.warns(match=OURS):
        fit(module, [QKClip(tau=largest(net, batch) / 2)], in_turn(batch), max_steps=1)
    assert torch.equal(weights_of(net), before)


@pytest.mark.parametrize("case", [*IDLE, *(f"straight {each}" for each in STRAIGHT)])
def test_the_limit_holds_where_nothing_of_it_acts(case):
    net, batch = (IDLE | {f"straight {name}": build for name, build in STRAIGHT.items()})[case]()
    tau = largest(net, batch) / 2
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(Trains(net), [QKClip(tau)], in_turn(batch), max_steps=1)
    assert any(OURS in str(each.message) for each in told) is not case.startswith("straight")
    assert largest(net, batch) == pytest.approx(tau, rel=1e-5)


@pytest.mark.parametrize("case", ACTING)
def test_no_bit_changes_below_tau(case):
    seen = []
    for callbacks in ([], [QKClip(tau=1e9)]):
        torch.manual_seed(0)
        net, batch = ACTING[case]()
        net = nn.Sequential(nn.Dropout(0.2), net) if batch.is_floating_point() else net
        fit(Trains(net, lr=0.1), callbacks, in_turn(batch, batch.flip(0)), max_steps=2)
        seen.append((weights_of(net), torch.rand(1)))
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_a_later_bias_is_seen():
    """It is 0 when the fit begins, and there all the same."""
    net, batch = own("bias")

    class Grows(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            nn.init.constant_(net[0].bias_u, float(batch_idx))

    tau = largest(net, batch) / 2
    fit(Trains(net), [Grows(), QKClip(tau)], in_turn(batch), max_steps=1)
    assert largest(net, batch) == pytest.approx(tau, rel=1e-5)
    with pytest.raises(ValueError, match="add a bias"):
        fit(Trains(net), [Grows(), QKClip(tau / 2)], in_turn(batch / 4, batch), max_steps=2)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-true"])
@pytest.mark.parametrize("size", [1.0, 40.0, 400.0])
def test_a_later_bias_is_seen_in_half_precision(precision, size):
    net, batch = own("bias", size=size)
    kind = {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(precision, torch.float32)
    with pytest.warns(match=OURS):
        fit(Trains(net.to(kind)), [QKClip(1e9)], in_turn(batch.to(kind)), max_steps=1, precision=precision)


def test_a_trial_that_fails_once_lets_no_clamp_pass(monkeypatch):
    """As where memory runs out: in the second batch."""
    net, batch = own("clamp", limit=50.0, size=40.0)
    changed, callback, fails = Clamping.changed, QKClip(1e9), []

    def may_fail(layer, q):
        if not layer.training and fails:
            raise fails.pop()
        return changed(layer, q)

    class Lowers(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            callback.tau = 1.0 if batch_idx else 1e9
            fails.extend([RuntimeError("out of memory")] * batch_idx)

    monkeypatch.setattr(Clamping, "changed", may_fail)
    with pytest.raises(ValueError, match="cannot clip"):
        fit(Trains(net), [Lowers(), callback], in_turn(batch, batch), max_steps=2)
    assert not fails


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("case", ["clamp", "plain"])
def test_in_half_precision(case, precision):
    net, batch = own(case, limit=50.0, size=40.0)
    before, tau = largest(net, batch), largest(net, batch) / 2
    if precision == "bf16-true":
        net, batch = net.bfloat16(), batch.bfloat16()
    kept = weights_of(net)
    if case == "clamp":
        with pytest.raises(ValueError, match="cannot clip"):
            fit(Trains(net, lr=0.1), [QKClip(tau)], in_turn(batch), max_steps=1, precision=precision)
        assert torch.equal(weights_of(net), kept)
    else:
        fit(Trains(net), [QKClip(tau)], in_turn(batch), max_steps=1, precision=precision)
        assert largest(net.float(), batch.float()) / before == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
def test_queries_that_were_half_precision_before_they_were_turned(precision):
    """Llama's rotary positions make them float32 under autocast, with the digits that they had."""
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    sizes = {"hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8}
    net = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=64, **sizes))
    optimizer, logged = torch.optim.SGD(net.parameters(), 0.0), {}
    with (
        warnings.catch_warnings(),
        attnswap.watch(net, callbacks=[QKClip(1e-3)], optimizer=optimizer, log=lambda now, step: logged.update(now)),
    ):
        warnings.filterwarnings("error", message=f".*{OURS}")
        with torch.autocast("cpu", precision):
            loss = net(torch.randint(64, (2, 64)), use_cache=False).last_hidden_state.square().mean()
        loss.backward()
        optimizer.step()
    assert logged["qk_clip/clipped_heads"] == 8


class Hooked(Changing):
    """Its queries take a hook, which only what has a gradient takes; a call on trial has none."""

    def changed(self, q):
        q.register_hook(lambda gradient: gradient.clamp(-1.0, 1.0))
        return q


class Gated(Changing):
    """Has a Parameter of no dimension."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(1.0))


@pytest.mark.parametrize(("kind", "said"), [(Hooked, "cannot be called on trial .RuntimeError"), (Gated, "")])
def test_what_a_trial_cannot_say_refuses_nothing(kind, said):
    declare_host(kind, qkv="qkv", heads=HEADS)
    net, batch = nn.Sequential(kind()), torch.randn(4, TOKENS, WIDTH)
    tau = largest_of(net, batch) / 2
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(Trains(net), [QKClip(tau)], in_turn(batch), max_steps=1)
    of_trials = " ".join(str(each.message) for each in told if "QKClip" in str(each.message))
    assert re.search(said, of_trials) if said else not of_trials
    assert largest_of(net, batch) == pytest.approx(tau, rel=1e-5)


def largest_of(net, batch):
    """By hand, as the plain model of a call without gradients is an error."""
    q, k = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in net[0].qkv(batch).chunk(3, -1)[:2])
    logits = q @ k.mT * q.shape[-1] ** -0.5
    return logits.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf).amax().item()


class Twice(nn.Module):
    """Calls a layer twice, and only the second call is large enough for its clamp."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        limit, self.layer.limit = self.layer.limit, torch.inf
        x = self.layer(x)
        self.layer.limit = limit
        return self.layer(x)


def test_a_clamp_of_a_second_call_is_found():
    layer, batch = own("clamp", limit=50.0, size=40.0)
    with pytest.raises(ValueError, match="cannot clip"), pytest.warns(match=OURS):
        fit(Trains(Twice(layer[0])), [QKClip(0.1)], in_turn(batch), max_steps=1)


@pytest.mark.parametrize("case", ["plain", "clamp"])
def test_a_call_of_zeros_says_nothing_yet(case):
    net, batch = own(case, limit=50.0, size=40.0)
    net[0].qkv.bias = None
    nothing = torch.zeros_like(batch)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{OURS}")
        fit(Trains(net), [QKClip(0.1)], in_turn(nothing), max_steps=1)
    refused = pytest.raises(ValueError, match="cannot clip") if case == "clamp" else nullcontext()
    with refused:
        fit(Trains(net), [QKClip(0.1)], in_turn(nothing, batch), max_steps=2)


class Marks(Changing):
    """Adds to the queries of the first token alone, or to one feature."""

    def changed(self, q):
        return torch.cat([q[..., :1, :] + self.bias_u, q[..., 1:, :]], -2)


class MarksFeature(Changing):
    def changed(self, q):
        return torch.cat([q[..., :1] + self.bias_u[0], q[..., 1:]], -1)


@pytest.mark.parametrize("kind", [Marks, MarksFeature])
@pytest.mark.parametrize("precision", ["32-true", "16-true", "bf16-true"])
def test_what_is_added_to_one_token_or_feature_is_found(kind, precision):
    declare_host(kind, qkv="qkv", heads=HEADS)
    dtype = {"16-true": torch.float16, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
    net, batch = nn.Sequential(kind()).to(dtype), torch.randn(1, 1500, WIDTH, dtype=dtype)
    with pytest.warns(match=OURS):
        fit(Trains(net), [QKClip(1e9)], in_turn(batch), max_steps=1, precision=precision)


@pytest.mark.parametrize("layers", [None, [0], [1]])
@pytest.mark.parametrize("mechanism", ["value_residual", "neutreno", "sink"])
def test_a_trial_leaves_what_layers_share(mechanism, layers):
    """The witness: the same fit without the callback."""
    found = []
    for callbacks in ([], [QKClip(1e6, layers=layers)]):
        module = TinyLM()
        torch.manual_seed(0)
        swap_attention(module, mechanism)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*cannot be called on trial")
            fit(module, callbacks, max_epochs=2)
        found.append(weights_of(module))
    assert torch.equal(*found)
