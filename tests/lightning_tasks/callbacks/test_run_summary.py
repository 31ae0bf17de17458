"""The end of a run: the summary's numbers are those of the log, and the figure shows what was logged."""

import csv
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from attention_modules import AttentionSpec, RPCAttention, SoftmaxAttention, swap_attention
from lightning_tasks.callbacks.writing.run_summary import RunSummary, divergence, swapped_layers
from lightning_tasks.cli.fit import run
from lightning_tasks.figures.run import draw_run
from lightning_tasks.runs.divergence import first_non_finite, is_loss
from lightning_tasks.runs.log import read_curves
from lightning_tasks.runs.panels import run_panels, select

DEMO = "tests.lightning_tasks.demo.DemoModule"


def write_log(path, rows):
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "metrics.csv"
    rows = [
        {"step": 0, "train/loss_step": 3.0, "attention/entropy/layer_00": 1.0, "attention/entropy/mean": 1.0},
        {"step": 1, "train/loss_step": 2.0, "train/loss_epoch": 2.5, "val/loss": 2.2},
        {"step": 2, "val/loss": math.nan, "qk_spectrum/variance/layer_00": 0.5, "qk_spectrum/scale/layer_00": 9.0},
    ]
    write_log(path, rows)
    return path


def test_curves_are_read_by_step(log):
    curves = read_curves(log)
    assert curves["train/loss"] == ([0, 1], [3.0, 2.0])
    assert curves["val/loss"] == ([1], [2.2])
    assert "train/loss_epoch" not in curves


def test_a_panel_shows_its_group_and_one_layer_without_the_mean(log):
    curves = read_curves(log)
    assert list(select(curves, ("attention/entropy",))) == ["attention/entropy/layer_00"]
    assert list(select(curves, ("qk_spectrum/variance",))) == ["qk_spectrum/variance/layer_00"]
    two_layers = {"a/layer_00": ([0], [1.0]), "a/layer_01": ([0], [1.0]), "a/mean": ([0], [1.0])}
    assert list(select(two_layers, ("a",))) == list(two_layers)


@pytest.mark.figures
def test_the_figure_grows_with_what_was_logged(log, tmp_path):
    import matplotlib.image

    three = matplotlib.image.imread(draw_run(run_panels(read_curves(log)), tmp_path / "three.png"))
    write_log(tmp_path / "one.csv", [{"step": 0, "val/loss": 1.0}])
    one = matplotlib.image.imread(draw_run(run_panels(read_curves(tmp_path / "one.csv")), tmp_path / "one.png"))
    assert three.shape[1] == 3 * one.shape[1]
    assert three.std() > 0


def test_nothing_logged_means_no_figure(tmp_path):
    write_log(tmp_path / "metrics.csv", [{"step": 0, "other": 1.0}])
    assert draw_run(run_panels(read_curves(tmp_path / "metrics.csv")), tmp_path / "none.png") is None
    assert draw_run(run_panels(read_curves(tmp_path / "absent.csv")), tmp_path / "none.png") is None
    assert not (tmp_path / "none.png").exists()


def test_swapped_layers_are_those_that_are_not_plain():
    spec = AttentionSpec(dim=8, num_heads=2, head_dim=4)
    first, second = nn.Module(), nn.Module()
    first.mechanism, second.mechanism = RPCAttention(spec, iterations=2), SoftmaxAttention(spec)
    assert swapped_layers(nn.ModuleDict({"first": first, "second": second})) == [
        "first (RPCAttention, iterations=2, lam=None, threshold='released')"
    ]
    model = nn.TransformerEncoderLayer(8, 2, 16)
    swap_attention(model, "symmetric")
    swap_attention(model, "rpc", iterations=3)
    assert swapped_layers(torch.compile(model)) == ["self_attn (RPCAttention, iterations=3)"]


def test_the_summary_says_before_and_after(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["attnswap"])
    summary = RunSummary()
    trainer = {
        "accelerator": "cpu",
        "max_steps": 4,
        "val_check_interval": 2,
        "limit_val_batches": 2,
        "num_sanity_val_steps": -1,
    }
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    options = [f"--trainer.{key}={value}" for key, value in {**trainer, **quiet}.items()]
    cli = run(["fit", "--model", DEMO, "--model.rate=0.0", *options], callbacks=[summary])
    folder = Path(cli.trainer.log_dir)
    values = [
        float(row["val/perplexity"]) for row in csv.DictReader((folder / "metrics.csv").open()) if row["val/perplexity"]
    ]
    assert summary.after == pytest.approx(values[-1])
    assert summary.before == pytest.approx(summary.after)  # nothing moves at learning rate 0
    printed = capsys.readouterr().out
    assert f"val/perplexity: {summary.before:.2f} before, {summary.after:.2f} after training" in printed
    assert "swapped layers: none" in printed
    assert f"files in {folder}: " in printed
    assert "metrics.csv" in printed
    assert f"figure: {folder / 'run.png'}" in printed


