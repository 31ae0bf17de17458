"""LipschitzMonitor logs what local_lipschitz finds at the layer's own input."""

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from attention_modules import SelfAttention, swap_attention
from attention_modules.analysis import local_lipschitz
from attention_modules.hosts.layer_call import LayerCall
from lightning_tasks.callbacks import LipschitzMonitor
from tests.attention_modules.hosts.sdpa.own import Joint, SequenceFirst
from tests.lightning_tasks.callbacks.modules import VOCABULARY, TinyLM, batches
from tests.rows import each_row

TOKENS, DIM = 5, 8
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def inputs(count=12):
    return torch.randn(count, TOKENS, DIM, generator=torch.Generator().manual_seed(0))


class Ours(pl.LightningModule):
    def __init__(self, mechanism="softmax"):
        super().__init__()
        self.first = SelfAttention(DIM, 2, qkv_bias=True)
        self.second = SelfAttention(DIM, 2, mechanism)

    def validation_step(self, batch, batch_idx):
        x = batch[0] + self.first(batch[0], attn_mask=CAUSAL.to(batch[0].device))
        self.log("val/loss", self.second(x).square().mean())

    def training_step(self, batch, batch_idx):
        return self.second(self.first(batch[0])).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Torch(pl.LightningModule):
    """nn.MultiheadAttention, in either layout, with padding."""

    def __init__(self, batch_first):
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=batch_first)
        self.batch_first = batch_first

    def attend(self, x):
        padding = torch.zeros(len(x), TOKENS, dtype=torch.bool)
        padding[:, -1] = True
        x = x if self.batch_first else x.transpose(0, 1)
        out, _ = self.attention(x, x, x, key_padding_mask=padding, attn_mask=~CAUSAL, need_weights=False)
        return out if self.batch_first else out.transpose(0, 1)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.attend(batch[0]).square().mean())


def trainer(tmp_path, *callbacks, **options):
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        callbacks=list(callbacks),
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )


def loader():
    return DataLoader(TensorDataset(inputs()), batch_size=6)


def validate(module, tmp_path, **options):
    run = trainer(tmp_path, LipschitzMonitor(**options))
    run.validate(module, loader(), verbose=False)
    return run.callback_metrics


@pytest.mark.parametrize("mechanism", ["softmax", "rpc"])
@pytest.mark.parametrize("max_tokens", [3, None])
def test_it_logs_the_mean_over_the_first_samples(tmp_path, mechanism, max_tokens):
    torch.manual_seed(0)
    module = Ours(mechanism).eval()
    metrics = validate(module, tmp_path, num_samples=3, max_tokens=max_tokens, tol=1e-4, max_iter=50)
    x = inputs()[:3]
    second = (x + module.first(x, attn_mask=CAUSAL))[:, :max_tokens]
    mask = CAUSAL[:max_tokens, :max_tokens]
    expected = [
        local_lipschitz(lambda x: module.first(x, attn_mask=mask), x[:, :max_tokens], tol=1e-4),
        local_lipschitz(module.second, second, tol=1e-4),
    ]
    for index, found in enumerate(expected):
        torch.testing.assert_close(metrics[f"val/lipschitz/layer_{index:02d}"], found.value.mean(), rtol=1e-3, atol=0)
        assert metrics[f"val/lipschitz_residual/layer_{index:02d}"] <= 1e-4
    assert not any(part._forward_pre_hooks for part in module.modules())
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("max_tokens", [3, None])
@pytest.mark.parametrize("batch_first", [False, True])
def test_torch_attention_in_both_layouts(tmp_path, batch_first, max_tokens):
    torch.manual_seed(0)
    module = Torch(batch_first).eval()
    metrics = validate(module, tmp_path, num_samples=2, max_tokens=max_tokens, tol=1e-4, max_iter=50)
    x = inputs()[:2, : TOKENS - 1]  # the last token is padding

    # Causal: the first tokens' outputs depend on those alone.
    def fn(cut):
        return module.attend(nn.functional.pad(cut, (0, 0, 0, TOKENS - cut.shape[1])))[:, : cut.shape[1]]

    expected = local_lipschitz(fn, x[:, :max_tokens], tol=1e-4).value.mean()
    torch.testing.assert_close(metrics["val/lipschitz/layer_00"], expected, rtol=1e-3, atol=0)


