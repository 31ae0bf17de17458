"""LocAteR adds its penalty to the loss, whatever else the trainer does."""

import json
import math
import warnings
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.plugins import MixedPrecision
from torch.nn.utils import prune

from attention_modules.hosts import attention_layers
from attention_modules.swap import swap_attention
from lightning_tasks.callbacks import LocAteR, QKClip, SpectrumMonitor
from lightning_tasks.language_modeling import LanguageModelingTask
from tests.lightning_tasks.callbacks.locater_cells import (
    CELLS,
    PenaltyInLoss,
    callback,
    difference,
    naive_penalty,
    validation_entropy,
)
from tests.lightning_tasks.callbacks.modules import (
    DIM,
    HEADS,
    TOKENS,
    VOCABULARY,
    TinyLM,
    TwoOptimizers,
    batches,
    fit,
    keeping,
    network,
    stepping,
    weights_of,
)
from tests.lightning_tasks.programs import run_ranks
from tests.rows import each_row

TOLERANCE = 2e-6
ROOT = Path(__file__).parents[3]


def assert_same_but_for_rounding(to_loss, to_neither):
    """Equal to the penalty in the loss to float precision, and the penalty matters."""
    assert to_loss < TOLERANCE
    assert to_neither > 1e-3


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_equals_the_penalty_in_the_loss(cell):
    assert_same_but_for_rounding(
        difference(cell), difference(cell, other=TinyLM)
    )  # five batches: a window of two ends short


@pytest.fixture(scope="module")
def two_processes():
    """What two processes report, which run every cell and one monitored validation."""
    outputs = run_ranks("tests.lightning_tasks.callbacks.locater_cells")
    report = json.loads(outputs[0].splitlines()[-1])
    assert report["world"] == 2
    return report


def test_equals_the_penalty_in_the_loss_in_two_processes(two_processes):
    assert len(two_processes["results"]) == len(CELLS)
    assert max(two_processes["results"]) < TOLERANCE


def test_sharded_layers_get_the_gradient_of_whole_ones(two_processes):
    assert two_processes["sharded"] < TOLERANCE


def test_validation_entropy_of_two_processes_is_that_of_one(two_processes):
    assert two_processes["entropy"] == pytest.approx(validation_entropy(), rel=1e-5)


def test_two_optimizers_each_get_their_own_parameters():
    class InLoss(TwoOptimizers):
        def manual_backward(self, loss, *args, **kwargs):
            super().manual_backward(loss + naive_penalty(self), *args, **kwargs)

    found, expected, without = TwoOptimizers(), InLoss(), TwoOptimizers()
    fit(found, [callback()])
    fit(expected)
    fit(without)
    difference_to = [(weights_of(found) - weights_of(other)).abs().max().item() for other in (expected, without)]
    assert_same_but_for_rounding(*difference_to)


