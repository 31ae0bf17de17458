from collections import OrderedDict

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from attention_modules.hosts import attention_layers
from lightning_tasks import LanguageModelingTask
from lightning_tasks.callbacks import LocAteR, QKClip
from lightning_tasks.callbacks.controls import FreezeQK, QKWeightDecay, qk_entries
from tests.lightning_tasks.callbacks.modules import fit as trained
from tests.lightning_tasks.language_data import SMALL, VOCAB, RandomText, trainer
from tests.rows import each_row

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 1,
    "n_embd": 8,
    "n_head": 2,
    "n_positions": 8,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT2 |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
DIM = 8


def task(model=SMALL, mechanism="softmax", **options):
    torch.manual_seed(1)
    optimizer = {"class_path": "AdamW", "init_args": {"lr": 0.1, "weight_decay": 0.0}}
    return LanguageModelingTask(model, optimizer=optimizer, vocab_size=VOCAB, mechanism=mechanism, **options)


def fit(folder, *callbacks, steps=1, **options):
    module = task(**options)
    run = trainer(folder, max_steps=steps, max_epochs=-1, callbacks=list(callbacks), limit_val_batches=0)
    run.fit(module, RandomText())
    return module


def before(**options):
    module = task(**options)
    module.configure_model()
    return module


def qkv(module):
    return module.model.layers[0].attn.qkv.weight.detach()


def test_frozen_rows_stay_and_value_rows_train_as_without(tmp_path):
    frozen, free, initial = fit(tmp_path, FreezeQK()), fit(tmp_path), before()
    assert torch.equal(qkv(frozen)[: 2 * DIM], qkv(initial)[: 2 * DIM])
    assert not torch.equal(qkv(free)[: 2 * DIM], qkv(initial)[: 2 * DIM])
    for (name, one), other in zip(frozen.named_parameters(), free.parameters(), strict=True):
        rows = slice(2 * DIM, None) if name.endswith("qkv.weight") else slice(None)
        assert torch.equal(one[rows], other[rows]), name


def test_frozen_rows_survive_weight_decay_and_many_steps(tmp_path):
    rules = [{"match": "*qkv.weight", "weight_decay": 0.5}]
    frozen = fit(tmp_path, FreezeQK(), steps=6, param_groups=rules)
    assert torch.equal(qkv(frozen)[: 2 * DIM], qkv(before())[: 2 * DIM])


def test_frozen_rows_take_no_part_in_clipping(tmp_path):
    module = task()
    norms = []

    class Norm(FreezeQK):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            super().on_before_optimizer_step(trainer, pl_module, optimizer)
            norms.append(qkv_gradient(pl_module)[: 2 * DIM].abs().max().item())

    trainer(tmp_path, max_steps=1, max_epochs=-1, callbacks=[Norm()], gradient_clip_val=0.1).fit(module, RandomText())
    assert norms == [0.0]


def qkv_gradient(module):
    return module.model.layers[0].attn.qkv.weight.grad


def test_decay_is_that_of_adamw_on_query_and_key_rows_alone(tmp_path):
    plain = fit(tmp_path)
    control = fit(tmp_path, QKWeightDecay(0.3))
    everywhere = fit(tmp_path, param_groups=[{"match": "*qkv.weight", "weight_decay": 0.3}])
    torch.testing.assert_close(qkv(control)[: 2 * DIM], qkv(everywhere)[: 2 * DIM])
    assert not torch.allclose(qkv(control)[: 2 * DIM], qkv(plain)[: 2 * DIM])
    for (name, one), other in zip(control.named_parameters(), plain.parameters(), strict=True):
        rows = slice(2 * DIM, None) if name.endswith("qkv.weight") else slice(None)
        assert torch.equal(one[rows], other[rows]), name


def test_a_decay_that_fades_is_that_of_smaller_and_smaller_decays(tmp_path):
    """Where the loss is zero, only the decay moves the weights."""

    class Zero(LanguageModelingTask):
        def training_step(self, batch, batch_idx):
            return 0 * super().training_step(batch, batch_idx)

    def run(*callbacks):
        torch.manual_seed(1)
        optimizer = {"class_path": "SGD", "init_args": {"lr": 0.1}}
        module = Zero(SMALL, optimizer=optimizer, vocab_size=VOCAB)
        trainer(tmp_path, max_steps=6, max_epochs=-1, callbacks=list(callbacks), limit_val_batches=0).fit(
            module, RandomText()
        )
        return qkv(module)[: 2 * DIM]

    factor = torch.tensor([1 - 0.1 * 0.3 * (1 - step / 4) for step in range(4)]).prod()
    torch.testing.assert_close(run(QKWeightDecay(0.3, fade_steps=4)), run() * factor)


