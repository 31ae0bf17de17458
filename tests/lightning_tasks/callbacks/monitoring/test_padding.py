"""What no row may see is no token: a padded sequence logs, and learns, what it does alone."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from attention_modules import SelfAttention, swap_attention
from attention_modules.analysis import local_lipschitz, token_similarity
from lightning_tasks.callbacks import (
    AttentionDiversification,
    AttentionMonitor,
    EntropyRegularizer,
    KernelPCAMonitor,
    LipschitzMonitor,
    LogitMonitor,
    PursuitMonitor,
    QKClip,
    SpectrumMonitor,
    SwapAttention,
)
from lightning_tasks.callbacks.attention_monitor import OBSERVABLES
from lightning_tasks.callbacks.monitoring.warnings import FEWEST_KEYS
from tests.attention_modules.hosts.model.test_seen import PadsInside
from tests.lightning_tasks.callbacks.modules import fit, weights_of

LENGTH, PADDING, VOCABULARY, WIDTH = 20, 44, 50, 16
SEQUENCES = torch.randint(1, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
# How many tokens of each sample stand before its padding.
PLACES = {"behind": (LENGTH, LENGTH), "before": (0, 0), "between": (7, 7), "of two kinds": (0, LENGTH)}


class Encoder(nn.Module):
    """PyTorch's own."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids, attention_mask, position_ids):
        x = self.tokens(input_ids) + self.positions(position_ids)
        return (self.encoder(x, src_key_padding_mask=attention_mask == 0),)


def of_transformers(kind):
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128, use_cache=False
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return getattr(transformers, f"{kind}Model")(config)


HOSTS = {"torch": Encoder, "bert": lambda: of_transformers("Bert"), "llama": lambda: of_transformers("Llama")}


class Reads(pl.LightningModule):
    """Learns from the tokens that are there."""

    def __init__(self, host):
        super().__init__()
        torch.manual_seed(0)
        self.model = HOSTS[host]()
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def training_step(self, batch, batch_idx):
        tokens, mask = batch
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        out = self.model(input_ids=tokens, attention_mask=mask, position_ids=positions)[0]
        return out[mask.bool()].sin().square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def padded(place, seed, length=LENGTH):
    """The sequences with padding, of numbers drawn by a seed, and their mask; alone where the place is None."""
    sequences = SEQUENCES[:, :length]
    if place is None:
        return sequences, torch.ones_like(sequences)
    other = torch.randint(1, VOCABULARY, (2, PADDING), generator=torch.Generator().manual_seed(seed))
    rows, masks = [], []
    for sequence, padding, at in zip(sequences, other, PLACES[place], strict=True):
        parts = [sequence[:at], padding, sequence[at:]]
        rows.append(torch.cat(parts))
        masks.append(torch.cat([torch.full_like(part, part is not padding) for part in parts]))
    return torch.stack(rows), torch.stack(masks)


def seen(host, callbacks, *given):
    """What a step of training and a validation log, and the weights behind them."""
    loader = DataLoader(TensorDataset(*padded(*given)), batch_size=2)
    module = Reads(host)
    logged = fit(module, callbacks(), loader, loader).callback_metrics
    return {name: float(value) for name, value in logged.items()}, weights_of(module)


