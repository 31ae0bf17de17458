"""Penalties of attention maps against the same penalties written into the loss."""

import math

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from attention_modules.stabilizers.naive import naive_diversification, naive_row_entropy
from attention_modules.swap import swap_attention
from lightning_tasks.callbacks import AttentionDiversification, EntropyRegularizer, LogitMonitor, QKClip
from tests.lightning_tasks.callbacks.modules import (
    DIM,
    PROMPTS,
    TOKENS,
    InTwoCalls,
    TinyLM,
    TwoOptimizers,
    batches,
    decoder,
    fit,
    weights_of,
)
from tests.rows import each_row, pairwise

FLOOR, WEIGHT = 0.95, 20.0


def naive_entropy_penalty(q, k, max_rows=None):
    """Σ over heads of the mean over samples of max(0, floor - h)², of causal maps."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    entropy = naive_row_entropy(q.to(dtype), k.to(dtype), is_causal=True)
    number = q.shape[2]
    kept = torch.arange(1, number)
    if max_rows is not None:
        kept = torch.linspace(0, number - 1, max_rows).round().long()
        kept = kept[kept > 0]  # the first row sees one key
    h = (entropy[..., kept] / (kept + 1).to(dtype).log()).mean(-1)
    return (FLOOR - h).clamp(min=0).square().mean(0).sum()


class InLoss:
    """Adds the penalty of every layer's map to the loss."""

    penalty = staticmethod(naive_entropy_penalty)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        swap_attention(self, "softmax")
        self.seen = []
        for layer in self.net["encoder"].layers:
            layer.self_attn.mechanism.register_forward_pre_hook(lambda _, args: self.seen.append(args[:2]))

    def added(self, loss):
        with torch.autocast("cpu", enabled=False):
            total = loss + WEIGHT * sum(self.penalty(*seen) for seen in self.seen)
        self.seen = []
        return total

    def training_step(self, batch, batch_idx):
        return self.added(super().training_step(batch, batch_idx))


class EntropyInLoss(InLoss, TinyLM):
    pass


class EntropyOfSomeRowsInLoss(EntropyInLoss):
    penalty = staticmethod(lambda q, k: naive_entropy_penalty(q, k, 3))


class DiversificationInLoss(InLoss, TinyLM):
    """The mean over two layers."""

    penalty = staticmethod(lambda q, k: naive_diversification(_wide(q), _wide(k), 1.0, is_causal=True) / 2)


def _wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def diversification():
    return AttentionDiversification(WEIGHT, threshold=1.0)


def entropy(**options):
    return EntropyRegularizer(WEIGHT, floor=FLOOR, **{"max_rows": None, **options})


KINDS = {
    "entropy": (entropy, EntropyInLoss),
    "some rows": (lambda: entropy(max_rows=3), EntropyOfSomeRowsInLoss),
    "diversification": (diversification, DiversificationInLoss),
}


def assert_same(found, expected, plain, atol):
    torch.testing.assert_close(weights_of(found), weights_of(expected), atol=atol, rtol=0)
    assert (weights_of(found) - weights_of(plain)).abs().max() > 1e-3


def all_three(kind, make=None, **options):
    make = make or (lambda in_loss: in_loss() if in_loss else TinyLM())
    callback, in_loss = KINDS[kind]
    found, expected, plain = make(None), make(in_loss), make(None)
    fit(found, [callback()], **options)
    fit(expected, **options)
    fit(plain, **options)
    return found, expected, plain


