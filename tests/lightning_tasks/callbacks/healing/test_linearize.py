"""What the recipe healing/linearize does: a language model whose layers become linear, in stages."""

import lightning.pytorch as pl
import pytest
import torch
from attnswap.datamodules import ResumableLoader
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import TensorDataset

from lightning_tasks.callbacks import Heal
from lightning_tasks.language_modeling import LanguageModelingTask


def test_a_language_model_that_is_made_linear_resumes_bitwise(tmp_path):
    """The stages of healing/linearize, whose checkpoint falls into the second."""
    pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = torch.randint(9, (2, 24, 6), generator=torch.Generator().manual_seed(4))

    def run(steps, checkpoint=None):
        torch.manual_seed(3)
        task = LanguageModelingTask(
            {"model_type": "llama", **sizes}, 9, "gated_delta", layers={"keep_every": 2}, chunk_size=None
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
