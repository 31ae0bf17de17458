import functools
import math

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional
from torchmetrics.text import Perplexity

from attention_modules import AttentionMechanism, RPCAttention, swap_attention
from lightning_tasks import LanguageModelingTask
from lightning_tasks.callbacks.init_from import InitFromCheckpoint
from lightning_tasks.models.causal_lm import bypassed, has_plain_head, log_probabilities, position_limit
from tests.lightning_tasks.demo import DemoText
from tests.lightning_tasks.language_data import SMALL, VOCAB, RandomText, trainer, windows
from tests.rows import each_row

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 8,
    "n_head": 2,
    "n_positions": 8,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "pad_token_id": 0}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 7}


class Bigrams(nn.Module):
    """Logits of any origin: no hidden states, no head."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens):
        return self.table(tokens)


def task(**options):
    return LanguageModelingTask(
        **{"model": SMALL, "optimizer": functools.partial(torch.optim.AdamW, lr=0.01), **options}
    )


def built(**options):
    result = task(vocab_size=VOCAB, **options)
    result.configure_model()
    return result


@pytest.mark.parametrize("split", ["val", "test"])
def test_perplexity_is_that_of_the_whole_split(split, tmp_path):
    data, module = RandomText(batch_size=3), task()
    run = trainer(tmp_path)
    logged = (run.validate if split == "val" else run.test)(module, datamodule=data, verbose=False)[0]
    inputs, targets = windows(7, 1 if split == "val" else 2)
    logits = module.model(inputs).detach()
    reference = Perplexity(ignore_index=-100)
    reference.update(logits, targets)
    assert logged[f"{split}/perplexity"] == pytest.approx(reference.compute().item(), rel=1e-5)
    expected = functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    assert logged[f"{split}/loss"] == pytest.approx(expected, rel=1e-5)
    batches = [
        functional.cross_entropy(x.flatten(0, 1), t.flatten())
        for x, t in zip(logits.split(3), targets.split(3), strict=True)
    ]
    assert abs(logged[f"{split}/loss"] - torch.stack(batches).mean().item()) > 1e-4  # the mean of means is another


def test_training_lowers_the_loss_and_logs(tmp_path):
    module, run = task(), trainer(tmp_path, max_epochs=40)
    run.fit(module, RandomText())
    assert run.logged_metrics["train/loss"] < math.log(VOCAB) - 0.5
    assert {"train/loss", "val/loss", "val/perplexity"} <= run.logged_metrics.keys()


@pytest.mark.parametrize("chunk_size", [1, 7, 256, None])
def test_training_step_is_the_token_mean(chunk_size, tmp_path):
    module = built(chunk_size=chunk_size)
    inputs, targets = windows(5, 3)
    module.log = lambda *args, **kwargs: None
    loss = module.training_step((inputs, targets), 0)
    expected = functional.cross_entropy(module.model(inputs).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected)


def test_predict_gives_log_probabilities(tmp_path):
    module = task()
    predictions = torch.cat(trainer(tmp_path).predict(module, datamodule=RandomText(batch_size=3)))
    inputs, targets = windows(7, 2)
    expected = module.model(inputs).log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(predictions, expected.masked_fill(targets == -100, 0).detach())


def test_vocabulary_of_the_data_module_is_kept(tmp_path):
    module, run = task(), trainer(tmp_path)
    run.fit(module, RandomText())
    run.save_checkpoint(tmp_path / "a.ckpt")
    assert module.hparams.vocab_size == VOCAB
    loaded = LanguageModelingTask.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert loaded.model.head.out_features == VOCAB
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), module.parameters(), strict=True))


def test_unknown_vocabulary_says_what_to_give():
    with pytest.raises(ValueError, match=r"give LanguageModelingTask\(vocab_size=...\)"):
        task().configure_model()


def test_configure_model_builds_once():
    module = built()
    model = module.model
    module.configure_model()
    assert module.model is model


@pytest.mark.parametrize(
    "attention",
    ["rpc", RPCAttention, "attention_modules.RPCAttention", {"class_path": "rpc"}, {"class_path": RPCAttention}],
    ids=["name", "class", "path", "dict", "dict of class"],
)
def test_spellings_of_attention(attention):
    module = built(mechanism=attention, options={"iterations": 2})
    mechanism = module.model.layers[0].attn.mechanism
    assert isinstance(mechanism, RPCAttention)
    assert mechanism.iterations == 2


def test_attention_with_its_options_inside():
    module = built(mechanism={"class_path": "rpc", "init_args": {"iterations": 3}})
    assert module.model.layers[0].attn.mechanism.iterations == 3


@pytest.mark.parametrize("model", ["TransformerLM", GPT2])
def test_the_other_layers_get_another_mechanism(model, tmp_path):
    module = built(model=model, mechanism="rpc", options={"iterations": 2}, layers=[0], other_attention="symmetric")
    kinds = [type(part).__name__ for part in module.modules() if isinstance(part, AttentionMechanism)]
    assert kinds[0] == "RPCAttention"
    assert set(kinds[1:]) == {"SymmetricAttention"}
    twin = built(model=model, mechanism="rpc", options={"iterations": 2}, layers=[0], other_attention="symmetric")
    twin.load_state_dict(module.state_dict())
    given = (*windows(7, 1), None)
    torch.testing.assert_close(*(log_probabilities(part.eval().model, *given) for part in (module, twin)))


@pytest.mark.parametrize("source", ["dict", "config", "folder"])
def test_hugging_face_model_with_swapped_attention(source, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**GPT2, vocab_size=VOCAB)
    model = {"dict": GPT2, "config": config, "folder": str(tmp_path)}[source]
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    module = task(model=model, mechanism="rpc", options={"iterations": 2}, layers=[1])
    run = trainer(tmp_path)
    run.fit(module, RandomText())
    assert all(part.training for part in module.model.modules())
    mechanisms = [type(m).__name__ for m in module.modules() if isinstance(m, RPCAttention)]
    assert mechanisms == ["RPCAttention"]
    assert module._tokens_at_once == 256
    logged = run.validate(module, RandomText(), verbose=False)[0]
    inputs, targets = windows(7, 1)
    expected = functional.cross_entropy(module.eval().model(inputs).logits.flatten(0, 1), targets.flatten())
    assert logged["val/loss"] == pytest.approx(expected.item(), rel=1e-5)
    run.save_checkpoint(tmp_path / "a.ckpt")
    loaded = LanguageModelingTask.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    torch.testing.assert_close(loaded.eval().model(inputs).logits, module.model(inputs).logits)


def test_a_pretrained_model_trains_in_the_trainers_precision_and_not_its_files(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**GPT2, vocab_size=VOCAB)
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path)
    for precision, dtype in {"32-true": torch.float32, "bf16-true": torch.bfloat16}.items():
        module = task(model=str(tmp_path))
        trainer(tmp_path, precision=precision, limit_train_batches=1).fit(module, RandomText())
        assert {parameter.dtype for parameter in module.parameters()} == {dtype}


@pytest.mark.parametrize(("attention", "found"), [("softmax", "GatedAttention"), ("rpc", "RPCAttention")])
def test_a_folder_that_was_saved_with_swapped_attention_is_trained_on_with_it(attention, found, tmp_path):
    transformers = pytest.importorskip("transformers")
    saved = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**GPT2, vocab_size=VOCAB))
    swap_attention(saved, "gated")
    for name, parameter in saved.named_parameters():
        if "mechanism" in name:
            torch.nn.init.normal_(parameter)
    saved.save_pretrained(tmp_path)
    module = built(model=str(tmp_path), mechanism=attention)
    assert {type(layer.attn.mechanism).__name__ for layer in module.model.transformer.h} == {found}
    if attention == "softmax":
        for name, parameter in saved.named_parameters():
            assert torch.equal(module.model.get_parameter(name), parameter), name


def test_hugging_face_model_that_caps_its_logits_is_not_taken_apart(tmp_path):
    pytest.importorskip("transformers")
    gemma = {"model_type": "gemma2", "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "head_dim": 4}
    gemma |= {"num_attention_heads": 2, "num_key_value_heads": 1, "final_logit_softcapping": 0.01, "pad_token_id": 0}
    module = built(model=gemma)
    assert module._tokens_at_once is None
    inputs, targets = windows(2, 0)
    expected = functional.cross_entropy(module.model(inputs).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(module._loss(inputs, targets)[0], expected)


class Later(nn.Module):
    """A language model of one's own, in which something acts that does nothing at first."""

    def __init__(self, vocab_size: int, kind: str = "") -> None:
        super().__init__()
        self.kind, self.embedding, self.head = kind, nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)
        self.scale, self.shift, self.drop = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(8)), nn.Dropout(0.5)

    def hidden(self, tokens):
        return self.embedding(tokens)

    def forward(self, tokens):
        hidden = self.hidden(tokens)
        hidden = {"shift": hidden + self.shift, "dropout": self.drop(hidden)}.get(self.kind, hidden)
        logits = self.head(hidden)
        return logits * self.scale if self.kind == "scale" else logits