def test_steps_that_it_does_not_see_are_warned_of():
    class Raw(TwoOptimizers):
        def optimizers(self, use_pl_optimizer=False):
            return super().optimizers(use_pl_optimizer)

    with pytest.warns(UserWarning, match=r"LocAteR has seen no step .* without use_pl_optimizer=False"):
        fit(Raw(), [callback()])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="LocAteR has seen no step")
        fit(TwoOptimizers(), [callback()])


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_under_a_gradient_scaler(fused):
    """A fused optimizer is given scaled gradients and unscales them itself."""

    def trained(kind, *callbacks):
        module = kind(fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        fit(module, callbacks, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        assert scaler.get_scale() == 2.0**10  # no step was skipped
        return weights_of(module)

    found = trained(TinyLM, callback())
    assert_same_but_for_rounding(
        (found - trained(PenaltyInLoss)).abs().max().item(), (found - trained(TinyLM)).abs().max().item()
    )


def test_a_resumed_run_is_the_same_run(tmp_path):
    def locater():
        return LocAteR(0.05, gamma=1.0, mean_target="initial")

    straight = TinyLM()
    fit(straight, [locater()], max_epochs=4)
    first = fit(TinyLM(), [locater()], max_epochs=2)
    first.save_checkpoint(tmp_path / "half.ckpt")
    torch.load(tmp_path / "half.ckpt", weights_only=True)
    resumed = TinyLM()
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[locater()],
    )
    trainer.fit(resumed, batches(), ckpt_path=tmp_path / "half.ckpt")
    assert torch.equal(weights_of(resumed), weights_of(straight))


def test_initial_mean_is_that_of_the_start():
    module = TinyLM()
    w_q, w_k, _ = module.net["encoder"].layers[0].self_attn.in_proj_weight.detach().clone().chunk(3)
    locater = LocAteR(0.01, gamma=1.0)
    fit(module, [locater], max_epochs=2)
    traces = locater.state_dict()["initial_traces"]
    assert list(traces) == ["net.encoder.layers.0.self_attn", "net.encoder.layers.1.self_attn"]
    torch.testing.assert_close(traces["net.encoder.layers.0.self_attn"], (w_q * w_k).sum(1).view(2, -1).sum(1))


def test_logs_the_penalty_of_the_weights_before_the_step():
    module = TinyLM()
    expected = naive_penalty(module).item()
    trainer = fit(module, [callback()], max_steps=1)
    assert trainer.callback_metrics["locater/penalty"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("locater", [callback(observe_only=True), LocAteR(0.0)], ids=["observe_only", "zero"])
def test_neutral_settings_change_nothing(locater):
    found, plain = TinyLM(), TinyLM()
    trainer = fit(found, [locater])
    fit(plain)
    assert torch.equal(weights_of(found), weights_of(plain))
    assert (trainer.callback_metrics["locater/penalty"] > 0) == (locater.weight > 0)


def test_only_the_chosen_layers_are_pulled():
    found, plain = TinyLM(), TinyLM()
    fit(found, [LocAteR(0.05, layers=[1])], max_steps=1)
    fit(plain, max_steps=1)
    same = [
        torch.equal(a.self_attn.in_proj_weight, b.self_attn.in_proj_weight)
        for a, b in zip(found.net["encoder"].layers, plain.net["encoder"].layers, strict=True)
    ]
    assert same == [True, False]


def test_trace_scale():
    """On a symmetric mechanism's weights tr W² is ‖W‖_F², so both train alike."""
    trained = []
    for scale in ("trace", "frobenius"):
        module = TinyLM()
        swap_attention(module, "symmetric")
        fit(module, [LocAteR(0.05, scale=scale)], max_steps=2)
        trained.append(weights_of(module))
    torch.testing.assert_close(*trained, atol=1e-6, rtol=1e-5)


@each_row(
    ("options", "message"),
    [
        ({"weight": -1.0}, "weight .* at least 0, got -1.0"),
        ({"weight": math.nan}, "weight .* got nan"),
        ({"weight": math.inf}, "weight .* got inf"),
        ({"weight": True}, "weight .* got True"),
        ({"weight": "1"}, "weight .* got '1'"),
        ({"weight": 1.0, "scale": "nuclear"}, "'frobenius', 'trace', got 'nuclear'"),
        ({"weight": 1.0, "gamma": -2.0}, "gamma .* got -2.0"),
        ({"weight": 1.0, "mean_target": "first"}, "mean_target, if not 'initial', must be a finite number, got"),
        ({"weight": 1.0, "mean_target": -math.inf}, "mean_target, .* got -inf"),
        ({"weight": 1.0, "mean_target": 5.0}, "mean_target is 5.0, and gamma=0 leaves the mean free: give gamma=1"),
        ({"weight": 1.0, "mean_target": ["initial"]}, r"mean_target, .* got \['initial'\]"),
        ({"weight": 1.0, "scale": ["trace"]}, r"scale must be one of 'frobenius', 'trace', got \['trace'\]"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        LocAteR(**options)


def test_frozen_layers_are_an_error():
    module = TinyLM()
    module.net["encoder"].layers[1].self_attn.in_proj_weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"net.encoder.layers.1.self_attn.*exclude="):
        fit(module, [callback()])
    fit(module, [callback(exclude=["*.layers.1.*"])])


def test_pruned_weights_are_an_error_that_says_so():
    module = TinyLM()
    for layer in module.net["encoder"].layers:
        prune.l1_unstructured(layer.self_attn, "in_proj_weight", amount=0.5)
    with pytest.raises(ValueError, match=r"layers.0.self_attn': the in_proj_weight of .* is no Parameter \(pruning"):
        fit(module, [LocAteR(0.1)])


@pytest.mark.parametrize("callback", [LocAteR(0.1), QKClip(1e-3)])
def test_weights_that_are_pruned_in_the_fit_end_it(callback):
    module = TinyLM()
    pruning = ModelPruning(
        "l1_unstructured",
        parameters_to_prune=[(layer.self_attn, "in_proj_weight") for layer in module.net["encoder"].layers],
        amount=0.5,
        use_global_unstructured=False,
        apply_pruning=lambda epoch: epoch == 1,
    )
    with pytest.raises(ValueError, match=r"layers.0.self_attn': the in_proj_weight of .* is no Parameter \(pruning"):
        fit(module, [callback, pruning], max_epochs=4)


def test_weights_that_no_optimizer_holds_are_an_error():
    class HeadOnly(TinyLM):
        def configure_optimizers(self):
            return torch.optim.SGD(self.net["head"].parameters(), lr=0.1)

    with pytest.raises(ValueError, match="in no optimizer"):
        fit(HeadOnly(), [callback()])


def test_nothing_matched_is_an_error():
    with pytest.raises(ValueError, match="blocks"):
        fit(TinyLM(), [callback(where="blocks.*")])


@each_row("name", ["FSDPStrategy", "DeepSpeedStrategy"])
def test_strategies_that_hide_gradients_are_refused(name):
    trainer = SimpleNamespace(strategy=type(name, (), {})())
    with pytest.raises(ValueError, match="DDP"):
        callback().setup(trainer, TinyLM(), "fit")
    callback(observe_only=True).setup(trainer, TinyLM(), "fit")


def test_a_spectrum_that_is_not_the_weights_is_a_warning(monkeypatch):
    from attention_modules.hosts import AttentionLayer

    monkeypatch.setattr(AttentionLayer, "spectrum_caveat", property(lambda self: "rope turns q and k"))
    with pytest.warns(UserWarning, match="rope turns q and k"):
        fit(TinyLM(), [callback()], max_steps=1)


def test_a_spectrum_that_is_not_the_weights_is_one_warning_for_all_layers(monkeypatch, recwarn):
    from attention_modules.hosts import AttentionLayer

    monkeypatch.setattr(AttentionLayer, "spectrum_caveat", property(lambda self: "rope turns q and k"))
    module = TinyLM()
    module.net["encoder"] = network(num_layers=12)["encoder"]
    fit(module, [callback(), SpectrumMonitor()], max_steps=1)
    said = [str(one.message) for one in recwarn if "rope turns" in str(one.message)]
    assert [text.split(" on ")[0] for text in said] == ["LocAteR", "SpectrumMonitor"]
    assert all("'net.encoder.layers.3.self_attn' and 8 more: rope turns q and k" in text for text in said)


def test_two_callbacks_log_each_under_its_own_name():
    logged, alone = {}, {}
    for names, callbacks in (
        (logged, [LocAteR(0.1, layers=[0]), LocAteR(0.3, layers=[1], observe_only=True)]),
        (alone, [LocAteR(0.3, layers=[1], observe_only=True)]),
    ):
        names |= fit(TinyLM(), callbacks, max_steps=1).callback_metrics
    assert {"locater/penalty", "locater/penalty_1"} <= logged.keys()
    assert logged["locater/penalty_1"] == alone["locater/penalty"]
    assert logged["locater/penalty_1"] != logged["locater/penalty"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_whose_step_the_module_leaves_out_add_no_penalty(accumulate):
    found, expected, plain = (stepping(kind, lambda batch: batch > 3)() for kind in (TinyLM, PenaltyInLoss, TinyLM))
    for module, callbacks in ((found, [callback()]), (expected, []), (plain, [])):
        fit(module, callbacks, batches(12), accumulate_grad_batches=accumulate)
    torch.testing.assert_close(weights_of(found), weights_of(expected), atol=TOLERANCE, rtol=0)
    assert (weights_of(found) - weights_of(plain)).abs().max() > 1e-3


def test_batches_that_the_module_gathers_itself_add_their_penalty():
    found, expected, plain = (keeping(kind, 3)() for kind in (TinyLM, PenaltyInLoss, TinyLM))
    for module, callbacks in ((found, [callback()]), (expected, []), (plain, [])):
        fit(module, callbacks, batches(12))
    torch.testing.assert_close(weights_of(found), weights_of(expected), atol=TOLERANCE, rtol=0)
    assert (weights_of(found) - weights_of(plain)).abs().max() > 1e-3


def test_a_batch_without_loss_adds_no_penalty():
    def skipping(kind):
        class Skips(kind):
            def training_step(self, batch, batch_idx):
                return None if batch_idx == 1 else super().training_step(batch, batch_idx)

        return Skips()

    found, expected = skipping(TinyLM), skipping(PenaltyInLoss)
    fit(found, [callback()], max_steps=3)
    fit(expected, max_steps=3)
    torch.testing.assert_close(weights_of(found), weights_of(expected), atol=TOLERANCE, rtol=0)


def test_on_our_own_language_model():
    shape = {"num_layers": 2, "dim": DIM, "num_heads": HEADS, "mlp_dim": DIM, "num_tokens": TOKENS}
    task = LanguageModelingTask({"class_path": "TransformerLM", "init_args": shape}, vocab_size=VOCABULARY)
    task.configure_model()
    expected = 0.0
    for qkv in (layer.module.qkv.weight.detach() for layer in attention_layers(task)):
        for w_q, w_k in zip(qkv[:DIM].chunk(HEADS), qkv[DIM : 2 * DIM].chunk(HEADS), strict=True):
            expected += (w_q.T @ w_k).square().sum().item()
    trainer = fit(task, [LocAteR(0.1)], max_steps=1)
    assert trainer.callback_metrics["locater/penalty"].item() == pytest.approx(0.1 * expected, rel=1e-5)


def test_the_state_of_another_model_is_an_error():
    module = TinyLM()
    locater = LocAteR(0.1, gamma=1.0)
    locater.load_state_dict({"initial_traces": {"net.encoder.layers.0.self_attn": torch.zeros(HEADS + 1)}})
    with pytest.raises(ValueError, match=f"{HEADS + 1} heads .* has {HEADS}"):
        locater.on_train_start(SimpleNamespace(optimizers=[module.configure_optimizers()]), module)
