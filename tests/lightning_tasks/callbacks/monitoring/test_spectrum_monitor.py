"""The QK spectrum in the logs."""

import copy
import csv
import re

import numpy as np
import pytest
import timm
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from torch.nn import functional as F

from attention_modules import SelfAttention, declare_host, swap_attention
from attention_modules.analysis import qk_spectrum, qk_statistics
from attention_modules.hosts import attention_layers
from lightning_tasks.callbacks import Callback, SpectrumMonitor
from lightning_tasks.callbacks.monitoring.warnings import SPECTRUM_SIGNS
from lightning_tasks.figures.spectrum import draw_spectra
from lightning_tasks.runs.loggers import log_histogram
from tests.lightning_tasks.callbacks.modules import DIM, HEADS, BuildsInConfigureModel, TinyLM, fit
from tests.lightning_tasks.runs.logged_files import tensorboard_events
from tests.rows import each_row


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
    assert "qk_spectrum/scale/layer_01" in trainer.callback_metrics
    assert "qk_spectrum/scale/layer_00" not in trainer.callback_metrics


@each_row("every", [0, -1, 1.5, True])
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


def spectrum_of(module, layer):
    """Real parts of the eigenvalues of all heads, sorted."""
    w_q, w_k, _ = module.net["encoder"].layers[layer].self_attn.in_proj_weight.detach().double().chunk(3)
    heads = [weight.view(HEADS, DIM // HEADS, DIM) for weight in (w_q, w_k)]
    return qk_spectrum(*heads).eigenvalues.real.flatten().sort().values.numpy()


def test_histograms_in_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra test is not installed")
    logger = TensorBoardLogger(tmp_path)
    fit(TinyLM(), [SpectrumMonitor(every_n_steps=2)], logger=logger)
    events = tensorboard_events(logger.log_dir)
    assert events.Tags()["histograms"] == [f"qk_spectrum/eigenvalues/layer_0{index}" for index in range(2)]
    found = events.Histograms("qk_spectrum/eigenvalues/layer_01")
    assert [one.step for one in found] == [0, 2, 4]
    first, expected = found[0].histogram_value, spectrum_of(TinyLM(), 1)
    assert first.num == DIM  # HEADS times head_dim
    assert (first.min, first.max) == pytest.approx((expected[0], expected[-1]), rel=1e-6)
    assert first.sum == pytest.approx(expected.sum(), rel=1e-6)
    assert not (tmp_path / "lightning_logs/version_0/qk_spectrum_eigenvalues.png").exists()


@pytest.mark.figures
@pytest.mark.parametrize(("steps", "most", "kept"), [(5, 64, [0, 1, 2, 3, 4]), (5, 2, [0, 4])])
def test_a_figure_where_no_logger_takes_histograms(tmp_path, monkeypatch, steps, most, kept):
    import lightning_tasks.callbacks.spectrum_monitor as target

    drawn = []
    monkeypatch.setattr(target, "MOST_SPECTRA", most)
    monkeypatch.setattr(target, "draw_spectra", lambda *args: drawn.append(args) or draw_spectra(*args))
    logger = CSVLogger(tmp_path)
    decompositions = []
    eigvals = torch.linalg.eigvals
    monkeypatch.setattr(torch.linalg, "eigvals", lambda matrix: decompositions.append(matrix) or eigvals(matrix))
    monitor = SpectrumMonitor(every_n_steps=1)
    fit(TinyLM(), [monitor], logger=logger, max_steps=steps)
    assert len(decompositions) == 2 * steps  # one per layer and record
    ((found, spectra, names),) = drawn
    assert found == kept
    assert names == [f"net.encoder.layers.{index}.self_attn" for index in range(2)]
    monkeypatch.setattr(torch.linalg, "eigvals", eigvals)
    assert sorted(spectra[0][1]) == pytest.approx(spectrum_of(TinyLM(), 1), rel=1e-6)
    with Image.open(f"{logger.log_dir}/qk_spectrum_eigenvalues.png") as figure:
        assert min(figure.size) > 100


@pytest.mark.figures
def test_a_layer_that_comes_later_is_not_in_the_figure(tmp_path, monkeypatch):
    import lightning_tasks.callbacks.spectrum_monitor as target

    class Ema(Callback):
        def on_train_batch_end(self, trainer, pl_module, *rest):
            pl_module.ema = copy.deepcopy(pl_module.net)

    drawn = []
    monkeypatch.setattr(target, "draw_spectra", lambda *args: drawn.append(args) or draw_spectra(*args))
    fit(TinyLM(), [Ema(), SpectrumMonitor(every_n_steps=1)], logger=CSVLogger(tmp_path), max_steps=3)
    ((_, spectra, names),) = drawn
    assert names == [f"net.encoder.layers.{index}.self_attn" for index in range(2)]
    assert [len(each) for each in spectra] == [2, 2, 2]


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (1.0, None),
        (20.0, r"entropy collapse in sight: .* logit_deviation above 50 in net\.encoder\.layers\.0\.self_attn \("),
        (1e-2, r"all rows attend alike, .* logit_deviation below 0\.001 in net\.encoder\.layers\.0\.self_attn \("),
    ],
)
def test_a_scale_that_ends_attention_is_warned_of_once_in_words(factor, words, recwarn):
    module = TinyLM(lr=0.0)
    with torch.no_grad():
        module.net["encoder"].layers[0].self_attn.in_proj_weight.mul_(factor)
    fit(module, [SpectrumMonitor(every_n_steps=1)], max_epochs=2)
    said = [str(one.message) for one in recwarn if "said once" in str(one.message)]
    assert len(said) == (words is not None), said
    assert words is None or re.search(f"SpectrumMonitor, training step 0: {words}", said[0]), said


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_said_once_and_end_no_run(tmp_path, bad, recwarn):
    module = TinyLM(lr=0.0)
    with torch.no_grad():
        module.net["encoder"].layers[0].self_attn.in_proj_weight[0, 0] = bad
    logger = CSVLogger(tmp_path, name="", version="")
    fit(module, [SpectrumMonitor(every_n_steps=1)], logger=logger)
    said = [str(one.message) for one in recwarn if "weights are not finite" in str(one.message)]
    assert len(said) == 1
    assert re.search(r"non_finite above 0 in net\.encoder\.layers\.0\.self_attn \(1\); said once", said[0])
    assert (tmp_path / "qk_spectrum_eigenvalues.png").is_file()