@pytest.mark.parametrize(("kind", "chunks"), [("", True), ("scale", False), ("shift", False), ("dropout", False)])
def test_what_acts_beside_the_head_later_keeps_logits_whole(kind, chunks):
    module = built(model=functools.partial(Later, kind=kind))
    assert module._tokens_at_once == (256 if chunks else None)
    assert module.model.training


class Readout(nn.Linear):
    """Of maximal update parametrization."""

    def forward(self, x):
        return nn.Linear.forward(self, 4 * x)


def test_a_head_with_a_forward_of_its_own_keeps_logits_whole():
    (inputs, targets), model = windows(2, 0), Later(VOCAB)
    model.head = Readout(8, VOCAB)
    assert not has_plain_head(model)
    module = built(model=Later)
    module.model.head.forward = functools.partial(Readout.forward, module.model.head)
    expected = functional.cross_entropy(module.model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(module._loss(inputs, targets)[0], expected)


def test_layers_that_share_values_do_so_in_chunks_too():
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**LLAMA | {"num_hidden_layers": 2}, vocab_size=VOCAB)
    model = transformers.AutoModelForCausalLM.from_config(config)
    swap_attention(model, "value_residual")
    assert bypassed(model) == ""
    assert has_plain_head(model)
    model.register_forward_hook(lambda module, args, out: None)
    assert bypassed(model) == "hooks of the model"


