"""The largest logits in the logs, and the warning."""

import math

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from attention_modules.swap import swap_attention
from lightning_tasks.callbacks import LogitMonitor
from tests.lightning_tasks.callbacks.modules import (
    DIM,
    HEADS,
    PROMPTS,
    TOKENS,
    InTwoCalls,
    TinyLM,
    batches,
    decoder,
    fit,
)
from tests.lightning_tasks.callbacks.monitoring.test_spectrum_monitor import logged
from tests.rows import each_row


def naive_largest(module, inputs):
    """The largest causal logit of each head of the first layer, ``[H]``."""
    x = module.net["embed"](inputs)
    layer = module.net["encoder"].layers[0].self_attn
    q, k, _ = torch.nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    q, k = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k))
    logits = (q @ k.mT * (DIM // HEADS) ** -0.5).masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -math.inf)
    return logits.amax((0, 2, 3))


def test_logs_the_first_batch_and_every_n_steps(tmp_path):
    module, logger = TinyLM(), CSVLogger(tmp_path)
    expected = naive_largest(module, next(iter(batches()))[0])
    trainer = fit(module, [LogitMonitor(every_n_steps=2, heads=True)], logger=logger, log_every_n_steps=1000)
    layer = logged(logger, "attention/largest_logit/layer_00")
    assert list(layer) == [0, 2, 4]
    assert layer[0] == pytest.approx(expected.max().item(), rel=1e-5)
    for head in range(HEADS):
        by_head = logged(logger, f"attention/largest_logit/layer_00/head_{head:02d}")
        assert by_head[0] == pytest.approx(expected[head].item(), rel=1e-5)
    both = [logged(logger, f"attention/largest_logit/layer_0{index}")[0] for index in range(2)]
    assert logged(logger, "attention/largest_logit/mean")[0] == pytest.approx(sum(both) / 2, rel=1e-5)
    assert "attention/largest_logit/layer_01" in trainer.callback_metrics
    assert not any(hasattr(each, "mechanism") for each in module.modules())  # plain again


def test_warns_of_layers_above_the_limit_once(recwarn):
    module = TinyLM(lr=0.0)
    with torch.no_grad():
        module.net["encoder"].layers[1].self_attn.in_proj_weight[: 2 * DIM] *= 200
    fit(module, [LogitMonitor(every_n_steps=1)])
    said = [str(one.message) for one in recwarn if "LogitMonitor" in str(one.message)]
    assert len(said) == 1
    assert "logits explode" in said[0]
    assert "layers.1.self_attn" in said[0]
    assert "layers.0.self_attn" not in said[0]


def test_numbers_that_are_not_finite_are_warned_of_and_logged():
    module = TinyLM(lr=0.0)
    with torch.no_grad():
        module.net["encoder"].layers[1].self_attn.in_proj_weight[0, 0] = math.nan
    with pytest.warns(UserWarning, match=r"activations are not finite.*layers\.1"):
        trainer = fit(module, [LogitMonitor()], max_steps=1)
    assert trainer.callback_metrics["attention/largest_logit/layer_01"].isnan()
    assert trainer.callback_metrics["attention/largest_logit/layer_00"].isfinite()


def sharpened(q, k, v, **options):
    return torch.nn.functional.scaled_dot_product_attention(q * 100, k, v, **options)


@pytest.mark.parametrize(
    ("mechanism", "text"),
    [("qk_norm", "QKNormAttention: it normalizes"), (sharpened, "sharpened: a function may change q and k")],
)
def test_logits_of_a_mechanisms_own_are_named(mechanism, text):
    module = TinyLM()
    swap_attention(module, mechanism, layers=[1])
    with pytest.warns(UserWarning, match=rf"not the logits of '.*layers\.1.*' \({text}"):
        fit(module, [LogitMonitor()], max_steps=1)


@each_row(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be an integer of at least 1, got 0"),
        ({"warn_above": -1.0}, "warn_above .* at least 0, got -1.0"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        LogitMonitor(**options)


def test_logits_without_a_query_of_a_call_that_continues_from_a_cache():
    module = InTwoCalls(decoder())
    swap_attention(module, "symmetric")
    trainer = fit(module, [LogitMonitor(every_n_steps=1)], DataLoader(PROMPTS, batch_size=4), max_steps=1)
    for index, layer in enumerate(module.cache.layers):
        logits = layer.keys @ layer.keys.mT * layer.keys.shape[-1] ** -0.5
        seen = torch.ones(TOKENS, TOKENS).tril().bool() & (PROMPTS != 0)[:, None, None]
        largest = logits.masked_fill(~seen, -math.inf).amax().item()
        assert trainer.callback_metrics[f"attention/largest_logit/layer_0{index}"].item() == pytest.approx(largest)
