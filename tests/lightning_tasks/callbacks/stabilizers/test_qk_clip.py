"""QKClip limits logits after each step, and nothing else."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.nn.functional import linear
from torch.utils.data import DataLoader

from attention_modules import build_mechanism, swap_attention
from lightning_tasks.callbacks import NonFiniteGuard, QKClip
from lightning_tasks.callbacks.stabilizers import qk_clip
from tests.lightning_tasks.callbacks.modules import (
    DIM,
    HEADS,
    TinyLM,
    TwoOptimizers,
    batches,
    fit,
    keeping,
    stepping,
    weights_of,
)
from tests.lightning_tasks.callbacks.stabilizers.ranks import TAU
from tests.rows import each_row


def attentions(module):
    return [layer.self_attn for layer in module.net["encoder"].layers]


def in_turn(*batches):
    """A loader of these batches."""
    return DataLoader(batches, batch_size=None)


def rows_of(module):
    """The rows of queries and keys of each layer."""
    return [layer.in_proj_weight[: 2 * DIM] for layer in attentions(module)]


class ClipsItself(TinyLM):
    """QK-clip of the weights and biases written into the module, for ``accumulate`` batches a step."""

    def __init__(self, tau, accumulate=1, alpha=0.5):
        super().__init__()
        self.tau, self.alpha, self.accumulate = tau, alpha, accumulate
        self.largest = torch.full((2, HEADS), -torch.inf)
        for index, layer in enumerate(attentions(self)):
            layer.register_forward_pre_hook(lambda layer, args, index=index: self.look(index, layer, args[0]))

    @torch.no_grad()
    def look(self, index, layer, x):
        q, k, _ = linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
        q, k = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k))
        logits = (q @ k.mT / (DIM // HEADS) ** 0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
        self.largest[index] = torch.maximum(self.largest[index], logits.amax((0, 2, 3)))

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if (batch_idx + 1) % self.accumulate and batch_idx != 4:
            return
        for layer, largest in zip(attentions(self), self.largest, strict=True):
            factor = (self.tau / largest).clamp(max=1.0).repeat_interleave(DIM // HEADS)
            for held in (layer.in_proj_weight, layer.in_proj_bias):
                column = factor.view(-1, *[1] * (held.ndim - 1))
                held[:DIM] *= column**self.alpha
                held[DIM : 2 * DIM] *= column ** (1 - self.alpha)
        self.largest.fill_(-torch.inf)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_equals_a_clip_written_into_the_module(accumulate):
    found, expected = TinyLM(), ClipsItself(TAU, accumulate, alpha=0.3)
    fit(found, [QKClip(TAU, alpha=0.3)], accumulate_grad_batches=accumulate, gradient_clip_val=0.5)
    fit(expected, accumulate_grad_batches=accumulate, gradient_clip_val=0.5)
    torch.testing.assert_close(weights_of(found), weights_of(expected), atol=1e-6, rtol=1e-5)
    plain = TinyLM()
    fit(plain, accumulate_grad_batches=accumulate, gradient_clip_val=0.5)
    assert (weights_of(found) - weights_of(plain)).abs().max() > 1e-3


@pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "looked at"])
def test_changes_no_bit_where_no_head_passes(bounded, monkeypatch):
    if not bounded:  # as on devices that must not be waited for
        monkeypatch.setattr(qk_clip, "logit_bound", lambda q, k, scale: torch.full(q.shape[:2], torch.inf))
    found, plain = TinyLM(), TinyLM()
    trainer = fit(found, [QKClip(tau=1e4)], max_epochs=2)
    fit(plain, max_epochs=2)
    assert torch.equal(weights_of(found), weights_of(plain))
    assert trainer.callback_metrics["qk_clip/clipped_heads"] == 0


def test_the_bound_changes_no_clip(monkeypatch):
    found, looked_at = TinyLM(), TinyLM()
    fit(found, [QKClip(TAU)])
    monkeypatch.setattr(qk_clip, "logit_bound", lambda q, k, scale: torch.full(q.shape[:2], torch.inf))
    fit(looked_at, [QKClip(TAU)])
    assert torch.equal(weights_of(found), weights_of(looked_at))


def test_every_n_steps_and_chosen_layers():
    found, plain = TinyLM(lr=0.0), TinyLM(lr=0.0)
    fit(found, [QKClip(TAU, every_n_steps=100, layers=[0])])
    once = weights_of(found)
    pairs = zip(attentions(found), attentions(plain), strict=True)
    assert [torch.equal(a.in_proj_weight, b.in_proj_weight) for a, b in pairs] == [False, True]
    found = TinyLM(lr=0.0)
    fit(found, [QKClip(TAU, layers=[0])], max_steps=1)
    assert torch.equal(weights_of(found), once)  # one look, at step 0


def test_a_mechanism_without_query_is_clipped_by_its_keys():
    module = TinyLM(lr=0.0)
    swap_attention(module, "symmetric")
    before = [layer.in_proj_weight.detach().clone() for layer in attentions(module)]
    trainer = fit(module, [QKClip(TAU, alpha=1.0)], max_steps=1)
    assert trainer.callback_metrics["qk_clip/clipped_heads"] == 2 * HEADS
    for layer, kept in zip(attentions(module), before, strict=True):
        ratio = (layer.in_proj_weight / kept)[:DIM].view(HEADS, -1)
        assert (ratio < 0.999).any(1).all()  # alpha = 1 would leave W_k as it is
        assert torch.equal(layer.in_proj_weight[DIM:], kept[DIM:])  # values


def test_a_swap_while_it_trains_is_followed():
    """The fused projection then has keys where its queries were."""

    class Swaps(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 1:
                swap_attention(pl_module, "symmetric")
                trainer.optimizers = [pl_module.configure_optimizers()]

    module = TinyLM(lr=0.0)
    values = [layer.in_proj_weight[2 * DIM :].detach().clone() for layer in attentions(module)]
    trainer = fit(module, [Swaps(), QKClip(TAU)], max_steps=2)
    assert trainer.callback_metrics["qk_clip/clipped_heads"] == 2 * HEADS
    for layer, kept in zip(attentions(module), values, strict=True):
        assert torch.equal(layer.in_proj_weight[DIM:], kept)


def test_with_manual_optimization():
    found, plain = TwoOptimizers(), TwoOptimizers()
    fit(found, [QKClip(TAU)])
    fit(plain)
    assert (weights_of(found) - weights_of(plain)).abs().max() > 1e-3


class TwoPaces(TinyLM):
    """Manual optimization: an optimizer of the head steps in every batch, that of all else in every second one."""

    def __init__(self, wrapped=True):
        super().__init__()
        self.automatic_optimization = False
        self.wrapped = wrapped

    def configure_optimizers(self):
        rest = [*self.net["embed"].parameters(), *self.net["encoder"].parameters()]
        return [torch.optim.SGD(self.net["head"].parameters(), lr=0.0), torch.optim.SGD(rest, lr=0.0)]

    def training_step(self, batch, batch_idx):
        of_head, of_rest = self.optimizers(use_pl_optimizer=self.wrapped)
        self.manual_backward(self.net["head"].weight.square().sum())
        of_head.step()
        self.manual_backward(super().training_step(batch, batch_idx) / 2)
        if batch_idx % 2:
            of_rest.step()
            of_rest.zero_grad()


@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "bare"])
@pytest.mark.parametrize("order", [1, -1])
def test_clips_by_all_batches_of_the_step_of_the_optimizer_that_holds_the_weights(order, wrapped):
    loader = in_turn(*list(batches(2))[::order])
    found, expected = TwoPaces(wrapped), TinyLM(lr=0.0)
    fit(found, [QKClip(TAU)], loader)
    fit(expected, [QKClip(TAU)], loader, accumulate_grad_batches=2)
    assert torch.equal(weights_of(found), weights_of(expected))
    assert not torch.equal(weights_of(found), weights_of(TinyLM()))


def test_a_look_is_used_by_the_step_that_follows_though_no_look_is_taken_there():
    found, expected = TwoPaces(), TinyLM(lr=0.0)
    fit(found, [QKClip(TAU, every_n_steps=2)], batches(2))
    fit(expected, [QKClip(TAU)], in_turn(next(iter(batches()))))
    assert torch.equal(weights_of(found), weights_of(expected))


@pytest.mark.parametrize("every_n_steps", [1, 2])
def test_what_is_seen_behind_a_step_counts_for_the_next_alone(every_n_steps):
    """The next one clips by it, unless no look is taken there: later ones do not."""

    class LooksAgain(TwoPaces):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, 1)
            if batch_idx == 0:
                with torch.no_grad():
                    self(torch.cat([inputs for inputs, _ in batches()]))

    first, second, third = batches(3)
    looks, expected = LooksAgain(), TinyLM(lr=0.0)
    fit(looks, [QKClip(TAU, every_n_steps=every_n_steps, layers=[0])], in_turn(first, second, third))
    if every_n_steps == 1:
        fit(expected, [QKClip(TAU, layers=[0])], in_turn(first))
        every = [torch.cat(parts) for parts in zip(*batches(), strict=True)]
        fit(expected, [QKClip(TAU, layers=[0])], in_turn(every))
    else:
        fit(expected, [QKClip(TAU, layers=[0])], in_turn(first, third))
    torch.testing.assert_close(weights_of(looks), weights_of(expected), atol=0, rtol=1e-5)


def test_batches_whose_step_the_module_leaves_out_count_nothing():
    second, first = batches(2)
    found, expected, both = stepping(TinyLM, lambda batch: batch == 1)(lr=0.0), TinyLM(lr=0.0), TinyLM(lr=0.0)
    fit(found, [QKClip(TAU)], in_turn(first, second))
    fit(expected, [QKClip(TAU)], in_turn(second))
    fit(both, [QKClip(TAU)], in_turn(first, second), accumulate_grad_batches=2)
    assert torch.equal(weights_of(found), weights_of(expected))
    assert not torch.equal(weights_of(found), weights_of(both))


def test_batches_that_the_module_gathers_itself_count():
    found, expected = keeping(TinyLM, 2)(lr=0.0), TinyLM(lr=0.0)
    second, first = batches(2)
    fit(found, [QKClip(TAU)], in_turn(first, second))
    fit(expected, [QKClip(TAU)], in_turn(first, second), accumulate_grad_batches=2)
    assert torch.equal(weights_of(found), weights_of(expected))


def test_each_of_several_steps_in_a_batch_clips():
    class ASampleAStep(TwoPaces):
        def training_step(self, batch, batch_idx):
            for sample in zip(*(part.split(1) for part in batch), strict=True):
                super().training_step(sample, 1)

    found, expected = ASampleAStep(), TinyLM(lr=0.0)
    fit(found, [QKClip(TAU)], batches(1))
    fit(expected, [QKClip(TAU)], batches(2, 1))
    assert torch.equal(weights_of(found), weights_of(expected))


def test_a_pass_for_a_gradient_of_the_modules_own_counts_nothing():
    class Probes(TinyLM):
        def training_step(self, batch, batch_idx):
            inputs, _ = batch
            with torch.no_grad():
                self.net["embed"].weight.mul_(30)
            torch.autograd.grad(self(inputs).square().mean(), [self.net["head"].weight])
            with torch.no_grad():
                self.net["embed"].weight.div_(30)
            return super().training_step(batch, batch_idx)

    found, expected = Probes(lr=0.0), TinyLM(lr=0.0)
    for module in (found, expected):
        fit(module, [QKClip(TAU)], batches(1))
    torch.testing.assert_close(weights_of(found), weights_of(expected))


class Poisoned(TinyLM):
    """Its second loss is NaN."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if batch_idx == 1 else loss