def test_the_trial_of_a_head_seeds_no_device_and_moves_no_draws(monkeypatch):
    """`torch.manual_seed` would seed CUDA too, where the run's own seed draws dropout."""

    def fails(seed):
        raise AssertionError("it seeds the generators of all devices")

    model = Later(VOCAB, kind="dropout")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "manual_seed", fails)
        assert not has_plain_head(model)
        assert has_plain_head(Later(VOCAB))
    torch.manual_seed(5)
    Later(VOCAB), Later(VOCAB)
    drawn = torch.get_rng_state()
    torch.manual_seed(5)
    has_plain_head(Later(VOCAB)), has_plain_head(Later(VOCAB))
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("of", ["model", "head"])
def test_hooks_and_compilation_act_in_a_loss_of_chunks_too(of):
    module, (inputs, targets) = built(model=Later), windows(2, 0)
    part = module.model.head if of == "head" else module.model
    plain = module._loss(inputs, targets)[0]
    handle = part.register_forward_hook(lambda module, args, out: out * 2)
    with pytest.warns(UserWarning, match=f"chunk_size=256 is left out, .*: hooks of the {of} would not act in chunks"):
        hooked = module._loss(inputs, targets)[0]
    logits = module.model(inputs).flatten(0, 1)
    torch.testing.assert_close(hooked, functional.cross_entropy(logits, targets.flatten(), reduction="sum"))
    handle.remove()
    assert module._tokens_at_once == 256
    torch.testing.assert_close(module._loss(inputs, targets)[0], plain)
    nn.utils.parametrizations.weight_norm(module.model.head)  # computes the weight itself
    assert module._tokens_at_once == 256
    part.compile(backend="eager")
    assert module._tokens_at_once is None


