"""FSDP1 and DeepSpeed are refused by name, with the cure, by what cannot work there."""

import itertools
from types import SimpleNamespace

import pytest

from lightning_tasks.callbacks import (
    AttentionMapLogger,
    AttentionMonitor,
    DriftMonitor,
    EntropyRegularizer,
    FreezeQK,
    Heal,
    KernelPCAMonitor,
    LipschitzMonitor,
    LocAteR,
    LogitMonitor,
    PursuitMonitor,
    QKClip,
    QKWeightDecay,
    SigmaReparam,
    SpectrumMonitor,
    SwapAttention,
)
from tests.lightning_tasks.callbacks.modules import TinyLM
from tests.rows import each_row

REFUSED = [
    AttentionMapLogger,
    AttentionMonitor,
    DriftMonitor,
    FreezeQK,
    KernelPCAMonitor,
    LipschitzMonitor,
    LogitMonitor,
    PursuitMonitor,
    QKClip,
    SigmaReparam,
    SpectrumMonitor,
]


def trainer(strategy, **attributes):
    return SimpleNamespace(strategy=type(strategy, (), attributes)(), callbacks=[])


@each_row(
    ("strategy", "callback"),
    itertools.product(
        ["FSDPStrategy", "DeepSpeedStrategy"],
        [
            *(kind() for kind in REFUSED),
            LocAteR(0.1),
            QKWeightDecay(0.1),
            EntropyRegularizer(0.1),
            Heal([{"match": "task"}]),
        ],
    ),
)
def test_what_reads_layers_weights_or_gradients_is_refused(callback, strategy):
    run = trainer(strategy)
    run.callbacks.append(callback)
    named = "FSDP1" if strategy == "FSDPStrategy" else "DeepSpeed"
    with pytest.raises(ValueError, match=rf"{type(callback).__name__} cannot .*{named} .*use .*DDP"):
        callback.setup(run, TinyLM(), "fit")


def test_a_query_is_not_dropped_from_weights_that_deepspeed_spread():
    run = trainer("DeepSpeedStrategy", zero_stage_3=True)
    module = TinyLM()
    with pytest.raises(ValueError, match=r"'rpc' drops the query .*DeepSpeed \(stage 3\).*use DDP"):
        SwapAttention("rpc").setup(run, module, "validate")
    before = module.state_dict().keys()
    assert before == TinyLM().state_dict().keys()
