"""What the monitors leave in files: W&B's charts, TensorBoard's figures, the table of heads; all in one fit."""

import csv
import io
import json

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from PIL import Image

from attention_modules import symmetric_attention
from attention_modules.analysis import attention_statistics, qk_spectrum
from attention_modules.mechanisms.pursuit import clip, next_input
from attention_modules.mechanisms.rpc import pursuit_threshold
from lightning_tasks.callbacks import (
    AttentionMapLogger,
    AttentionMonitor,
    LipschitzMonitor,
    PursuitMonitor,
    SpectrumMonitor,
    SwapAttention,
)
from lightning_tasks.runs.heads import TABLE, read_heads, write_heads
from tests.lightning_tasks.callbacks.modules import DIM, HEADS, TinyLM, batches, fit
from tests.lightning_tasks.runs.logged_files import tensorboard_events, wandb_records

EPOCHS, STEPS = 3, 2  # steps per epoch
MAPS = [f"attention_maps/layer_0{index}" for index in range(2)]
HEAD_MAPS = ["attention/entropy_heads", "val/attention/entropy_heads"]


def monitors():
    return [
        SwapAttention("rpc", {"iterations": 2}, layers=[0]),
        AttentionMonitor(every_n_steps=1, statistics=["entropy", "sink"]),
        SpectrumMonitor(every_n_steps=2),
        LipschitzMonitor(every_n_validations=2, num_samples=1, layers=[1]),
        PursuitMonitor(),
        AttentionMapLogger(every_n_epochs=2),
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a fit that W&B and TensorBoard logged."""
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard", reason="the extra test is not installed")
    folder = tmp_path_factory.mktemp("logged")
    wandb = WandbLogger(save_dir=str(folder), offline=True)
    loggers = [CSVLogger(folder, name="csv"), wandb, TensorBoardLogger(folder, name="board")]
    fit(TinyLM(lr=0.0), monitors(), batches(STEPS), batches(2), logger=loggers, max_epochs=EPOCHS)
    wandb.experiment.finish()
    return folder


def expected_entropy():
    """Of the heads of the first layer, on all tokens that the two batches hold."""
    module, tokens = TinyLM(), torch.cat([tokens for tokens, _ in batches(2)])
    with torch.no_grad():
        attention = module.net["encoder"].layers[0].self_attn
        projected = module.net["embed"](tokens) @ attention.in_proj_weight.T + attention.in_proj_bias
        _, keys, values = (x.unflatten(-1, (HEADS, DIM // HEADS)).transpose(1, 2) for x in projected.chunk(3, -1))
        limit = pursuit_threshold(keys, is_causal=True)
        first = clip(keys, limit)
        low_rank = symmetric_attention(first, values, is_causal=True)
        _, last, _ = next_input(keys, limit, first, low_rank)  # what asks in the second pass, the last
        return attention_statistics(last, last, is_causal=True)["entropy"].mean(0).numpy()


def test_heads_in_the_table(run):
    found = read_heads(run / "csv/version_0" / TABLE)
    assert list(found) == ["attention/entropy", "val/attention/entropy"]
    steps, _, values = found["val/attention/entropy"]
    assert steps == [1, 3, 5]  # as Lightning logs what it validated at the end of an epoch
    assert values.shape == (3, 2, HEADS)
    np.testing.assert_allclose(values[0, 0], expected_entropy(), rtol=1e-4)
    steps, _, values = found["attention/entropy"]
    assert steps == list(range(EPOCHS * STEPS))
    with (run / "csv/version_0/metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["attention/entropy/layer_01"]]
    logged = [float(row["attention/entropy/layer_01"]) for row in rows]
    np.testing.assert_allclose(values[:, 1].mean(1), logged, rtol=1e-4)  # heads see equally many rows


@pytest.mark.figures
def test_figures_in_tensorboard_open_and_are_not_empty(run):
    events = tensorboard_events(run / "board/version_0")
    steps = {name: [one.step for one in events.Images(name)] for name in events.Tags()["images"]}
    assert sorted(steps) == sorted(MAPS + HEAD_MAPS)
    assert [steps[name] for name in MAPS] == [[3], [3]]  # of the second epoch
    assert [steps[name] for name in HEAD_MAPS] == [[1, 3, 6]] * 2  # after validations 1 and 2, and at the end
    for name in steps:
        image = Image.open(io.BytesIO(events.Images(name)[-1].encoded_image_string)).convert("RGB")
        assert min(image.size) > 50
        assert np.asarray(image).std() > 5
    assert len(events.Histograms("qk_spectrum/eigenvalues/layer_00")) == 3


@pytest.mark.figures
def test_figures_as_files(run):
    folder = run / "csv/version_0"
    figures = [path for name in MAPS for path in folder.glob(f"{name.replace('/', '_')}_step_*.png")]
    assert len(figures) >= len(MAPS)
    for path in (*figures, *(folder / f"{name.replace('/', '_')}.png" for name in HEAD_MAPS)):
        with Image.open(path) as figure:
            assert min(figure.size) > 50
    assert not (run / "csv/version_0/qk_spectrum_eigenvalues.png").exists()


def last_table(run, history, chart):
    """The table behind a chart as it was logged last."""
    name = [row[f"{chart}_table/path"] for row in history if f"{chart}_table/path" in row][-1]
    (path,) = run.glob(f"wandb/offline-run-*/files/{name}")
    return json.loads(path.read_text())


def test_charts_and_histograms_in_wandb(run):
    history, config = wandb_records(run)
    panels = {name for update in config for name in update if "visualize" in name}
    names = ["attention/entropy", "val/attention/entropy", "qk_spectrum/variance", "val/lipschitz"]
    names += ["val/pursuit/sparsity"]
    assert {f"_wandb/visualize/charts/{name}" for name in names} <= panels
    assert not any("sink" in name for name in panels)  # too few keys: nothing was logged
    rows = [row for row in history if "charts/val/attention/entropy_table/path" in row]
    assert [row["trainer/global_step"] for row in rows] == [1, 3, 6]
    table = last_table(run, history, "charts/val/attention/entropy")
    assert table["columns"] == ["step", "lineKey", "lineVal"]
    assert [row[:2] for row in table["data"]] == [
        [step, line] for line in ("layer_00", "layer_01", "mean") for step in (1, 3, 5)
    ]
    assert table["data"][0][2] == pytest.approx(expected_entropy().mean(), rel=1e-4)
    lipschitz = last_table(run, history, "charts/val/lipschitz")["data"]
    assert [row[:2] for row in lipschitz] == [[1, "layer_01"], [5, "layer_01"]]  # only where it was measured
    spectra = [row for row in history if "qk_spectrum/eigenvalues/layer_01/values" in row]
    assert [row["trainer/global_step"] for row in spectra] == [0, 2, 4]
    w_q, w_k, _ = TinyLM().net["encoder"].layers[1].self_attn.in_proj_weight.detach().double().chunk(3)
    real = qk_spectrum(*(w.view(HEADS, DIM // HEADS, DIM) for w in (w_q, w_k))).eigenvalues.real
    assert sum(spectra[0]["qk_spectrum/eigenvalues/layer_01/values"]) == DIM
    bins = spectra[0]["qk_spectrum/eigenvalues/layer_01/bins"]
    assert (bins[0], bins[-1]) == pytest.approx((real.min().item(), real.max().item()), rel=1e-5)
    images = [row for row in history if "attention/entropy_heads/filenames" in row]
    assert [row["trainer/global_step"] for row in images] == [1, 3, 6]


def fit_here(folder, checkpoint=None, **options):
    """A fit that logs into this very folder, whatever is there."""
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[AttentionMonitor(every_n_steps=1)],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(TinyLM(), batches(3), batches(1), ckpt_path=checkpoint, weights_only=True if checkpoint else None)
    return trainer, {name: steps for name, (steps, *_) in read_heads(folder / TABLE).items()}


def test_a_resumed_run_doubles_no_step_in_the_table(tmp_path):
    trainer, steps = fit_here(tmp_path, max_epochs=1)
    assert steps == {"attention/entropy": [0, 1, 2], "val/attention/entropy": [2]}
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    fit_here(tmp_path, tmp_path / "one.ckpt", max_epochs=3)
    _, steps = fit_here(tmp_path, tmp_path / "one.ckpt", max_epochs=2)  # resumed again, as if that had been killed
    assert steps == {"attention/entropy": [0, 1, 2, 3, 4, 5], "val/attention/entropy": [2, 5]}
    lines = (tmp_path / TABLE).read_text().splitlines()
    assert len(lines) == 1 + 2 * (6 + 2)
    _, steps = fit_here(tmp_path, max_epochs=1)  # another run: nothing of the old one is left
    assert steps == {"attention/entropy": [0, 1, 2], "val/attention/entropy": [2]}


def test_what_does_not_train_replaces_its_own_steps_alone(tmp_path):
    value = np.ones((1, 1, 2))
    write_heads(tmp_path / TABLE, {"x": ([4, 8], [0], np.concatenate([value, value]))}, set())
    for step in (0, 8):
        write_heads(tmp_path / TABLE, {"x": ([step], [0], 3 * value)}, set(), trains=False)
    steps, _, values = read_heads(tmp_path / TABLE)["x"]
    assert dict(zip(steps, values[:, 0, 0].tolist(), strict=True)) == {0: 3, 4: 1, 8: 3}


def test_a_table_of_another_model_is_replaced(tmp_path):
    write_heads(tmp_path / TABLE, {"old": ([0, 1], [0], np.ones((2, 1, 3)))}, set())
    write_heads(tmp_path / TABLE, {"new": ([5], [3], np.array([[[0.5, np.nan]]]))}, set())
    steps, layers, values = read_heads(tmp_path / TABLE)["new"]
    assert (list(read_heads(tmp_path / TABLE)), steps, layers) == (["new"], [5], [3])
    np.testing.assert_array_equal(values, [[[0.5, np.nan]]])


def test_heads_stay_on_the_device_while_training_steps_go_on(tmp_path, monkeypatch):
    """A transfer in a step would make it wait for the device; `cpu` is what the record brings values over by."""
    calls, steps = [], []
    bring = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda value: calls.append(value.shape) or bring(value))

    class Watch(pl.Callback):
        def on_train_batch_end(self, *args):
            steps.append(list(calls))

    monitor = AttentionMonitor(every_n_steps=1, stages=["train"])
    fit(TinyLM(), [monitor, Watch()], batches(3), logger=CSVLogger(tmp_path, name="", version=""))
    assert steps == [[], [], []]
    brought = [shape for shape in calls if len(shape) == 4]  # the trainer brings weights home at the end, too
    assert brought == [(2, 3, 2, HEADS)]  # sums and counts, steps, layers, heads: once
    assert read_heads(tmp_path / TABLE)["attention/entropy"][0] == [0, 1, 2]