def test_pretrained_model_with_too_few_token_ids(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**GPT2, vocab_size=11)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="knows 11 token ids and the data has 29"):
        built(model=str(tmp_path))


def test_model_of_any_kind_from_its_logits(tmp_path):
    module, run = task(model=Bigrams), trainer(tmp_path)
    run.fit(module, RandomText())
    inputs, targets = windows(7, 2)
    expected = functional.cross_entropy(module.model(inputs).flatten(0, 1), targets.flatten())
    assert run.test(module, RandomText(), verbose=False)[0]["test/loss"] == pytest.approx(expected.item(), rel=1e-5)
    predicted = torch.cat(run.predict(module, RandomText()))
    assert -predicted.sum().item() == pytest.approx(expected.item() * (targets != -100).sum().item(), rel=1e-5)


@each_row(
    ("options", "error", "text"),
    [
        ({"model": nn.Linear(1, 1)}, TypeError, "say how to build one, got a Linear that is built"),
        ({"mechanism": "rcp"}, ValueError, "Did you mean 'rpc'"),
        ({"mechanism": lambda spec: None}, TypeError, "cannot be stored in a checkpoint"),
        ({"optimizer": lambda params: None}, TypeError, "cannot be stored in a checkpoint"),
        ({"scheduler": "LinearRL"}, ValueError, "looked in torch.optim.lr_scheduler"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, or None for all tokens, got 0"),
        ({"scheduler_interval": "batch"}, ValueError, "'step' or 'epoch', got 'batch'"),
    ],
)
def test_bad_arguments(options, error, text):
    with pytest.raises(error, match=text):
        task(**options)


def states(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


DROPOUT = {**SMALL, "init_args": {**SMALL["init_args"], "dropout": 0.2}}


def fit(folder, *callbacks, seed=5, ckpt_path=None):
    """The weights after three epochs of four steps."""
    pl.seed_everything(seed, verbose=False)
    module = task(model=DROPOUT, scheduler={"class_path": "LinearLR", "init_args": {"total_iters": 10}})
    keep = ModelCheckpoint(dirpath=folder / "kept", save_last=True)
    run = trainer(folder, max_epochs=3, callbacks=[keep, *callbacks])
    run.fit(module, RandomText(), ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return states(module)


def test_same_seed_same_numbers(tmp_path):
    first, second, other = fit(tmp_path / "a"), fit(tmp_path / "b"), fit(tmp_path / "c", seed=6)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.head.weight"], other["model.head.weight"])


class Killed(RuntimeError):
    pass


class KillAt(pl.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, run, module, batch, batch_idx):
        if run.global_step == self.step:
            raise Killed


def test_killed_and_resumed_ends_as_if_nothing_had_happened(tmp_path):
    """Killed within the third epoch, resumed from the end of the second; dropout goes on as it would have."""
    with pytest.raises(Killed):
        fit(tmp_path / "killed", KillAt(9))
    last = tmp_path / "killed" / "kept" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 8
    whole = fit(tmp_path / "whole")
    resumed = fit(tmp_path / "resumed", seed=7, ckpt_path=last)  # another seed, which must not matter
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_a_vocabulary_below_that_of_the_data_is_refused(tmp_path):
    task = LanguageModelingTask(model={"class_path": "TransformerLM", "init_args": SMALL}, vocab_size=VOCAB - 1)
    with pytest.raises(ValueError, match=f"vocab_size={VOCAB - 1} is below the {VOCAB} ids"):
        trainer(tmp_path).fit(task, RandomText())


TOO_SHORT = {
    "gpt2": {**GPT2, "n_positions": 7},
    "own": {**SMALL, "init_args": {**SMALL["init_args"], "num_tokens": 7}},
}


@pytest.mark.parametrize("data", [DemoText, RandomText], ids=["at the start", "at the first batch"])
@pytest.mark.parametrize("model", TOO_SHORT)
def test_windows_longer_than_the_model_takes_are_refused(model, data, tmp_path):
    pytest.importorskip("transformers")
    text = r"windows have 8 tokens and \w+ has 7 positions.*(n_positions|larger num_tokens)"
    run, module = trainer(tmp_path), task(model=TOO_SHORT[model])
    with pytest.raises(ValueError, match=text):
        run.fit(module, data())
    assert (module.model is None) == (data is DemoText)
    with pytest.raises(ValueError, match=text):
        run.predict(task(model=TOO_SHORT[model], vocab_size=VOCAB), data())


def test_a_pretrained_model_that_cannot_be_reached_names_the_cure(monkeypatch):
    transformers = pytest.importorskip("transformers")

    def fail(name, **options):
        raise OSError(f"no network\nfor {name}")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ValueError, match=r"'nobody/gpt' .*\(OSError: no network for nobody/gpt\).*folder of a saved"):
        built(model="nobody/gpt")


def test_positions_of_roberta_begin_behind_that_of_padding():
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 30,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    config = transformers.AutoConfig.for_model("roberta", **sizes, max_position_embeddings=34, pad_token_id=1)
    model = transformers.AutoModel.from_config(config)
    assert position_limit(model) == 32
    model(torch.full((1, 32), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, 33), 5))
    assert position_limit(transformers.AutoModel.from_config(transformers.BertConfig(**sizes))) == 512


def test_rope_takes_windows_of_any_length(tmp_path):
    pytest.importorskip("transformers")
    trainer(tmp_path, max_steps=1, limit_val_batches=0).fit(task(model=LLAMA), DemoText())


@pytest.mark.parametrize(
    ("mechanism", "options", "key"), [("rpc", {}, "qkv.weight"), ("scaled", {"variant": "scalar"}, "mechanism")]
)
def test_resuming_a_plain_run_of_our_own_model_names_the_cure_which_works(mechanism, options, key, tmp_path):
    plain, path = task(), tmp_path / "plain.ckpt"
    run = trainer(tmp_path, max_steps=1, limit_val_batches=0)
    run.fit(plain, RandomText())
    run.save_checkpoint(path)
    other = {"mechanism": mechanism, "options": options}
    with pytest.raises(ValueError, match=rf"is built with .*not as they were: .*{key}.*--init_from"):
        trainer(tmp_path, max_steps=2).fit(task(**other), RandomText(), ckpt_path=path)
    started = task(**other)
    start = InitFromCheckpoint(str(path))
    trainer(tmp_path, max_steps=0, callbacks=[start], limit_val_batches=0).fit(started, RandomText())
    own, taken = plain.model.layers[0].attn, started.model.layers[0].attn
    assert torch.equal(taken.qkv.weight, own.qkv.weight[-len(taken.qkv.weight) :])
    assert torch.equal(taken.proj.weight, own.proj.weight)


def test_resuming_a_run_without_a_query_with_plain_attention_promises_no_weights(tmp_path):
    run = trainer(tmp_path, max_steps=1, limit_val_batches=0)
    run.fit(task(mechanism="rpc"), RandomText())
    run.save_checkpoint(tmp_path / "rpc.ckpt")
    with pytest.raises(ValueError, match=r"is built with SoftmaxAttention.* that it was trained with$"):
        trainer(tmp_path, max_steps=2).fit(task(), RandomText(), ckpt_path=tmp_path / "rpc.ckpt")


@each_row("spec", [GPT2, LLAMA])
def test_resuming_a_plain_run_with_attention_without_a_query_is_refused(spec, tmp_path):
    pytest.importorskip("transformers")
    run = trainer(tmp_path, max_steps=1, limit_val_batches=0)
    run.fit(task(model=spec), RandomText())
    run.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match=r"now has RPCAttention.*(c_attn|q_proj).*--init_from"):
        trainer(tmp_path, max_steps=2).fit(
            task(model=spec, mechanism="rpc"), RandomText(), ckpt_path=tmp_path / "plain.ckpt"
        )