def test_the_files_that_wandb_keeps_for_itself_are_not_listed(log):
    inner = log.parent / "wandb" / "offline-run-1" / "files"
    inner.mkdir(parents=True)
    (inner / "requirements.txt").write_text("x")
    (log.parent / "wandb" / "debug.log").write_text("x")
    assert f"files in {log.parent}: metrics.csv, run.png, wandb/\n" in RunSummary().text(nn.Identity(), log.parent)


def test_a_second_fit_forgets_the_first():
    summary = RunSummary()
    summary.before, summary.after = 2.0, 1.0
    summary.setup(pl.Trainer(callbacks=[summary], logger=False, enable_checkpointing=False), None, "fit")
    assert (summary.before, summary.after) == (None, None)


def test_without_a_log_the_summary_still_speaks():
    text = RunSummary().text(nn.Identity(), None)
    assert "not measured before" in text
    assert "no CSV logger" in text


def test_a_fit_whose_loss_became_nan_says_so_in_its_last_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["attnswap"])
    options = ["accelerator=cpu", "max_steps=4", "val_check_interval=2", "limit_val_batches=1", "log_every_n_steps=1"]
    options += ["enable_progress_bar=false", "enable_model_summary=false"]
    arguments = ["fit", "--model", DEMO, "--model.rate=.nan", *[f"--trainer.{option}" for option in options]]
    run(arguments, callbacks=[RunSummary()])
    printed = capsys.readouterr().out
    assert "before, NaN after training" in printed
    said = "diverged: train/loss is NaN (first at step 1), val/loss is NaN (first at step 1), val/perplexity is NaN "
    assert printed.splitlines()[-1] == f"{said}(first at step 1)"


def test_only_losses_tell_of_divergence(log):
    values = {"train/loss": 1.0, "val/loss": math.inf, "train/loss_epoch": 2.5}
    assert divergence(values, log.parent) == ["diverged: val/loss is inf (first at step 2)"]
    assert divergence(values, None) == ["diverged: val/loss is inf"]
    assert divergence({"train/loss": 1.0}, log.parent) == []
    names = {
        "val/loss/dataloader_idx_1": True,
        "val/accuracy/dataloader_idx_0": False,
        "train/loss": True,
        "loss": True,
        "val/perplexity": True,
        "train/decode_loss_epoch": True,
    }
    names |= {"attention/entropy": False, "val/miou": False, "losses/other": False}
    assert {name: is_loss(name) for name in names} == names


def test_a_log_with_words_and_torn_lines_tells_of_divergence(tmp_path):
    log = tmp_path / "metrics.csv"
    log.write_text("step,train/loss,note\n1,0.5,warm\n,nan,\n2,nan,x,more\n3,")
    assert first_non_finite(log) == {"train/loss": 2}


def test_the_metric_of_a_project_and_its_losses_have_panels(tmp_path):
    write_log(tmp_path / "metrics.csv", [{"step": step, "val_acc": 0.5, "train_loss": 2.0} for step in (0, 1)])
    curves = read_curves(tmp_path / "metrics.csv")
    assert [(title, [*shown]) for title, shown in run_panels(curves, "val_acc")] == [
        ("val_acc", ["val_acc"]),
        ("loss [nats]", ["train_loss"]),
    ]
    assert len(run_panels(curves, "train_loss")) == 1, "the panel of losses has it"
    assert len(run_panels(curves, "val/top1")) == 1, "nothing of it was logged"


def test_a_metric_that_was_not_logged_is_named_with_those_that_were(capsys):
    summary = RunSummary("val/loss")
    trainer = SimpleNamespace(callback_metrics={"val_loss": torch.tensor(1.0)}, loggers=[])
    summary.on_fit_end(trainer, nn.Identity())
    said = "val/loss was not logged in a validation; logged was val_loss: give one as metric="
    assert said in capsys.readouterr().out
