"""The Trainer of transformers runs our callbacks, and logs what they give."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from attnswap.integrations.transformers import Watch  # noqa: E402
from lightning_tasks.callbacks import AttentionMonitor, LocAteR  # noqa: E402


def trained(tmp_path, callbacks, accumulate=1):
    """What was logged, and the weights, of four steps."""
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    data = [
        {"input_ids": torch.arange(place, place + 8) % 17, "labels": torch.arange(place, place + 8) % 17}
        for place in range(16)
    ]
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        lr_scheduler_type="constant",
        seed=0,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    if callbacks:
        trainer.add_callback(Watch(trainer, *callbacks))
    trainer.train()
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    return trainer.state.log_history, weights


@pytest.mark.parametrize("accumulate", [1, 2])
def test_watching_changes_nothing_and_is_in_the_history(tmp_path, accumulate):
    _, plain = trained(tmp_path, [], accumulate)
    history, watched = trained(tmp_path, [AttentionMonitor(every_n_steps=2)], accumulate)
    assert torch.equal(plain, watched)
    seen = [row for row in history if "attention/entropy/mean" in row]
    assert len(seen) == 2
    assert all(0 < row["attention/entropy/mean"] < 3 for row in seen)


def test_a_regularizer_trains(tmp_path):
    history, weights = trained(tmp_path, [LocAteR(10.0)])
    _, plain = trained(tmp_path, [])
    assert not torch.equal(weights, plain)
    penalties = [row["locater/penalty"] for row in history if "locater/penalty" in row]
    assert len(penalties) == 4
    assert penalties[-1] < penalties[0]
