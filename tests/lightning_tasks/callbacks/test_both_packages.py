"""Lightning's own demo language model, unchanged, from YAML, through either Lightning package's command line."""

import csv
import random
from importlib import import_module

import pytest
import torch
import yaml

from attention_modules.mechanism import AttentionMechanism
from lightning_tasks.callbacks import (
    AttentionDiversification,
    AttentionMonitor,
    Callback,
    EntropyRegularizer,
    LocAteR,
    LogitMonitor,
    QKClip,
    SigmaReparam,
    SpectrumMonitor,
    SwapAttention,
)
from tests.rows import each_row

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "dog", "run", "far", "away"]


@pytest.fixture(params=PACKAGES)
def package(request):
    pytest.importorskip(request.param)
    return request.param


@pytest.fixture
def demo_data(tmp_path, monkeypatch):
    """The demo reads ``./data/wikitext-2.txt``, and downloads it only where it is missing."""
    (tmp_path / "data").mkdir()
    chooser = random.Random(0)
    lines = [" ".join(chooser.choices(WORDS, k=20)) for _ in range(20)]
    (tmp_path / "data" / "wikitext-2.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(package, folder):
    ours = "lightning_tasks.callbacks"
    callbacks = [
        {"class_path": f"{ours}.SwapAttention", "init_args": {"mechanism": "rpc", "options": {"iterations": 2}}},
        {"class_path": f"{ours}.LocAteR", "init_args": {"weight": 0.01, "gamma": 0.1}},
        {"class_path": f"{ours}.AttentionMonitor", "init_args": {"every_n_steps": 1, "stages": ["train"]}},
        {"class_path": f"{ours}.SpectrumMonitor", "init_args": {"every_n_steps": 1}},
        {"class_path": f"{ours}.LogitMonitor", "init_args": {"every_n_steps": 1}},
        {"class_path": f"{ours}.SigmaReparam", "init_args": {"gamma": 1.0, "layers": [2]}},
        {"class_path": f"{ours}.QKClip", "init_args": {"tau": 0.01, "layers": [0, 1]}},
        {"class_path": f"{ours}.EntropyRegularizer", "init_args": {"weight": 0.1, "target": 0.5, "max_rows": None}},
        {"class_path": f"{ours}.AttentionDiversification", "init_args": {"weight": 0.1}},
    ]
    callbacks[0]["init_args"]["where"] = "*encoder*self_attn"
    trainer = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "limit_train_batches": 3,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "logger": {"class_path": f"{package}.loggers.CSVLogger", "init_args": {"save_dir": str(folder)}},
        "callbacks": callbacks,
    }
    return {"seed_everything": 1, "model": {"vocab_size": len(WORDS) + 1}, "trainer": trainer}


def test_demo_module_from_yaml(package, demo_data):
    demo = import_module(f"{package}.demos").LightningTransformer
    command_line = import_module(f"{package}.cli").LightningCLI
    (demo_data / "run.yaml").write_text(yaml.safe_dump(config(package, demo_data)))
    done = command_line(demo, args=["fit", "--config", str(demo_data / "run.yaml")])
    mechanisms = [type(part).__name__ for part in done.model.modules() if isinstance(part, AttentionMechanism)]
    # Two encoder layers as asked; the decoder's two were observed, and are plain again.
    assert mechanisms == ["RPCAttention", "RPCAttention"]
    with open(f"{done.trainer.logger.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    for name in (
        "attention/entropy/mean",
        "attention/entropy/layer_03",
        "qk_spectrum/variance/layer_00",
        "locater/penalty",
        "attention/largest_logit/layer_02",
        "qk_clip/clipped_heads",
        "entropy_regularizer/penalty",
        "attention_diversification/penalty",
    ):
        assert {int(row["step"]) for row in rows if row[name]} == {0, 1, 2}, name
    checkpoint = torch.load(done.trainer.checkpoint_callback.best_model_path, weights_only=True)
    plan = next(state["plan"] for key, state in checkpoint["callbacks"].items() if key.startswith("SwapAttention"))
    assert plan["layers"] == [f"model.transformer.encoder.layers.{index}.self_attn" for index in range(2)]


def test_locater_pulls_the_demo_module(package, demo_data):
    library = import_module(package)
    demo = import_module(f"{package}.demos").LightningTransformer
    scales = []
    for weight in (0.0, 1.0):
        library.seed_everything(0, verbose=False)
        trainer = library.Trainer(
            accelerator="cpu",
            max_steps=3,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[LocAteR(weight), SpectrumMonitor(every_n_steps=2)],
        )
        trainer.fit(demo(vocab_size=len(WORDS) + 1))
        scales.append(trainer.callback_metrics["qk_spectrum/scale/mean"].item())
    assert scales[1] < 0.9 * scales[0]


STABILIZERS = [AttentionDiversification, EntropyRegularizer, LogitMonitor, QKClip, SigmaReparam]


@each_row("kind", [AttentionMonitor, LocAteR, SpectrumMonitor, SwapAttention, *STABILIZERS])
def test_belongs_to_both_trees(kind, package):
    assert issubclass(kind, Callback)
    assert issubclass(kind, import_module(package).Callback)