def test_no_decay_changes_nothing(tmp_path):
    first, second = fit(tmp_path, QKWeightDecay(0.0), steps=3), fit(tmp_path, steps=3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_transposed_projection_of_gpt2(tmp_path):
    pytest.importorskip("transformers")
    frozen, initial = fit(tmp_path, FreezeQK(), model=GPT2), before(model=GPT2)
    now, then = (module.model.transformer.h[0].attn.c_attn.weight for module in (frozen, initial))  # [in, out]
    assert torch.equal(now[:, : 2 * DIM], then[:, : 2 * DIM])
    assert not torch.equal(now[:, 2 * DIM :], then[:, 2 * DIM :])


def test_symmetric_attention_has_key_rows_only():
    module = before(mechanism="symmetric")
    ((parameter, mask),) = qk_entries(attention_layers(module))
    assert parameter is module.model.layers[0].attn.qkv.weight
    assert mask[:DIM].all()
    assert not mask[DIM:].any()


def test_frozen_already_is_an_error():
    module = before()
    module.model.layers[0].attn.qkv.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"model.layers.0.attn.*do not require gradients"):
        qk_entries(attention_layers(module))


def test_fading_over_no_steps_is_an_error():
    with pytest.raises(ValueError, match="fade_steps must be an integer of at least 1, got 0"):
        QKWeightDecay(0.1, fade_steps=0)


@each_row("value", [-0.1, float("inf"), float("nan"), "1", None, True])
def test_bad_weight_decay(value):
    with pytest.raises(ValueError, match="weight_decay must be a finite number of at least 0"):
        QKWeightDecay(value)


@each_row("order", [1, -1])
def test_freezing_what_locater_trains_is_refused(tmp_path, order):
    with pytest.raises(ValueError, match=r"whatever LocAteR does to model\.layers\.0\.attn.*observe_only=True"):
        fit(tmp_path, *[FreezeQK(), LocAteR(0.1)][::order])


@each_row("other", [QKClip(), QKWeightDecay(0.1)])
def test_freezing_what_another_callback_changes_is_refused(tmp_path, other):
    with pytest.raises(ValueError, match=rf"whatever {type(other).__name__} does to model\.layers\.0\.attn"):
        fit(tmp_path, other, FreezeQK())


def test_freezing_behind_an_average_is_refused(tmp_path):
    with pytest.raises(ValueError, match="list FreezeQK before EMAWeightAveraging"):
        fit(tmp_path, EMAWeightAveraging(), FreezeQK())


@pytest.mark.parametrize("other", [{"observe_only": True}, {"layers": [1]}])
def test_freezing_beside_a_locater_that_trains_something_else(tmp_path, other):
    model = {**SMALL, "init_args": {**SMALL["init_args"], "num_layers": 2}}
    frozen = fit(tmp_path, FreezeQK(layers=[0]), LocAteR(0.1, **other), model=model)
    assert torch.equal(qkv(frozen)[: 2 * DIM], qkv(before(model=model))[: 2 * DIM])


class Network(pl.LightningModule):
    def __init__(self, optimizer, size=1.0):
        super().__init__()
        self.layer, self.optimizer, self.size = nn.MultiheadAttention(8, 2), optimizer, size

    def training_step(self, batch, batch_idx):
        return self.layer(batch, batch, batch)[0].square().sum() * self.size

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


class TwoGradients(torch.optim.SGD):
    """Asks for the gradients twice in a step, as sharpness-aware minimization does."""

    def step(self, closure=None):
        closure()
        return super().step(closure)


def factor(module, *plugins):
    """What a step of no length leaves of W_q and W_k."""
    before = module.layer.in_proj_weight.detach()[:16].clone()
    trained(module, [QKWeightDecay(0.5)], DataLoader(torch.randn(4, 5, 8), 4), plugins=[*plugins])
    return (module.layer.in_proj_weight.detach()[:16] / before).median().item()


