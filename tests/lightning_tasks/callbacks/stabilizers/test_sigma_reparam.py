"""SigmaReparam trains γ/σ(W) W, with the callbacks that read weights, and survives checkpoints."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from torch.nn.utils import parametrize

from attention_modules.hosts import attention_layers
from attention_modules.stabilizers.sigma import plain_state, renew_averaged, reparametrizations, sigma_reparametrize
from datamodules import DigitsDataModule
from lightning_tasks import load_swapped
from lightning_tasks.callbacks import (
    AttentionMonitor,
    FreezeQK,
    LocAteR,
    QKClip,
    SigmaReparam,
    SpectrumMonitor,
    SwapAttention,
)
from lightning_tasks.image_classification import ImageClassificationTask
from tests.lightning_tasks.callbacks.locater_cells import GAMMA, TARGET, WEIGHT, callback, naive_penalty
from tests.lightning_tasks.callbacks.modules import (
    DIM,
    BuildsInConfigureModel,
    BuildsInSetup,
    TinyLM,
    batches,
    fit,
    weights_of,
)
from tests.rows import each_row

QUIET = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, "logger": False}


def attentions(module):
    return [layer.self_attn for layer in module.net["encoder"].layers]


class NaiveSigma(TinyLM):
    """γ/σ(W) W written into the forward of the attention layers, σ by SVD."""

    def __init__(self, penalty=False):
        super().__init__()
        self.penalty = penalty
        self.gammas = torch.nn.ParameterList()
        for layer in attentions(self):
            for weight in (layer.in_proj_weight, layer.out_proj.weight):
                self.gammas.append(torch.linalg.matrix_norm(weight.detach(), 2))
        for layer in attentions(self):
            for owner, name in ((layer, "in_proj_weight"), (layer.out_proj, "weight")):
                parametrize.register_parametrization(owner, name, Spectral(self.gammas[self._next()]))

    def _next(self):
        self.count = getattr(self, "count", -1) + 1
        return self.count

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + (naive_penalty(self) if self.penalty else 0.0)


class Spectral(torch.nn.Module):
    def __init__(self, gamma):
        super().__init__()
        self.held = [gamma]

    def forward(self, weight):
        return self.held[0] / torch.linalg.matrix_norm(weight, 2) * weight


def many_steps(module, batch_idx=None):
    """As many steps of the power iteration as SVD is worth."""
    for _ in range(300):
        for owner, tensor, part in reparametrizations(module):
            part.step(owner.parametrizations[tensor].original)


class ToTheEnd(SigmaReparam):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        many_steps(pl_module)


@pytest.mark.parametrize("penalty", [False, True], ids=["alone", "with LocAteR"])
def test_trains_the_equation(penalty):
    found, expected, plain = TinyLM(), NaiveSigma(penalty), TinyLM()
    callbacks = [ToTheEnd(), callback()] if penalty else [ToTheEnd()]
    fit(found, callbacks)
    fit(expected, accumulate_grad_batches=1)
    fit(plain, callbacks[1:])
    for one, other, without in zip(*map(attentions, (found, expected, plain)), strict=True):
        for a, b, c in (
            (one.in_proj_weight, other.in_proj_weight, without.in_proj_weight),
            (one.out_proj.weight, other.out_proj.weight, without.out_proj.weight),
        ):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
            assert (a - c).abs().max() > 1e-4
    assert (callback().weight, callback().gamma, callback().mean_target) == (WEIGHT, GAMMA, TARGET)


@pytest.mark.parametrize("kind", [TinyLM, BuildsInSetup, BuildsInConfigureModel])
def test_a_resumed_run_is_the_same_run(kind, tmp_path):
    def callbacks():
        return [SwapAttention("symmetric", layers=[0]), SigmaReparam(all_linear=True), AttentionMonitor(2)]

    straight, resumed = kind(), kind()
    fit(straight, callbacks(), max_epochs=4)
    fit(kind(), callbacks(), max_epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    trainer = pl.Trainer(max_epochs=4, accelerator="cpu", callbacks=callbacks(), **QUIET)
    trainer.fit(resumed, batches(), ckpt_path=tmp_path / "half.ckpt")
    assert torch.equal(weights_of(resumed), weights_of(straight))
    tested = kind()
    trainer = pl.Trainer(accelerator="cpu", callbacks=callbacks(), **QUIET)
    trainer.test(tested, batches(), ckpt_path=tmp_path / "half.ckpt", verbose=False)
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in tested.state_dict().items())


def test_the_plain_checkpoint_loads_and_the_way_back():
    module = TinyLM()
    fit(module, [SigmaReparam()])
    state = module.state_dict()
    assert "net.encoder.layers.0.self_attn.parametrizations.in_proj_weight.original" in state
    plain = TinyLM()
    plain.load_state_dict(plain_state(state))
    inputs = next(iter(batches()))[0]
    torch.testing.assert_close(plain(inputs), module(inputs))
    module.load_state_dict(TinyLM().state_dict())
    torch.testing.assert_close(module(inputs), TinyLM()(inputs), atol=1e-5, rtol=1e-5)


def test_a_task_without_it_says_what_the_checkpoint_of_a_run_with_it_needs(tmp_path):
    sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2}
    task, data = ImageClassificationTask(model_options=sizes), DigitsDataModule()
    run = {**QUIET, "max_steps": 1, "accelerator": "cpu", "limit_val_batches": 1}
    trainer = pl.Trainer(**run, callbacks=[SigmaReparam()])
    trainer.fit(task, data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = ImageClassificationTask(model_options=sizes)
    with pytest.raises(ValueError, match=r"trainer\.callbacks\+=attnswap\.callbacks\.SigmaReparam with the options"):
        pl.Trainer(**run).validate(again, data, ckpt_path=tmp_path / "last.ckpt", verbose=False)
    pl.Trainer(**run, callbacks=[SigmaReparam()]).validate(again, data, ckpt_path=tmp_path / "last.ckpt", verbose=False)


def test_a_module_that_was_swapped_too_is_rebuilt(tmp_path):
    module = TinyLM()
    trainer = fit(module, [SwapAttention("symmetric", layers=[0]), SigmaReparam()])
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    rebuilt = load_swapped(TinyLM, tmp_path / "last.ckpt")
    inputs = next(iter(batches()))[0]
    assert torch.equal(rebuilt(inputs), module.eval()(inputs))
    assert len(list(reparametrizations(rebuilt))) == 4


def test_the_optimizer_has_gamma_and_the_spectrum_is_that_of_the_acting_weight():
    module = TinyLM(lr=0.0)
    trainer = fit(module, [SigmaReparam(gamma=1.0), SpectrumMonitor(every_n_steps=1)], max_steps=1)
    gammas = {id(part.gamma) for _, _, part in reparametrizations(module)}
    assert len(gammas) == 4  # two projections in two layers
    assert gammas <= {id(one) for group in trainer.optimizers[0].param_groups for one in group["params"]}
    w_q, w_k = attention_layers(module)[0].qk_weights()
    torch.testing.assert_close(torch.linalg.matrix_norm(attentions(module)[0].in_proj_weight, 2), torch.tensor(1.0))
    scale = (w_q.transpose(1, 2) @ w_k).square().sum((1, 2)).mean()
    torch.testing.assert_close(trainer.callback_metrics["qk_spectrum/scale/layer_00"], scale, check_dtype=False)


def test_a_gamma_that_an_optimizer_of_before_cannot_train_is_warned_of(recwarn):
    class Early(TinyLM):
        def __init__(self):
            super().__init__()
            self.early = torch.optim.SGD(self.parameters(), lr=0.1)

        def configure_optimizers(self):
            return self.early

    with pytest.warns(UserWarning, match=r"hold 4 weights and not the γ of these.*configure_optimizers"):
        fit(Early(), [SigmaReparam()], max_steps=1)

    class Head(TinyLM):
        def configure_optimizers(self):
            return torch.optim.SGD(self.net["embed"].parameters(), lr=0.1)

    with pytest.warns(UserWarning, match="no optimizer holds 4 of the 4 weights"):
        fit(Head(), [SigmaReparam()], max_steps=1)
    recwarn.clear()
    fit(TinyLM(), [SigmaReparam()], max_steps=1)
    assert not [each for each in recwarn if "SigmaReparam" in str(each.message)]


def test_watching_does_not_train_it():
    watched, alone = TinyLM(), TinyLM()
    fit(watched, [SigmaReparam(), SpectrumMonitor(1), LocAteR(0.1, observe_only=True), AttentionMonitor(1)])
    fit(alone, [SigmaReparam()])
    assert torch.equal(weights_of(watched), weights_of(alone))
    assert attention_layers(watched)[0].mechanism is None


@each_row("other", [lambda: QKClip(), lambda: FreezeQK()])
def test_what_changes_weights_itself_refuses_weights_that_are_computed(other):
    with pytest.raises(ValueError, match=r"computed (at each call|of several)"):
        fit(TinyLM(), [SigmaReparam(), other()])


def test_averages_of_weights_hold_it_or_are_refused():
    averaging = pl.callbacks.WeightAveraging
    module = TinyLM()
    average = averaging()
    fit(module, [SigmaReparam(), average])
    assert len(list(reparametrizations(module))) == 4
    for kind, callbacks in ((TinyLM, [averaging(), SigmaReparam()]), (BuildsInSetup, [SigmaReparam(), averaging()])):
        with pytest.raises(ValueError, match="would average a copy of the module without σReparam: list SigmaReparam"):
            fit(kind(), callbacks)


def test_an_average_of_weights_has_the_norm_that_it_learned():
    """The average of u and v is shorter than they are, and no singular vector of the averaged weight."""
    module, seen = TinyLM(lr=0.3), []
    callbacks = [SigmaReparam(gamma=1.0), pl.callbacks.EMAWeightAveraging(decay=0.9), Averages(seen)]
    fit(module, callbacks, max_epochs=20)
    assert min(seen) < 0.9995
    for owner, tensor, part in reparametrizations(module):
        norm = torch.linalg.matrix_norm(getattr(owner, tensor), 2)
        torch.testing.assert_close(norm, part.gamma.detach(), atol=0, rtol=1e-4)


class Averages(pl.Callback):
    """Keeps how long u is in the module as training ends, when it has the averaged weights."""

    def __init__(self, seen):
        self.seen = seen

    def on_train_end(self, trainer, pl_module):
        self.seen += [part.u.norm().item() for _, _, part in reparametrizations(pl_module)]


def test_u_and_v_of_an_average_are_made_anew_and_others_rest():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 4) for _ in range(2)]
    for layer in layers:
        sigma_reparametrize(layer, "weight", gamma=1.0)
    before = {name: value.clone() for name, value in layers[0].state_dict().items()}
    average = copy.deepcopy(layers[0])
    others = layers[1].state_dict()
    average.load_state_dict({name: (value + others[name]) / 2 for name, value in before.items()})
    norms = [torch.linalg.matrix_norm(average.weight, 2).item()]
    plain = plain_state(average.state_dict())["weight"]
    renew_averaged(average)
    renew_averaged(layers[0])
    norms += [torch.linalg.matrix_norm(each, 2).item() for each in (average.weight, plain)]
    assert norms[0] > 1.05
    assert norms[1:] == pytest.approx([1.0, 1.0], rel=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in layers[0].state_dict().items())
    with torch.no_grad():
        layers[0].parametrizations.weight[0].u.fill_(float("nan"))  # as of a run that diverged, which is shown
    renew_averaged(layers[0])


def test_all_linear_layers():
    module = TinyLM()
    fit(module, [SigmaReparam(all_linear=True)], max_steps=1)
    assert parametrize.is_parametrized(module.net["head"], "weight")
    assert len(list(reparametrizations(module))) == 2 * 4 + 1
    assert attentions(module)[0].in_proj_weight.shape == (3 * DIM, DIM)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
@pytest.mark.parametrize("kind", [TinyLM, BuildsInConfigureModel])
def test_half_precision_trains_and_resumes(kind, precision, tmp_path):
    def module():
        return kind(lr=0.01)

    straight, again, resumed = module(), module(), module()
    for one in (straight, again):
        fit(one, [SigmaReparam(all_linear=True)], max_epochs=2, precision=precision)
    assert straight.net["head"].weight.dtype == {"bf16-true": torch.bfloat16, "16-true": torch.float16}[precision]
    assert all(part.u.dtype == part.gamma.dtype == torch.float32 for _, _, part in reparametrizations(straight))
    assert weights_of(straight).isfinite().all()
    half = fit(module(), [SigmaReparam(all_linear=True)], max_epochs=1, precision=precision)
    half.save_checkpoint(tmp_path / "half.ckpt")
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", precision=precision, callbacks=[SigmaReparam(all_linear=True)], **QUIET
    )
    trainer.fit(resumed, batches(), ckpt_path=tmp_path / "half.ckpt")
    for name, tensor in straight.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
        assert torch.equal(resumed.state_dict()[name], tensor)


def tied(**options):
    """Two layers with one projection, and a head with the weight of the embedding."""
    module = TinyLM(**options)
    first, second = attentions(module)
    second.in_proj_weight, second.in_proj_bias = first.in_proj_weight, first.in_proj_bias
    module.net["head"].weight = module.net["embed"].weight
    return module


def test_layers_of_one_weight_have_one_sigma_or_are_refused(tmp_path):
    module = tied()
    fit(module, [SigmaReparam(all_linear=True, exclude=["net.head"])])
    first, second = attentions(module)
    assert torch.equal(first.in_proj_weight, second.in_proj_weight)
    assert not parametrize.is_parametrized(module.net["head"])
    back = tied()
    back.load_state_dict(plain_state(module.state_dict()))
    inputs = next(iter(batches()))[0]
    torch.testing.assert_close(back(inputs), module(inputs))
    with pytest.raises(ValueError, match=r"0\.self_attn\.in_proj_weight' is '.*1\.self_attn\.in_proj_weight' too"):
        fit(tied(), [SigmaReparam(layers=[0])])
    with pytest.raises(ValueError, match=r"'net\.head\.weight' is 'net\.embed\.weight' too"):
        fit(tied(), [SigmaReparam(all_linear=True)])


def test_linear_layers_are_left_out_by_name():
    module = TinyLM()
    fit(module, [SigmaReparam(all_linear=True, exclude=["*.1.*", "net.head"])], max_steps=1)
    names = {id(part): name for name, part in module.named_modules()}
    found = {names[id(owner)] for owner, _, _ in reparametrizations(module)}
    assert not any(".1." in name or "head" in name for name in found)
    assert "net.encoder.layers.0.linear1" in found
    with pytest.raises(ValueError, match="nothing_here"):
        fit(TinyLM(), [SigmaReparam(all_linear=True, exclude=["nothing_here"])])


@each_row(
    ("options", "message"),
    [
        ({"gamma": 0}, "gamma must be above 0, got 0"),
        ({"gamma": "one"}, "gamma, if not 'sigma', must be a finite number of at least 0, got 'one'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        SigmaReparam(**options)
