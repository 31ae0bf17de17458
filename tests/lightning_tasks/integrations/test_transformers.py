"""The Trainer of transformers runs our callbacks, and logs what they give."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from attention_modules import swap_attention  # noqa: E402
from attnswap.integrations.transformers import Watch  # noqa: E402
from lightning_tasks.callbacks import AttentionMonitor, EntropyRegularizer, LocAteR  # noqa: E402


class Stops(transformers.TrainerCallback):
    """Ends training by an error."""

    def on_step_end(self, args, state, control, **kwargs):
        raise RuntimeError("out of memory")


def trained(tmp_path, callbacks, accumulate=1, wrap=lambda model: model, count=16, further=(), resume=None, **options):
    """What was logged, and the weights, of four steps."""
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = wrap(transformers.LlamaForCausalLM(config))
    data = [
        {"input_ids": torch.arange(place, place + 8) % 17, "labels": torch.arange(place, place + 8) % 17}
        for place in range(count)
    ]
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="steps" if "save_steps" in options else "no",
        lr_scheduler_type="constant",
        seed=0,
        **options,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=list(further))
    if callbacks:
        trainer.add_callback(Watch(trainer, *callbacks))
    trainer.train(resume_from_checkpoint=resume)
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    return trainer.state.log_history, weights, trainer


def lora(model):
    """With adapters that change what it computes."""
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "k_proj", "v_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))


HOWS = {
    "bfloat16": {"bf16": True},
    "LoRA": {"wrap": lora},
    "LoRA in bfloat16": {"wrap": lora, "bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
}


@pytest.mark.costly
@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.slow if how == "compiled" else ()) for how in HOWS]
)
def test_watching_changes_nothing_however_it_trains(tmp_path, how):
    _, plain, _ = trained(tmp_path, [], **HOWS[how])
    history, watched, _ = trained(tmp_path, [AttentionMonitor(every_n_steps=1)], **HOWS[how])
    assert torch.equal(plain, watched)
    assert sum("attention/entropy/mean" in row for row in history) == 4
    assert not torch.equal(trained(tmp_path, [LocAteR(10.0)], **HOWS[how])[1], plain)


@pytest.mark.parametrize("penalty", [lambda: LocAteR(10.0), lambda: EntropyRegularizer(10.0, target=0.3)])
def test_a_last_step_of_fewer_batches_has_its_whole_penalty(tmp_path, penalty):
    """The Trainer divides the loss by the batches that there are."""
    _, two_of_three, _ = trained(tmp_path, [penalty()], accumulate=3, count=4)
    _, two_of_two, _ = trained(tmp_path, [penalty()], accumulate=2, count=4)
    assert torch.equal(two_of_three, two_of_two)


def test_after_an_error_the_model_is_as_it_was(tmp_path):
    kept = []
    before = []

    def wrap(model):
        kept.append(model)
        before.append({name: type(part) for name, part in model.named_modules()})
        return model

    with pytest.raises(RuntimeError, match="out of memory"):
        trained(tmp_path, [AttentionMonitor(every_n_steps=1), LocAteR(0.1)], wrap=wrap, further=[Stops()])
    (model,) = kept
    assert {name: type(part) for name, part in model.named_modules()} == before[0]
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_watching_changes_nothing_and_is_in_the_history(tmp_path, accumulate):
    _, plain, _ = trained(tmp_path, [], accumulate)
    history, watched, _ = trained(tmp_path, [AttentionMonitor(every_n_steps=2)], accumulate)
    assert torch.equal(plain, watched)
    seen = [row for row in history if "attention/entropy/mean" in row]
    assert len(seen) == 2
    assert all(0 < row["attention/entropy/mean"] < 3 for row in seen)


class StopsAtHalf(transformers.TrainerCallback):
    """Ends training after two steps."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 2


def test_a_resumed_run_holds_the_mean_of_the_first_start(tmp_path):
    def weights(*folders, further=(), **options):
        penalty = LocAteR(1.0, gamma=50.0)
        return trained(
            tmp_path.joinpath(*folders), [penalty], further=further, learning_rate=0.05, save_steps=2, **options
        )[1]

    whole = weights("whole")
    weights("parted", further=[StopsAtHalf()])
    assert torch.equal(weights("parted", resume=True), whole)


def test_the_card_of_the_trainer_names_what_was_swapped(tmp_path):
    trainer = trained(tmp_path, [AttentionMonitor(2)], wrap=lambda model: (swap_attention(model, "gated"), model)[1])[2]
    with pytest.warns(UserWarning, match="saving 2 swapped attention layers"):
        trainer.save_model()
    trainer.create_model_card(model_name="mine")
    text = (tmp_path / "README.md").read_text()
    assert "# mine" in text
    assert "| gated |" in text


def test_a_regularizer_trains(tmp_path):
    history, weights, _ = trained(tmp_path, [LocAteR(10.0)])
    _, plain, _ = trained(tmp_path, [])
    assert not torch.equal(weights, plain)
    penalties = [row["locater/penalty"] for row in history if "locater/penalty" in row]
    assert len(penalties) == 4
    assert penalties[-1] < penalties[0]