def test_a_step_that_asks_for_several_gradients_decays_once():
    steps = {
        "one": lambda parameters: torch.optim.SGD(parameters, 0.1),
        "two": lambda parameters: TwoGradients(parameters, 0.1),
        "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, 0.1, max_iter=5),
    }
    found = {name: factor(Network(optimizer, size=1e-9)) for name, optimizer in steps.items()}
    assert found == pytest.approx(dict.fromkeys(steps, 0.95), abs=1e-4)


@pytest.mark.parametrize("how", ["wrapped", "raw", "closure"])
def test_a_step_by_hand_decays_once(how):
    class ByHand(Network):
        def __init__(self, optimizer, size):
            super().__init__(optimizer, size)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers(use_pl_optimizer=how == "wrapped")
            optimizer.zero_grad()

            def backward():
                self.manual_backward(super(ByHand, self).training_step(batch, batch_idx))

            optimizer.step(backward if how == "closure" else backward())

    module = ByHand(lambda parameters: torch.optim.SGD(parameters, 0.1), size=1e-9)
    assert factor(module) == pytest.approx(0.95, abs=1e-4)


def test_another_optimizers_steps_count_for_no_fading():
    class Alternates(Network):
        def __init__(self):
            super().__init__(None)
            self.automatic_optimization, self.other = False, nn.Linear(8, 8)

        def training_step(self, batch, batch_idx):
            own, other = self.optimizers()
            for optimizer in (other, other, own):
                optimizer.zero_grad()
                self.manual_backward(self.other(self.layer(batch, batch, batch)[0]).sum() * 1e-9)
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(each.parameters(), 0.1) for each in (self.layer, self.other)]

    module = Alternates()
    before = module.layer.in_proj_weight.detach()[:16].clone()
    trained(module, [QKWeightDecay(0.5, fade_steps=4)], DataLoader(torch.randn(4, 5, 8), 1))
    expected = (1 - 0.05) * (1 - 0.05 * 0.75) * (1 - 0.05 * 0.5) * (1 - 0.05 * 0.25)
    assert (module.layer.in_proj_weight.detach()[:16] / before).median().item() == pytest.approx(expected, abs=1e-5)


def test_a_fade_goes_on_in_a_resumed_run_and_in_a_used_trainer(tmp_path):

    def decays():
        return [QKWeightDecay(0.5, fade_steps=4), QKWeightDecay(0.0, layers=[0])]

    data = DataLoader(torch.randn(4, 5, 8), 1)
    module, resumed = (Network(lambda parameters: torch.optim.SGD(parameters, 0.1), size=0.0) for _ in range(2))
    run = trained(module, decays(), data)
    run.save_checkpoint(tmp_path / "a.ckpt")
    before = module.layer.in_proj_weight.detach().clone()
    run.fit_loop.max_epochs = 2
    run.fit(module, data)
    assert torch.equal(module.layer.in_proj_weight, before)
    trained(resumed, decays(), data, max_epochs=2, ckpt_path=str(tmp_path / "a.ckpt"))
    assert torch.equal(resumed.layer.in_proj_weight, before)


def test_another_optimizer_may_step_between_a_forward_and_its_backward():
    """As in adversarial training: the discriminator steps, and the generator's loss goes back through both."""

    class Between(Network):
        def __init__(self):
            super().__init__(None)
            self.automatic_optimization, self.critic = False, nn.Linear(8, 1)

        def training_step(self, batch, batch_idx):
            own, other = self.optimizers()
            made = self.layer(batch, batch, batch)[0]
            other.zero_grad()
            self.manual_backward(self.critic(made.detach()).sum())
            other.step()
            own.zero_grad()
            self.manual_backward(-self.critic(made).square().sum())
            own.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(each.parameters(), 0.1) for each in (self.layer, self.critic)]

    module = Between()
    before = module.layer.in_proj_weight.detach().clone()
    trained(module, [FreezeQK()], DataLoader(torch.randn(4, 5, 8), 2))
    assert torch.equal(module.layer.in_proj_weight[:16], before[:16])
    assert not torch.equal(module.layer.in_proj_weight[16:], before[16:])


