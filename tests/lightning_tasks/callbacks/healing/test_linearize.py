"""What the recipe healing/linearize does: a language model whose layers become linear, in stages."""

import lightning.pytorch as pl
import pytest
import torch
from attnswap.datamodules import ResumableLoader
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import TensorDataset

from lightning_tasks.callbacks import Heal
from lightning_tasks.files.load import load_module
from lightning_tasks.language_modeling import LanguageModelingTask

pytest.importorskip("transformers", reason="the extra [hf] is not installed")


@pytest.mark.parametrize("lora", [None, {"r": 2, "target_modules": ["q_proj", "v_proj"]}], ids=["all", "lora"])
def test_a_language_model_that_is_made_linear_resumes_bitwise(tmp_path, lora):
    """The stages of healing/linearize, whose checkpoint falls into the second."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = torch.randint(9, (2, 24, 6), generator=torch.Generator().manual_seed(4))

    def run(steps, checkpoint=None, lora=lora):
        torch.manual_seed(3)
        task = LanguageModelingTask(
            {"model_type": "llama", **sizes}, 9, "gated_delta", layers={"keep_every": 2}, chunk_size=None, lora=lora
        )
        stages = [{"match": "layers", "steps": 2, "lr_scale": 2.0}, {"match": "logits", "steps": 2}, {"match": "task"}]
        loader = ResumableLoader(TensorDataset(*tokens), batch_size=4, generator=torch.Generator())
        trainer = pl.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[
                Heal(stages, network="model"),
                ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1),
            ],
        )
        trainer.fit(task, loader, ckpt_path=checkpoint)
        return task

    whole = run(6)
    resumed = run(6, tmp_path / "step=3.ckpt")
    for (name, one), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other), name
    if lora is not None:
        with pytest.warns(UserWarning, match=r"was trained with lora .*, and is used with .*'lora_alpha': 64"):
            run(4, tmp_path / "step=3.ckpt", {**lora, "lora_alpha": 64})
    loaded = load_module(tmp_path / "step=6.ckpt", LanguageModelingTask)
    for (name, one), other in zip(whole.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_with_lora_adapters_and_mechanisms_train_and_become_an_ordinary_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    task = LanguageModelingTask({"model_type": "llama", **sizes}, 9, "gated_delta", layers=[0], lora={"r": 2})
    task.configure_model()
    names = [name for name, one in task.named_parameters() if one.requires_grad]
    assert all("lora" in name or "mechanism" in name for name in names)
    assert any("mechanism" in name for name in names)
    for one in task.parameters():
        if one.requires_grad:
            torch.nn.init.normal_(one, std=0.3)
    tokens = torch.randint(9, (2, 7))
    expected = task(tokens).logits
    merged = task.model.merge_and_unload()
    assert type(merged).__name__ == "LlamaForCausalLM"
    torch.testing.assert_close(merged(tokens).logits, expected)


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rank": 8}, "lora must be a mapping with any of r, lora_alpha"),
        ({"megatron_core": "os"}, "lora must be a mapping with any of r, lora_alpha"),
        (8, "lora must be a mapping with any of r, lora_alpha"),
        ({"r": 0}, "r must be an integer of at least 1, got 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a finite number above 0, got nan"),
        ({"lora_alpha": 0}, "lora_alpha must be a finite number above 0, got 0"),
        ({"lora_dropout": -0.1}, "lora_dropout must be a finite number of at least 0 and at most 1, got -0.1"),
        ({"use_rslora": "no"}, "use_rslora must be True or False, got 'no'"),
        ({"bias": "some"}, "bias must be one of 'none', 'all', 'lora_only', got 'some'"),
        ({"target_modules": "("}, r"target_modules must be a list of names such as \['q_proj', 'v_proj'\], got '\('"),
        (
            {"target_modules": ["q_proj", "query"]},
            "target_modules names 'query', and LlamaForCausalLM has no such layer",
        ),
        ({"target_modules": ["norm"]}, "peft refuses it for LlamaForCausalLM"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [9]}, "peft refuses it for LlamaForCausalLM"),
    ],
)
def test_other_options_of_lora_are_refused(lora, said):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(ValueError, match=said):
        LanguageModelingTask({"model_type": "llama", **sizes}, 9, lora=lora).configure_model()