@pytest.mark.parametrize(
    ("kind", "precision", "accumulate", "clip"), pairwise(KINDS, ("64-true", "bf16-mixed"), (1, 3), (None, 0.5))
)
def test_equals_the_penalty_in_the_loss(kind, precision, accumulate, clip):
    options = {"precision": precision, "accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    assert_same(*all_three(kind, **options), atol=1e-6 if precision == "64-true" else 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_double_precision_equal_those_of_the_loss_form(kind):
    """To rounding, of every parameter."""
    grads = []

    class Keeps(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            grads.append({name: part.grad.clone() for name, part in pl_module.named_parameters()})

    callback, in_loss = KINDS[kind]
    for module, callbacks in ((TinyLM(), [callback()]), (in_loss(), []), (TinyLM(), [])):
        fit(module, [*callbacks, Keeps()], precision="64-true", max_steps=1)
    found, expected, plain = grads
    assert all(grad.dtype == torch.float64 for grad in found.values())
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-12, rtol=1e-9)
    assert any((found[name] - plain[name]).abs().max() > 1e-3 for name in plain)


def test_under_a_gradient_scaler():
    def trained(module, *callbacks):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        fit(module, callbacks, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        assert scaler.get_scale() == 2.0**10  # no step was skipped
        return module

    assert_same(trained(TinyLM(), entropy()), trained(EntropyInLoss()), trained(TinyLM()), atol=2e-3)


def test_with_manual_optimization():
    class ManualInLoss(InLoss, TwoOptimizers):
        training_step = TwoOptimizers.training_step

        def manual_backward(self, loss, *args, **kwargs):
            super().manual_backward(self.added(loss), *args, **kwargs)

    found, expected, plain = TwoOptimizers(), ManualInLoss(), TwoOptimizers()
    fit(found, [entropy()])
    fit(expected)
    fit(plain)
    assert_same(found, expected, plain, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_activation_checkpointing(reentrant):
    def checkpointed(in_loss):
        module = in_loss() if in_loss else TinyLM()
        for layer in module.net["encoder"].layers if in_loss is None else []:
            plain = layer.forward
            layer.forward = lambda *args, plain=plain, **kwargs: (
                checkpoint(plain, *args, use_reentrant=reentrant, **kwargs)
                if not reentrant
                else checkpoint(lambda x: plain(x, **kwargs), *args, use_reentrant=True)
            )
        return module

    found, expected, plain = all_three("entropy", checkpointed, max_steps=2)
    assert_same(found, expected, plain, atol=1e-5)


def test_logs_the_penalty_once(tmp_path):
    value = fit(TinyLM(), [entropy()], max_steps=1).callback_metrics["entropy_regularizer/penalty"]
    module = EntropyInLoss()
    plain = module.training_step(next(iter(batches())), 0) - TinyLM().training_step(next(iter(batches())), 0)
    assert value.item() == pytest.approx(plain.item(), rel=1e-4)


@pytest.mark.parametrize("kind", [entropy, diversification, lambda: LogitMonitor(1), lambda: QKClip(0.1)])
def test_a_pass_without_tokens_counts_nothing(kind):
    class SeesNothingToo(TinyLM):
        def training_step(self, batch, batch_idx):
            empty = self.net["encoder"](torch.zeros(2, 0, DIM)).sum()
            return super().training_step(batch, batch_idx) + empty

    found, expected = SeesNothingToo(), TinyLM()
    for module in (found, expected):
        fit(module, [kind()], max_steps=2)
    torch.testing.assert_close(weights_of(found), weights_of(expected))


def test_weight_zero_changes_no_bit_and_layers_are_plain_again():
    found, plain = TinyLM(), TinyLM()
    fit(found, [EntropyRegularizer(0.0)], max_epochs=2)
    fit(plain, max_epochs=2)
    assert torch.equal(weights_of(found), weights_of(plain))
    assert not any(hasattr(part, "mechanism") for part in found.modules())


def test_a_resumed_run_is_the_same_run(tmp_path):
    straight, resumed = TinyLM(), TinyLM()
    fit(straight, [entropy()], max_epochs=4)
    fit(TinyLM(), [entropy()], max_epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=4, accelerator="cpu", logger=False, callbacks=[entropy()], **quiet)
    trainer.fit(resumed, batches(), ckpt_path=tmp_path / "half.ckpt")
    assert torch.equal(weights_of(resumed), weights_of(straight))


def test_a_mechanism_without_a_query_is_penalized_at_its_keys():
    weights = []
    for callbacks in ([entropy()], []):
        module = TinyLM()
        swap_attention(module, "symmetric")
        fit(module, callbacks)
        weights.append(weights_of(module))
    assert (weights[0] - weights[1]).abs().max() > 1e-3


class OwnEntropyInLoss(EntropyInLoss):
    """Of ssmax's map, whose factor s is trained too."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        swap_attention(self, "ssmax")
        for layer in self.net["encoder"].layers:
            layer.self_attn.mechanism.register_forward_pre_hook(self.see)

    def see(self, mechanism, args):
        q, k = args[:2]
        number = torch.arange(1, q.shape[2] + 1).view(-1, 1)
        self.seen.append((q * mechanism.s.view(1, -1, 1, 1) * number.log(), k))


def test_the_map_that_acts_is_penalized_and_the_mechanisms_own_parameters_learn_of_it():
    written, attached, plain = OwnEntropyInLoss(), TinyLM(), TinyLM()
    for module in (attached, plain):
        swap_attention(module, "ssmax")
    fit(written)
    fit(attached, [entropy()])
    fit(plain)
    torch.testing.assert_close(weights_of(attached), weights_of(written), atol=1e-5, rtol=1e-5)
    starts = [module.net["encoder"].layers[0].self_attn.mechanism.s for module in (attached, written, plain)]
    torch.testing.assert_close(starts[0], starts[1])
    assert (starts[0] - starts[2]).abs().max() > 1e-4


@pytest.mark.parametrize("mechanism", ["l2", "forgetting", "sink", "rpc", "elliptical", "gated"])
def test_other_softmax_maps_are_penalized(mechanism):
    modules = TinyLM(), TinyLM()
    for module, callbacks in zip(modules, ([entropy()], []), strict=True):
        swap_attention(module, mechanism)
        fit(module, callbacks, precision="bf16-mixed")
    assert (weights_of(modules[0]) - weights_of(modules[1])).abs().max() > 1e-3


def test_layers_that_it_cannot_penalize_are_refused():
    for mechanism, name in (("sigmoid", "SigmoidAttention"), ("twicing", "TwicingAttention")):
        module = TinyLM()
        swap_attention(module, mechanism, layers=[0])
        with pytest.raises(ValueError, match=rf"of {name}\w* in 'net.encoder.layers.0.self_attn' is none.*exclude="):
            fit(module, [entropy()])
    module = TinyLM()
    module.requires_grad_(False)
    module.net["head"].requires_grad_(True)
    with pytest.raises(ValueError, match=r"layers.0.self_attn' take a gradient.*exclude="):
        fit(module, [entropy()])


@each_row(
    ("options", "message"),
    [
        ({"weight": -1.0}, "weight .* at least 0, got -1.0"),
        ({"weight": 1.0, "floor": 1.5}, "floor .* at most 1, got 1.5"),
        ({"weight": 1.0, "target": math.nan}, "target .* got nan"),
        ({"weight": 1.0, "floor": 0.1, "target": 0.2}, "not both: got floor=0.1 and target=0.2"),
        ({"weight": 1.0, "max_rows": 0}, "max_rows .* got 0"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        EntropyRegularizer(**options)


class Padded(TinyLM):
    """Whose first tokens are padding, where a batch says so; the penalty alone trains."""

    def training_step(self, batch, batch_idx):
        tokens, padding = batch
        hidden = torch.arange(tokens.shape[1]) < padding[:, None]
        return 0.0 * self.net["encoder"](self.net["embed"](tokens), src_key_padding_mask=hidden).sum()


@pytest.mark.parametrize(
    "callback",
    [
        lambda: EntropyRegularizer(WEIGHT, floor=FLOOR, max_rows=None),
        lambda: AttentionDiversification(WEIGHT, threshold=0.5),
    ],
)
def test_rows_of_padding_are_not_penalized(callback):
    tokens = batches(1, batch_size=1).dataset.tensors[0]
    alone, padded = Padded(), Padded()
    fit(alone, [callback()], DataLoader([(tokens[:, 2:], torch.tensor([0]))], batch_size=None))
    fit(padded, [callback()], DataLoader([(tokens, torch.tensor([2]))], batch_size=None))
    torch.testing.assert_close(weights_of(padded), weights_of(alone), rtol=1e-4, atol=1e-6)
    assert not torch.equal(weights_of(alone), weights_of(Padded()))


def test_without_a_query_a_call_that_continues_from_a_cache_is_penalized():
    penalized, plain = InTwoCalls(decoder()), InTwoCalls(decoder())
    for module in (penalized, plain):
        swap_attention(module, "symmetric")
    tokens = PROMPTS[1::2]  # those without padding
    callbacks = [EntropyRegularizer(WEIGHT, floor=FLOOR, max_rows=None)]
    fit(penalized, callbacks, DataLoader(tokens, batch_size=len(tokens)), max_steps=1)
    loss = plain.training_step(tokens, 0)
    for layer in plain.cache.layers:
        entropy = naive_row_entropy(layer.keys, layer.keys, is_causal=True)
        for rows in (torch.arange(1, 4), torch.arange(4, TOKENS)):  # of the two calls; the first row sees one key
            h = (entropy[..., rows] / (rows + 1).log()).mean(-1)
            loss = loss + WEIGHT * (FLOOR - h).clamp(min=0).square().mean(0).sum()
    loss.backward()
    plain.configure_optimizers().step()
    torch.testing.assert_close(weights_of(penalized), weights_of(plain), rtol=1e-4, atol=1e-5)
