"""Attention statistics in the logs, of plain and swapped layers."""

import re

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from attention_modules import SelfAttention
from attention_modules.analysis import STATISTICS, attention_statistics, sink_features, token_similarity
from attention_modules.analysis.acting import acting_sums
from attention_modules.mechanism import AttentionMechanism
from attention_modules.swap import swap_attention
from attnswap import attention_maps
from lightning_tasks.callbacks import AttentionMapLogger, AttentionMonitor, SwapAttention
from lightning_tasks.callbacks.attention_monitor import OBSERVABLES
from tests.lightning_tasks.callbacks import modules
from tests.lightning_tasks.callbacks.modules import (
    DIM,
    HEADS,
    PROMPTS,
    BuildsInConfigureModel,
    BuildsInSetup,
    Generates,
    InTwoCalls,
    TinyLM,
    batches,
    decoder,
    fit,
    shown,
    weights_of,
)
from tests.lightning_tasks.callbacks.monitoring.test_spectrum_monitor import logged
from tests.rows import each_row


def first_layer_statistics(module, tokens):
    """Of the first layer of an untrained module, from its own weights."""
    with torch.no_grad():
        x = module.net["embed"](tokens)
        attention = module.net["encoder"].layers[0].self_attn
        q, k, _ = torch.nn.functional.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
        q, k = (part.unflatten(-1, (HEADS, DIM // HEADS)).transpose(1, 2) for part in (q, k))
        return {name: value.mean().item() for name, value in attention_statistics(q, k, is_causal=True).items()}


@pytest.mark.parametrize("kind", [TinyLM, BuildsInSetup, BuildsInConfigureModel])
def test_observes_plain_attention(kind, tmp_path):
    expected = first_layer_statistics(TinyLM(), next(iter(batches()))[0])
    logger = CSVLogger(tmp_path)
    fit(kind(), [AttentionMonitor(every_n_steps=2)], logger=logger, log_every_n_steps=1000)
    for name in STATISTICS:
        steps = logged(logger, f"attention/{name}/layer_00")
        assert list(steps) == [0, 2, 4]
        assert steps[0] == pytest.approx(expected[name], rel=1e-4)
        both = [logged(logger, f"attention/{name}/layer_0{index}")[2] for index in range(2)]
        assert logged(logger, f"attention/{name}/mean")[2] == pytest.approx(sum(both) / 2, rel=1e-5)


def test_validation_is_averaged_over_all_batches():
    module = TinyLM(lr=0.0)
    loader = batches(3)
    per_batch = [first_layer_statistics(module, tokens) for tokens, _ in loader]
    trainer = fit(module, [AttentionMonitor(stages=["validation"])], val_loader=loader)
    for name in STATISTICS:
        expected = sum(batch[name] for batch in per_batch) / 3
        assert trainer.callback_metrics[f"val/attention/{name}/layer_00"].item() == pytest.approx(expected, rel=1e-4)
    assert not any(name.startswith("attention/") for name in trainer.callback_metrics)


def test_the_mean_counts_rows_in_training_and_evaluation(tmp_path):
    """The second layer sees only the first tokens, of each batch another number of them."""

    class Shortens(TinyLM):
        def forward(self, tokens):
            first, second = self.net["encoder"].layers
            x = self.net["embed"](tokens)
            x = second(first(x)[:, : 1 + int(tokens.sum()) % 5])
            return self.net["head"](x.mean(1, keepdim=True)).expand(-1, tokens.shape[1], -1)

    kept = [1 + int(tokens.sum()) % 5 for tokens, _ in batches(3)]
    assert len(set(kept)) > 1
    logger = CSVLogger(tmp_path)
    trainer = fit(
        Shortens(lr=0.0), [AttentionMonitor(every_n_steps=1)], batches(3), batches(3), logger=logger, max_epochs=1
    )
    layers = [logged(logger, f"attention/entropy/layer_0{index}") for index in range(2)]
    mean = logged(logger, "attention/entropy/mean")
    for step, rows in enumerate(kept):  # of 6 rows in the first layer
        by_rows = (6 * layers[0][step] + rows * layers[1][step]) / (6 + rows)
        assert mean[step] == pytest.approx(by_rows, rel=1e-5)
    whole = [trainer.callback_metrics[f"val/attention/entropy/{label}"].item() for label in ("layer_00", "layer_01")]
    by_rows = (6 * 3 * whole[0] + sum(kept) * whole[1]) / (6 * 3 + sum(kept))
    assert trainer.callback_metrics["val/attention/entropy/mean"].item() == pytest.approx(by_rows, rel=1e-5)
    assert by_rows != pytest.approx(sum(whole) / 2, rel=1e-2)


def test_test_stage_has_its_own_names():
    trainer = fit(TinyLM(), [AttentionMonitor(stages=["test"])], val_loader=batches(1))
    assert not any("attention" in name for name in trainer.callback_metrics)
    trainer.test(trainer.lightning_module, batches(1), verbose=False)
    assert "test/attention/entropy/mean" in trainer.callback_metrics


@pytest.mark.parametrize("mechanism", ["softmax", "symmetric", "rpc", "scaled"])
def test_observes_every_mechanism(mechanism):
    options = {"scaled": {"variant": "scalar"}}.get(mechanism, {})
    callbacks = [SwapAttention(mechanism, options), AttentionMonitor(every_n_steps=1)]
    trainer = fit(TinyLM(), callbacks, max_steps=1)
    assert 0 < trainer.callback_metrics["attention/entropy/mean"] < torch.tensor(modules.TOKENS).log()


def test_training_is_untouched():
    watched, plain = TinyLM(), TinyLM()
    fit(watched, [SwapAttention("softmax"), AttentionMonitor(every_n_steps=1)])
    fit(plain, [SwapAttention("softmax")])
    assert torch.equal(weights_of(watched), weights_of(plain))


def test_nothing_is_hooked_between_firings():
    hooks = []

    class Records(TinyLM):
        def training_step(self, batch, batch_idx):
            found = [module for module in self.modules() if isinstance(module, AttentionMechanism)]
            hooks.append([len(module._forward_pre_hooks) for module in found])
            return super().training_step(batch, batch_idx)

    fit(Records(), [AttentionMonitor(every_n_steps=2)])
    assert hooks == [[1, 1], [0, 0], [1, 1], [0, 0], [1, 1]]


def test_a_skipped_batch_leaves_no_hook():
    class SkipsEpochs(TinyLM):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if self.current_epoch == 0 else None

    module = SkipsEpochs()
    swap_attention(module, "softmax")  # or its mechanisms would be gone with their hooks
    fit(module, [AttentionMonitor(every_n_steps=1)], max_epochs=2)
    found = [part for part in module.modules() if isinstance(part, AttentionMechanism)]
    assert found
    assert not any(part._forward_pre_hooks for part in found)


def test_hooks_are_gone_after_an_error():
    class Breaks(TinyLM):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("broken")

    module = Breaks()
    swap_attention(module, "softmax")
    with pytest.raises(RuntimeError, match="broken"):
        fit(module, [AttentionMonitor()])
    found = [part for part in module.modules() if isinstance(part, AttentionMechanism)]
    assert found
    assert not any(part._forward_pre_hooks for part in found)
    assert "configure_model" not in vars(module)


def count_observations(monkeypatch):
    calls = []
    target = "lightning_tasks.callbacks.attention_monitor.acting_sums"

    def counting(*args, **kwargs):
        calls.append(args)
        return acting_sums(*args, **kwargs)

    monkeypatch.setattr(target, counting)
    return calls


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_does_not_count_twice(use_reentrant, monkeypatch):
    class Checkpointed(TinyLM):
        def forward(self, tokens):
            x = self.net["embed"](tokens)
            mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
            for layer in self.net["encoder"].layers:
                x = checkpoint(layer, x, mask, use_reentrant=use_reentrant)
            return self.net["head"](x)

    calls = count_observations(monkeypatch)
    fit(Checkpointed(), [AttentionMonitor(every_n_steps=1)], max_steps=1)
    assert len(calls) == 2


def test_under_torch_compile(monkeypatch):
    """The compiled steps go on uncompiled while observed, and are not compiled anew after."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    calls = count_observations(monkeypatch)
    torch._dynamo.reset()  # what other tests compiled would be found again
    module = torch.compile(TinyLM(), backend=backend)
    fit(module, [AttentionMonitor(every_n_steps=2)], batches(5))
    assert len(calls) == 3 * 2
    graphs = len(compiled)
    assert graphs > 0
    compiled.clear()
    torch._dynamo.reset()
    fit(torch.compile(TinyLM(), backend=backend), [SwapAttention("softmax")], batches(5))
    assert graphs == len(compiled)


def test_bf16_mixed():
    trainer = fit(TinyLM(), [AttentionMonitor(every_n_steps=1)], precision="bf16-mixed", max_steps=1)
    assert trainer.callback_metrics["attention/entropy/mean"].dtype == torch.float32


@each_row(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, "at least 1, got 0"),
        ({"every_n_steps": "2"}, "every_n_steps must be .* got '2'"),
        ({"statistics": ["entropie"]}, "entropie"),
        ({"stages": ["predict"]}, "predict"),
        ({"stages": []}, "stages"),
        ({"statistics": "entropy"}, "must be a list"),
        ({"statistics": 2}, "must be a list of some of entropy.* got 2"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionMonitor(**options)


def test_nothing_matched_is_an_error():
    with pytest.raises(ValueError, match="blocks"):
        fit(TinyLM(), [AttentionMonitor(where="blocks.*")])


def test_batches_without_a_row_to_average_do_not_count():
    # Rows of the only token see one key, so normalized entropy is not defined in the second batch.
    tokens = next(iter(batches()))
    validated = [tokens, [part[:, :1] for part in tokens]]
    both, first = (
        fit(
            TinyLM(lr=0.0),
            [AttentionMonitor(stages=["validation"])],
            val_loader=DataLoader(validated[:count], batch_size=None),
        ).callback_metrics
        for count in (2, 1)
    )
    name = "val/attention/normalised_entropy/mean"
    assert both[name].item() == pytest.approx(first[name].item(), rel=1e-6)
    assert both["val/attention/entropy/mean"] < first["val/attention/entropy/mean"]


def test_an_empty_batch_does_not_count():
    whole = next(iter(batches()))
    both, alone = (
        fit(
            TinyLM(lr=0.0),
            [AttentionMonitor(stages=["validation"])],
            val_loader=DataLoader(validated, batch_size=None),
        ).callback_metrics
        for validated in ([[part[:0] for part in whole], whole], [whole])
    )
    names = [name for name in alone if "attention" in name]
    assert names
    assert {name: both[name].item() for name in names} == {name: alone[name].item() for name in names}


class LeftPadded(TinyLM):
    """A batch's second part says how many tokens at the left of each sample are padding."""

    def training_step(self, batch, batch_idx):
        tokens, padding = batch
        hidden = torch.arange(tokens.shape[1]) < padding[:, None]
        past = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        x = self.net["encoder"](self.net["embed"](tokens), mask=past, src_key_padding_mask=hidden)
        return x[~hidden].square().mean()


def test_every_row_counts_once_whatever_the_padding():
    tokens = batches(1, batch_size=4).dataset.tensors[0]
    padding = torch.tensor([0, 5, 4, 3])
    loader = DataLoader([(tokens[:2], padding[:2]), (tokens[2:], padding[2:])], batch_size=None)
    alone = [first_layer_statistics(TinyLM(), one[None, pad:]) for one, pad in zip(tokens, padding, strict=True)]
    rows = (modules.TOKENS - padding).tolist()
    metrics = fit(LeftPadded(lr=0.0), [AttentionMonitor(every_n_steps=9)], loader, loader).callback_metrics

    def mean(name, samples):
        counts = [rows[index] - (name == "normalised_entropy") for index in samples]  # there, of the rows that see two
        known = [alone[index][name] * count for index, count in zip(samples, counts, strict=True) if count]
        return pytest.approx(sum(known) / sum(counts), rel=1e-4)

    for name in STATISTICS:
        assert metrics[f"attention/{name}/layer_00"].item() == mean(name, [0, 1])
        assert metrics[f"val/attention/{name}/layer_00"].item() == mean(name, [0, 1, 2, 3])


class Padded(LeftPadded):
    """The same without causality, where rows of padding see the other tokens."""

    def training_step(self, batch, batch_idx):
        tokens, padding = batch
        hidden = torch.arange(tokens.shape[1]) < padding[:, None]
        return self.net["encoder"](self.net["embed"](tokens), src_key_padding_mask=hidden)[~hidden].square().mean()


@pytest.mark.parametrize("mechanism", [None, "sigmoid"])
def test_rows_of_padding_do_not_count(mechanism):
    tokens, padding, found = batches(1, batch_size=2).dataset.tensors[0], torch.tensor([2, 3]), []
    alone = [(one[None, pad:], pad[None] * 0) for one, pad in zip(tokens, padding, strict=True)]
    for given in ([(tokens, padding)], alone):
        module = Padded(lr=0.0)
        if mechanism is not None:
            swap_attention(module, mechanism)
        metrics = fit(
            module, [AttentionMonitor()], DataLoader(given, batch_size=None), DataLoader(given, batch_size=None)
        )
        found.append({name: float(each) for name, each in metrics.callback_metrics.items() if "val/attention" in name})
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert len(found[0]) > 10


class Reads(TinyLM):
    """Attends to as many other tokens, of which some are padding, in a layer whose name says nothing of it."""

    def __init__(self):
        super().__init__(lr=0.0)
        self.attn = nn.MultiheadAttention(modules.DIM, 2, batch_first=True)

    others = staticmethod(lambda x: x.flip(1).contiguous())

    def training_step(self, batch, batch_idx):
        x, hidden = self.net["embed"](batch[0]), torch.zeros(batch[0].shape, dtype=torch.bool)
        hidden[:, 3:] = True
        return self.attn(x, self.others(x), self.others(x), key_padding_mask=hidden)[0].sum()


def test_equal_tokens_are_the_same_whatever_holds_them(monkeypatch):
    found = []
    for copied in (lambda x: x, torch.clone):
        monkeypatch.setattr(Reads, "others", staticmethod(copied))
        torch.manual_seed(0)
        found.append(fit(Reads(), [AttentionMonitor(where="attn")], batches(1), batches(1)).callback_metrics)
    shown = [name for name in found[0] if name.startswith("val/attention")]
    assert len(shown) > 5
    assert [found[1][name] for name in shown] == [pytest.approx(float(found[0][name])) for name in shown]


def test_every_row_counts_of_attention_to_other_tokens():
    module, rows = Reads(), []
    swap_attention(module, "softmax", where="attn")
    module.attn.mechanism.register_forward_hook(
        lambda mechanism, args, kwargs, out: rows.append(
            attention_statistics(*args[:2], attn_mask=kwargs["attn_mask"])["entropy"].mean()
        ),
        with_kwargs=True,
    )
    found = fit(module, [AttentionMonitor(where="attn")], batches(1), batches(1)).callback_metrics
    assert found["val/attention/entropy/mean"] == pytest.approx(rows[-1].item(), rel=1e-5)


def test_token_similarity_is_that_of_the_layers_input_without_padding():
    tokens = batches(1, batch_size=2).dataset.tensors[0]
    padding = torch.tensor([0, 3])
    loader = DataLoader([(tokens, padding)], batch_size=None)
    metrics = fit(LeftPadded(lr=0.0), [AttentionMonitor(every_n_steps=9)], loader, loader).callback_metrics
    embed = TinyLM().net["embed"]
    alone = [token_similarity(embed(one[None, pad:])).item() for one, pad in zip(tokens, padding, strict=True)]
    for prefix in ("", "val/"):
        found = metrics[f"{prefix}attention/token_similarity/layer_00"].item()
        assert found == pytest.approx(sum(alone) / 2, rel=1e-4)


class Long(TinyLM):
    """Twenty tokens, so that sinks are looked for, and first weights that `spoil` changes."""

    def __init__(self, spoil=None):
        super().__init__(lr=0.0)
        attention = self.net["encoder"].layers[0].self_attn
        with torch.no_grad():
            if spoil == "entropy":  # all rows, in both heads, attend to the largest token
                first = torch.arange(1, 1 + modules.VOCABULARY).float()[:, None]
                self.net["embed"].weight[:, [0, DIM // HEADS]] = first
                attention.in_proj_weight.copy_(100 * torch.eye(DIM).repeat(3, 1))
            if spoil == "tokens":
                self.net["embed"].weight.copy_(torch.ones_like(self.net["embed"].weight))
            if spoil == "sink":  # all rows attend to the word that only the first place holds
                self.net["embed"].weight[:, 0] = 1.0
                self.net["embed"].weight[:, 1] = 0.0
                self.net["embed"].weight[0, 1] = 1.0
                attention.in_proj_weight.zero_()
                attention.in_proj_weight[[0, DIM // HEADS], 0] = 3.0
                attention.in_proj_weight[[DIM, DIM + DIM // HEADS], 1] = 3.0
                attention.in_proj_bias.zero_()

    def forward(self, tokens):
        return self.net["head"](self.net["encoder"](self.net["embed"](tokens)))


def collapse_warnings(recwarn):
    return [str(one.message) for one in recwarn if "said once" in str(one.message)]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (None, None),
        ("tokens", "rank collapse: .* token_similarity above 0.98 in net.encoder.layers.0.self_attn \\(1\\)"),
        ("sink", "attention sink: .* sink above 0.3 in net.encoder.layers.0.self_attn"),
        ("entropy", "entropy collapse: .* normalised_entropy below 0.02 in net.encoder.layers.0.self_attn"),
    ],
)
def test_collapse_is_warned_of_once_in_words(spoil, words, recwarn):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, modules.VOCABULARY, (6, 20), generator=generator)
    if spoil == "entropy":
        tokens = torch.full((6, 20), 1)
        tokens[:, 3] = 12  # the largest product with every query
    tokens[:, 0] = 0
    loader = DataLoader([(tokens[:2], tokens[:2]), (tokens[2:], tokens[2:])], batch_size=None)
    monitor = AttentionMonitor(every_n_steps=1, layers=[0], statistics=["effective_support"])
    metrics = fit(Long(spoil), [monitor], loader, loader, max_epochs=2, max_steps=-1).callback_metrics
    logged = {name.removeprefix("val/").split("/")[1] for name in metrics if "attention" in name}
    assert logged == {"effective_support"}  # what warnings need is not logged with it
    said = collapse_warnings(recwarn)
    assert len(said) == (words is not None) + (spoil == "entropy"), said  # a collapsed row is a sink here, too
    if words is not None:
        assert any(re.search(words, one) for one in said), said


def test_alike_tokens_of_an_untrained_model_are_no_rank_collapse(recwarn):
    tokens = torch.randint(1, modules.VOCABULARY, (4, 20), generator=torch.Generator().manual_seed(0))
    loader = DataLoader([(tokens, tokens)], batch_size=None)

    def said():
        return [str(one.message) for one in recwarn if "rank collapse" in str(one.message)]

    trainer = fit(Long("tokens"), [AttentionMonitor(every_n_steps=1, stages=["train"])], loader, max_steps=1)
    assert trainer.callback_metrics["attention/token_similarity/layer_00"] > 0.98
    assert not said()
    fit(Long("tokens"), [AttentionMonitor(every_n_steps=1, stages=["train"])], loader, max_epochs=2)
    assert len(said()) == 1
    assert "training step 1" in said()[0]
    trainer.validate(Long("tokens"), loader, verbose=False)  # by itself it may well be a trained model
    fit(Long("tokens"), [], loader, max_steps=1)
    pretrained = AttentionMonitor()
    fit(Long("tokens"), [pretrained], loader, max_steps=1).validate(Long("tokens"), loader, verbose=False)
    assert len(said()) == 2


@pytest.mark.parametrize("statistics", [["entropy"], OBSERVABLES])
def test_a_training_step_brings_numbers_over_once(statistics, monkeypatch):
    counts, calls = [], []
    bring = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda values: calls.append(values.shape) or bring(values))

    class Counting(AttentionMonitor):
        def on_train_batch_end(self, *args):
            before = len(calls)
            super().on_train_batch_end(*args)
            counts.append(len(calls) - before)

    fit(TinyLM(), [Counting(every_n_steps=1, statistics=statistics)], batches(2))
    assert counts == [1, 1]


class Outlier(pl.LightningModule):
    """A layer to whose 20 tokens one is added that all attend to, three times as long and all in one coordinate."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = SelfAttention(8, 2, qkv_bias=True)
        self.x = torch.nn.functional.normalize(torch.randn(4, 21, 8), dim=-1)
        self.x[:, 5] = torch.tensor([3.0, *[0.0] * 7])
        self.layer.qkv.weight.data[:16] = 0.0
        self.layer.qkv.bias.data[:8] = 5.0  # all queries are alike,
        self.layer.qkv.weight.data[8:16, 0] = 5.0  # and keys are long where the first coordinate is

    def validation_step(self, batch, batch_idx):
        self.layer(self.x)


def test_the_token_of_a_sink_stands_out():
    module = Outlier()
    monitor = AttentionMonitor(statistics=["sink", "sink_norm", "sink_coordinate"])
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[monitor], enable_progress_bar=False)
    trainer.validate(module, DataLoader([0]), verbose=False)
    found = {name: float(trainer.callback_metrics[f"val/attention/{name}/layer_00"]) for name in monitor.statistics}
    assert found["sink"] == pytest.approx(1.0, abs=1e-3)
    assert found["sink_norm"] == pytest.approx(3 / (23 / 21))
    largest = module.x.abs().amax(-1)
    assert found["sink_coordinate"] == pytest.approx(float((largest[:, 5] / largest.mean(-1)).mean()))
    assert "val/attention/token_similarity/layer_00" not in trainer.callback_metrics


def test_features_of_a_sink_are_of_the_token_with_the_largest_share():
    x = torch.randn(2, 3, 4)
    shares = torch.tensor([[[0.1, 0.7, 0.2], [0.8, 0.1, 0.1]], [[0.2, 0.2, 0.6], [torch.nan, 0.5, 0.5]]])
    found = sink_features(x, shares)
    norms, largest = x.norm(dim=-1), x.abs().amax(-1)
    for name, size in (("sink_norm", norms), ("sink_coordinate", largest)):
        expected = torch.stack([size[0, [1, 0]] / size[0].mean(), size[1, [2, 0]] / size[1].mean()])
        expected[1, 1] = torch.nan
        torch.testing.assert_close(found[name], expected, equal_nan=True)


class Own(torch.nn.Module):
    """A layer of nobody's host, of either order of its axes."""

    def __init__(self, sequence_first):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.sequence_first = torch.nn.Linear(8, 24), sequence_first

    def forward(self, x):
        x = x.transpose(0, 1) if self.sequence_first else x
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return out.transpose(0, 1) if self.sequence_first else out


def test_tokens_are_told_from_samples_in_layers_of_ones_own():
    alike = torch.randn(4, 1, 8).expand(4, 20, 8) + 1e-3 * torch.randn(4, 20, 8)
    found = []
    for sequence_first in (False, True):
        module = pl.LightningModule()
        module.layer = Own(sequence_first)
        x = alike.transpose(0, 1) if sequence_first else alike
        module.validation_step = lambda batch, index, module=module, x=x: (module.layer(x), None)[1]
        monitor = AttentionMonitor(statistics=["token_similarity", "sink_norm"])
        trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[monitor], enable_progress_bar=False)
        trainer.validate(module, DataLoader([0]), verbose=False)
        found.append({name: value for name, value in trainer.callback_metrics.items() if "layer" in name})
    assert found[0]["val/attention/token_similarity/layer_00"] > 0.99
    torch.testing.assert_close(found[1], found[0])


def test_sinks_are_not_looked_for_among_few_keys():
    metrics = fit(TinyLM(), [AttentionMonitor(every_n_steps=1)], max_steps=1).callback_metrics
    assert "attention/token_similarity/layer_01" in metrics
    assert not any("sink" in name for name in metrics)


def written_out(q, k, v, attn_mask=None, is_causal=False):
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    weights = (3 * (q @ k.mT)).masked_fill(hidden, -torch.inf).softmax(-1)
    written_out.seen.append(torch.special.entr(weights).sum(-1).mean().item())
    return weights @ v


@pytest.mark.parametrize("inference_mode", [True, False])
def test_entropy_is_that_of_the_weights_that_act(inference_mode):
    written_out.seen = []
    module, callbacks = TinyLM(lr=0.0), [AttentionMonitor(statistics=["entropy"])]
    swap_attention(module, written_out, layers=[0])
    trainer = fit(module, callbacks, val_loader=batches(1), inference_mode=inference_mode)
    found = trainer.callback_metrics["val/attention/entropy/layer_00"].item()
    assert found == pytest.approx(written_out.seen[-1], rel=1e-4)


def squared(q, k, v, attn_mask=None, is_causal=False):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal).square()


def test_a_mechanism_without_a_map_is_named_once_and_left_out():
    module = TinyLM(lr=0.0)
    swap_attention(module, squared, layers=[0])
    with pytest.warns(UserWarning, match=r"AttentionMonitor shows no map of .*0.self_attn.*squared has"):
        trainer = fit(module, [AttentionMonitor(), AttentionMapLogger()], val_loader=batches(1))
    logged = trainer.callback_metrics
    assert "val/attention/entropy/layer_00" not in logged or logged["val/attention/entropy/layer_00"].isnan()
    assert logged["val/attention/entropy/layer_01"] > 0
    assert logged["val/attention/token_similarity/layer_00"] < 1


def validated(kind, model, *callbacks):
    """A module that did with the model what its kind does, and what was logged."""
    module, options = kind(model), {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = pl.Trainer(callbacks=list(callbacks), **options)
    trainer.validate(module, DataLoader(PROMPTS, batch_size=4), verbose=False)
    return module, trainer.callback_metrics


def written_rows(model, tokens):
    """Entropy, effective support and largest weight of each row of the first layer but those of padding, at once."""
    given = shown(tokens)
    weights = next(iter(attention_maps(model, given).values())).abs()
    there = given["attention_mask"].bool()[:, None].expand(weights.shape[:3])
    shares = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
    rows = {
        "entropy": torch.special.entr(shares).sum(-1),
        "effective_support": 1 / shares.square().sum(-1),
        "largest_probability": weights.amax(-1),
    }
    return {name: (values, there) for name, values in rows.items()}


@pytest.mark.parametrize("kind", [Generates, InTwoCalls])
@pytest.mark.parametrize("host", ["Llama", "GPT2", "GPTNeoX"])
@pytest.mark.parametrize(
    ("mechanism", "options"), [("softmax", {}), ("forgetting", {}), ("symmetric", {}), ("l2", {"shared": True})]
)
def test_rows_of_a_call_that_continues_from_a_cache_count_as_in_one_call(mechanism, options, host, kind):
    model = decoder(host)
    swap_attention(model, mechanism, **options)
    tokens = PROMPTS
    if kind is Generates:
        tokens = validated(kind, model)[0].tokens
    module, metrics = validated(kind, model, AttentionMonitor(), AttentionMapLogger())
    if kind is Generates:
        assert torch.equal(module.tokens, tokens)
        tokens = tokens[:, :-1]
    for name, (values, there) in written_rows(model, tokens).items():
        found = metrics[f"val/attention/{name}/layer_00"]
        torch.testing.assert_close(found, values[there].mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [Generates, InTwoCalls])
@pytest.mark.parametrize("mechanism", ["window", "hedgehog", "gated_delta", "retention"])
def test_a_call_that_continues_from_a_state_is_left_out_and_said_once(mechanism, kind, recwarn):
    model = decoder()
    swap_attention(model, mechanism)
    tokens = validated(kind, model)[0].tokens if kind is Generates else PROMPTS
    module, metrics = validated(kind, model, AttentionMonitor())
    if kind is Generates:
        assert torch.equal(module.tokens, tokens)
    first = PROMPTS.shape[1] if kind is Generates else 4
    for name, (values, there) in written_rows(model, tokens).items():
        wanted = values[:, :, :first][there[:, :, :first]].mean()
        found = metrics[f"val/attention/{name}/layer_00"]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    said = [str(one.message) for one in recwarn if "AttentionMonitor shows no map" in str(one.message)]
    assert len(said) == 1
    assert "has no attention map of a call that continues from a cache" in said[0]