def test_histograms_leave_out_what_is_not_finite():
    logged = []

    class TensorBoardLogger:
        class experiment:
            @staticmethod
            def add_histogram(name, values, step):
                logged.append((name, values.tolist(), step))

    class Trainer:
        loggers = (TensorBoardLogger(),)

    log_histogram(Trainer, "some", np.array([1.0, np.nan, 2.0, np.inf]), 3)
    log_histogram(Trainer, "none", np.array([np.nan, -np.inf]), 3)
    assert logged == [("some", [1.0, 2.0], 3)]


def test_the_figure_of_spectra_has_one_scale_that_is_written():
    spread, narrow, bad = np.linspace(-1, 1, 64), np.full(64, 0.5), np.full(64, np.nan)
    figure = draw_spectra([0, 5], [[spread, bad], [narrow, bad]], ["first", "second"])
    first, second, bar = figure.axes
    assert [axes.get_title() for axes in (first, second)] == ["first", "second"]
    assert "color: its square root" in bar.get_ylabel()
    shown = first.images[0].get_array()
    assert shown[:, 0].max() == pytest.approx(1 / 64)
    assert shown[:, 1].max() == 1.0
    assert first.images[0].norm is second.images[0].norm
    assert (first.images[0].norm.vmin, first.images[0].norm.vmax) == (0.0, 1.0)
    assert second.images[0].get_array().mask.all()  # white, not an error


