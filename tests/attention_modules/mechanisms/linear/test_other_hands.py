"""Models with linear-time mechanisms in other people's tools: saved and loaded, adapted, trained, copied, exported."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attention_modules import swap_attention
from attention_modules.pretrained import load_pretrained
from attnswap import attention_maps
from tests.attention_modules.hosts.cases import MECHANISMS, WITH_A_STATE

transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")

IDS = torch.randint(1, 50, (4, 12), generator=torch.Generator().manual_seed(1))
SHORT = {"window": 4, "sinks": 1}
each = pytest.mark.parametrize("mechanism", WITH_A_STATE)


def llama(mechanism, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": 50, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **tokens, num_key_value_heads=2))
    name, own = MECHANISMS[mechanism]
    swap_attention(model, name, **{**own, **options}, **(SHORT if name == "window" else {}))
    return model


class Layer(nn.Module):
    """A layer of nobody's library."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@each
def test_a_model_without_memory_is_swapped(mechanism):
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights():
        model = llama(mechanism)
    assert all(parameter.is_meta for parameter in model.parameters())


@each
@pytest.mark.filterwarnings("ignore:saving . swapped attention layers")
def test_a_saved_model_loads_as_it_was(mechanism, tmp_path):
    model = llama(mechanism).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(transformers.AutoModelForCausalLM, tmp_path).eval()
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@each
def test_adapters_train_and_generate(mechanism):
    peft = pytest.importorskip("peft")
    model = llama(mechanism)
    own = any(".mechanism." in name for name, _ in model.named_parameters())
    keep = ["mechanism"] if own else None
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=keep))
    adapted(input_ids=IDS, labels=IDS).loss.backward()
    idle = [name for name, each in adapted.named_parameters() if each.requires_grad and each.grad is None]
    assert idle == []
    written = [
        adapted.eval().generate(input_ids=IDS[:1], max_new_tokens=5, do_sample=False, use_cache=cached)
        for cached in (True, False)
    ]
    assert torch.equal(*written)


@each
def test_a_layer_of_nobody_s_is_copied_exported_and_sees_no_future(mechanism):
    model = nn.Sequential(Layer(), Layer()).eval()
    x = torch.randn(2, 9, 32)
    name, options = MECHANISMS[mechanism]
    swap_attention(model, name, example=x, **options)
    out = model(x)
    assert torch.equal(copy.deepcopy(model)(x), out)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), out)
    changed = torch.cat([x[:, :5], x[:, 5:] + 1], 1)
    torch.testing.assert_close(model(changed)[:, :5], out[:, :5])
    assert all(not each.triu(1).any() for each in attention_maps(model, x).values())


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers_keeps_the_best_and_resumes(tmp_path):
    def trainer(**options):
        given = {"max_steps": 4, "report_to": [], "per_device_train_batch_size": 2, "use_cpu": True}
        arguments = transformers.TrainingArguments(
            str(tmp_path), **given, **options, learning_rate=0.05, save_steps=2, eval_steps=2, disable_tqdm=True
        )
        data = [{"input_ids": row, "labels": row} for row in IDS]
        return transformers.Trainer(llama("gated_delta"), arguments, train_dataset=data, eval_dataset=data)

    first = trainer(eval_strategy="steps", save_strategy="steps", load_best_model_at_end=True)
    first.train()
    kept = transformers.trainer_utils.get_last_checkpoint(str(tmp_path))
    best = load_pretrained(transformers.AutoModelForCausalLM, first.state.best_model_checkpoint)
    assert torch.equal(best.eval()(IDS).logits, first.model.eval()(IDS).logits)
    second = trainer(save_strategy="no")
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    whole = load_pretrained(transformers.AutoModelForCausalLM, kept)
    assert kept.endswith("checkpoint-4")
    for (name, one), other in zip(second.model.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other), name
