"""The QK spectrum in the logs."""

import csv

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from attention_modules.analysis import qk_statistics
from lightning_tasks.callbacks import SpectrumMonitor
from tests.lightning_tasks.callbacks.modules import DIM, HEADS, BuildsInConfigureModel, TinyLM, fit


def logged(logger, name):
    """Step to value of one metric, from the file."""
    with open(f"{logger.log_dir}/metrics.csv") as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}


def test_logs_the_untrained_model_and_every_n_steps(tmp_path):
    module = TinyLM()
    w_q, w_k, _ = module.net["encoder"].layers[1].self_attn.in_proj_weight.detach().clone().chunk(3)
    logger = CSVLogger(tmp_path)
    fit(module, [SpectrumMonitor(every_n_steps=2, heads=True)], logger=logger, log_every_n_steps=1000)
    expected = qk_statistics(*(weight.view(HEADS, DIM // HEADS, DIM) for weight in (w_q, w_k)))
    for name, over_heads in {"mean": "mean", "variance": "mean", "scale": "mean", "max": "amax", "min": "amin"}.items():
        steps = logged(logger, f"qk_spectrum/{name}/layer_01")
        assert list(steps) == [0, 2, 4]
        value = getattr(expected[name], over_heads)().item()
        assert steps[0] == pytest.approx(value, rel=1e-4)
        assert steps[2] != steps[0]
        head = logged(logger, f"qk_spectrum/{name}/layer_01/head_01")[0]
        assert head == pytest.approx(expected[name][1].item(), rel=1e-4)
        both = [logged(logger, f"qk_spectrum/{name}/layer_0{index}")[0] for index in range(2)]
        assert logged(logger, f"qk_spectrum/{name}/mean")[0] == pytest.approx(sum(both) / 2, rel=1e-4)


def test_with_accumulation_counts_optimizer_steps(tmp_path):
    logger = CSVLogger(tmp_path)
    fit(TinyLM(), [SpectrumMonitor(every_n_steps=2)], logger=logger, accumulate_grad_batches=2, max_epochs=2)
    assert list(logged(logger, "qk_spectrum/scale/mean")) == [0, 2, 4]


def test_can_be_monitored_by_other_callbacks():
    trainer = fit(BuildsInConfigureModel(), [SpectrumMonitor(every_n_steps=1)])
    assert trainer.callback_metrics["qk_spectrum/variance/layer_00"] > 0


def test_chosen_layers_only():
    trainer = fit(TinyLM(), [SpectrumMonitor(every_n_steps=1, layers=[1])])
    assert "qk_spectrum/scale/layer_00" in trainer.callback_metrics
    assert "qk_spectrum/scale/layer_01" not in trainer.callback_metrics


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_bad_interval(every):
    with pytest.raises(ValueError, match=f"at least 1, got {every}"):
        SpectrumMonitor(every_n_steps=every)


def test_nothing_matched_is_an_error():
    with pytest.raises(ValueError, match="blocks"):
        fit(TinyLM(), [SpectrumMonitor(where="blocks.*")])


def test_training_is_untouched():
    watched, plain = TinyLM(), TinyLM()
    fit(watched, [SpectrumMonitor(every_n_steps=1, heads=True)])
    fit(plain)
    for a, b in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