class Masked(SequenceFirst):
    """It does not run on a sequence alone."""

    def forward(self, x, given):
        return super().forward(x) + 0 * given


class Own(pl.LightningModule):
    """A layer of a class of the user's own, plain, or with a mechanism of which the output is the same."""

    def __init__(self, kind, mechanism=None):
        super().__init__()
        torch.manual_seed(0)
        self.attention = kind()
        if kind is Masked:
            self.example_input_array = torch.zeros(3, TOKENS, 16)
        if mechanism is not None:
            swap_attention(self, mechanism)

    def forward(self, x):
        x = x if isinstance(self.attention, Joint) else x.transpose(0, 1)
        return self.attention(x, *[x] * isinstance(self.attention, Masked))

    def validation_step(self, batch, batch_idx):
        self(torch.cat([batch[0], batch[0].sin()], -1))


@pytest.mark.parametrize("max_tokens", [3, None])
@pytest.mark.parametrize("mechanism", [None, "softmax"])
@pytest.mark.parametrize("kind", [SequenceFirst, Masked])
def test_sequence_first_layers_of_a_class_of_ones_own(tmp_path, kind, mechanism, max_tokens):
    options = {"num_samples": 2, "max_tokens": max_tokens, "tol": 1e-4, "max_iter": 50}
    expected, found = (validate(Own(each, mechanism), tmp_path, **options) for each in (Joint, kind))
    torch.testing.assert_close(found["val/lipschitz/layer_00"], expected["val/lipschitz/layer_00"], rtol=1e-3, atol=0)


class Padded(pl.LightningModule):
    """An encoder that evaluates with nested tensors, as PyTorch's do by default; the last token is hidden."""

    def __init__(self, nested):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(DIM, 2, DIM, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)

    def validation_step(self, batch, batch_idx):
        padding = (torch.arange(TOKENS) == TOKENS - 1).expand(len(batch[0]), TOKENS)
        out = self.encoder(batch[0], src_key_padding_mask=padding)
        self.log_dict({"val/loss": out[:, 0].square().mean(), "val/padded": out[:, -1].square().sum()})


def test_layers_that_get_nested_tensors_are_measured_on_padded_ones(tmp_path):
    nested = Padded(True)
    metrics = validate(nested, tmp_path, max_iter=8)
    wanted = validate(Padded(False), tmp_path, max_iter=8)
    assert metrics.pop("val/padded") == 0 < wanted.pop("val/padded")  # as they are without a monitor
    torch.testing.assert_close(metrics, wanted)
    assert "val/lipschitz/layer_01" in metrics
    assert nested.encoder.use_nested_tensor


def test_a_nested_tensor_from_elsewhere_is_refused():
    x = torch.nested.nested_tensor([torch.randn(count, DIM) for count in (2, 3)])
    with pytest.raises(
        ValueError, match=r"nested tensor.*set use_nested_tensor of the nn\.TransformerEncoder to False"
    ):
        LayerCall.of(nn.MultiheadAttention(DIM, 2, batch_first=True), (x, x, x), {})


@each_row("by_name", [False, True])
def test_keys_from_elsewhere_are_refused_by_name(tmp_path, by_name):
    """With its keys held, a layer on reduced keys would be measured by its query alone."""

    class Reduced(Torch):
        def attend(self, x):
            keys = x[:, ::2]
            given = {"key": keys, "value": keys} if by_name else {}
            return self.attention(x, *(() if by_name else (keys, keys)), **given)[0]

    with pytest.raises(ValueError, match=r"'attention': its key \(6, 3, 8\) is another .* \(6, 5, 8\).*exclude"):
        validate(Reduced(batch_first=True), tmp_path)