def watched(*mechanism):
    lipschitz = LipschitzMonitor(max_tokens=LENGTH // 2, tol=1e-4, max_iter=60)
    return [SwapAttention(*mechanism), AttentionMonitor(1, OBSERVABLES), lipschitz]


def softmax():
    whole = KernelPCAMonitor(), LogitMonitor(1, heads=True), SpectrumMonitor(1)
    return [*watched("softmax"), *whole, QKClip(0.5), EntropyRegularizer(1.0, target=0.1), AttentionDiversification()]


def symmetric():
    return [*watched("symmetric"), KernelPCAMonitor(), EntropyRegularizer(1.0, target=0.1, max_rows=None)]


def rpc():
    return [*watched("rpc", {"iterations": 3, "lam": 1.0}), PursuitMonitor(), EntropyRegularizer(1.0, max_rows=1)]


def plain():
    return [LipschitzMonitor(max_tokens=None, tol=1e-4, max_iter=60)]


CASES = [plain, softmax, symmetric, rpc, lambda: watched("sigmoid"), lambda: watched("twicing")]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("callbacks", CASES, ids=["plain", "softmax", "symmetric", "rpc", "sigmoid", "twicing"])
def test_a_padded_sequence_is_that_sequence(host, callbacks, subtests):
    alone, weights = seen(host, callbacks, None, 0)
    assert len(alone) > 2
    assert all(value == value for value in alone.values())
    for place, seed in (*((place, 2) for place in PLACES), ("behind", 3)):
        with subtests.test(place=place, seed=seed):
            found, learned = seen(host, callbacks, place, seed)
            assert found == pytest.approx(alone, rel=1e-3, abs=1e-4)
            torch.testing.assert_close(learned, weights, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("host", HOSTS)
def test_a_short_sequence_has_no_sink_however_long_its_padding(host, recwarn):
    found, _ = seen(host, lambda: [AttentionMonitor(1, OBSERVABLES)], "behind", 2, FEWEST_KEYS - 1)
    assert not any("attention sink" in str(warning.message) for warning in recwarn)
    assert {name for name, value in found.items() if value != value} == {name for name in found if "sink" in name}


def estimated(module, tokens, mask, **options):
    monitor = LipschitzMonitor(tol=1e-4, max_iter=60, **options)
    run = pl.Trainer(accelerator="cpu", logger=False, callbacks=[monitor], enable_progress_bar=False)
    run.validate(module, DataLoader(TensorDataset(tokens, mask), batch_size=len(tokens)), verbose=False)
    return [float(run.callback_metrics[f"val/lipschitz/layer_0{layer}"]) for layer in (0, 1)]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("max_tokens", [8, None])
def test_samples_of_different_lengths_count_once_each_and_padding_alone_is_none(host, max_tokens):
    tokens = torch.cat([SEQUENCES, SEQUENCES[:1]])
    mask = torch.ones_like(tokens)
    mask[0, 12:], mask[1, :5], mask[2] = 0, 0, 0
    found = estimated(Reads(host), tokens, mask, max_tokens=max_tokens)
    parts = tokens[:1, :12], tokens[1:2, 5:]
    alone = [estimated(Reads(host), part, torch.ones_like(part), max_tokens=max_tokens) for part in parts]
    assert found == pytest.approx(torch.tensor(alone).mean(0).tolist(), rel=1e-3)


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_layers_that_softmax_does_not_take_are_measured_beside_others(option):
    module = Reads("torch")
    layers = module.model.encoder.layers
    layers[1].self_attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True, **{option: True})
    mask = torch.ones_like(SEQUENCES)
    mask[:, 12:] = 0
    first, second = estimated(module, SEQUENCES, mask)
    alone, _ = estimated(module, SEQUENCES[:, :12], mask[:, :12])
    assert first == pytest.approx(alone, rel=1e-3)
    assert second > 0


def test_a_sample_of_padding_alone_pursues_nothing():
    mask = torch.ones_like(SEQUENCES)
    tokens = torch.cat([SEQUENCES, SEQUENCES[:1]])
    found = []
    for given in ((SEQUENCES, mask), (tokens, torch.cat([mask, torch.zeros_like(mask[:1])]))):
        module = Reads("torch")
        swap_attention(module, "rpc", iterations=2)
        loader = DataLoader(TensorDataset(*given), batch_size=3)
        logged = fit(module, [PursuitMonitor()], loader, loader).callback_metrics
        found.append({name: float(value) for name, value in logged.items() if "pursuit" in name})
    assert len(found[0]) > 4
    assert found[1] == pytest.approx(found[0], rel=1e-5)


class ByColumn(nn.Module):
    """Its logits depend on columns, of which it takes any number."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.qkv = 4, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x, attn_mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        places = torch.linspace(0.5, 2, 64)[: x.shape[1], None]
        out = nn.functional.scaled_dot_product_attention(q * places, k * places, v, attn_mask=attn_mask)
        return out.transpose(1, 2).flatten(2)


class Columns(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = ByColumn()
        self.x = torch.randn(2, 64, WIDTH)

    def validation_step(self, batch, batch_idx):
        self.layer(self.x, attn_mask=batch[1][:, None, None].bool())


def test_where_a_cut_would_move_tokens_to_other_columns_all_that_are_seen_are_looked_at():
    module, (_, mask) = Columns(), padded("before", 2)
    monitor = LipschitzMonitor(max_tokens=10, tol=1e-4, max_iter=60)
    run = pl.Trainer(accelerator="cpu", logger=False, callbacks=[monitor], enable_progress_bar=False)
    with pytest.warns(UserWarning, match=r"'layer' \(64 tokens\): works only with as many tokens"):
        run.validate(module, DataLoader(TensorDataset(mask, mask), batch_size=2), verbose=False)
    hidden, sequences = module.x[:, :PADDING], module.x[:, PADDING:]
    whole = local_lipschitz(
        lambda x: module.layer(torch.cat([hidden, x], 1), mask[:, None, None].bool())[:, PADDING:], sequences, tol=1e-4
    )
    torch.testing.assert_close(run.callback_metrics["val/lipschitz/layer_00"], whole.value.mean(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("host", HOSTS)
def test_watching_plain_layers_on_padding_changes_no_bit(host):
    (watched, weights), (bare, expected) = (seen(host, of, "before", 2) for of in (plain, list))
    assert torch.equal(weights, expected)
    assert watched["val/loss"] == bare["val/loss"]


class Inside(pl.LightningModule):
    """One layer that pads inside."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = PadsInside()
        self.x = torch.randn(2, 6, WIDTH)

    def validation_step(self, lengths, batch_idx):
        self.layer(self.x, torch.arange(6) < lengths[:, None])


@pytest.mark.parametrize("lengths", [[3, 6], [6, 6]])
def test_samples_whose_padding_has_no_known_place_are_left_out_or_told_of(lengths, recwarn):
    monitors = [AttentionMonitor(1, ["token_similarity", "entropy"]), LipschitzMonitor(max_tokens=None)]
    run = pl.Trainer(accelerator="cpu", logger=False, callbacks=monitors, enable_progress_bar=False)
    module = Inside()
    run.validate(module, DataLoader(torch.tensor(lengths), batch_size=2), verbose=False)
    whole = module.x if lengths[0] == 6 else module.x[1:]
    found = float(run.callback_metrics["val/attention/token_similarity/layer_00"])
    assert found == pytest.approx(token_similarity(whole).mean().item(), rel=1e-4)
    told = [str(one.message) for one in recwarn if "padding counts" in str(one.message)]
    assert len(told) == (lengths[0] != 6)


class Rows(pl.LightningModule):
    """One layer with a mask of rows, in which padding sees itself alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = SelfAttention(WIDTH, 4)
        self.x = torch.randn(2, 6, WIDTH)

    def validation_step(self, lengths, batch_idx):
        seen = torch.arange(int(lengths.max())) < lengths[:, None]
        mask = (seen[:, None] & seen[:, :, None]) | torch.eye(seen.shape[1], dtype=torch.bool)
        self.layer(self.x[-len(lengths) :, : seen.shape[1]], attn_mask=mask[:, None])


def test_padding_that_sees_itself_alone_does_not_count():
    found = []
    for lengths in ([3, 6], [3], [6]):
        module = Rows()
        module.x = module.x[:1] if lengths == [3] else module.x
        monitors = [AttentionMonitor(1, ["entropy", "token_similarity"])]
        run = pl.Trainer(accelerator="cpu", logger=False, callbacks=monitors, enable_progress_bar=False)
        run.validate(module, DataLoader(torch.tensor(lengths), batch_size=2), verbose=False)
        found.append({name: float(value) for name, value in run.callback_metrics.items() if "layer_00" in name})
    both, short, long = found
    entropy, similarity = (f"val/attention/{name}/layer_00" for name in ("entropy", "token_similarity"))
    assert both[entropy] == pytest.approx((3 * short[entropy] + 6 * long[entropy]) / 9, rel=1e-4)
    assert both[similarity] == pytest.approx((short[similarity] + long[similarity]) / 2, rel=1e-4)