def test_frozen_rows_are_as_they_were_between_the_steps_of_a_batch():
    class Twice(Network):
        def __init__(self):
            super().__init__(lambda parameters: torch.optim.AdamW(parameters, 0.1, weight_decay=1.0))
            self.automatic_optimization, self.seen = False, []

        def training_step(self, batch, batch_idx):
            for _ in range(3):
                self.seen.append(self.layer.in_proj_weight.detach().clone())
                loss = super().training_step(batch, batch_idx)
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()

    module = Twice()
    trained(module, [FreezeQK()], DataLoader(torch.randn(4, 5, 8), 4))
    assert all(torch.equal(each[:16], module.seen[0][:16]) for each in [*module.seen, module.layer.in_proj_weight])
    assert not torch.equal(module.seen[1][16:], module.seen[0][16:])


def test_a_step_that_a_gradient_scaler_leaves_out_decays_nothing():
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    module = Network(lambda parameters: torch.optim.SGD(parameters, 0.1), size=1e36)
    assert factor(module, scaled) == 1.0
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1.0))
    module = Network(lambda parameters: torch.optim.SGD(parameters, 0.1), size=1e-9)
    assert factor(module, scaled) == pytest.approx(0.95, abs=1e-4)


def test_a_step_that_a_fused_optimizer_leaves_out_decays_nothing():
    for size, left in ((1e36, 1.0), (1e-9, 0.95)):
        scaled = MixedPrecision(
            "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**16 if left == 1 else 1.0)
        )
        module = Network(lambda parameters: torch.optim.SGD(parameters, 0.1, fused=True), size=size)
        assert factor(module, scaled) == pytest.approx(left, abs=1e-4)


@pytest.mark.parametrize("hooks", [None, {}, OrderedDict()])
@pytest.mark.parametrize("callback", [QKWeightDecay(0.5), QKClip(1.0)])
def test_an_optimizer_whose_steps_call_no_hooks_is_refused(callback, hooks):
    class Around(torch.optim.Optimizer):
        def __init__(self, inside):
            self.param_groups, self.state, self.defaults, self.inside = inside.param_groups, {}, {}, inside
            if hooks is not None:
                self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = hooks

        def step(self, closure=None):
            return self.inside.step(closure)

    module = Network(lambda parameters: Around(torch.optim.SGD(parameters, 0.1)))
    before = module.layer.in_proj_weight.detach().clone()
    run = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"Around\.step\(\) calls no hooks of steps: give an optimizer that calls"):
        run.fit(module, DataLoader(torch.randn(4, 5, 8), 4))
    assert torch.equal(module.layer.in_proj_weight, before)

    def apart(parameters):
        first, *others = parameters
        module.automatic_optimization = False
        return torch.optim.SGD([first], 0.1), Around(torch.optim.SGD(others, 0.1))

    module.optimizer = apart
    run.fit(module, DataLoader(torch.randn(4, 5, 8), 4))  # one that does not hold them is no obstacle


class Adapted(nn.Linear):
    """LoRA of one's own."""

    def __init__(self, plain):
        super().__init__(plain.in_features, plain.out_features)
        self.down, self.up = nn.Linear(plain.in_features, 2), nn.Linear(2, plain.out_features)

    def forward(self, x):
        return super().forward(x) + self.up(self.down(x))


def replace_class(attention):
    attention.qkv = Adapted(attention.qkv)


class Beside(nn.Module):
    """The same that is no nn.Linear, as torchtune's."""

    def __init__(self, plain):
        super().__init__()
        self.weight, self.bias, self.adapted = plain.weight, plain.bias, Adapted(plain)

    def forward(self, x):
        return self.adapted(x)


def replace_by_another_class(attention):
    attention.qkv = Beside(attention.qkv)


def replace_forward(attention):
    """As LoRA does that leaves the layer where it is."""
    plain, more = attention.qkv.forward, nn.Linear(DIM, 3 * DIM)
    attention.qkv.forward = lambda x: plain(x) + more(x)


@pytest.mark.parametrize("adapt", [replace_class, replace_by_another_class, replace_forward])
@pytest.mark.parametrize("control", [FreezeQK, lambda: QKWeightDecay(0.1), lambda: LocAteR(0.1), lambda: QKClip(1.0)])
def test_weights_that_a_forward_of_one_s_own_adds_to_are_refused(control, adapt, tmp_path):
    module = before()
    adapt(module.model.layers[0].attn)
    run = trainer(tmp_path, max_steps=1, callbacks=[control()], limit_val_batches=0)
    with pytest.raises(ValueError, match="cannot be read, as it has a forward of its own: merge"):
        run.fit(module, RandomText())