def gpt2():
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    return transformers.GPT2Model(config)


class Text(pl.LightningModule):
    """A causal language model, given its first tokens only where asked."""

    def __init__(self, model, tokens):
        super().__init__()
        self.model, self.tokens = model, tokens

    def validation_step(self, batch, batch_idx):
        self.model(batch[0][:, : self.tokens])  # GPT-2 keeps a cache


@pytest.mark.parametrize("build", [gpt2, TinyLM], ids=["gpt2", "encoder"])
def test_cut_is_as_if_the_causal_sequence_ended_there(tmp_path, build):
    torch.manual_seed(0)
    model = build().eval()
    found = []
    for given, max_tokens in ((3, None), (6, 3), (6, None)):
        run = trainer(tmp_path, LipschitzMonitor(tol=1e-4, max_iter=50, max_tokens=max_tokens))
        run.validate(Text(model, given), batches(1, 4), verbose=False)
        found.append([run.callback_metrics[f"val/lipschitz/layer_{index:02d}"].item() for index in range(2)])
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    assert found[2] != pytest.approx(found[0], rel=1e-3)


def test_rotary_embeddings_are_cut_along_tokens_alone(tmp_path):
    """With as many tokens as features a head their last dimension is no dimension of tokens."""
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=12, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model, found = transformers.LlamaModel(config).eval(), []
    for given, max_tokens in ((3, None), (6, 3)):
        run = trainer(tmp_path, LipschitzMonitor(tol=1e-4, max_iter=50, max_tokens=max_tokens))
        run.validate(Text(model, given), batches(1, 4), verbose=False)
        found.append(run.callback_metrics["val/lipschitz/layer_00"].item())
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_an_empty_batch_is_said_and_not_logged(tmp_path):
    run = trainer(tmp_path, LipschitzMonitor())
    with pytest.warns(UserWarning, match="LipschitzMonitor on 'first', 'second': it got no sample.* nothing is logged"):
        run.validate(Ours().eval(), DataLoader([[inputs()[:0]], [inputs()]], batch_size=None), verbose=False)
    assert not any("lipschitz" in name for name in run.callback_metrics)