@pytest.mark.parametrize("fused", [False, True], ids=["scaler's step", "fused step"])
@pytest.mark.parametrize("by", ["guard before", "guard after", "scaler"])
@pytest.mark.filterwarnings("ignore:skipped step")
def test_a_step_that_is_skipped_clips_nothing(by, fused):
    found, expected = Poisoned(lr=0.0, fused=fused), TinyLM(lr=0.0, fused=fused)
    guard, options = NonFiniteGuard("skip"), []
    callbacks = {"guard before": [guard, QKClip(TAU)], "guard after": [QKClip(TAU), guard], "scaler": [QKClip(TAU)]}
    for _ in range(2):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        options.append({"plugins": [MixedPrecision("16-mixed", "cpu", scaler)] if by == "scaler" else []})
    first, second, third = batches(3)
    fit(found, callbacks[by], in_turn(first, second, third), **options[0])
    fit(expected, [QKClip(TAU)], in_turn(first, third), **options[1])
    assert torch.equal(weights_of(found), weights_of(expected))
    assert not torch.equal(weights_of(found), weights_of(TinyLM()))


def test_weights_that_are_frozen_later_are_left_alone():
    class Freezes(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 1:
                attentions(pl_module)[0].requires_grad_(False)

    found, earlier = TinyLM(), TinyLM()
    fit(found, [Freezes(), QKClip(TAU)], max_steps=2)
    fit(earlier, [QKClip(TAU)], max_steps=1)
    stays, moves = (torch.equal(*pair) for pair in zip(*map(rows_of, (found, earlier)), strict=True))
    assert (stays, moves) == (True, False)


def test_weights_that_no_optimizer_holds_are_warned_of():
    class HeadAlone(TinyLM):
        def configure_optimizers(self):
            return torch.optim.SGD(self.net["head"].parameters(), lr=0.0)

    module = HeadAlone()
    with pytest.warns(UserWarning, match=r"none holds the weights of 'net.encoder.layers.0.self_attn'.*exclude="):
        fit(module, [QKClip(TAU)], max_steps=1)
    assert torch.equal(weights_of(module), weights_of(TinyLM()))


class Wrapped(torch.optim.Optimizer):
    """Has an optimizer of its own, which is the one that is stepped, as SAM's published form does."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.inner.param_groups


class StepsInside(TinyLM):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return Wrapped(self.parameters())

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers().optimizer.inner
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Parted(StepsInside):
    """Keys have an optimizer of their own."""

    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": DIM, "num_attention_heads": HEADS, "num_hidden_layers": 1, "intermediate_size": DIM}
        self.net["encoder"] = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=10))

    def configure_optimizers(self):
        keys = [one for name, one in self.named_parameters() if ".key." in name]
        rest = [one for name, one in self.named_parameters() if ".key." not in name]
        return [torch.optim.SGD(part, lr=0.1) for part in (keys, rest)]

    def training_step(self, batch, batch_idx):
        output = self.net["encoder"](inputs_embeds=self.net["embed"](batch[0])).last_hidden_state
        self.manual_backward(output.square().mean())
        for optimizer in self.optimizers():
            optimizer.step()


@pytest.mark.parametrize(
    ("make", "said"),
    [(StepsInside, "has seen no step of the trainer's optimizers"), (Parted, "lie in several optimizers")],
)
def test_steps_that_do_not_clip_are_warned_of(make, said, recwarn):
    with pytest.warns(UserWarning, match=f"QKClip.*{said}"):
        fit(make(), [QKClip(TAU)], max_steps=2)
    recwarn.clear()
    fit(TinyLM(), [QKClip(TAU)], max_steps=2)
    assert not [each for each in recwarn if "QKClip" in str(each.message)]


def test_layers_that_have_one_mechanism_between_them_are_refused():
    module, made = TinyLM(), []

    def one(spec):
        made[:] = made or [build_mechanism("softmax", spec)]
        return made[0]

    for layer in module.net["encoder"].layers:
        swap_attention(layer, one)
    with pytest.raises(ValueError, match=r"QKClip tells layers apart.*layers\.0.*layers\.1.*build one for each"):
        fit(module, [QKClip(TAU)], max_steps=1)


class LooksBehind(TwoPaces):
    """Shows all batches behind the last step of the second epoch."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, 1)
        seen = torch.cat([inputs for inputs, _ in batches()])
        if self.current_epoch == 1:
            self.manual_backward(0 * self(seen).sum())


@pytest.mark.parametrize(("make", "count"), [(TinyLM, 5), (LooksBehind, 1)])
def test_a_resumed_run_is_the_same_run(make, count, tmp_path):
    """Also where a step clips by what a layer showed behind the last one, before the checkpoint."""
    straight, half, resumed = make(), make(), make()
    fit(straight, [QKClip(TAU)], batches(count), max_epochs=4)
    fit(half, [QKClip(TAU)], batches(count), max_epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=4, accelerator="cpu", logger=False, callbacks=[QKClip(TAU)], **quiet)
    trainer.fit(resumed, batches(count), ckpt_path=tmp_path / "half.ckpt")
    assert torch.equal(weights_of(resumed), weights_of(straight))
    assert not torch.equal(weights_of(resumed), weights_of(half))


def test_what_other_heads_showed_counts_nothing(tmp_path):
    fit(LooksBehind(), [QKClip(TAU)], batches(1), max_epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    resumed = []
    for callbacks in ([], [QKClip(1e6)]):
        module = LooksBehind()
        for layer in module.net["encoder"].layers:
            layer.self_attn.num_heads, layer.self_attn.head_dim = 1, DIM
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pl.Trainer(max_epochs=3, accelerator="cpu", callbacks=callbacks, **quiet)
        trainer.fit(module, batches(1), ckpt_path=tmp_path / "half.ckpt")
        resumed.append(weights_of(module))
    assert torch.equal(*resumed)


def test_a_second_one_is_refused_by_name():
    with pytest.raises(ValueError, match="2 callbacks QKClip"):
        fit(TinyLM(), [QKClip(layers=[0]), QKClip(layers=[1])])


def test_layers_that_cannot_be_clipped_are_refused_by_name():
    module = TinyLM()
    swap_attention(module, "qk_norm", layers=[1])
    with pytest.raises(ValueError, match=r"'net.encoder.layers.1.self_attn' \(the logits of QKNormAttention.*exclude="):
        fit(module, [QKClip()])
    fit(module, [QKClip(exclude=["*.1.*"])], max_steps=1)
    module = TinyLM()
    attentions(module)[0].in_proj_weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"layers.0.self_attn' \(its weights are frozen"):
        fit(module, [QKClip()])


@each_row(
    ("options", "message"),
    [
        ({"tau": 0}, "tau must be above 0, got 0"),
        ({"tau": -1.0}, "tau .* at least 0, got -1.0"),
        ({"tau": 10**400}, "tau .* at least 0, got 1000"),
        ({"alpha": 1.5}, "alpha .* at most 1, got 1.5"),
        ({"every_n_steps": 0}, "every_n_steps .* got 0"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        QKClip(**options)