def test_the_threshold_of_the_scale_is_that_of_collapsed_entropy():
    """Logits of the documented deviation have a normalized entropy of about AttentionMonitor's 0.02."""
    (sign,) = (sign for sign in SPECTRUM_SIGNS if sign.statistic == "logit_deviation" and not sign.below)
    generator = torch.Generator().manual_seed(0)
    for keys in (64, 1024):
        logits = sign.threshold * torch.randn(2048, keys, generator=generator)
        entropy = torch.special.entr(logits.softmax(-1)).sum(-1).mean() / torch.tensor(keys).log()
        assert entropy.item() == pytest.approx(0.02, abs=0.006)


def test_logit_deviation_is_that_of_independent_tokens():
    w_q, w_k = torch.randn(2, 1, 4, 64, generator=torch.Generator().manual_seed(0))
    q, k = (torch.randn(4000, 64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    logits = (q @ w_q[0].T) * (k @ w_k[0].T) / 2  # head_dim 4
    expected = (qk_statistics(w_q, w_k)["scale"][0] / 4).sqrt().item()
    assert logits.sum(-1).std().item() == pytest.approx(expected, rel=0.05)


class Own(torch.nn.Module):
    """A layer of one's own with another factor on its logits."""

    def __init__(self, scale):
        super().__init__()
        self.qkv, self.scale, self.heads = torch.nn.Linear(32, 96, bias=False), scale, 4

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale).transpose(1, 2).flatten(2)


declare_host(Own, qkv="qkv", heads="heads")


def of_transformers(name, **more):
    """A small model, and where its layer has its factor."""
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    config = getattr(transformers, f"{name}Config")(vocab_size=20, **more)
    return getattr(transformers, {"T5": "T5EncoderModel"}.get(name, f"{name}Model"))(config)


def opt():
    sizes = {"hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return of_transformers("OPT", **sizes, word_embed_proj_dim=32)


def timesfm():
    """Its queries are multiplied by a learned vector, so that the usual factor is taken."""
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return transformers.TimesFmModel(transformers.TimesFmConfig(**sizes, head_dim=8))


GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4}
FACTORS = {
    "own": (lambda: torch.nn.Sequential(Own(None)), 8**-0.5),
    "own, 1": (lambda: torch.nn.Sequential(Own(1.0)), 1.0),
    "torch": (lambda: torch.nn.TransformerEncoderLayer(32, 4), 8**-0.5),
    "SelfAttention": (lambda: SelfAttention(32, 4), 8**-0.5),
    "GPT-2": (lambda: of_transformers("GPT2", **GPT2), 8**-0.5),
    "GPT-2, unscaled": (lambda: of_transformers("GPT2", **GPT2, scale_attn_weights=False), 1.0),
    "T5": (lambda: of_transformers("T5", d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4), 1.0),
    "OPT": (opt, 8**-0.5),
    "TimesFM": (timesfm, 8**-0.5),
    "timm": (lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1), 64**-0.5),
}


@pytest.mark.parametrize("mechanism", [None, "softmax"])
@pytest.mark.parametrize("case", FACTORS)
def test_the_deviation_is_of_logits_with_the_factor_of_the_layer(case, mechanism):
    build, factor = FACTORS[case]
    model = build()
    if mechanism is not None and case != "SelfAttention":
        swap_attention(model, mechanism)
    (layer,) = attention_layers(model)
    assert layer.scale == pytest.approx(factor)


def test_the_warning_is_of_the_factor_of_the_layer(recwarn):
    class Of(TinyLM):
        def __init__(self, scale):
            super().__init__(lr=0.0)
            self.own = Own(scale)
            torch.nn.init.normal_(self.own.qkv.weight, std=1.0)

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + 0 * self.own(torch.randn(1, 3, 32)).sum()

    for scale in (None, 1.0):  # ‖W_qᵀ W_k‖_F is about 90
        fit(Of(scale), [SpectrumMonitor(every_n_steps=1, where="own")], max_epochs=1)
        said = [str(one.message) for one in recwarn if "entropy collapse in sight" in str(one.message)]
        assert len(said) == (scale is not None)