def test_only_every_so_many_validations(tmp_path):
    seen = []

    class Record(pl.Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            seen.append(monitor.fired)
            monitor.fired = False

    class Counting(LipschitzMonitor):
        fired = False

        def _log(self, *args):
            self.fired = True
            super()._log(*args)

    monitor = Counting(every_n_validations=2, layers=[1], num_samples=1)
    run = trainer(tmp_path, monitor, Record(), max_epochs=3, num_sanity_val_steps=1, limit_val_batches=1)
    run.fit(Ours(), loader(), loader())
    assert seen == [False, True, False, True]  # the sanity check, then three validations
    assert "val/lipschitz/layer_01" in run.callback_metrics
    assert "val/lipschitz/layer_00" not in run.callback_metrics
    run.save_checkpoint(tmp_path / "three.ckpt")
    seen.clear()
    monitor = Counting(every_n_validations=2, layers=[1], num_samples=1)
    resumed = trainer(tmp_path, monitor, Record(), max_epochs=5, num_sanity_val_steps=0, limit_val_batches=1)
    resumed.fit(Ours(), loader(), loader(), ckpt_path=tmp_path / "three.ckpt", weights_only=True)
    assert seen == [False, True]  # the fourth and the fifth
    for _ in range(2):
        seen.clear()
        again = trainer(tmp_path, monitor, Record(), max_epochs=1, num_sanity_val_steps=0, limit_val_batches=1)
        again.fit(Ours(), loader(), loader())
        assert seen == [True]  # the first of another run


def test_a_validation_that_is_cut_short_does_not_count(tmp_path):
    class Cut(pl.Callback):
        def on_validation_batch_end(self, trainer, pl_module, *_):
            raise RuntimeError("cut")

    monitor = LipschitzMonitor(every_n_validations=2, num_samples=1)
    with pytest.raises(RuntimeError, match="cut"):
        trainer(tmp_path, monitor, Cut(), num_sanity_val_steps=0).fit(Ours(), loader(), loader())
    assert monitor.state_dict() == {"validations": 0}


def test_bfloat16_weights_and_activations(tmp_path):
    torch.manual_seed(0)
    run = trainer(tmp_path, LipschitzMonitor(), precision="bf16-true")
    run.validate(Ours(), loader(), verbose=False)
    assert run.callback_metrics["val/lipschitz/layer_00"].isfinite()


def test_what_has_not_converged_is_warned_of(tmp_path):
    both = r"'first' \(4 of 4 samples\), 'second' \(4 of 4 samples\)"
    with pytest.warns(UserWarning, match=f"{both}: not converged after 1 iterations"):
        metrics = validate(Ours(), tmp_path, max_iter=1, tol=1e-6)
    assert metrics["val/lipschitz_residual/layer_00"] > 1e-6


class Broken(Ours):
    def validation_step(self, batch, batch_idx):
        self.first(batch[0] * float("nan"))


class Uncalled(Ours):
    def validation_step(self, batch, batch_idx):
        self.first(batch[0])


def test_nan_activations_are_said_and_not_logged(tmp_path):
    module = Broken()
    with pytest.warns(
        UserWarning, match="LipschitzMonitor on 'first': .* its input, .* holds NaN .* nothing is logged"
    ):
        metrics = validate(module, tmp_path)
    assert not any("lipschitz" in name for name in metrics)
    assert not any(part._forward_pre_hooks for part in module.modules())


def test_what_it_cannot_measure_ends_the_fit_before_its_first_epoch(tmp_path):
    class NotTokens(Ours):
        """Its first layer gets one sequence without a batch."""

        def __init__(self):
            super().__init__()
            self.first, self.steps = nn.MultiheadAttention(DIM, 2), 0

        def validation_step(self, batch, batch_idx):
            self.first(batch[0][0], batch[0][0], batch[0][0])

        def training_step(self, batch, batch_idx):
            self.steps += 1
            return self.second(batch[0]).square().mean()

    module = NotTokens()
    run = trainer(tmp_path, LipschitzMonitor(max_tokens=3), max_epochs=1)
    with pytest.raises(ValueError, match=r"LipschitzMonitor on 'first': its input must be \[batch, .* with exclude"):
        run.fit(module, loader(), loader())
    assert module.steps == 0


class Picky(nn.Linear):
    """Takes what a function of its input does not refuse."""

    def __init__(self, linear, check):
        super().__init__(linear.in_features, linear.out_features)
        self.check = check

    def forward(self, x):
        self.check(x)
        return super().forward(x)


class Windows(Ours):
    """Needs whole sequences."""

    def __init__(self):
        super().__init__()
        for layer in (self.first, self.second):
            layer.qkv = Picky(layer.qkv, self.check)

    @staticmethod
    def check(x):
        if x.shape[1] != TOKENS:
            raise ValueError(f"windows are of {TOKENS} tokens")


def test_layers_of_one_number_of_tokens_are_looked_at_whole(tmp_path, recwarn):
    torch.manual_seed(0)
    module = Windows()
    run = trainer(tmp_path, LipschitzMonitor(max_tokens=3), max_epochs=2, num_sanity_val_steps=1)
    run.fit(module, loader(), loader())
    (said,) = [str(one.message) for one in recwarn if "max_tokens" in str(one.message)]
    assert f"on 'first' ({TOKENS} tokens), 'second' ({TOKENS} tokens): works only with as many" in said
    assert "in place of the first 3" in said
    assert "`max_tokens: null`" in said
    expected = {name: value for name, value in validate(module, tmp_path, max_tokens=None).items() if "lip" in name}
    found = {name: value for name, value in validate(module, tmp_path, max_tokens=3).items() if "lip" in name}
    assert len(found) == 4
    assert found == expected


def test_rope_of_a_grid_of_patches(tmp_path):
    """As in timm's eva and DINOv3: 261 tokens, of which 256 have a rotary embedding."""
    layers = pytest.importorskip("timm.layers.attention")

    class Rope(Ours):
        def __init__(self):
            super().__init__()
            self.first = layers.AttentionRope(DIM, num_heads=2, num_prefix_tokens=5)

        def validation_step(self, batch, batch_idx):
            generator = torch.Generator().manual_seed(0)
            self.first(torch.randn(1, 261, DIM, generator=generator), rope=torch.randn(256, DIM, generator=generator))

    module = Rope()
    values = [
        validate(module, tmp_path, max_tokens=count, max_iter=2, layers=[0])["val/lipschitz/layer_00"]
        for count in (256, None)
    ]
    assert values[0] == values[1]


def test_an_error_of_a_whole_sequence_is_not_put_down_to_its_length(tmp_path):
    class Refuses(Ours):
        def __init__(self):
            super().__init__()
            self.first.qkv = Picky(self.first.qkv, self.check)

        @staticmethod
        def check(x):
            if x.requires_grad:
                raise ValueError("no gradients here")

    with pytest.raises(ValueError, match=r"^LipschitzMonitor on 'first': no gradients here$"):
        validate(Refuses(), tmp_path)


def test_a_layer_that_is_not_called_is_said(tmp_path):
    with pytest.warns(UserWarning, match="'second': it was not called"):
        metrics = validate(Uncalled(), tmp_path)
    assert "val/lipschitz/layer_00" in metrics
    assert "val/lipschitz/layer_01" not in metrics


@each_row("name", ["every_n_validations", "num_samples", "max_tokens", "max_iter", "tol"])
def test_limits(name):
    with pytest.raises(ValueError, match=f"{name} must be .*got 0"):
        LipschitzMonitor(**{name: 0})
    with pytest.raises(ValueError, match=f"{name} must be .*got '1'"):
        LipschitzMonitor(**{name: "1"})


def test_hooks_of_users_do_not_see_its_calls(tmp_path):
    counts = []
    for callbacks in ([], [LipschitzMonitor(max_iter=2)]):
        module, seen = TinyLM(), []
        for layer in module.net["encoder"].layers:
            layer.self_attn.register_forward_hook(lambda *given, seen=seen: seen.append(1))
            layer.self_attn.out_proj.register_forward_hook(lambda *given, seen=seen: seen.append(1))
        trainer(tmp_path, *callbacks).validate(module, batches(2), verbose=False)
        counts.append(len(seen))
    assert counts[0] == counts[1] > 0


def generating(name, mechanism, **how):
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    short = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    kinds = {
        "llama": ("LlamaForCausalLM", {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2}),
        "cohere2": ("Cohere2ForCausalLM", {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2}),
        "t5": ("T5ForConditionalGeneration", {"d_model": 16, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 4}),
        "bart": ("BartForConditionalGeneration", {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2}),
    }
    kind, sizes = kinds[name]
    if name in ("llama", "cohere2"):
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    if name == "bart":
        sizes |= {f"{part}_{what}": 4 for part in ("encoder", "decoder") for what in ("attention_heads", "ffn_dim")}
    if name in ("t5", "bart"):
        sizes |= {"decoder_start_token_id": 0}
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, kind).config_class(**short, **sizes)).eval()
    if mechanism is not None:
        swap_attention(model, mechanism)
    return Generating(model, how)


