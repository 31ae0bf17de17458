"""A teacher that is shown calls with key-value caches, and leaves the user's caches as they are."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from attention_modules import SelfAttention, swap_attention
from lightning_tasks.callbacks import DriftMonitor, Heal
from tests.rows import pairwise

transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")

TOKENS = torch.randint(2, 40, (3, 6), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(TOKENS)
MASK[0, :2] = 0
SHORT = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SPREAD = {"initializer_range": 0.3}


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHORT, **SIZES, **SPREAD))


def gpt2():
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **SHORT, **SPREAD)
    return transformers.GPT2LMHeadModel(config)


def cohere2():
    """Whose masks, with a static cache, have a column for each of its places."""
    config = transformers.Cohere2Config(**SHORT, **SIZES, **SPREAD, num_key_value_heads=4, sliding_window=64)
    return transformers.Cohere2ForCausalLM(config)


def t5():
    config = transformers.T5Config(
        **SHORT, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def _length(out: Any) -> int:
    return 0 if out.past_key_values is None else int(out.past_key_values.get_seq_length())


class Generating(pl.LightningModule):
    """Generates in each validation, twice, and keeps what that gave."""

    def __init__(self, make: Any, mechanism: str, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.how = make().eval(), how
        self.outs, self.lengths = [], []
        swap_attention(self.model, mechanism)

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        for _ in range(2):
            out = self.model.generate(
                tokens,
                attention_mask=MASK,
                max_new_tokens=4,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
                **self.how,
            )
            self.outs.append(out)
            self.lengths.append(_length(out))


def validated(module: pl.LightningModule, *callbacks: Any) -> dict[str, float]:
    run = pl.Trainer(
        accelerator="cpu",
        logger=False,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    run.validate(module, DataLoader(TOKENS, 3), verbose=False)
    return {name: float(value) for name, value in run.callback_metrics.items()}


CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "beams": {"num_beams": 2},
}


def _takes(make: Any, mechanism: str, cache: str) -> bool:
    return (make, mechanism) not in {(t5, "window"), (t5, "gated_delta")}  # its bias of positions


@pytest.mark.parametrize(
    ("make", "mechanism", "cache"),
    pairwise(
        (llama, gpt2, cohere2, t5),
        ("softmax", "sink", "symmetric", "forgetting", "window", "gated_delta"),
        CACHES,
        allowed=_takes,
    ),
)
def test_the_drift_of_a_generation_with_a_cache_is_that_of_its_prompt_without_one(make, mechanism, cache):
    """The witness: the same generation with use_cache=False, and one without the monitor."""
    module = Generating(make, mechanism, **CACHES[cache])
    alone = Generating(make, mechanism, **CACHES[cache])
    found = validated(module, DriftMonitor(maps=mechanism == "sink"))
    wanted = validated(Generating(make, mechanism, use_cache=False), DriftMonitor(maps=mechanism == "sink"))
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    if mechanism == "softmax":
        assert found["val/drift/output_error"] < 1e-5
    validated(alone)
    assert [_length(out) for out in module.outs] == module.lengths == alone.lengths
    for out, plain in zip(module.outs, alone.outs, strict=True):
        assert torch.equal(out.sequences, plain.sequences)
        assert all(torch.equal(one, other) for one, other in zip(out.logits, plain.logits, strict=True))


class Continuing(Generating):
    """Calls its network with a cache that it filled before, at the first call or at all of them."""

    def __init__(self, mechanism: str, always: bool) -> None:
        super().__init__(llama, mechanism)
        self.always = always

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        cache = transformers.DynamicCache()
        self.model.model(tokens[:, :2], past_key_values=cache)
        self.model(tokens[:, 2:4], past_key_values=cache)
        if not self.always:
            self.model(input_ids=tokens)
        assert cache.get_seq_length() == 4
        self.cache = cache


@pytest.mark.parametrize("mechanism", ["softmax", "window"])
def test_calls_that_continue_from_a_cache_are_passed_by_or_refused(mechanism):
    module = Continuing(mechanism, always=False)
    assert validated(module, DriftMonitor())["val/drift/output_error"] < (1e-5 if mechanism == "softmax" else 1.0)
    assert module.cache.get_seq_length() == 4
    with pytest.raises(ValueError, match="each call of 'model' in validation_step continues from a key-value cache"):
        validated(Continuing(mechanism, always=True), DriftMonitor())


class Cache:
    """One of a user's own: keys and values of one layer, in places that are there from the start."""

    def __init__(self) -> None:
        self.keys, self.values, self.length = torch.zeros(3, 9, 16), torch.zeros(3, 9, 16), 0


class OwnNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.embed, self.head = SelfAttention(16, 2), nn.Embedding(40, 16), nn.Linear(16, 40)

    def forward(self, tokens: Tensor, kv_cache: Cache | None = None) -> Tensor:
        x = self.embed(tokens)
        if kv_cache is not None:
            start, kv_cache.length = kv_cache.length, kv_cache.length + x.shape[1]
            kv_cache.keys[:, start : kv_cache.length] = x
            x = kv_cache.keys[:, : kv_cache.length].clone()
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return self.head(self.attention(x, attn_mask=mask))[:, -tokens.shape[1] :]


class Own(pl.LightningModule):
    def __init__(self, cached: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.cached, self.cache = OwnNetwork(), cached, Cache()
        swap_attention(self.net, "sink")

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens, *([self.cache] if self.cached else []))

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        self(tokens)
        if self.cached:
            self(tokens[:, :1])

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        self.cache = Cache()
        loss = self(tokens).square().mean()
        self.lengths = self.cache.length
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_cache_of_ones_own_is_copied():
    module = Own(cached=True)
    assert validated(module, DriftMonitor()) == pytest.approx(validated(Own(cached=False), DriftMonitor()), rel=1e-5)
    assert module.cache.length == 7
    assert (module.cache.keys[:, 7:] == 0).all()


@pytest.mark.parametrize("match", ["layers", "output"])
def test_healing_leaves_a_cache_to_the_student(match):
    """The witness: the same fit whose network is called without a cache."""
    found = []
    for cached in (False, True):
        module = Own(cached)
        run = pl.Trainer(
            accelerator="cpu",
            max_steps=2,
            logger=False,
            callbacks=[Heal([{"match": match}])],
            limit_val_batches=0,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        run.fit(module, DataLoader(TOKENS.repeat(2, 1), 3))
        found.append((run.callback_metrics["heal/loss"], *module.parameters()))
        assert module.lengths == (6 if cached else 0)
    assert found[0][0] > 1e-4
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_healing_refuses_a_full_cache():
    class Chunks(Generating):
        def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
            past = self.model(tokens[:, :3]).past_key_values
            return self.model(tokens[:, 3:], past_key_values=past).logits.square().mean()

        configure_optimizers = Own.configure_optimizers

    run = pl.Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        callbacks=[Heal([{"match": "output"}])],
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    with pytest.raises(ValueError, match="Heal: training_step calls the network with a key-value cache that holds"):
        run.fit(Chunks(llama, "sink"), DataLoader(TOKENS, 3))
