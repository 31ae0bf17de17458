"""Continuous batching: a swapped model writes what it generates one by one, or refuses before it starts."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from attention_modules.swap import make_observable, restore_attention, swap_attention
from tests.attention_modules.hosts.cases import MECHANISMS
from tests.rows import each_row

transformers = pytest.importorskip("transformers")
PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13]]
WRITES = (
    *("softmax", "symmetric", "gated", "sink", "entmax", "hard", "sigmoid", "ssa", "ssmax", "l2", "kde", "uniform"),
    *("talking_heads", "qk_norm, gain='scalar'", "differential, pairs='heads'"),
    *("elliptical", "value_residual", "l2, shared=True"),
)
pytestmark = pytest.mark.filterwarnings("ignore")


def language_model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, pad_token_id=0, initializer_range=0.3, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


def one_by_one(model: nn.Module) -> list[list[int]]:
    given = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    return [model.generate(torch.tensor([each]), **given)[0, len(each) :].tolist() for each in PROMPTS]


def batched(model: nn.Module) -> list[list[int]]:
    config = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1)
    sizes = transformers.ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64)  # the default takes all memory
    given = {"generation_config": config, "continuous_batching_config": sizes, "progress_bar": False}
    found = model.generate_batch(PROMPTS, **given)
    assert [found[name].error for name in sorted(found)] == [None, None]
    return [found[name].generated_tokens for name in sorted(found)]


@each_row("name", WRITES)
def test_the_same_tokens_are_written(name: str) -> None:
    model = language_model()
    mechanism, options = MECHANISMS[name]
    swap_attention(model, mechanism, **options)
    layer = model.model.layers[0].self_attn
    if not layer.mechanism.uses_query and "cache" in inspect.signature(layer.plain_class.forward).parameters:
        with pytest.raises(NotImplementedError, match="has no query, and with this version of transformers"):
            batched(model)  # from 5.24 on
        return
    assert batched(model) == one_by_one(model)


@each_row("name", sorted({*MECHANISMS} - {*WRITES}))
def test_the_others_are_refused_in_the_main_thread(name: str) -> None:
    model = language_model()
    mechanism, options = MECHANISMS[name]
    try:
        swap_attention(model, mechanism, **options)
    except ValueError:
        return  # the swap itself is refused, as of features that rope has turned
    with pytest.raises(NotImplementedError, match=r"continuous batching: .*restore_attention\(model\)"):
        batched(model)


def test_plain_watched_copied_and_restored_models_write() -> None:
    model = language_model()
    expected = batched(model)
    make_observable(model, [f"model.layers.{index}.self_attn" for index in range(2)])
    assert batched(model) == expected
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert batched(twin) == expected
    swap_attention(model, "rpc")
    with pytest.raises(NotImplementedError, match="continuous batching"):
        batched(model)
    restore_attention(model)
    assert batched(model) == expected
    assert "init_continuous_batching" not in vars(model)