class Generating(pl.LightningModule):
    def __init__(self, model, how):
        super().__init__()
        self.model, self.how = model, how

    def validation_step(self, batch, batch_idx):
        mask = torch.ones_like(batch)
        mask[0, :2] = 0
        self.out = self.model.generate(batch, attention_mask=mask, max_new_tokens=4, do_sample=False, **self.how)


@each_row(
    ("name", "mechanism"),
    [
        *(("llama", each) for each in (None, "sink", "gated_delta")),
        *(("cohere2", each) for each in (None, "softmax", "forgetting", "gated_delta")),
        *(("t5", each) for each in (None, "softmax")),
        *(("bart", each) for each in (None, "sink")),
    ],
)
@pytest.mark.parametrize("max_tokens", [3, None])
def test_the_prompt_of_a_generation_with_a_cache_is_looked_at_without_it(tmp_path, name, mechanism, max_tokens):
    """The witness: the same generation with use_cache=False, and its tokens without the monitor."""
    tokens = DataLoader(torch.randint(2, 40, (3, 6), generator=torch.Generator().manual_seed(3)), 3)
    found = []
    for how in ({"use_cache": False}, {}, {"cache_implementation": "static", "disable_compile": True}):
        module, alone = generating(name, mechanism, **how), generating(name, mechanism, **how)
        run = trainer(tmp_path, LipschitzMonitor(max_tokens=max_tokens))
        run.validate(module, tokens, verbose=False)
        trainer(tmp_path).validate(alone, tokens, verbose=False)
        assert torch.equal(module.out, alone.out)
        found.append({key: value.item() for key, value in run.callback_metrics.items()})
    assert len(found[0]) >= 4
    assert found[1] == pytest.approx(found[0], rel=1e-3, abs=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-3, abs=1e-6)


