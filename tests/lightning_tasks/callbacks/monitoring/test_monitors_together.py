"""What all monitors have in common: names of layers, one of a kind a trainer, and values that are not finite."""

import itertools
import re

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_tasks.callbacks import (
    AttentionDiversification,
    AttentionMapLogger,
    AttentionMonitor,
    DriftMonitor,
    EntropyRegularizer,
    Heal,
    LipschitzMonitor,
    LogitMonitor,
    PredictionTable,
    PursuitMonitor,
    RunSummary,
    SegmentationOverlay,
    SigmaReparam,
    SpectrumMonitor,
    SwapAttention,
)
from lightning_tasks.figures.heads import draw_heads
from lightning_tasks.runs.heads import TABLE, read_heads
from tests.lightning_tasks.callbacks.modules import HEADS, TinyLM, batches, fit
from tests.rows import each_row

MONITORS = [AttentionMonitor, SpectrumMonitor, PursuitMonitor, LipschitzMonitor, AttentionMapLogger]


@pytest.mark.parametrize("choice", [{"layers": [1]}, {"where": "*layers.1*"}, {"exclude": ["*layers.0*"]}])
def test_a_layers_number_is_its_place_in_the_model(tmp_path, choice):
    monitors = [kind(**choice) for kind in MONITORS]
    logger = CSVLogger(tmp_path, name="", version="")
    swap = SwapAttention("rpc", {"iterations": 2}, layers=[1])
    metrics = fit(TinyLM(), [swap, *monitors], batches(1), batches(1), logger=logger).callback_metrics
    names = {name for name in metrics if "layer_" in name}
    stems = ("attention/entropy", "val/attention/entropy", "qk_spectrum/scale", "val/lipschitz")
    assert {f"{stem}/layer_01" for stem in stems} < names
    assert "val/pursuit/sparsity/layer_01/pass_2" in names
    assert all("layer_01" in name for name in names)
    assert [path.name for path in tmp_path.glob("attention_maps*")] == ["attention_maps_layer_01_step_000000.png"]
    _, layers, values = read_heads(tmp_path / TABLE)["val/attention/entropy"]
    assert (layers, values.shape) == ([1], (1, 1, HEADS))


def test_heat_maps_of_heads_name_the_layers():
    figure = draw_heads([0], [3, 5], torch.rand(1, 2, 4).numpy(), "entropy")
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["3", "5"]


@each_row(("kind", "derived"), itertools.product(MONITORS, [0, 1, 2]))
def test_a_second_monitor_of_a_kind_is_refused(tmp_path, kind, derived):
    first, second = (type(name, (kind,), {}) if place < derived else kind for place, name in enumerate("AB"))
    module = TinyLM()
    callbacks = [SwapAttention("rpc"), first(layers=[1]), second(layers=[0])]
    with pytest.raises(ValueError, match=f"2 callbacks {kind.__name__}, .*--config RECIPE --config FILE"):
        fit(module, callbacks, batches(1), batches(1), logger=CSVLogger(tmp_path, name="", version=""))
    assert "configure_model" not in vars(module)
    assert not list(tmp_path.iterdir())


def drift():
    return DriftMonitor(network="net.encoder")


def heal():
    return Heal([{"match": "task"}], network="net.encoder")


def evaluated():
    return AttentionMonitor(stages=("validation",))


@pytest.mark.parametrize("make", [LipschitzMonitor, PursuitMonitor, AttentionMapLogger, drift, evaluated])
@pytest.mark.parametrize("given", [(None, {}), (batches(1), {"limit_val_batches": 0})])
def test_a_fit_without_validations_says_who_has_nothing_to_do(make, given):
    loader, limit = given
    monitor = make()
    with pytest.warns(UserWarning, match=f"^{type(monitor).__name__} acts at validations alone, and this fit has none"):
        fit(TinyLM(), [SwapAttention("rpc", {"iterations": 2}), monitor], batches(1), loader, **limit)


@pytest.mark.parametrize(("make", "loader"), [(AttentionMonitor, None), (heal, None), (drift, batches(1))])
def test_who_acts_in_training_too_says_no_such_thing(recwarn, make, loader):
    fit(TinyLM(), [SwapAttention("rpc", {"iterations": 2}), make()], batches(1), loader)
    assert not any("at validations alone" in str(warning.message) for warning in recwarn)


def test_two_classes_derived_from_one_penalty_or_one_that_trains_weights_are_refused():
    for kind, given in ((EntropyRegularizer, (0.1, 0.5)), (SigmaReparam, ()), (DriftMonitor, ())):
        callbacks = [type(name, (kind,), {})(*given) for name in "AB"]
        with pytest.raises(ValueError, match=f"2 callbacks {kind.__name__}, "):
            fit(TinyLM(), [SwapAttention("softmax"), *callbacks], batches(1))


def test_different_penalties_and_monitors_of_one_base_go_together():
    callbacks = [EntropyRegularizer(0.1, 0.5), AttentionDiversification(0.1), LogitMonitor(), AttentionMonitor()]
    fit(TinyLM(), [SwapAttention("softmax"), *callbacks], batches(1))


@each_row("kind", [RunSummary, PredictionTable, SegmentationOverlay])
def test_a_second_callback_that_writes_the_same_files_is_refused(kind):
    derived = [type(name, (kind,), {})() for name in "AB"]
    for callbacks in ([kind(), kind()], derived):
        with pytest.raises(ValueError, match=f"2 callbacks {kind.__name__}, "):
            fit(TinyLM(), callbacks, batches(1), batches(1))


class Spoilt(TinyLM):
    """Its second layer is given NaN, in one of two samples."""

    def __init__(self):
        super().__init__(lr=0.0)
        self.net["encoder"].layers[0].register_forward_hook(
            lambda layer, args, out: torch.cat([out[:1], out[1:] * torch.nan])
        )

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        return self.net["head"].bias.sum()  # a gradient of NaN would spoil every weight


@pytest.mark.parametrize("kind", [AttentionMonitor, PursuitMonitor, AttentionMapLogger, LipschitzMonitor])
def test_activations_that_are_not_finite_are_said_once_and_end_no_run(tmp_path, kind, recwarn):
    monitor = kind(every_n_steps=1) if kind is AttentionMonitor else kind()
    callbacks = [SwapAttention("rpc", {"iterations": 1, "lam": 4.0}), monitor]
    logger = CSVLogger(tmp_path, name="", version="")
    metrics = fit(Spoilt(), callbacks, batches(2), batches(2), logger=logger, max_epochs=2).callback_metrics
    said = [str(one.message) for one in recwarn if re.search("NaN or infinite numbers", str(one.message))]
    assert len(said) == 1, said
    assert kind.__name__ in said[0]
    assert "net.encoder.layers.1.self_attn" in said[0]
    assert "net.encoder.layers.0.self_attn" not in said[0]
    spoilt = {name: float(value) for name, value in metrics.items() if "layer_01" in name}
    whole = {name: float(value) for name, value in metrics.items() if "layer_00" in name}
    assert bool(spoilt) == (kind in (AttentionMonitor, PursuitMonitor))
    assert bool(whole) == (kind is not AttentionMapLogger)
    assert all(value != value for value in spoilt.values()), spoilt
    assert all(value == value for value in whole.values()), whole
    assert any(tmp_path.glob("attention_maps_layer_01_step_*.png")) == (kind is AttentionMapLogger)