def test_a_layer_that_continues_from_a_full_cache_alone_is_said(tmp_path):
    class Continuing(Generating):
        def validation_step(self, batch, batch_idx):
            model = self.model.model
            past = self.past
            model(batch[0], past_key_values=past)

    module = Continuing(generating("llama", "sink").model, {})
    with torch.no_grad():
        module.past = module.model(torch.ones(4, 2, dtype=torch.long)).past_key_values
    run = trainer(tmp_path, LipschitzMonitor())
    with pytest.warns(UserWarning, match="not called on its own in the first batch .or with a full cache alone"):
        run.validate(module, batches(1, 4), verbose=False)
    assert not run.callback_metrics
    assert module.past.get_seq_length() == 8
    given = {"hidden_states": torch.ones(4, 1, 16), "past_key_values": module.past}
    with pytest.raises(ValueError, match="it continues from a key-value cache"):
        LayerCall.of(module.model.model.layers[0].self_attn, (), given)


class Remembering(Joint):
    """Keeps what it is given in an object of its caller's, and attends to that, too."""

    def forward(self, x, memory=None):
        if memory is not None:
            memory.calls.append(x.detach().clone())
            x = torch.cat([*memory.calls[:-1], x], 1)
        return super().forward(x)


@pytest.mark.parametrize("by_name", [False, True])
def test_an_object_that_a_layer_writes_is_copied_for_each_call(tmp_path, by_name):
    """The witness: the layer without it."""

    class Owner(Own):
        def __init__(self, remembers):
            super().__init__(Remembering, "softmax")
            self.memory = SimpleNamespace(calls=[]) if remembers else None

        def forward(self, x, memory=None):
            return self.attention(x, memory=memory) if by_name else self.attention(x, memory)

        def validation_step(self, batch, batch_idx):
            self(torch.cat([batch[0], batch[0].sin()], -1), self.memory)

    options = {"num_samples": 6, "tol": 1e-4, "max_iter": 50}
    module = Owner(True)
    found, wanted = validate(module, tmp_path, **options), validate(Owner(False), tmp_path, **options)
    assert len(module.memory.calls) == 2  # one for each batch
    torch.testing.assert_close(found["val/lipschitz/layer_00"], wanted["val/lipschitz/layer_00"], rtol=1e-3, atol=0)
